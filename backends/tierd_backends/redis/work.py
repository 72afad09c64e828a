"""The work of the tier's threads on a batch: one job after another, each at its node.

The threads fill in the jobs; the event loop reads them when the batch is over. A job's view is
touched only by `Link.get_many` and `Link.set_many`, inside the `turn.using` of `Nodes.ask`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from tierd.backend import (
    HEADER_BYTES,
    BlockHeader,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    match_header,
    pack_header,
    unpack_header,
)
from tierd.errors import BackendError
from tierd.types import BlockKey
from tierd_backends.common.calls import CallTurn
from tierd_backends.common.second_read import DamageSite, judge
from tierd_backends.redis.connect import ServerUnreachableError
from tierd_backends.redis.nodes import REDIRECTS, Nodes, RedisNode
from tierd_backends.redis.wire import (
    RUN_BLOCKS_MAX,
    Answer,
    ErrorReply,
    Given,
    Link,
    Odd,
    Reply,
    Value,
    Wanted,
    WireError,
    command,
    commands,
)

PAGE_KEYS = 1000
"""Keys that one SCAN visits: a millisecond of the server's time."""

PROBES = 16
"""Keys probed when the tier is opened: with several masters, one is surely on another node."""

RUN_BYTES_MAX = 512 << 10
"""Small blocks travel together up to this many bytes. A round trip costs as much as 100 KiB, but
more bytes than the socket buffers hold arrive in small pieces."""

_Job = TypeVar("_Job")


@dataclass(slots=True, eq=False)
class GetJob:
    """A block to get. `why` explains an ERROR; `fault` says where a damaged block was damaged."""

    key: bytes
    block: BlockKey
    request: GetRequest
    outcome: Outcome = Outcome.ERROR
    header: BlockHeader | None = None
    fault: DamageSite | None = None
    dropped: bool = False
    why: str = ""

    @property
    def result(self) -> GetResult:
        """The result in the contract's terms."""
        return GetResult(self.outcome, self.header)


@dataclass(slots=True, eq=False)
class PutJob:
    """A block to put. `why` explains an ERROR."""

    key: bytes
    block: BlockKey
    request: PutRequest
    position: int
    outcome: Outcome = Outcome.ERROR
    why: str = ""


@dataclass(slots=True, eq=False)
class EachJob:
    """One command for several keys of one node; `failure` is set if the node does not answer."""

    node: RedisNode
    verb: bytes
    keys: list[bytes]
    positions: list[int]
    rest: Sequence[bytes] = ()
    """Words that follow the key in each command."""
    replies: list[Reply] = field(default_factory=list)
    failure: BackendError | None = None


@dataclass(slots=True, eq=False)
class PageJob:
    """A page of a node's keys. `cursor` is the start of the next page, or b"0" at the end."""

    node: RedisNode
    cursor: bytes = b"0"
    headers: list[BlockHeader] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ShapeJob:
    """The distribution of a cluster's slots; see `Nodes.shape`."""

    shape: tuple[object, bool] = ({}, False)


@dataclass(slots=True, eq=False)
class MarksJob:
    """A command for the set of marks, and the server's reply."""

    words: tuple[bytes, ...]
    reply: Reply = None


_Block = TypeVar("_Block", GetJob, PutJob)


class Work:
    """Functions for `CallThreads.run`. DeniedError ends the whole batch."""

    def __init__(self, nodes: Nodes, prefix: str, ttl_ms: int) -> None:
        self._nodes = nodes
        self._prefix = prefix
        self._ttl_ms = ttl_ms
        self.marks_key = f"{prefix}:marks".encode()
        """Key of the set of marks. The set lies in one slot, so one read returns all of it."""

    def key_of(self, block: BlockKey) -> bytes:
        """Return the server's key of a block."""
        return f"{self._prefix}:{block.namespace.hex()}:{block.block_hash.hex()}".encode()

    def probe(self, turn: CallTurn[None]) -> None:
        """Raise BackendError unless the server answers and is as configured."""
        while turn.take() is not None:
            pass
        nodes = self._nodes
        keys = [f"{self._prefix}:probe:{number}".encode() for number in range(PROBES)]
        if nodes.cluster:
            nodes.learn(turn)
            answers = [self._one(turn, b"EXISTS", keys[0])]
        else:
            node = nodes.of(keys[0])
            answers = nodes.ask(
                turn, node, lambda link: link.exchange(commands(b"EXISTS", keys), len(keys))
            )
        for answer in answers:
            if isinstance(answer, ErrorReply):
                raise nodes.connector.refusal(nodes.of(keys[0]).address, str(answer))

    def runs(self, jobs: Iterable[_Block]) -> list[list[_Block]]:
        """Group jobs for `get` and `put`: by node, several small blocks per run."""
        runs: list[list[_Block]] = []
        open_runs: dict[RedisNode, tuple[list[_Block], int]] = {}
        for job in jobs:
            node = self._nodes.of(job.key)
            run, size = open_runs.get(node, (None, 0))
            size += job.request.length
            if run is None or size > RUN_BYTES_MAX or len(run) == RUN_BLOCKS_MAX:
                run, size = [], job.request.length
                runs.append(run)
            run.append(job)
            open_runs[node] = run, size
        return runs

    def get(self, turn: CallTurn[list[GetJob]]) -> None:
        """Get runs of blocks and verify them. Drop a value that is not the wanted block."""
        while (run := turn.take()) is not None:
            blocks = [Wanted(job.key, job.request.view, job.request.length) for job in run]
            node = self._nodes.of(run[0].key)
            answers: list[Answer] = [Odd.UNREAD] * len(run)
            with contextlib.suppress(ServerUnreachableError):
                answers = self._nodes.ask(turn, node, partial(Link.get_many, blocks=blocks))
            for job, block, answer in zip(run, blocks, answers, strict=True):
                self._got(turn, job, block, answer)

    def _got(self, turn: CallTurn[_Job], job: GetJob, block: Wanted, answer: Answer) -> None:
        """Settle one block. Send a GET for it alone if the run's GET was not answered."""
        if not isinstance(answer, Value) and (answer is Odd.UNREAD or self._is_redirect(answer)):
            try:
                answer = self._nodes.perform(turn, job.key, lambda link: link.get_many([block])[0])
            except ServerUnreachableError as error:
                job.why = str(error)
                return
        job.header = _header_of(answer, job)
        if job.header is not None:
            job.outcome = Outcome.HIT
        elif answer is None:
            job.outcome = Outcome.MISS
        elif isinstance(answer, ErrorReply) and answer.code != "WRONGTYPE":
            self._check(job.key, answer)
            job.why = str(answer)
        else:
            self._read_again(turn, job, block, answer)

    def _read_again(self, turn: CallTurn[_Job], job: GetJob, block: Wanted, first: Answer) -> None:
        """Read a wrong value (another block, damage, a list) again over another connection, and
        judge it. Drop it if it is stored that way: it would keep the block from being stored."""
        job.fault = DamageSite.UNKNOWN
        settle = partial(self._settle, job, block, first)
        try:
            self._nodes.perform(turn, job.key, settle, fresh=True)
        except ServerUnreachableError as error:
            job.why = str(error)

    def _settle(self, job: GetJob, block: Wanted, first: Answer, link: Link) -> ErrorReply | None:
        """Read a block again and settle it. Returns a reply that redirects to another node."""
        second = link.get_watched(block)
        if second is None:
            job.outcome, job.fault = Outcome.MISS, None
        elif isinstance(second, ErrorReply) and second.code != "WRONGTYPE":
            if self._is_redirect(second):
                return second
            job.why = f"damaged, and could not be read again: {second}"
        else:
            job.header = _header_of(second, job)
            job.fault = judge(_comparable(first), _comparable(second), job.header)
            if job.header is not None:
                job.outcome = Outcome.HIT
            elif job.fault is DamageSite.TRANSIT:
                job.why = "two reads of it were damaged in different ways"
            else:
                job.outcome = Outcome.CORRUPT
                dropped = link.unlink_watched(job.key)
                job.dropped = dropped is True
                job.why = f"not dropped: {dropped}" if isinstance(dropped, ErrorReply) else ""
        return None

    def put(self, turn: CallTurn[list[PutJob]]) -> None:
        """Store runs of blocks that the server lacks."""
        while (run := turn.take()) is not None:
            blocks = [self._given(job) for job in run]
            node = self._nodes.of(run[0].key)
            replies: list[Reply | Odd] = [Odd.UNREAD] * len(run)
            set_many = partial(Link.set_many, blocks=blocks, ttl_ms=self._ttl_ms)
            with contextlib.suppress(ServerUnreachableError):
                replies = [*self._nodes.ask(turn, node, set_many)]
            for job, block, reply in zip(run, blocks, replies, strict=True):
                self._was_put(turn, job, block, reply)

    def _given(self, job: PutJob) -> Given:
        _, parent, digest, view, length = job.request
        header = pack_header(BlockHeader(job.block, parent, length, digest))
        return Given(job.key, header, view[:length])

    def _was_put(self, turn: CallTurn[_Job], job: PutJob, block: Given, reply: Reply | Odd) -> None:
        """Settle one block. Send a SET for it alone if the run's SET was not answered."""
        if reply is Odd.UNREAD or self._is_redirect(reply):
            try:
                reply = self._nodes.perform(
                    turn, job.key, lambda link: link.set_many([block], self._ttl_ms)[0]
                )
            except ServerUnreachableError as error:
                job.why = str(error)
                return
        if reply is None:
            job.outcome = Outcome.PRESENT
        elif reply == b"OK":
            job.outcome = Outcome.STORED
        elif isinstance(reply, ErrorReply) and reply.code == "OOM":
            job.outcome = Outcome.REFUSED
        elif isinstance(reply, ErrorReply):
            self._check(job.key, reply)
            job.why = str(reply)
        else:
            job.why = "the server answered SET with neither OK nor nil"

    def _is_redirect(self, answer: object) -> bool:
        return self._nodes.cluster and isinstance(answer, ErrorReply) and answer.code in REDIRECTS

    def _check(self, key: bytes, reply: ErrorReply) -> None:
        """Raise DeniedError if the same error would meet every block."""
        self._nodes.connector.check(self._nodes.of(key).address, reply)

    def each(self, turn: CallTurn[EachJob]) -> None:
        """Send one command for many keys, in one round trip per job."""
        while (job := turn.take()) is not None:
            try:
                job.replies = self._each(turn, job)
            except ServerUnreachableError as error:
                job.failure = error
                self._nodes.refresh(turn)

    def _each(self, turn: CallTurn[EachJob], job: EachJob) -> list[Reply]:
        sent, count = commands(job.verb, job.keys, *job.rest), len(job.keys)
        replies = self._nodes.ask(turn, job.node, lambda link: link.exchange(sent, count))
        for number, reply in enumerate(replies):
            if not isinstance(reply, ErrorReply):
                continue
            if self._is_redirect(reply):
                replies[number] = self._one(turn, job.verb, job.keys[number], *job.rest)
            else:
                self._check(job.keys[number], reply)
        return replies

    def _one(self, turn: CallTurn[_Job], verb: bytes, key: bytes) -> Reply:
        sent = command(verb, key)
        return self._nodes.perform(turn, key, lambda link: link.exchange(sent, 1)[0])

    def shape(self, turn: CallTurn[ShapeJob]) -> None:
        """Learn the distribution of slots. Raises ServerUnreachableError."""
        while (job := turn.take()) is not None:
            job.shape = self._nodes.shape(turn)

    def marks(self, turn: CallTurn[MarksJob]) -> None:
        """Send a command about the set of marks to the master to which the address leads now.
        Raises ServerUnreachableError."""
        while (job := turn.take()) is not None:
            verb, *rest = job.words
            operation = partial(Link.members_at_master, key=self.marks_key)
            if verb != b"SMEMBERS":
                operation = partial(Link.at_master, sent=command(verb, self.marks_key, *rest))
            job.reply = self._nodes.perform(turn, self.marks_key, operation, fresh=True)

    def page(self, turn: CallTurn[PageJob]) -> None:
        """Read the headers of the next page of blocks. Raises ServerUnreachableError."""
        while (job := turn.take()) is not None:
            self._nodes.ask(turn, job.node, partial(self._page, job))

    def _page(self, job: PageJob, link: Link) -> None:
        pattern = f"{self._prefix}:*".encode()
        count = b"%d" % PAGE_KEYS
        scan = command(b"SCAN", job.cursor, b"MATCH", pattern, b"COUNT", count)
        match link.exchange(scan, 1)[0]:
            case [bytes(following), list(found)]:
                keys = [key for key in found if isinstance(key, bytes) and key != self.marks_key]
            case ErrorReply() as refusal:
                raise self._nodes.connector.refusal(job.node.address, str(refusal))
            case _:
                raise WireError("SCAN is not understood")
        replies = dict(zip(keys, _beginnings(link, keys, asking=False), strict=True))
        # A node gives keys of a slot that is being moved to it only after ASKING.
        moving = [key for key, reply in replies.items() if self._is_redirect(reply)]
        replies |= zip(moving, _beginnings(link, moving, asking=True), strict=True)
        headers: list[BlockHeader] = []
        failed: list[ErrorReply] = []
        for key, reply in replies.items():
            if isinstance(reply, ErrorReply):
                if reply.code != "WRONGTYPE":
                    self._nodes.connector.check(job.node.address, reply)
                    failed.append(reply)
                continue
            header = unpack_header(reply) if isinstance(reply, bytes) else None
            if header is not None and self.key_of(header.key) == key:
                headers.append(header)
        job.cursor, job.headers = following, headers
        job.unread = [f"{len(failed)} keys at {job.node.address}: {failed[0]}"] if failed else []


def _beginnings(link: Link, keys: list[bytes], *, asking: bool) -> list[Reply]:
    """Return the first HEADER_BYTES of each key, by GETRANGE."""
    if not keys:
        return []
    if not asking:
        first = commands(b"GETRANGE", keys, b"0", b"%d" % (HEADER_BYTES - 1))
        return link.exchange(first, len(keys))
    last = b"%d" % (HEADER_BYTES - 1)
    each = (command(b"ASKING") + command(b"GETRANGE", key, b"0", last) for key in keys)
    return link.exchange(b"".join(each), 2 * len(keys))[1::2]


def _header_of(answer: Answer, job: GetJob) -> BlockHeader | None:
    """Return the header if an answer is the wanted block."""
    if not isinstance(answer, Value):
        return None
    return match_header(answer.raw_header, job.block, job.request.length, answer.digest)


def _comparable(answer: Answer) -> object:
    return answer.code if isinstance(answer, ErrorReply) else answer
