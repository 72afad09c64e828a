"""Demand metrics: tokens that engines request and load, by namespace and by source."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.support import blocks
from tests.support.prometheus import Family, read
from tests.support.tiers.bench import SPACE, Bench, run
from tierd.core.host import HostTier
from tierd.core.l2.space import Space
from tierd.daemon.http.metrics import scrape
from tierd.daemon.session.demand import SEATS_MAX, Demand, DemandCounts

TOKENS = SPACE.block_tokens


def scraped(bench: Bench) -> dict[str, Family]:
    return read(scrape(bench.node.status()))


def test_tokens_are_counted_by_their_source() -> None:
    """An operator could not see which tier is worth its cost."""

    async def test(bench: Bench) -> None:
        node, space = bench.node, bench.space
        bench.store(6, "cold")
        await bench.backed_up()
        bench.forget()
        cold, _ = blocks.chain(8, "cold")
        warm = bench.store(4, "warm")
        lease = node.acquire_now(1, [space], warm).lease
        assert lease is not None
        assert not scraped(bench)["tierd_saved_tokens_total"].value(), "leased, and not loaded"
        bench.load(warm, lease)
        assert await bench.acquire(cold) == 6
        assert await bench.acquire(blocks.chain(5, "none")[0]) == 0
        found = scraped(bench)
        assert found["tierd_requested_tokens_total"].value() == (4 + 8 + 5) * TOKENS
        assert found["tierd_saved_tokens_total"].value() == 10 * TOKENS
        assert found["tierd_host_loaded_tokens_total"].value() == 4 * TOKENS
        by_tier = found["tierd_tier_loaded_tokens_total"]
        assert by_tier.value(tier="tier0") == 6 * TOKENS
        assert by_tier.value(tier="tier1") == 0
        assert found["tierd_loaded_bytes_total"].value() == 10 * space.slot_bytes
        assert found["tierd_stored_bytes_total"].value() == 10 * space.slot_bytes
        names = {"namespace": space.digest.hex(), "model": SPACE.model}
        assert found["tierd_namespace_requested_tokens_total"].value(**names) == 17 * TOKENS
        assert found["tierd_namespace_loaded_tokens_total"].value(**names) == 10 * TOKENS

    run(test)


def test_last_reported_prefill_speed_is_shown() -> None:
    """`tierd bench` and `tierd doctor` would not know which speed a tier has to beat."""

    async def test(bench: Bench) -> None:
        node, space = bench.node, bench.space
        hashes = bench.store(2)
        for told, known in ((0, 0), (500, 500), (400, 400), (0, 400)):
            node.acquire_now(1, [space], hashes, told)
            assert node.demand.status()[0]["prefill_tokens_per_s"] == known

    run(test)


def test_tokens_of_a_request_to_several_ranks_count_once() -> None:
    """The saved prefill time would be eight times too long, though the hit ratio is right."""

    async def test(bench: Bench) -> None:
        other = bench.node.register(blocks.namespace(8192, tp_rank=1, tp_size=2))
        hashes = bench.store(4, space=bench.space)
        bench.store(4, space=other)
        answer = bench.node.acquire_now(1, [bench.space, other], hashes)
        assert answer.lease is not None
        bench.load(hashes, answer.lease, [bench.space, other])
        found = scraped(bench)
        assert found["tierd_saved_tokens_total"].value() == 4 * TOKENS
        assert found["tierd_loaded_bytes_total"].value() == 4 * (4096 + 8192)

    run(test)


def opened() -> list[Space]:
    """Namespaces without sessions and blocks."""
    host = HostTier(1 << 20)
    names = [blocks.namespace(model=f"model {number}") for number in range(3 * SEATS_MAX)]
    return [space for space in map(host.open_space, names) if space is not None]


SPACES = opened()


@given(st.lists(st.tuples(st.integers(0, len(SPACES) - 1), st.booleans()), max_size=100))
def test_demand_counters_never_decrease_and_series_are_bounded(
    events: list[tuple[int, bool]],
) -> None:
    """Each new namespace would be a permanent series, or rates would be wrong."""
    demand = Demand()
    before: Counter[str] = Counter()
    for asked, (number, stays) in enumerate(events, 1):
        SPACES[number]._sessions = int(stays)
        demand.of(SPACES[number]).requested_tokens += 1
        shown: list[dict] = demand.status()
        assert len(shown) <= SEATS_MAX + 1
        now = Counter({entry["namespace"]: entry["requested_tokens"] for entry in shown})
        assert all(count >= before[name] for name, count in now.items())
        before.update(now - before)
        assert before.total() == asked


def test_ended_namespace_frees_its_demand_series() -> None:
    """After twenty restarts of an engine with a random hash seed no new namespace would be
    shown."""
    demand, spaces = Demand(), opened()
    for space in spaces:
        space._sessions = 1
        demand.of(space)
    assert demand.of(spaces[SEATS_MAX]) is demand.others
    first = demand.of(spaces[0])
    first.requested_tokens = 7
    spaces[0]._sessions = 0
    assert demand.of(spaces[SEATS_MAX]) is not demand.others
    assert demand.of(spaces[0]) is demand.others
    spaces[1]._sessions = 0
    spaces[1]._chain.insert(0, bytes(32), blocks.ROOT)
    assert demand.of(spaces[0]) is demand.others, "its blocks may be asked for again"
    spaces[1]._chain.remove(0)
    assert demand.of(spaces[0]) == DemandCounts(requested_tokens=7)
