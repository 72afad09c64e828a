"""The result of a warm: how many blocks are warm, and why the others are not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tierd.cli.common.text import number, printable, size
from tierd.wire.messages import Warmth

LABELS_MAX: Final = 3
"""Prompts or runs named for each reason."""

REASONS_MAX: Final = 50
"""Limit of distinct reasons, since an engine may have written part of their text."""

_REASONS: Final = {
    Warmth.NOWHERE: "no tier has them",
    Warmth.NO_ROOM: "no space: the blocks in host memory are worth more, leased or pinned",
    Warmth.AWAY: "a tier that may have them failed or accepts no reads now",
    Warmth.CORRUPT: "they were corrupt",
    Warmth.LATE: "the deadline passed first",
    Warmth.BARRED: "they are being flushed",
    Warmth.UNWRITTEN: "the storage tier did not store them",
}

COLD: Final = frozenset({Warmth.NOWHERE, Warmth.CORRUPT})
"""Outcomes that an engine can remedy by computing the blocks: no tier has them."""

NOT_STORED: Final = "the engine computed them but did not store them in time"


@dataclass(slots=True)
class Reason:
    """How many blocks are not warm for one reason, and of which prompts or runs."""

    blocks: int = 0
    units: int = 0
    """Prompts, or runs of a hot set or of a tier."""
    labels: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WarmReport:
    """Counts of one run. A block shared by several prompts counts once for each."""

    units: int = 0
    blocks: int = 0
    here: int = 0
    brought: int = 0
    computed: int = 0
    before: int = 0
    """Blocks of units that the journal lists as finished and that are still there."""
    bytes_read: int = 0
    """Bytes loaded, of all ranks. One read that serves two calls counts twice."""
    had_bytes: int = 0
    """Bytes of warm blocks, of all ranks."""
    kept_bytes: int | None = None
    """Pinned bytes of `had_bytes`; None without --pin."""
    unverified: int = 0
    """Blocks that could not be verified, since they have no checksum yet."""
    reasons: dict[str, Reason] = field(default_factory=dict)
    late: bool = False
    """The deadline passed before all was processed."""
    interrupted: bool = False
    engine_away: str = ""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def had(self) -> int:
        """Number of warm blocks."""
        return self.here + self.brought + self.computed + self.before

    @property
    def whole(self) -> bool:
        """Whether all blocks are warm and all input was processed."""
        return not self.reasons and not self.late and not self.interrupted

    def finished(
        self, label: str, outcomes: bytes, before: bytes | None = None, why: str | None = None
    ) -> None:
        """Count a unit whose outcomes are final.

        `before`: its outcomes before an engine computed it. `why`: why no engine computed its
        missing blocks.
        """
        self.units += 1
        self.blocks += len(outcomes)
        for outcome, was in zip(outcomes, before or outcomes, strict=True):
            if outcome <= Warmth.BROUGHT:
                self.computed += was > Warmth.BROUGHT
                self.here += was == Warmth.HERE
                self.brought += was == Warmth.BROUGHT
        unmade = NOT_STORED if before is not None else why
        for outcome, blocks in Counter(outcomes).items():
            if outcome > Warmth.BROUGHT:
                cold = outcome in COLD
                reason = unmade if cold and unmade is not None else _REASONS[Warmth(outcome)]
                self.missing(label, reason, blocks)

    def finished_before(self, blocks: int) -> None:
        """Count a unit that the journal lists as finished and that is still there."""
        self.units += 1
        self.blocks += blocks
        self.before += blocks

    def missing(self, label: str, why: str, blocks: int = 0) -> None:
        """Count blocks of the prompt or run `label` that are not warm."""
        if why not in self.reasons and len(self.reasons) >= REASONS_MAX:
            why = "other reasons"
        reason = self.reasons.setdefault(why, Reason())
        reason.blocks += blocks
        reason.units += 1
        if len(reason.labels) < LABELS_MAX:
            reason.labels.append(label)

    def speed(self) -> float:
        """Return the bytes loaded per second."""
        return self.bytes_read / max(1e-3, time.monotonic() - self.began_s)

    def progress(self, under_way: int, warm: int, share: float | None) -> tuple[float | None, str]:
        """Return the share that is done, None if unknown, and a short text.

        `under_way`: blocks of unfinished units; `warm` of them are warm. `share`: how much of the
        input was read.
        """
        done, known = self.had + warm, self.blocks + under_way
        part = None if share is None else share * (self.blocks + warm) / max(1, known)
        more = "" if share == 1 else " so far"
        return part, f"{number(done)} of {number(known)} blocks{more}, {size(self.speed())}/s"

    def lines(self, target: str) -> Iterator[str]:
        """Yield the report as text."""
        spent_s = time.monotonic() - self.began_s
        yield f"{self.had} of {self.blocks} blocks in {target}, of {self.units} prompts and runs"
        parts = [("already there", self.here), ("loaded", self.brought)]
        parts += [("computed", self.computed), ("finished before", self.before)]
        told = ", ".join(f"{count} {what}" for what, count in parts if count)
        if told:
            yield f"  {told}; {size(self.bytes_read)} in {spent_s:.1f} s, {size(self.speed())}/s"
        if self.kept_bytes is not None:
            more = "" if self.kept_bytes >= self.had_bytes else "; host.pin_share allows no more"
            yield f"  pinned: {size(self.kept_bytes)} of {size(self.had_bytes)}{more}"
        if self.unverified:
            yield f"  unverified: {self.unverified} blocks, which have no checksum yet"
        yield from self.reason_lines()

    def reason_lines(self) -> Iterator[str]:
        """Yield one line per reason for which blocks are not warm or input was not read."""
        for why, reason in sorted(self.reasons.items(), key=lambda item: -item[1].blocks):
            more = ", ..." if reason.units > len(reason.labels) else ""
            count = f"{reason.blocks} blocks" if reason.blocks else f"{reason.units} not read"
            yield printable(f"  {count}: {why} ({', '.join(reason.labels)}{more})")
        if self.late:
            yield "  the deadline passed before all was processed"
        if self.interrupted:
            yield "  interrupted before all was processed"

    def as_json(self) -> dict[str, object]:
        """Return the report for `--json`."""
        return {
            "units": self.units,
            "blocks": self.blocks,
            "had": self.had,
            "here": self.here,
            "brought": self.brought,
            "computed": self.computed,
            "before": self.before,
            "missing": self.blocks - self.had,
            "bytes": self.bytes_read,
            "kept_bytes": self.kept_bytes,
            "unverified": self.unverified,
            "seconds": round(time.monotonic() - self.began_s, 3),
            "late": self.late,
            "interrupted": self.interrupted,
            "reasons": self.reasons_as_json(),
        }

    def reasons_as_json(self) -> list[dict[str, object]]:
        """Return the reasons of `reason_lines` for `--json`."""
        return [
            {"why": why, "blocks": r.blocks, "units": r.units, "first": r.labels}
            for why, r in self.reasons.items()
        ]
