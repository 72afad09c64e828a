"""From which prefix length on a tier beats recomputing: what the daemon decides, as a table.

Pure. A load takes a tier's time for one block alone, and the rest at its speed; the daemon's own
judgement (`tierd.core.prefetch.pays`) says whether that is sooner than computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tierd.cli.common.namespaces import ADAPTER_MARK
from tierd.cli.common.operator import tables, whole
from tierd.core.prefetch import pays

LENGTHS: Final = tuple(512 << power for power in range(9))
"""Prefix lengths of the table, 512 to 131,072 tokens."""

_FAMILY: Final = (
    "model",
    "weights",
    "kv_dtype",
    "block_tokens",
    "platform",
    "tp_size",
    "pp_size",
    "cp_size",
    "hash_scheme",
    "hash_root",
)
"""As `Namespace.family` has it: what the namespaces of one engine's ranks share."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a token's KV takes, of all ranks together, and how many tokens a block has."""

    bytes_per_token: float
    block_tokens: int
    ranks: int = 1
    """Among which a block's bytes are divided."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """How a tier gives blocks: what any load costs at least, and bytes a second beyond it."""

    latency_s: float
    bytes_per_s: float

    def load_s(self, model: Model, tokens: int) -> float:
        """How long a prefix takes to come."""
        return self.latency_s + tokens * model.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """What tiers have to keep up with: a model, and how fast its engine computes prompts."""

    model: Model
    prefill_tokens_per_s: float


def model_of(status: Mapping[str, object], digest: str) -> Model | None:
    """The model of a namespace that the daemon knows, all ranks of its engine together."""
    spaces = tables(status["namespaces"])
    mine = next((space for space in spaces if space["digest"] == digest), None)
    if mine is None:
        return None
    ranks = [space for space in spaces if all(space[name] == mine[name] for name in _FAMILY)]
    block_tokens = whole(mine["block_tokens"])
    size_bytes = sum(whole(space["block_bytes"]) for space in ranks)
    return Model(size_bytes / block_tokens, block_tokens, len(ranks))


def only_model(status: Mapping[str, object]) -> Model | None:
    """The model of the only engine whose namespaces the daemon knows; of several that of the only
    one that is connected."""
    spaces = [
        space for space in tables(status["namespaces"]) if ADAPTER_MARK not in str(space["weights"])
    ]
    for some in (spaces, [space for space in spaces if space["sessions"]]):
        families = {tuple(str(space[name]) for name in _FAMILY): space for space in some}
        if len(families) == 1:
            (space,) = families.values()
            return model_of(status, str(space["digest"]))
    return None


def learned_load(status: Mapping[str, object]) -> PrefillDemand | None:
    """The most demanding of the engines that have told the daemon how fast they are."""
    loads = [
        PrefillDemand(model, whole(seat["prefill_tokens_per_s"]))
        for seat in tables(status.get("demand", []))
        if seat.get("prefill_tokens_per_s")
        and (model := model_of(status, str(seat["namespace"]))) is not None
    ]
    return max(
        loads, key=lambda each: each.model.bytes_per_token * each.prefill_tokens_per_s, default=None
    )


def first_paying(
    speed: TierSpeed, model: Model, prefill_tokens_per_s: float, min_tokens: int = 0
) -> int | None:
    """The shortest prefix, in whole blocks, that is loaded sooner than computed; None: none is.

    `min_tokens` is the daemon's own bound: fewer are never asked of a tier.
    """
    gain_s = 1 / prefill_tokens_per_s - model.bytes_per_token / speed.bytes_per_s
    if gain_s <= 0:
        return None
    shortest = int(speed.latency_s / gain_s)
    blocks = max(1, -(-max(min_tokens, shortest) // model.block_tokens))
    # Rounding may have taken a token away.
    while not pays(
        speed.load_s(model, blocks * model.block_tokens),
        blocks * model.block_tokens,
        prefill_tokens_per_s,
    ):
        blocks += 1
    return blocks * model.block_tokens
