"""Computes the prefix length from which a tier beats recomputing, as the daemon decides it.

Pure functions. A load takes the tier's latency plus the transfer at its speed. The daemon's own
`tierd.core.l3.prefetch.pays` decides whether that is faster than computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tierd.cli.common.namespaces import ADAPTER_MARK
from tierd.cli.common.operator import tables, whole
from tierd.core.l3.prefetch import pays

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
"""The fields of `Namespace.family`, which all ranks of one engine share."""


@dataclass(frozen=True, slots=True)
class Model:
    """KV bytes per token on all ranks together, and tokens per block."""

    bytes_per_token: float
    block_tokens: int
    ranks: int = 1
    """Number of ranks that share a block's bytes."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Speed of a tier: the fixed time of a load, and bytes per second beyond it."""

    latency_s: float
    bytes_per_s: float

    def load_s(self, model: Model, tokens: int) -> float:
        """Return the seconds to load a prefix of `tokens`."""
        return self.latency_s + tokens * model.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """A model and its engine's prefill speed, which tiers must beat."""

    model: Model
    prefill_tokens_per_s: float


def model_of(status: Mapping[str, object], digest: str) -> Model | None:
    """Return the model of a namespace with all ranks of its engine; None if it is unknown."""
    spaces = tables(status["namespaces"])
    mine = next((space for space in spaces if space["digest"] == digest), None)
    if mine is None:
        return None
    ranks = [space for space in spaces if all(space[name] == mine[name] for name in _FAMILY)]
    block_tokens = whole(mine["block_tokens"])
    size_bytes = sum(whole(space["block_bytes"]) for space in ranks)
    return Model(size_bytes / block_tokens, block_tokens, len(ranks))


def only_model(status: Mapping[str, object]) -> Model | None:
    """Return the model of the only engine that the daemon knows, or of the only connected one of
    several; None if that is ambiguous."""
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
    """Return the most demanding engine that reported its prefill speed; None if none did."""
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
    """Return the tokens of the shortest prefix, in whole blocks, that loads faster than it
    computes; None if no prefix does.

    `min_tokens`: the daemon's lower bound for loads from a tier.
    """
    gain_s = 1 / prefill_tokens_per_s - model.bytes_per_token / speed.bytes_per_s
    if gain_s <= 0:
        return None
    shortest = int(speed.latency_s / gain_s)
    blocks = max(1, -(-max(min_tokens, shortest) // model.block_tokens))
    # Rounding may have made the prefix one token too short.
    while not pays(
        speed.load_s(model, blocks * model.block_tokens),
        blocks * model.block_tokens,
        prefill_tokens_per_s,
    ):
        blocks += 1
    return blocks * model.block_tokens
