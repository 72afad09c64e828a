"""The journal of `tierd warm`: finished units, which a later run skips.

The file has a header line, then one line per unit, appended once all of the unit's blocks are
warm. Each line carries its CRC-32. A last line that a crash cut off is dropped. A file that is no
journal is never changed.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from tierd.cli.common.operator import Operator, tables
from tierd.errors import ConfigError
from tierd.lines import is_sealed, sealed
from tierd.types import DIGEST_BYTES, HASH_BYTES
from tierd.wire.messages import EXPLAINED_MAX

VERSION: Final = 2


class FinishedUnit(NamedTuple):
    """A finished unit: its namespaces, its last block and its number of blocks (0: no block)."""

    digests: tuple[bytes, ...]
    last: bytes
    blocks: int


class WarmJournal:
    """An open journal, locked against other processes."""

    def __init__(self, path: str, target: str) -> None:
        """Open or create the journal of warms to `target`.

        Raises ConfigError for a file that is no journal or one for another target, and leaves it
        unchanged.
        """
        self.path = path
        self.done: dict[str, FinishedUnit] = {}
        try:
            self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115  # `close` does
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        with ExitStack() as undo:
            undo.callback(self._file.close)
            self._claim(target)
            undo.pop_all()

    def finish(self, unit: str, done: FinishedUnit) -> None:
        """Record a finished unit; the record survives the death of this process."""
        record = {
            "unit": unit,
            "digests": [digest.hex() for digest in done.digests],
            "last": done.last.hex(),
            "blocks": done.blocks,
        }
        self._write(sealed(record))
        self.done[unit] = done

    def close(self) -> None:
        """Close and unlock it, without fsync: a machine that crashes loses L2 as well."""
        self._file.close()

    def _claim(self, target: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{self.path}: another tierd warm uses this journal") from error
        header = sealed({"tierd_warm_journal": VERSION, "to": target})
        self._file.seek(0)
        data = self._file.read()
        if header.startswith(data):
            # The file is new, or was cut off in its first line.
            self._file.truncate(0)
            self._write(header)
            return
        lines = data.splitlines(keepends=True)
        self._check_header(lines[0], header)
        torn = 0 if lines[-1].endswith(b"\n") else len(lines.pop())
        self.done.update(self._records(lines[1:]))
        if torn:
            self._file.truncate(len(data) - torn)

    def _check_header(self, line: bytes, ours: bytes) -> None:
        if line == ours:
            return
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or "tierd_warm_journal" not in found:
            raise ConfigError(
                f"{self.path} is not a journal of tierd warm and was not changed: pass another file"
            )
        if found["tierd_warm_journal"] != VERSION:
            raise ConfigError(
                f"{self.path} has version {found['tierd_warm_journal']!r:.20}; this tierd reads "
                f"version {VERSION}: pass another file"
            )
        raise ConfigError(
            f"{self.path} is the journal of a warm to {found.get('to')!r:.80}, not to "
            f"{json.loads(ours)['to']!r}: pass another file"
        )

    def _records(self, lines: list[bytes]) -> Iterator[tuple[str, FinishedUnit]]:
        for number, line in enumerate(lines, 2):
            try:
                record = json.loads(line)
                done = FinishedUnit(
                    tuple(bytes.fromhex(digest) for digest in record["digests"]),
                    bytes.fromhex(record["last"]),
                    record["blocks"],
                )
                sound = (
                    type(done.blocks) is int
                    and all(len(digest) == DIGEST_BYTES for digest in done.digests)
                    and len(done.last) == (HASH_BYTES if done.blocks else 0)
                    and is_sealed(line)
                )
                unit = record["unit"]
            except (ValueError, KeyError, TypeError, RecursionError):
                sound = False
            if not sound or not isinstance(unit, str):
                raise ConfigError(
                    f"{self.path}, line {number}: the journal is damaged; delete it or pass another"
                )
            yield unit, done

    def _write(self, line: bytes) -> None:
        try:
            written = self._file.write(line)
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        if written != len(line):
            raise ConfigError(f"{self.path}: no space left on its disk")


def still_there(
    journal: WarmJournal, operator: Operator, target: int
) -> Mapping[str, FinishedUnit]:
    """Return finished units whose last block is still in the target: L2 (`target` 0) or the
    storage tier number `target` - 1. The last block is evicted first, so the others are there."""
    there = {unit: done for unit, done in journal.done.items() if not done.blocks}
    units = [(unit, done) for unit, done in journal.done.items() if done.blocks]
    units.sort(key=lambda entry: entry[1].digests)
    for digests, entries in groupby(units, key=lambda entry: entry[1].digests):
        some = list(entries)
        for at in range(0, len(some), EXPLAINED_MAX):
            part = some[at : at + EXPLAINED_MAX]
            hashes = [done.last for _, done in part]
            answers = [tables(operator.explain(d, hashes)["blocks"]) for d in digests]
            for (unit, done), *blocks in zip(part, *answers, strict=True):
                if all(_has(block, target) for block in blocks):
                    there[unit] = done
    return there


def _has(block: Mapping[str, object], target: int) -> bool:
    tiers = block["tiers"]
    assert isinstance(tiers, list)
    return target - 1 in tiers if target else bool(block["host"])
