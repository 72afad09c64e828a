"""What a warm came to: how many blocks are where they should be, and why the others are not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tierd.cli.common.text import number, printable, size
from tierd.wire.messages import Warmth

LABELS_MAX: Final = 3
"""Prompts or runs that are named for each reason."""

REASONS_MAX: Final = 50
"""Different reasons that are told apart: part of their text may be an engine's."""

_REASONS: Final = {
    Warmth.NOWHERE: "no tier has them",
    Warmth.NO_ROOM: "no room for them: what is there is worth more, leased or kept",
    Warmth.AWAY: "a tier that may have them takes no reads now, or failed",
    Warmth.CORRUPT: "they were damaged",
    Warmth.LATE: "the deadline passed first",
    Warmth.BARRED: "they are being flushed",
    Warmth.UNWRITTEN: "the storage tier did not take them",
}

COLD: Final = frozenset({Warmth.NOWHERE, Warmth.CORRUPT})
"""What an engine can help: nobody has the blocks."""

NOT_STORED: Final = "the engine has computed them, and not stored them in time"


@dataclass(slots=True)
class Reason:
    """Why something is not warm: how many blocks, and whose."""

    blocks: int = 0
    units: int = 0
    """Prompts, or runs of a hot set or tier."""
    labels: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WarmReport:
    """Counts of one run. A block that several prompts share counts for each."""

    units: int = 0
    blocks: int = 0
    here: int = 0
    brought: int = 0
    computed: int = 0
    before: int = 0
    """Blocks of units that the journal has as finished, and that are still there."""
    bytes_read: int = 0
    """What was brought, in all ranks; what two calls have from one read counts for both."""
    had_bytes: int = 0
    """What is there, in all ranks."""
    kept_bytes: int | None = None
    """Of that what is kept for a time; None: that was not asked for."""
    unproven: int = 0
    """Blocks that were to be verified, and have no checksum yet."""
    reasons: dict[str, Reason] = field(default_factory=dict)
    late: bool = False
    """The deadline passed before all input was read."""
    interrupted: bool = False
    engine_away: str = ""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def had(self) -> int:
        """Blocks that are warm."""
        return self.here + self.brought + self.computed + self.before

    @property
    def whole(self) -> bool:
        """Nothing was left out."""
        return not self.reasons and not self.late and not self.interrupted

    def finished(
        self, label: str, outcomes: bytes, before: bytes | None = None, why: str | None = None
    ) -> None:
        """A unit has come to its end.

        `before` are its outcomes before an engine computed it; `why` is why none did what no
        tier has.
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
        """A unit of the journal's that is still there."""
        self.units += 1
        self.blocks += blocks
        self.before += blocks

    def missing(self, label: str, why: str, blocks: int = 0) -> None:
        """Something is not warm; `label` says whose it is."""
        if why not in self.reasons and len(self.reasons) >= REASONS_MAX:
            why = "other reasons"
        reason = self.reasons.setdefault(why, Reason())
        reason.blocks += blocks
        reason.units += 1
        if len(reason.labels) < LABELS_MAX:
            reason.labels.append(label)

    def speed(self) -> float:
        """Bytes that were brought a second."""
        return self.bytes_read / max(1e-3, time.monotonic() - self.began_s)

    def progress(self, under_way: int, warm: int, share: float | None) -> tuple[float | None, str]:
        """What part is done, None if nobody knows, and a few words.

        Of `under_way` blocks, whose unit has not come to its end, `warm` are there already; the
        input has been read up to `share`.
        """
        done, known = self.had + warm, self.blocks + under_way
        part = None if share is None else share * (self.blocks + warm) / max(1, known)
        more = "" if share == 1 else " so far"
        return part, f"{number(done)} of {number(known)} blocks{more}, {size(self.speed())}/s"

    def lines(self, target: str) -> Iterator[str]:
        """For people."""
        spent_s = time.monotonic() - self.began_s
        yield f"{self.had} of {self.blocks} blocks in {target}, of {self.units} prompts and runs"
        parts = [("were there", self.here), ("brought", self.brought)]
        parts += [("computed", self.computed), ("done before", self.before)]
        told = ", ".join(f"{count} {what}" for what, count in parts if count)
        if told:
            yield f"  {told}; {size(self.bytes_read)} in {spent_s:.1f} s, {size(self.speed())}/s"
        if self.kept_bytes is not None:
            more = "" if self.kept_bytes >= self.had_bytes else "; host.pin_share allows no more"
            yield f"  kept: {size(self.kept_bytes)} of {size(self.had_bytes)}{more}"
        if self.unproven:
            yield f"  not verified: {self.unproven} blocks, which have no checksum yet"
        yield from self.reason_lines()

    def reason_lines(self) -> Iterator[str]:
        """Why not all is warm, or was looked at."""
        for why, reason in sorted(self.reasons.items(), key=lambda item: -item[1].blocks):
            more = ", ..." if reason.units > len(reason.labels) else ""
            count = f"{reason.blocks} blocks" if reason.blocks else f"{reason.units} not read"
            yield printable(f"  {count}: {why} ({', '.join(reason.labels)}{more})")
        if self.late:
            yield "  the deadline has passed; not all was read"
        if self.interrupted:
            yield "  interrupted; not all was read"

    def as_json(self) -> dict[str, object]:
        """For programs."""
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
            "unproven": self.unproven,
            "seconds": round(time.monotonic() - self.began_s, 3),
            "late": self.late,
            "interrupted": self.interrupted,
            "reasons": self.reasons_as_json(),
        }

    def reasons_as_json(self) -> list[dict[str, object]]:
        """Why not all is warm, or was looked at, for programs."""
        return [
            {"why": why, "blocks": r.blocks, "units": r.units, "first": r.labels}
            for why, r in self.reasons.items()
        ]
