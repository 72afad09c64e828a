"""`tierd warm`: bring prompts' blocks from the tiers into host memory before they are asked for.

Reads a prompt a line, as `tierd hash` does. It asks for each as an engine would, and gives the
lease back at once: what the tiers have is in host memory then, until something else needs the
room.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from tierd.cli.operator import Operator, add_socket, tables
from tierd.cli.progress import Progress
from tierd.cli.text import printable
from tierd.client import Client, Handle
from tierd.errors import ConfigError, DisconnectedError, HashInputError, RefusedError
from tierd.hashing import KeyStyle, Lora, RequestExtras, hash_blocks
from tierd.types import DIGEST_BYTES, Namespace
from tierd.wire.messages import KEYS_PER_CALL_MAX

ALL: Final = 0
AWAY: Final = 1
PARTLY: Final = 3
"""Exit statuses."""

ACQUIRE_S_MAX: Final = 60.0
"""Longest that one call waits; the daemon's own prefetch policy ends it sooner."""

INDEX_S_MAX: Final = 300.0
"""Longest wait for tiers that have just been opened to know what they have."""

INDEX_POLL_S: Final = 0.2

_PROMPT_FIELDS: Final = {"tokens", "salt", "lora", "namespace"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "warm",
        help="bring prompts' blocks from the tiers into host memory",
        description="Read a prompt a line and have the daemon bring what its tiers have of it. A "
        'line is a JSON list of token ids, or an object with "tokens" and, as they apply, "salt", '
        '"lora" ([name, path]) and "namespace" (fields or digest, or a list of one for each rank).',
        epilog="Exit status: 0 all blocks are in host memory, 3 some are in no tier or did not "
        "come in time, 1 no daemon answers, 2 wrong input.",
    )
    parser.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="prompts; - (default) reads stdin"
    )
    parser.add_argument(
        "--namespace",
        action="append",
        metavar="FILE|DIGEST",
        help="of lines that name none: a JSON file of its fields, or the digest of one that the "
        "daemon knows; once for each rank of an engine",
    )
    parser.add_argument("--deadline", type=float, metavar="S", help="begin nothing after so long")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Warm; the exit status."""
    client = Client(args.socket, name="tierd warm", map_segments=False)
    try:
        with _opened(args.file) as (source, name):
            warming = _Warming(client, args.socket, args.deadline)
            try:
                warming.wait_for_tiers()
                warming.use([_given(text) for text in args.namespace or ()])
                for number, line in enumerate(source, 1):
                    if not warming.prompt(f"{name}, line {number}", line):
                        break
            finally:
                warming.progress.clear()
    except (DisconnectedError, RefusedError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return AWAY
    finally:
        client.close()
    if args.json:
        print(json.dumps(warming.counts))
    else:
        print("{prompts} prompts: {had} of {blocks} blocks in host memory".format(**warming.counts))
        if warming.counts["missing"]:
            print(f"  {warming.counts['missing']} are in no tier, or did not come in time")
    if warming.late:
        print("tierd: the deadline has passed; not all prompts were read", file=sys.stderr)
    return PARTLY if warming.counts["missing"] or warming.late else ALL


@contextmanager
def _opened(path: str) -> Iterator[tuple[IO[bytes], str]]:
    if path == "-":
        yield sys.stdin.buffer, "stdin"
        return
    try:
        source = Path(path).open("rb")  # noqa: SIM115 (a fault in between is not this file's)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with source:
        yield source, path


class _Warming:
    """One run: what is registered, and what came."""

    def __init__(self, client: Client, socket_path: str, deadline_s: float | None) -> None:
        self.counts = {"prompts": 0, "blocks": 0, "had": 0, "missing": 0}
        self.late = False
        """The deadline has passed before all lines were read."""
        self.progress = Progress()
        self._client = client
        self._socket_path = socket_path
        self._end_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._default: list[Handle] = []
        self._handles: dict[bytes, Handle] = {}

    def wait_for_tiers(self) -> None:
        """Until they know what they have: right after a start a tier would miss it."""
        end_s = time.monotonic() + INDEX_S_MAX
        if self._end_s is not None:
            end_s = min(end_s, self._end_s)
        with Operator(self._socket_path, "tierd warm") as operator:
            while time.monotonic() < end_s:
                states = {str(tier["state"]) for tier in tables(operator.status()["storage"])}
                if not states & {"opening", "indexing"}:
                    return
                self.progress.say("waiting for the tiers to know what they have")
                time.sleep(INDEX_POLL_S)

    def use(self, given: list[object]) -> None:
        """The namespaces of lines that name none."""
        self._default = [self._handle(each) for each in given]

    def prompt(self, where: str, line: bytes) -> bool:
        """Bring a line's blocks. False once it is too late for any more.

        Raises ConfigError for a line that is none, DisconnectedError, RefusedError.
        """
        if self._end_s is not None and time.monotonic() >= self._end_s:
            self.late = True
            return False
        try:
            handles, hashes = self._read(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        except (HashInputError, ConfigError) as error:
            raise ConfigError(f"{where}: {error}") from error
        had = self._bring(handles, hashes)
        self.counts["prompts"] += 1
        self.counts["blocks"] += len(hashes)
        self.counts["had"] += had
        self.counts["missing"] += len(hashes) - had
        self.progress.say("{prompts} prompts, {had} of {blocks} blocks".format(**self.counts))
        return True

    def _read(self, line: bytes) -> tuple[list[Handle], list[bytes]]:
        value = json.loads(line)
        fields = {"tokens": value} if isinstance(value, list) else value
        if not isinstance(fields, dict) or "tokens" not in fields:
            raise ConfigError(
                f"want a list of token ids, or an object with them, not {value!r:.40}"
            )
        if unknown := sorted(fields.keys() - _PROMPT_FIELDS):
            raise ConfigError(f"unknown field {unknown[0]!r}")
        handles = self._default
        if (own := fields.get("namespace")) is not None:
            handles = [self._handle(each) for each in (own if isinstance(own, list) else [own])]
        if not handles:
            raise ConfigError("no namespace: give --namespace, or one in the line")
        namespace = handles[0].namespace
        for handle in handles:
            if handle.namespace.family != namespace.family:
                raise ConfigError("the namespaces of one prompt must be the ranks of one engine")
        return handles, _hashes(fields, namespace)

    def _bring(self, handles: list[Handle], hashes: list[bytes]) -> int:
        """How many of the blocks are in host memory, from the first on."""
        hashes = hashes[:KEYS_PER_CALL_MAX]
        had, more = 0, bool(hashes)
        while more:
            left_s = ACQUIRE_S_MAX if self._end_s is None else self._end_s - time.monotonic()
            lease = self._client.acquire(
                handles, hashes, int(1000 * max(0.0, min(left_s, ACQUIRE_S_MAX)))
            )
            self._check(handles)
            blocks = 0
            if lease is not None:
                blocks = lease.blocks
                self._client.release(lease)
            # The daemon's policy may have ended the wait while blocks were still coming.
            more = had < blocks < len(hashes)
            had = max(had, blocks)
        return had

    def _check(self, handles: list[Handle]) -> None:
        """Raise if an answer was none of the daemon's."""
        for handle in handles:
            if handle.refusal is not None:
                raise RefusedError(handle.refusal)
        if not self._client.connected or not all(handle.ready for handle in handles):
            raise DisconnectedError(
                f"no answer from {self._socket_path}: {self._client.last_error}"
            )

    def _handle(self, given: object) -> Handle:
        """The registration of a namespace given by its fields or its digest."""
        if isinstance(given, str):
            namespace = self._known(given)
        elif isinstance(given, dict):
            namespace = _namespace(given)
        else:
            raise ConfigError(
                f"a namespace is an object of its fields or a digest, not {given!r:.40}"
            )
        handle = self._handles.get(namespace.digest)
        if handle is None:
            handle = self._handles[namespace.digest] = self._client.register(namespace)
        return handle

    def _known(self, digest: str) -> Namespace:
        """The namespace of a digest, by the daemon."""
        try:
            raw = bytes.fromhex(digest)
        except ValueError:
            raw = b""
        if len(raw) != DIGEST_BYTES:
            raise ConfigError(
                f"{digest!r} is neither a file nor a digest of {2 * DIGEST_BYTES} digits"
            )
        if raw in self._handles:
            return self._handles[raw].namespace
        with Operator(self._socket_path, "tierd warm") as operator:
            try:
                return operator.describe(raw)
            except RefusedError:
                known = [
                    f"{space['digest']} ({printable(space['model'])}, rank {space['tp_rank']})"
                    for space in tables(operator.status()["namespaces"])
                ]
        raise ConfigError(
            f"tierd knows no namespace {digest}; it knows {', '.join(known) or 'none'}"
        )


def _given(text: str) -> object:
    """A namespace from the command line: the fields in a file, or a digest."""
    path = Path(text)
    if not path.is_file():
        return text
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{text}: {error}") from error


def _namespace(fields: dict[str, object]) -> Namespace:
    """As JSON has it: the root of hashes in hex."""
    root = fields.get("hash_root")
    try:
        raw = bytes.fromhex(root) if isinstance(root, str) else root
    except ValueError as error:
        raise ConfigError("namespace field 'hash_root' must be in hex") from error
    return Namespace.from_fields({**fields, "hash_root": raw} if "hash_root" in fields else fields)


def _hashes(fields: dict[str, object], namespace: Namespace) -> list[bytes]:
    """The hashes of a prompt's full blocks. Raises HashInputError and ConfigError."""
    try:
        style = KeyStyle(namespace.hash_scheme)
    except ValueError:
        raise ConfigError(
            f"hashes of {namespace.hash_scheme} are its engine's own and cannot be computed here"
        ) from None
    tokens, lora = fields["tokens"], fields.get("lora")
    if lora is not None and (not isinstance(lora, list) or len(lora) != 2):
        raise ConfigError("lora must be a list of its name and its path")
    extras = RequestExtras(
        salt=fields.get("salt"),  # type: ignore[arg-type]  # checked with the rest of the extras
        lora=None if lora is None else Lora(*lora),
    )
    size = namespace.block_tokens
    keys = None
    if extras != RequestExtras():
        count = len(tokens) // size if isinstance(tokens, list) else 0
        keys = extras.block_keys(count, size, style)
    return hash_blocks(tokens, size, parent=namespace.hash_root, extra=keys)  # type: ignore[arg-type]  # it refuses what are no tokens
