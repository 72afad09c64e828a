"""Write budgets and write policies, on simulated time."""

from __future__ import annotations

import hashlib
import random

import pytest

from tierd.config import Size, StorageConfig, WritePolicy, parse
from tierd.core.l3.writes import (
    DEMAND_EARLY,
    DEMAND_MAX,
    HORIZON_S_MAX,
    RATE_BURST_S,
    Miss,
    Missed,
    WriteBudget,
    WriteMoment,
    Writes,
)
from tierd.errors import ConfigError
from tierd.eviction.policy import PrefixRequest
from tierd.eviction.reuse import Reuse

SPACE = b"n" * 16
S = 1_000_000_000
BLOCK = 4096
L2_BYTES = 1000 * BLOCK


def chain(count: int, tag: object = 0) -> list[bytes]:
    return [hashlib.sha256(f"{tag}/{i}".encode()).digest() for i in range(count)]


def config(policy: WritePolicy = WritePolicy.WRITE_THROUGH_SELECTIVE, **keys: object):
    return StorageConfig(type="memory", write_policy=policy, **keys)  # type: ignore[arg-type]


# --- budgets ----------------------------------------------------------------------------


def spend_all(budget: WriteBudget, now_ns: int) -> int:
    """Write as many blocks as the budget allows, at most 100; return their bytes."""
    budget.pass_time(now_ns)
    return budget.spend_on(100, BLOCK) * BLOCK


def test_demand_is_steered_to_the_write_share() -> None:
    """An operator who pays by the request would pay for more than the share that was set, or have
    less written than was paid for."""
    rng = random.Random(1)
    for share in (0.1, 0.4, 0.8):
        budget = WriteBudget(config(write_share=share), L2_BYTES)
        written = 0
        for number in range(40_000):
            budget.offer(BLOCK)
            if rng.random() >= budget.demand:
                assert budget.spend_on(1, BLOCK) == 1
                written += number >= 20_000
        assert written / 20_000 == pytest.approx(share, abs=0.05)


def test_write_rate_is_bounded() -> None:
    """Backups would fill a shared link."""
    budget = WriteBudget(config(write_share=1.0, write_bytes_per_s=Size(BLOCK)), L2_BYTES)
    first = spend_all(budget, 0)
    assert first == RATE_BURST_S * BLOCK
    total = sum(spend_all(budget, second * S) for second in range(1, 101))
    assert 99 * BLOCK <= total <= 101 * BLOCK


def test_writes_per_day_are_bounded() -> None:
    """An SSD would wear out in one year instead of five."""
    budget = WriteBudget(config(write_share=1.0, drive_writes_per_day=0.5), L2_BYTES)
    assert budget.spend_on(5, BLOCK) == 5, "without a capacity there is nothing to count in"
    capacity = 10_000 * BLOCK
    budget.resize(capacity)
    total = sum(spend_all(budget, minute * 60 * S) for minute in range(24 * 60))
    assert 0.49 * capacity <= total <= 0.53 * capacity
    budget.resize(capacity)
    assert spend_all(budget, 24 * 3600 * S) <= 4 * BLOCK, "the same capacity is no new burst"
    budget.resize(capacity // 2)
    total = sum(spend_all(budget, (24 * 60 + minute) * 60 * S) for minute in range(24 * 60))
    assert 0.24 * capacity <= total <= 0.28 * capacity, "a smaller drive takes less"


def test_rate_bound_raises_the_demand_before_it_stops_writes() -> None:
    """The bytes of each second would go to the first blocks in it."""
    budget = WriteBudget(config(write_share=1.0, write_bytes_per_s=Size(10 * BLOCK)), L2_BYTES)
    rng = random.Random(1)
    stopped = 0
    for number in range(40_000):  # 100 blocks a second: only a tenth may be written.
        budget.pass_time(number * S // 100)
        budget.offer(BLOCK)
        if rng.random() >= budget.demand:
            written = budget.spend_on(1, BLOCK)
            stopped += number >= 20_000 and not written
    assert budget.demand == pytest.approx(0.9, abs=0.06)
    assert stopped < 600, "of 2,000 that the bound lets through"


def test_unwritten_blocks_are_refunded() -> None:
    """Blocks that the tier already has, or refuses, would use up the budget."""
    budget = WriteBudget(config(write_bytes_per_s=Size(BLOCK)), L2_BYTES)
    spend_all(budget, 0)
    budget.refund(BLOCK)
    assert spend_all(budget, 0) == BLOCK
    calm, busy = (WriteBudget(config(), L2_BYTES) for _ in range(2))
    for _ in range(1000):
        calm.offer(BLOCK)
        busy.offer(BLOCK)
        busy.spend_on(1, BLOCK)
        busy.refund(BLOCK)
    assert busy.demand == calm.demand


def test_horizon_is_the_turnover_time_of_the_tier() -> None:
    """A small tier would get blocks whose next use comes long after it has evicted them."""
    budget = WriteBudget(config(), L2_BYTES)
    assert budget.horizon_s == HORIZON_S_MAX, "nothing is known of the tier"
    budget.resize(1000 * BLOCK)
    for second in range(3000):
        budget.pass_time(second * S)
        budget.offer(20 * BLOCK)
        budget.spend_on(10, BLOCK)
    assert budget.horizon_s == pytest.approx(100, rel=0.1)
    budget.pass_time(100_000 * S)
    assert budget.horizon_s == HORIZON_S_MAX, "no writes within the horizon"


def parsed(environ: dict[str, str], **keys: object) -> StorageConfig:
    raw: dict[str, object] = {"host": {"capacity": "1GiB"}, "storage": [{"type": "file", **keys}]}
    (tier,) = parse(raw, environ).storage
    return tier


def test_budgets_are_read_from_file_and_environment() -> None:
    """A configured bound would not hold, or a daemon would not start."""
    tier = parsed({"TIERD_STORAGE_FILE_WRITE_SHARE": "0.3"}, drive_writes_per_day=1)
    assert (tier.write_share, tier.drive_writes_per_day) == (0.3, 1.0)
    assert parsed({}, write_policy="write_back").write_policy is WritePolicy.WRITE_BACK
    for bad in ({"write_policy": "write_thru"}, {"write_share": 0}, {"write_uses": 5}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            parsed({}, **bad)
    with pytest.raises(ConfigError, match="WRITE_SHARE=much"):
        parsed({"TIERD_STORAGE_FILE_WRITE_SHARE": "much"})


def test_bound_without_effect_is_refused() -> None:
    """An operator would believe the SSD protected under write_back."""
    with pytest.raises(ConfigError, match="need write_policy"):
        parsed({}, write_policy="write_back", write_bytes_per_s="1MiB")


# --- missed blocks ----------------------------------------------------------------------


def test_each_refusal_counts_one_lost_hit() -> None:
    """The cost of a budget would be counted again on each later request."""
    missed, hashes = Missed(), chain(4)
    missed.add(SPACE, hashes[:3], Miss.REFUSED)
    missed.add(SPACE, hashes[3:], Miss.FULL)
    assert missed.lost(SPACE, hashes) == 3, "a block lost to a full queue is no refusal"
    assert missed.lost(SPACE, hashes) == 0
    missed.add(SPACE, hashes[:1], Miss.REFUSED)
    assert missed.lost(b"m" * 16, hashes) == 0
    assert missed.lost(SPACE, hashes) == 1, "refused again"


def test_block_written_later_is_no_lost_hit() -> None:
    """A hit of the tier would count as lost by its policy."""
    missed, hashes = Missed(), chain(2)
    missed.add(SPACE, hashes, Miss.REFUSED)
    assert missed.remove(SPACE, hashes[0])
    assert not missed.remove(SPACE, hashes[0])
    assert missed.lost(SPACE, hashes) == 1


def test_number_of_remembered_misses_is_bounded() -> None:
    """The memory of refused blocks would grow without bound, or forget the latest ones."""
    missed = Missed(limit=64)
    for number in range(50):
        missed.add(SPACE, chain(5, number), Miss.REFUSED)
        assert len(missed) <= 64
    assert missed.lost(SPACE, chain(5, 49)) == 5
    assert missed.lost(SPACE, chain(5, 0)) == 0


# --- policies ---------------------------------------------------------------------------


class Foreseen(Reuse):
    """A book in which every block has the same uses and chance of use."""

    def __init__(self, uses: int, chance: float | None = None) -> None:
        super().__init__()
        self._given = uses, chance

    def uses(self, block_hash: bytes) -> int:
        return self._given[0]

    def chance(self, block_hash: bytes, horizon_s: float) -> float:
        chance = self._given[1]
        assert chance is not None, "the chance must not matter in this case"
        assert 0 < horizon_s <= HORIZON_S_MAX
        return chance


def takes(writes: Writes, moment: WriteMoment, uses: int, chance: float | None = None) -> bool:
    chosen = writes.choose(moment, SPACE, chain(1), Foreseen(uses, chance), BLOCK, 0)
    return chosen == [0]


def selective(demand: float, **keys: object) -> Writes:
    """A selective policy whose budget has come to a demand."""
    writes = Writes(config(WritePolicy.WRITE_THROUGH_SELECTIVE, **keys), L2_BYTES)
    writes.budget.demand, writes.budget._first_steps = demand, 0
    return writes


def test_write_through_writes_every_block() -> None:
    """Blocks seen for the first time would not be kept, as HiCache's write_through failed to do."""
    writes = Writes(config(WritePolicy.WRITE_THROUGH), 1)
    assert all(takes(writes, moment, 1) for moment in WriteMoment)


def test_write_back_writes_only_on_eviction() -> None:
    """Popular blocks would be written although L2 keeps them; HiCache's write_back sends to
    storage whatever it demotes, needed or not."""
    writes = Writes(config(WritePolicy.WRITE_BACK), 1)
    assert not takes(writes, WriteMoment.STORED, 1)
    assert not takes(writes, WriteMoment.USED, 50)
    assert takes(writes, WriteMoment.EVICTING, 1)


def test_selective_writes_at_once_while_budget_is_left() -> None:
    """A quiet node would lose its blocks with the daemon although it has write budget left."""
    assert takes(selective(DEMAND_EARLY), WriteMoment.STORED, 1)
    assert not takes(selective(2 * DEMAND_EARLY), WriteMoment.STORED, 1)
    writes = Writes(config(write_share=1.0, write_bytes_per_s=Size(1000 * BLOCK)), L2_BYTES)
    for second in range(400):
        writes.choose(WriteMoment.STORED, SPACE, chain(40, second), Foreseen(1), BLOCK, second * S)
    now_ns = 400 * S
    assert writes.choose(WriteMoment.STORED, SPACE, chain(1), Foreseen(1), BLOCK, now_ns) == [0]


def least(writes: Writes, moment: WriteMoment) -> float:
    """The least chance of use that is enough, in steps of a thousandth."""
    return next(p / 1000 for p in range(1001) if takes(writes, moment, 2, p / 1000))


def test_selective_requires_a_higher_chance_at_a_higher_demand() -> None:
    """The budget would be spent on the first blocks."""
    for demand in (0.02, 0.2, 0.5, DEMAND_MAX):
        writes = selective(demand)
        assert not takes(writes, WriteMoment.STORED, 1), "one use is not enough"
        assert not takes(writes, WriteMoment.USED, 1)
        assert least(writes, WriteMoment.EVICTING) == pytest.approx(demand, abs=0.001)
        # A block that stays can be written later, when more is known of its reuse.
        assert least(writes, WriteMoment.USED) > demand


def test_popular_blocks_are_written_while_they_stay() -> None:
    """The system prompt that never leaves L2 would be lost with the daemon, and unknown to the
    other nodes that share the tier."""
    assert takes(selective(0.2), WriteMoment.USED, 20, 0.99)
    assert takes(selective(DEMAND_MAX), WriteMoment.USED, 20, 1.0)


def bounded(blocks: int) -> Writes:
    """Return a selective policy that may write `blocks` now."""
    return selective(0.2, write_bytes_per_s=Size(round(blocks * BLOCK / RATE_BURST_S)))


def test_selective_writes_nothing_beyond_a_bound() -> None:
    """An operator's bound would not hold."""
    writes = bounded(10)
    taken = sum(takes(writes, WriteMoment.EVICTING, 9, 1.0) for _ in range(50))
    assert taken == 10
    assert not any(takes(writes, moment, 9, 1.0) for moment in WriteMoment)


def test_bound_within_a_chain_keeps_the_prefix() -> None:
    """Children would be written without their parents, which no request can use."""
    writes = bounded(5)
    hashes = chain(8)
    chosen = writes.choose(WriteMoment.EVICTING, SPACE, hashes, Foreseen(2, 1.0), BLOCK, 0)
    assert chosen == [0, 1, 2, 3, 4]
    assert writes.missed.lost(SPACE, hashes) == 3


def test_refused_blocks_are_offered_once() -> None:
    """A block that is refused and computed again repeatedly would raise the budget for others:
    the share counts what write_through would write, which is each block once."""
    writes = selective(0.5)
    for _ in range(2000):
        takes(writes, WriteMoment.STORED, 1)
        assert not takes(writes, WriteMoment.EVICTING, 1, 0.0)
    assert writes.budget.demand == 0.5


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_write_uses_is_applied(count: int) -> None:
    """The key `write_uses` would have no effect; HiCache's threshold is not a setting."""
    writes = selective(0.5, write_uses=count)
    enough = [takes(writes, WriteMoment.USED, n, 1.0) for n in (1, 2, 3, 4)]
    assert enough == [n >= count for n in (1, 2, 3, 4)]


def test_conversations_are_preferred_to_documents_read_once() -> None:
    """The budget would go to long documents, and conversations would be recomputed."""
    reuse = Reuse()
    talk = chain(400, "talk")
    for turn in range(1, 200):
        reuse.use(PrefixRequest(talk[: 2 * turn], 20.0 * turn))
        reuse.use(PrefixRequest(chain(64, turn), 20.0 * turn))
    last = [talk[396], talk[0], *chain(64, 199)[:2]]
    writes = selective(0.2)
    assert writes.choose(WriteMoment.EVICTING, SPACE, last, reuse, BLOCK, 4000 * S) == [0, 1]


def test_stop_writes_popular_blocks_at_any_demand() -> None:
    """A restart in a busy hour would lose popular blocks, and keep one-off prompts of the hour
    before."""
    writes, reuse = Writes(config(), L2_BYTES), Reuse()
    used, once = chain(10, "used"), chain(10, "once")
    for now_s in (0.0, 1.0):
        reuse.use(PrefixRequest(used, now_s))
    reuse.use(PrefixRequest(once, 1.0))

    def chosen(moment: WriteMoment) -> list[int]:
        writes.budget.demand = DEMAND_MAX
        return writes.choose(moment, SPACE, [*used, *once], reuse, BLOCK, 2 * S)

    assert chosen(WriteMoment.EVICTING) == []
    assert chosen(WriteMoment.STOPPING) == [*range(10)]
