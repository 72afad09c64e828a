"""The servers of a tier: which server keeps a key, its idle links, and whether to ask it.

There is one server, or a cluster whose slots are spread over several. Runs on the tier's threads,
several at a time. For a while after a node has failed, requests to it fail at once, so it costs
only its own blocks and one wait, not one wait per block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from tierd.errors import BackendError
from tierd_backends.common.calls import CallCancelledError, CallTurn
from tierd_backends.redis.connect import Address, Connector, DeniedError, ServerUnreachableError
from tierd_backends.redis.wire import (
    WRONG_SERVER,
    ErrorReply,
    Link,
    Reply,
    WireError,
    command,
)

DOWN_S = 1.5
"""Pause before a failed node of a cluster is asked again. For a single server it is the time that
its silence costs, if that is less: long enough that a batch waits for the server only once, and
no longer than the daemon needs, which sends nothing while the tier is down, to try it again."""

REFRESH_S = 1.0
"""Least time between two reads of a cluster's slots: a resharding moves thousands of them."""

HOPS_MAX = 4
"""Redirections that one command follows. While slots move there are one or two in a row."""

PORT_MAX = (1 << 16) - 1

REDIRECTS = ("MOVED", "ASK")
"""Codes of error replies that name another node."""

_SLOTS = command(b"CLUSTER", b"SLOTS")
_NODES = command(b"CLUSTER", b"NODES")
_ASKING = command(b"ASKING")

_Job = TypeVar("_Job")
_T = TypeVar("_T")

_log = logging.getLogger("tierd_backends.redis")


class RedisNode:
    """One server. Threads borrow its links; there are at most as many links as threads."""

    def __init__(
        self, address: Address, connector: Connector, down_s: float, count: Callable[[str], None]
    ) -> None:
        self.address = address
        self._connector = connector
        self._down_s = down_s
        self._count = count
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._lost = 0
        self._retired = False
        self._era = 0
        self._answered = False
        self._down_until = 0.0
        self._why = ""

    def admit(self) -> None:
        """Raise ServerUnreachableError if the node failed within its pause."""
        with self._lock:
            if not self._down_until:
                return
            now = time.monotonic()
            if now < self._down_until:
                self._count("skipped_total")
                raise ServerUnreachableError(self._why)
            # This thread tries the node; the others fail at once until it has succeeded.
            self._down_until = now + self._down_s

    def take(self) -> Link:
        """Return an idle link, or a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.connect()

    def fresh(self) -> Link:
        """Return a new link that knows its server's role, and close the link that was idle longest.
        So links do not grow old, and an address that now leads elsewhere is noticed."""
        with self._lock:
            oldest = self._idle.pop(0) if self._idle else None
        if oldest is not None:
            oldest.close()
        return self.connect(ask_role=True)

    def connect(self, *, ask_role: bool = False) -> Link:
        """Return a new link. Raises ServerUnreachableError or DeniedError."""
        with self._lock:
            era = self._era
        link = self._connector.connect(self.address, ask_role=ask_role)
        link.era = era
        with self._lock:
            again = self._lost > 0
            self._lost -= again
        self._count("reconnects_total" if again else "connects_total")
        return link

    def give_back(self, link: Link) -> None:
        """Keep a link without replies in flight for the next caller."""
        link.used = True
        with self._lock:
            if not self._retired and link.era == self._era:
                self._idle.append(link)
                return
        link.close()

    def drop(self, link: Link) -> None:
        """Close a link that broke or was shut down."""
        with self._lock:
            self._lost += 1
        link.close()

    def drop_idle(self) -> None:
        """Close idle links now, and borrowed links of this era when they are given back: the server
        closed one of them, or one leads to the wrong server."""
        with self._lock:
            self._era += 1
            idle, self._idle = self._idle, []
            self._lost += len(idle)
        for link in idle:
            link.close()

    def retire(self) -> None:
        """Close idle links now, and all others when they are given back."""
        with self._lock:
            self._retired = True
        self.drop_idle()

    def went_down(self, error: Exception) -> None:
        """Note a failure, and log it if the node has answered before."""
        with self._lock:
            first = not self._down_until
            self._down_until = time.monotonic() + self._down_s
            self._why = str(error)
        if first:
            self._count("node_down_total")
        if first and self._answered:
            # Before its first answer the caller gets the error, and tries again and again.
            _log.warning("%s", error)

    def came_up(self) -> None:
        """Note an answer, and log it if the node was down."""
        self._answered = True
        if self._down_until:
            with self._lock:
                self._down_until = 0.0
            _log.info("the server at %s answers again", self.address)


class Nodes:
    """The configured server, and the other nodes of its cluster."""

    def __init__(
        self, seed: Address, connector: Connector, cluster: bool, count: Callable[[str], None]
    ) -> None:
        self.cluster = cluster
        self.connector = connector
        self._count = count
        self._down_s = DOWN_S if cluster else min(DOWN_S, connector.access.silence_s)
        self._seed = RedisNode(seed, connector, self._down_s, count)
        self._lock = threading.Lock()
        self._nodes = {seed: self._seed}
        self._slots = [self._seed] * REDIS_CLUSTER_HASH_SLOTS
        self._refreshing = threading.Lock()
        self._fresh_until = 0.0
        self._closed = False

    def of(self, key: bytes) -> RedisNode:
        """Return the node that keeps `key`, by the latest known slots."""
        return self._slots[key_slot(key)] if self.cluster else self._seed

    def masters(self) -> list[RedisNode]:
        """Return every node that keeps slots."""
        return list(dict.fromkeys(self._slots)) if self.cluster else [self._seed]

    def ask(
        self,
        turn: CallTurn[_Job],
        node: RedisNode,
        operation: Callable[[Link], _T],
        *,
        fresh: bool = False,
    ) -> _T:
        """Run `operation` on a link to `node`; `fresh`: on a new link.

        Raises ServerUnreachableError, DeniedError or CallCancelledError.
        """
        node.admit()
        link = self._connected(node, node.fresh if fresh else node.take)
        while True:
            failure: OSError | WireError | None = None
            try:
                with turn.using(link.sock):
                    answer = operation(link)
            except CallCancelledError:
                node.give_back(link)
                raise
            except BackendError:
                # Raised by the operation because of a reply.
                node.drop(link)
                raise
            except (OSError, WireError) as error:
                failure = error
            if failure is None:
                break
            node.drop(link)
            if turn.cancelled:
                raise CallCancelledError from failure
            if not link.used or not isinstance(failure, ConnectionError):
                raise self._failed(node, failure, fresh=not link.used) from failure
            # The server has restarted, or closes idle links.
            node.drop_idle()
            link = self._connected(node, node.connect)
        if link.turned_away is not None:
            node.drop(link)
            node.drop_idle()
            if link.turned_away.code in WRONG_SERVER:
                misplaced = self.connector.misplaced(node.address, link.turned_away)
                node.went_down(misplaced)
                raise misplaced
            # The caller explains a denial. The next link logs in with the credentials of its time.
        elif link.broken or turn.cancelled:
            # After a cancellation the socket may have been shut down behind the last byte.
            node.drop(link)
        else:
            node.give_back(link)
        node.came_up()
        return answer

    def perform(
        self,
        turn: CallTurn[_Job],
        key: bytes,
        operation: Callable[[Link], _T | ErrorReply],
        *,
        fresh: bool = False,
    ) -> _T | ErrorReply:
        """Run `operation` at the node that keeps `key` now, following moves. Raises as `ask`."""
        node, asking = self.of(key), False
        failure = None
        for _ in range(HOPS_MAX):
            try:
                there = _asking(operation) if asking else operation
                answer = self.ask(turn, node, there, fresh=fresh)
            except ServerUnreachableError as error:
                failure = error
                self.refresh(turn)
                if self.of(key) is node:
                    raise
                node, asking = self.of(key), False
                continue
            if not isinstance(answer, ErrorReply):
                return answer
            if not self.cluster or answer.code not in REDIRECTS:
                self.connector.check(node.address, answer)
                return answer
            node, asking = self._redirected(node, answer), answer.code == "ASK"
            if not asking:
                # Other nodes may not know the move yet, and would undo it here.
                self.refresh(turn, node)
        raise failure or ServerUnreachableError(
            f"the server at {node.address} redirects without end"
        )

    def refresh(self, turn: CallTurn[_Job], *first: RedisNode) -> None:
        """Learn the nodes' slots, from `first` or else from the first node that answers."""
        if not self.cluster or not self._refreshing.acquire(blocking=False):
            return
        try:
            if time.monotonic() >= self._fresh_until:
                self._fresh_until = time.monotonic() + REFRESH_S
                self.learn(turn, *first)
        except ServerUnreachableError as error:
            _log.warning("the cluster's slots are not known: %s", error)
        finally:
            self._refreshing.release()

    def learn(self, turn: CallTurn[_Job], *first: RedisNode) -> None:
        """Like `refresh`, but always. Raises ServerUnreachableError or DeniedError if no node
        answers."""
        for node in dict.fromkeys([*first, *self.masters(), self._seed]):
            try:
                reply = self.ask(turn, node, lambda link: link.exchange(_SLOTS, 1)[0])
            except ServerUnreachableError as error:
                failure = error
                continue
            if isinstance(reply, ErrorReply):
                raise self.connector.refusal(node.address, str(reply))
            self._apply(node, reply)
            return
        raise failure

    def shape(self, turn: CallTurn[_Job]) -> tuple[dict[Address, bytes], bool]:
        """Return the slots of each master that answers, by its own account, and whether any slot is
        being moved. If either differs after a scan, the scan may have missed keys.

        Raises ServerUnreachableError or DeniedError if no node answers.
        """
        if not self.cluster:
            return {}, False
        self.learn(turn)
        shape, moving = {}, False
        for node in self.masters():
            try:
                reply = self.ask(turn, node, lambda link: link.exchange(_NODES, 1)[0])
            except ServerUnreachableError:
                continue  # The scan meets the same error and reports it.
            if isinstance(reply, ErrorReply) or not isinstance(reply, bytes):
                raise self.connector.refusal(node.address, str(reply))
            for line in reply.splitlines():
                words = line.split()
                if len(words) >= 8 and b"myself" in words[2]:
                    shape[node.address] = b" ".join(words[8:])
                    moving = moving or any(word.startswith(b"[") for word in words[8:])
        return shape, moving

    def log_in_again(self) -> None:
        """Make every later call use a new link."""
        with self._lock:
            nodes = [*self._nodes.values()]
        for node in nodes:
            node.drop_idle()

    def close(self) -> None:
        """Close idle links now, and all others when they are given back."""
        with self._lock:
            self._closed = True
            nodes = [*self._nodes.values()]
        for node in nodes:
            node.retire()

    def _connected(self, node: RedisNode, connect: Callable[[], Link]) -> Link:
        try:
            return connect()
        except ServerUnreachableError as error:
            node.went_down(error)
            raise
        except DeniedError:
            node.came_up()
            raise

    def _failed(
        self, node: RedisNode, error: Exception, *, fresh: bool = False
    ) -> ServerUnreachableError:
        """Return a link's error in an operator's terms, and note it at the node."""
        if isinstance(error, TimeoutError):
            self._count("timeouts_total")
        failure = self.connector.broken(node.address, error, fresh=fresh)
        node.went_down(failure)
        return failure

    def _redirected(self, node: RedisNode, reply: ErrorReply) -> RedisNode:
        """Return the node in a reply "MOVED slot host:port" or "ASK slot host:port"."""
        self._count("moved_total")
        try:
            code, slot, where = str(reply).split(" ")
            host, _, port = where.rpartition(":")
            if not 0 < int(port) <= PORT_MAX:
                # A port of 0 would be a unix socket here, and its server would get the password.
                raise ValueError(f"no port: {port}")
            target = self._node(Address(host or node.address.host, int(port)))
            if code == "MOVED":
                self._slots[int(slot)] = target
        except (ValueError, IndexError) as error:
            raise self._failed(node, error) from error
        return target

    def _node(self, address: Address) -> RedisNode:
        with self._lock:
            node = self._nodes.get(address)
            if node is None:
                node = RedisNode(address, self.connector, self._down_s, self._count)
                self._nodes[address] = node
                if self._closed:
                    node.retire()
            return node

    def _apply(self, asked: RedisNode, reply: Reply) -> None:
        """Adopt the slots in CLUSTER SLOTS: first, last, [host, port, ...] of the master, ..."""
        slots = list(self._slots)
        for entry in reply if isinstance(reply, list) else [reply]:
            match entry:
                case [int(first), int(last), [(bytes() | None) as host, int(port), *_], *_] if (
                    0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS and 0 < port <= PORT_MAX
                ):
                    name = host.decode("utf-8", "replace") if host else asked.address.host
                    node = self._node(Address(name, port))
                    slots[first : last + 1] = [node] * (last + 1 - first)
                case _:
                    raise self._failed(asked, WireError("CLUSTER SLOTS is not understood"))
        self._slots = slots
        kept = {*slots, self._seed}
        with self._lock:
            gone = [node for node in self._nodes.values() if node not in kept]
            for node in gone:
                del self._nodes[node.address]
        for node in gone:
            node.retire()


def _asking(operation: Callable[[Link], _T]) -> Callable[[Link], _T]:
    def act(link: Link) -> _T:
        link.exchange(_ASKING, 1)
        return operation(link)

    return act
