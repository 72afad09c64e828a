"""The estimate of `tierd warm --dry-run`: where the blocks are, and about how long a warm takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tierd.cli.common.operator import Operator, table, tables, whole
from tierd.cli.common.text import duration, printable, size
from tierd.cli.warm.sources import WantedBlocks
from tierd.types import Namespace
from tierd.wire.messages import EXPLAINED_MAX


@dataclass(slots=True)
class Estimate:
    """Where blocks are. A block counts for a place only if all ranks have it there."""

    units: int = 0
    blocks: int = 0
    size_bytes: int = 0
    """Size of all blocks, of all ranks."""
    here: int = 0
    """Blocks that are in the target already."""
    nowhere: int = 0
    tokens_nowhere: int = 0
    by_tier: Counter[str] = field(default_factory=Counter)
    """Blocks in each tier, also if another tier has them; 0 for a tier that does not answer."""
    silent: set[str] = field(default_factory=set)
    """Tiers that do not accept reads, so that their blocks are unknown."""
    read_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that a warm would read from each tier."""
    read_s: float | None = 0.0
    """Time to read them at the measured speeds; None if a speed was not measured."""
    compute_s: float | None = None
    """Time for an engine to compute the missing blocks; None if its speed is unknown."""

    def lines(self, target: str) -> Iterator[str]:
        """Yield the estimate as text."""
        yield (
            f"{self.units} prompts and runs: {self.blocks} blocks, {size(self.size_bytes)}; "
            f"{self.here} in {target}, {self.nowhere} in no tier"
        )
        for name, blocks in self.by_tier.items():
            what = size(self.read_bytes[name])
            yield printable(f"  {name}: {blocks} blocks, {what} to read")
        for name in sorted(self.silent):
            yield printable(f"  {name}: accepts no reads now, its blocks are unknown")
        yield f"  time to read: {_time(self.read_s)}; to compute the missing blocks: " + (
            _time(self.compute_s) if self.nowhere else "none"
        )

    def as_json(self) -> dict[str, object]:
        """Return the estimate for `--json`."""
        return {
            "units": self.units,
            "blocks": self.blocks,
            "bytes": self.size_bytes,
            "here": self.here,
            "nowhere": self.nowhere,
            "tiers": {name: {"blocks": blocks} for name, blocks in self.by_tier.items()},
            "read_bytes": dict(self.read_bytes),
            "silent": sorted(self.silent),
            "read_s": self.read_s,
            "compute_s": self.compute_s,
        }


def estimate(operator: Operator, wants: Iterable[WantedBlocks], target: int) -> Estimate:
    """Ask the daemon for all wants. Raises RefusedError and what `wants` raises."""
    status = operator.status()
    found = Estimate()
    speeds = {str(tier["name"]): tier["read_bytes_per_s"] for tier in tables(status["storage"])}
    for want in wants:
        found.units += 1
        left = iter(want.hashes)
        while hashes := list(islice(left, EXPLAINED_MAX)):
            _count(found, operator, want.ranks, hashes, target)
    for name, read_bytes in found.read_bytes.items():
        speed = speeds.get(name)
        if found.read_s is None or not isinstance(speed, int | float) or speed <= 0:
            found.read_s = None
        else:
            found.read_s += read_bytes / speed
    prefill = max(whole(each["prefill_tokens_per_s"]) for each in tables(status["demand"]))
    found.compute_s = found.tokens_nowhere / prefill if prefill else None
    return found


def _count(
    found: Estimate,
    operator: Operator,
    ranks: Sequence[Namespace],
    hashes: list[bytes],
    target: int,
) -> None:
    answers = [operator.explain(rank.digest, hashes) for rank in ranks]
    names = [str(tier["name"]) for tier in tables(answers[0]["tiers"])]
    for tier in tables(answers[0]["tiers"]):
        if not tier["reads"]:
            found.silent.add(str(tier["name"]))
    block_bytes = sum(rank.block_bytes for rank in ranks)
    for blocks in zip(*(tables(answer["blocks"]) for answer in answers), strict=True):
        found.blocks += 1
        found.size_bytes += block_bytes
        in_host = all(block["host"] for block in blocks)
        tiers = set.intersection(*(set(_tiers(block)) for block in blocks))
        found.by_tier.update(names[number] for number in tiers)
        if (target - 1 in tiers) if target else in_host:
            found.here += 1
        elif in_host:
            continue  # A write to the target tier is enough; nothing has to be read.
        elif tiers:
            found.read_bytes[names[min(tiers)]] += block_bytes
        else:
            found.nowhere += 1
            found.tokens_nowhere += ranks[0].block_tokens


def _tiers(block: Mapping[str, object]) -> list[int]:
    tiers = table(block)["tiers"]
    assert isinstance(tiers, list)
    return tiers


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown, the speed was not measured yet"
    return f"about {duration(seconds)}"
