"""The journal of a warm: what it has finished, so that another run need not do it again.

A header line, then a line for each unit, appended once all its blocks were had, each with its
CRC-32. A line that was
cut off by a crash is as if it had never been begun; any other file is left as it is.
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
    """A finished unit: where its last block is, and how many it has (0: it has no last)."""

    digests: tuple[bytes, ...]
    last: bytes
    blocks: int


class WarmJournal:
    """An open journal, which nobody else can have open."""

    def __init__(self, path: str, target: str) -> None:
        """Open or make it. `target` is where blocks are brought; another one's is refused.

        Raises ConfigError for a file that is no such journal, and changes nothing in it.
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
        """A unit is finished: it will not be forgotten if this process dies now."""
        record = {
            "unit": unit,
            "digests": [digest.hex() for digest in done.digests],
            "last": done.last.hex(),
            "blocks": done.blocks,
        }
        self._write(sealed(record))
        self.done[unit] = done

    def close(self) -> None:
        """Let others have it. A machine that crashes now has lost L2 as well: no fsync."""
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
            # New, or cut off in its first line.
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
            raise ConfigError(f"{self.path} is not a journal of tierd warm; it is left as it is")
        if found["tierd_warm_journal"] != VERSION:
            raise ConfigError(
                f"{self.path} is of version {found['tierd_warm_journal']!r:.20}; this tierd reads "
                f"version {VERSION}"
            )
        raise ConfigError(
            f"{self.path} is of a warm to {found.get('to')!r:.80}, not to "
            f"{json.loads(ours)['to']!r}"
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
                raise ConfigError(f"{self.path}, line {number}: not a journal's; it is damaged")
            yield unit, done

    def _write(self, line: bytes) -> None:
        try:
            written = self._file.write(line)
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        if written != len(line):
            raise ConfigError(f"{self.path}: no space left for it")


def still_there(
    journal: WarmJournal, operator: Operator, target: int
) -> Mapping[str, FinishedUnit]:
    """Finished units whose last block is still in L2 (`target` 0), or in the storage tier of
    number `target` - 1. Blocks go from the last one on, so the others are there too."""
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
