"""The file of a hot set: JSON lines in this order, each ending with its CRC-32 (`tierd.lines`).

    {"tierd_hotset": 2, "written": SECONDS, "version": "tierd's"}       written: Unix time
    {"namespace": "DIGEST", "fields": {...}}                           before its first run
    {"run": ["DIGEST", ...], "parent": "HASH", "tokens": N, "uses": N, "age_s": N,
     "bytes": N, "hashes": ["HASH", ...]}
    {"end": {"runs": N, "blocks": N, "bytes": N}}                      a file without it was cut

All digests and hashes are in hex. `fields` are the fields of `tierd.types.Namespace`. `run` lists
the namespaces of an engine's ranks, whose blocks have the same hashes. `parent` is the parent of
the run's first block, `tokens` the length of the prefix that ends with the run's last block,
`bytes` the size of the run's blocks in all ranks. At least `uses` requests used each block of the
run, the last one at most `age_s` seconds before `written` (null: no use is known).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, Final

from tierd.errors import ConfigError, NamespaceError
from tierd.hotset.families import RANKS_MAX, Family, Hot, merged
from tierd.hotset.forest import RUN_BLOCKS_MAX, HotRun
from tierd.lines import KEY, is_sealed, sealed
from tierd.types import DIGEST_BYTES, HASH_BYTES, NEVER, Namespace

FORMAT: Final = 2
"""Version of the file's format."""

LINE_BYTES_MAX: Final = 16 << 20
"""Maximum bytes of a line. The longest namespace takes 13 MiB: 64 groups of 16,384 characters
that JSON escapes."""


def pieces(
    families: Sequence[Family], *, written_s: int, version: str, size_bytes: int | None = None
) -> Iterator[bytes]:
    """Yield the file of a hot set in pieces; an empty piece lets the caller do other work.

    The set ends before the first block that exceeds `size_bytes`. All families are listed, also
    without runs.
    """
    yield sealed({"tierd_hotset": FORMAT, "written": written_s, "version": version})
    for namespaces, _ in families:
        for namespace in namespaces:
            yield sealed({"namespace": namespace.digest.hex(), "fields": _shown(namespace)})
    runs = blocks = total_bytes = 0
    for hot in merged(families):
        if hot is None:
            yield b""
            continue
        if size_bytes is not None and total_bytes + hot.size_bytes > size_bytes:
            hot = _cut(hot, (size_bytes - total_bytes) // hot.block_bytes)
            size_bytes = 0
        if hot.run.hashes:
            runs += 1
            blocks += len(hot.run.hashes)
            total_bytes += hot.size_bytes
            yield _run_line(hot)
        if size_bytes == 0:
            break
    yield sealed({"end": {"runs": runs, "blocks": blocks, "bytes": total_bytes}})


def _cut(hot: Hot, blocks: int) -> Hot:
    run = hot.run
    depth = run.depth - len(run.hashes) + blocks
    return hot._replace(run=run._replace(hashes=run.hashes[:blocks], depth=depth))


def _shown(namespace: Namespace) -> dict[str, object]:
    return {**namespace.to_fields(), "hash_root": namespace.hash_root.hex()}


def _run_line(hot: Hot) -> bytes:
    run = hot.run
    return sealed(
        {
            "run": [namespace.digest.hex() for namespace in hot.namespaces],
            "parent": run.parent.hex(),
            "tokens": hot.tokens,
            "uses": run.uses,
            "age_s": None if run.age_s == NEVER else run.age_s,
            "bytes": hot.size_bytes,
            "hashes": [block_hash.hex() for block_hash in run.hashes],
        }
    )


def _digits(text: object) -> int:
    return len(text) if isinstance(text, str) else 0


class HotSet:
    """Reader of a hot set's file; iterates over its runs once, in order of the file.

    `namespaces` holds the namespaces read so far. Iteration raises ConfigError, with the line's
    number, when it reaches a wrong line; the caller already has the runs before that line.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """`name` is the file's name in errors.

        Raises ConfigError for a file of another kind or version, OSError if it cannot be read.
        """
        self.namespaces: dict[bytes, Namespace] = {}
        self._file = file
        self._name = name
        self._number = 0
        self._raw = b""
        first = self._next(sealed=False)
        if first is None or "tierd_hotset" not in first:
            raise self._error("this is not a tierd hot set")
        if first["tierd_hotset"] != FORMAT:
            raise self._error(
                f"the hot set has version {first['tierd_hotset']!r}; this tierd reads version "
                f"{FORMAT}"
            )
        self._check_seal()
        self._check_fields(first, ("tierd_hotset", "written", "version"))
        self.written_s = self._whole(first, "written")
        """Unix time, in seconds, at which the file was written."""
        self.version = str(first["version"])
        """Version of the tierd that wrote the file."""

    def __iter__(self) -> Iterator[Hot]:
        runs = blocks = total_bytes = 0
        while (line := self._next()) is not None:
            if "namespace" in line:
                self._know(line)
            elif "run" in line:
                hot = self._hot(line)
                runs += 1
                blocks += len(hot.run.hashes)
                total_bytes += hot.size_bytes
                yield hot
            elif "end" in line:
                self._check_fields(line, ("end",))
                if line["end"] != {"runs": runs, "blocks": blocks, "bytes": total_bytes}:
                    raise self._error("the counts of the end do not match the runs before it")
                if self._file.readline(1):
                    raise self._error("there is more after the end")
                return
            else:
                raise self._error("this is not a line of a hot set")
        raise self._error("the file was cut: its end is missing")

    def _next(self, *, sealed: bool = True) -> dict[str, object] | None:
        """Return the next line's object, or None at the end of the file; `sealed` checks its CRC.

        Raises ConfigError for a line that is too long, not whole, not JSON or damaged.
        """
        raw = self._raw = self._file.readline(LINE_BYTES_MAX + 1)
        self._number += 1
        if not raw:
            return None
        if len(raw) > LINE_BYTES_MAX:
            raise self._error(f"a line has at most {LINE_BYTES_MAX} bytes")
        if not raw.endswith(b"\n"):
            raise self._error("the file was cut: a line is not whole")
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self._error(f"this is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise self._error("a line must be an object")
        if sealed:
            self._check_seal()
        value.pop(KEY, None)
        return value

    def _check_seal(self) -> None:
        if not is_sealed(self._raw):
            raise self._error("the line was changed after writing: its crc32 is wrong or missing")

    def _know(self, line: dict[str, object]) -> None:
        self._check_fields(line, ("namespace", "fields"))
        digest = self._hex(line["namespace"], DIGEST_BYTES)
        fields = line["fields"]
        if not isinstance(fields, dict):
            raise self._error("fields must be an object")
        root = fields.get("hash_root")
        if root is not None:
            fields = {**fields, "hash_root": self._hex(root, HASH_BYTES)}
        try:
            namespace = Namespace.from_fields(fields)
        except NamespaceError as error:
            raise self._error(str(error)) from error
        if namespace.digest != digest:
            raise self._error(f"{digest.hex()} is not the digest of these fields")
        self.namespaces[digest] = namespace

    def _hot(self, line: dict[str, object]) -> Hot:
        names = ("run", "parent", "tokens", "uses", "age_s", "bytes", "hashes")
        self._check_fields(line, names)
        digests = [self._hex(text, DIGEST_BYTES) for text in self._list(line, "run", RANKS_MAX)]
        for digest in digests:
            if digest not in self.namespaces:
                raise self._error(f"namespace {digest.hex()} is not defined before its run")
        namespaces = tuple(map(self.namespaces.__getitem__, digests))
        if len({*digests}) < len(digests) or len({each.family for each in namespaces}) > 1:
            raise self._error("the namespaces of a run must belong to the ranks of one engine")
        hashes = self._hashes(self._list(line, "hashes", RUN_BLOCKS_MAX))
        tokens = self._whole(line, "tokens")
        depth, rest = divmod(tokens, namespaces[0].block_tokens)
        if rest or depth < len(hashes):
            raise self._error(f"a prefix that ends with these blocks cannot have {tokens} tokens")
        age_s = NEVER if line["age_s"] is None else min(self._whole(line, "age_s"), NEVER)
        uses = min(self._whole(line, "uses"), NEVER)
        parent = self._hex(line["parent"], HASH_BYTES)
        hot = Hot(namespaces, HotRun(parent, hashes, uses, age_s, depth))
        if self._whole(line, "bytes") != hot.size_bytes:
            raise self._error(f"these blocks have {hot.size_bytes} bytes, not {line['bytes']}")
        return hot

    def _check_fields(self, line: Mapping[str, object], names: Sequence[str]) -> None:
        for name in names:
            if name not in line:
                raise self._error(f"{name!r} is missing")
        for name in line:
            if name not in names:
                raise self._error(f"{name!r} is not a field of this kind of line")

    def _whole(self, line: Mapping[str, object], name: str) -> int:
        value = line[name]
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise self._error(f"{name!r} must be a whole number")
        return value

    def _list(self, line: Mapping[str, object], name: str, most: int) -> list[object]:
        value = line[name]
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise self._error(f"{name!r} must be a list of 1 to {most}")
        return value

    def _hashes(self, texts: list[object]) -> list[bytes]:
        # One conversion for all texts is ten times faster; the fallback finds the wrong text.
        joined = "".join(text for text in texts if isinstance(text, str))
        try:
            raw = bytes.fromhex(joined)
        except ValueError:
            raw = b""
        if raw.hex() != joined or {*map(_digits, texts)} != {2 * HASH_BYTES}:
            return [self._hex(text, HASH_BYTES) for text in texts]
        return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]

    def _hex(self, text: object, size_bytes: int) -> bytes:
        try:
            raw = bytes.fromhex(text) if isinstance(text, str) else b""
        except ValueError:
            raw = b""
        if len(raw) != size_bytes or raw.hex() != text:
            raise self._error(f"{text!r:.80} must be {2 * size_bytes} hex digits")
        return raw

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._name}, line {self._number}: {what}")
