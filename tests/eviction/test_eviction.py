"""The eviction policies: invariants that hold for all, and each against a simple model."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.traces import BLOCK_TOKENS, trace_lines
from tierd.chain import ChainIndex
from tierd.eviction import POLICIES, make_policy, survival
from tierd.eviction.hazard import HOLDS
from tierd.eviction.policy import Ghosts, PrefixRequest
from tierd.eviction.reuse import LEARNED_REQUESTS, SLICE, USES_MAX, Reuse
from tierd.replay.trace import Trace, parse_trace
from tierd.types import NEVER

ROOT = b"R" * 32
CAPACITY = 60
FLOOR = 0.002
"""Share of all references by which LRU may be ahead of the policy."""
EVENTS = ["serve", "serve", "remove", "move", "evict", "touch", "resize"]


def block(number: int) -> bytes:
    return b"%032d" % number


def generated(seed: int, requests: int = 400) -> Trace:
    return parse_trace(trace_lines(seed, requests), "generated", BLOCK_TOKENS)


class Cache:
    """An index and its free items, filled in the same order as by the daemon."""

    def __init__(self, capacity: int, name: str, reuse: Reuse | None = None) -> None:
        self.reuse = reuse or Reuse()
        self.policy = make_policy(name, capacity, self.reuse)
        self.index = ChainIndex(self.policy)
        self.free = list(range(capacity))
        self.hits = 0

    def serve(self, request: PrefixRequest) -> list[int]:
        """Use and store one request's blocks; returns the items that were evicted for it."""
        items, hashes = self.index.items, request.hashes
        self.reuse.use(request)
        found = self.index.use(request)
        self.hits += found
        wanted = [i for i in range(len(hashes)) if hashes[i] not in items]
        own = {items[h] for h in hashes if h in items}
        gone = self.index.evict(len(wanted) - len(self.free), own.__contains__)
        self.free += gone
        for i in wanted[: len(self.free)]:
            self.index.insert(self.free.pop(), hashes[i], hashes[i - 1] if i else ROOT)
        return gone


@pytest.mark.parametrize("name", POLICIES)
def test_prefixes_never_have_holes(name: str) -> None:
    """Blocks behind a hole would fill the cache and could never be served."""
    cache = Cache(CAPACITY, name)
    for number, request in enumerate(generated(1).requests):
        cache.serve(request)
        index = cache.index
        assert len(index) + len(cache.free) == CAPACITY
        for item in index.items.values():
            parent = index.parent_of(item)
            assert parent == ROOT or parent in index
        if number % 10 == 0:
            index.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_accounting_holds_for_any_order_of_events(name: str, data: st.DataObject) -> None:
    """A lost slot would shrink the cache; a slot given out twice would serve a wrong byte."""
    capacity = 8
    cache = Cache(capacity, name)
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 30))):
        event = data.draw(st.sampled_from(EVENTS))
        items = sorted(cache.index.items.values())
        now_s += data.draw(st.sampled_from([0.0, 0.01, 5.0, 1e5]))
        if event == "serve":
            first = data.draw(st.integers(0, 5)) * 100
            chain = [block(first + i) for i in range(data.draw(st.integers(0, 7)))]
            partial = bool(chain) and data.draw(st.booleans())
            request = PrefixRequest(
                chain, now_s, partial, data.draw(st.sampled_from([None, 5, 99, 500]))
            )
            cache.serve(request)
        elif event == "touch":
            cache.index.touch(items[:3])
        elif event == "resize":
            # As when lent memory is taken back: the policy may keep the other items.
            cache.policy.resize(data.draw(st.integers(1, 2 * capacity)))
        elif event == "evict":
            busy = set(items[::2])
            gone = cache.index.evict(data.draw(st.integers(0, 9)), busy.__contains__)
            assert not busy & set(gone)
            cache.free += gone
        elif items:
            item = data.draw(st.sampled_from(items))
            if event == "remove":
                cache.index.remove(item)
                cache.free.append(item)
            elif cache.free:
                target = cache.free.pop()
                cache.index.move(item, target)
                cache.free.append(item)
        cache.index.check()
        assert sorted([*cache.free, *cache.index.items.values()]) == list(range(capacity))


@pytest.mark.parametrize("name", POLICIES)
def test_all_blocks_can_be_evicted(name: str) -> None:
    """A namespace whose blocks cannot all be evicted would never lend its memory."""
    cache = Cache(CAPACITY, name)
    for request in generated(2, 100).requests:
        cache.serve(request)
    held = len(cache.index)
    assert len(cache.index.evict(10 * CAPACITY, lambda item: False)) == held
    assert cache.index.evict(1, lambda item: False) == []
    cache.index.check()


@pytest.mark.parametrize("name", POLICIES)
def test_busy_blocks_are_evicted_only_after_release(name: str) -> None:
    """A leased slot reused under its reader would be a wrong byte; one never freed would be
    lost."""
    cache = Cache(10, name)
    cache.serve(PrefixRequest([block(i) for i in range(5)], 0.0))
    cache.serve(PrefixRequest([block(100 + i) for i in range(5)], 1.0))
    tail = cache.index.items[block(4)]
    gone = cache.index.evict(20, lambda item: item == tail)
    assert len(gone) == 5
    assert block(4) in cache.index
    assert len(cache.index.evict(20, lambda item: False)) == 5


# --- each policy against a model ----------------------------------------------------


class Model:
    """Recomputes the worth of every leaf at every eviction, from the history alone."""

    def __init__(self, capacity: int, worth: Callable[[Model, bytes], tuple[float, ...]]) -> None:
        self.capacity = capacity
        self.worth = worth
        self.parent: dict[bytes, bytes] = {}
        self.used: dict[bytes, int] = {}
        self.uses: dict[bytes, int] = {}
        self.clock = 0
        self.hits = 0

    def serve(self, hashes: list[bytes]) -> None:
        run = True
        self.clock += 1
        for block_hash in hashes:
            run = run and block_hash in self.parent
            self.hits += run
            if block_hash in self.parent:
                self.used[block_hash] = self.clock
                self.uses[block_hash] += 1
        own = set(hashes)
        room = self.capacity - len(self.parent)
        wanted = [i for i in range(len(hashes)) if hashes[i] not in self.parent]
        for _ in range(len(wanted) - room):
            inner = set(self.parent.values())
            leaves = [h for h in self.parent if h not in inner and h not in own]
            if not leaves:
                break
            victim = min(leaves, key=lambda h: self.worth(self, h))
            del self.parent[victim]
        for i in wanted[: self.capacity - len(self.parent)]:
            self.clock += 1
            self.parent[hashes[i]] = hashes[i - 1] if i else ROOT
            self.used[hashes[i]] = self.clock
            self.uses[hashes[i]] = 1


MODELS: dict[str, Callable[[Model, bytes], tuple[float, ...]]] = {
    "lru": lambda model, h: (model.used[h],),
    "lfu": lambda model, h: (model.uses[h], model.used[h]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_reference_policies_match_their_models(name: str, seed: int) -> None:
    """A baseline that is not really LRU would make any policy look good."""
    cache = Cache(CAPACITY, name)
    model = Model(CAPACITY, MODELS[name])
    for request in generated(seed, 200).requests:
        cache.serve(request)
        model.serve(list(request.hashes))
        assert set(cache.index.items) == set(model.parent)
    assert cache.hits == model.hits > 0


def test_s3fifo_keeps_blocks_used_twice_during_a_scan() -> None:
    """Without its small queue it would be a plain FIFO, and a scan would empty it."""
    cache = Cache(20, "s3fifo")
    hot = [block(i) for i in range(5)]
    cache.serve(PrefixRequest(hot, 0.0))
    cache.serve(PrefixRequest(hot, 0.0))
    for number in range(50):
        cache.serve(PrefixRequest([block(1000 + number)], 0.0))
    assert all(block_hash in cache.index for block_hash in hot)


def test_arc_target_moves_towards_ghost_hits() -> None:
    """With a fixed target the cache would be two fixed halves."""
    cache = Cache(4, "arc")
    cache.serve(PrefixRequest([block(0)], 0.0))
    cache.serve(PrefixRequest([block(0)], 0.0))
    for number in range(1, 6):
        cache.serve(PrefixRequest([block(number)], 0.0))
    assert block(0) in cache.index
    before = cache.policy._target  # type: ignore[attr-defined]
    cache.serve(PrefixRequest([block(1)], 0.0))
    assert cache.policy._target > before  # type: ignore[attr-defined]


def test_credit_lasts_one_turnover() -> None:
    """A scan of one capacity would push out blocks that are used all the time."""
    cache = Cache(20, "credit")
    hot = [block(i) for i in range(5)]
    for _ in range(4):
        cache.serve(PrefixRequest(hot, 0.0))
    for number in range(30):
        cache.serve(PrefixRequest([block(1000 + number)], 0.0))
    assert all(block_hash in cache.index for block_hash in hot)
    for number in range(20):
        cache.serve(PrefixRequest([block(2000 + number)], 0.0))
    assert not any(block_hash in cache.index for block_hash in hot)


def test_credit_from_a_larger_size_expires() -> None:
    """After memory was taken back, blocks would be evicted in the wrong order, or not at all."""
    cache = Cache(2000, "credit")
    for _ in range(8):
        cache.serve(PrefixRequest([block(i) for i in range(5)], 0.0))
    assert cache.policy.victim() == cache.index.items[block(4)]
    cache.policy.resize(10)
    cache.serve(PrefixRequest([block(i) for i in range(5)], 0.0))
    cache.index.check()
    cache.index.touch([cache.index.items[block(4)]])
    cache.index.check()
    assert len(cache.index.evict(9, lambda item: False)) == 5


@pytest.mark.parametrize("name", POLICIES)
def test_smaller_index_keeps_fewer_ghosts(name: str) -> None:
    """After memory was taken back, the index would keep a ghost for each block of it."""
    cache = Cache(2000, name)
    for number in range(60):
        cache.serve(PrefixRequest([block(100 * number + i) for i in range(100)], float(number)))
    cache.policy.resize(100)
    cache.index.check()
    cache.policy.resize(3000)
    cache.serve(PrefixRequest([block(9999)], 99.0))
    cache.index.check()


# --- the default of L2 --------------------------------------------------------------


def hits_on(requests: list[PrefixRequest], capacity: int, name: str) -> int:
    cache = Cache(capacity, name)
    for request in requests:
        cache.serve(request)
    return cache.hits


def zipf_and_scans(seed: int, requests: int) -> list[PrefixRequest]:
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(200)]
    stream, now_s, fresh = [], 0.0, 1 << 20
    for number in range(requests):
        now_s += rng.expovariate(5)
        if number % 20 == 0:
            chain = [block(fresh + i) for i in range(60)]
            fresh += 60
        else:
            document = rng.choices(range(200), weights)[0]
            chain = [block(document * 100 + i) for i in range(8)]
        stream.append(PrefixRequest(chain, now_s))
    return stream


@pytest.mark.slow
def test_hazard_resists_scans() -> None:
    """A nightly batch job would evict every other client's prefixes."""
    stream = zipf_and_scans(1, 2000)
    assert hits_on(stream, 300, "hazard") > 1.1 * hits_on(stream, 300, "lru")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_hazard_evicts_the_least_valuable_of_the_oldest(seed: int) -> None:
    """State kept between two evictions would be wrong, and so would the order."""
    reuse = Reuse()
    cache = Cache(CAPACITY, "hazard", reuse)
    checked = 0
    for request in generated(seed, 700).requests:
        cache.serve(request)
        if reuse.requests < LEARNED_REQUESTS or reuse.requests % 3:
            continue
        index, tables = cache.index, reuse.survival.tables
        inner = {index.parent_of(item) for item in index.items.values()}
        oldest: dict[int, int] = {}
        for block_hash in index.items.keys() - inner:
            kind, last_ms = reuse.last_use_or_now(block_hash)
            oldest[kind] = min(last_ms, oldest.get(kind, last_ms))
        worth = {kind: tables.value(kind, reuse.now_ms - oldest[kind]) for kind in oldest}
        [gone] = [index.hash_of(item) for item in [cache.policy.victim()] if item is not None]
        cache.free += index.evict(1, lambda item: False)
        assert gone not in index
        kind, last_ms = reuse.last_use_or_now(gone)
        assert last_ms == oldest[kind]
        assert worth[kind] == pytest.approx(min(worth.values()), rel=2 / HOLDS)
        checked += 1
    assert checked > 100


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [100, 400, 1000])
def test_hazard_is_not_worse_than_lru_when_the_workload_changes(capacity: int) -> None:
    """After every deployment an operator would lose hits compared with LRU."""
    first, then = generated(5, 1500).requests, zipf_and_scans(2, 1500)
    offset_s = first[-1].now_s
    stream = first + [r._replace(now_s=r.now_s + offset_s) for r in then]
    references = sum(len(request.hashes) for request in stream)
    loss = hits_on(stream, capacity, "lru") - hits_on(stream, capacity, "hazard")
    assert loss / references < FLOOR


def chats(seed: int, shared: int, added: tuple[int, int], think_s: float) -> list[PrefixRequest]:
    """Chats of several turns; each turn repeats the whole chat and adds a little."""
    rng = random.Random(seed)
    stream, start_s = [], 0.0
    for chat in range(200):
        start_s += rng.expovariate(0.5)
        now_s = start_s
        system = rng.randrange(4)
        chain = [block(system * 1000 + i) for i in range(shared)]
        for _ in range(rng.randint(2, 9)):
            first, more = 10_000 * (chat + 1) + len(chain), rng.randint(*added)
            chain = chain + [block(first + i) for i in range(more)]
            stream.append(PrefixRequest(chain, now_s))
            now_s += think_s * rng.lognormvariate(0, 0.5)
    return sorted(stream, key=lambda request: request.now_s)


def documents(seed: int, pick: Callable[[random.Random, int], int]) -> list[PrefixRequest]:
    """Requests for one of many documents of 8 blocks, 5 a second."""
    rng = random.Random(seed)
    numbers = (pick(rng, number) for number in range(3000))
    return [
        PrefixRequest([block(8 * document + i) for i in range(8)], number / 5)
        for number, document in enumerate(numbers)
    ]


STREAMS: dict[str, Callable[[], list[PrefixRequest]]] = {
    "agents": lambda: chats(1, 60, (5, 30), 5),
    "short think times": lambda: chats(2, 0, (2, 5), 8),
    "tenants": lambda: chats(3, 20, (1, 6), 60),
    "cycle": lambda: documents(4, lambda rng, number: number % 300),
    "uniform": lambda: documents(5, lambda rng, number: rng.randrange(300)),
    "drift": lambda: documents(6, lambda rng, number: number // 10 + rng.randrange(100)),
    "scan": lambda: documents(7, lambda rng, number: number),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_hazard_is_not_worse_than_lru_on_other_workloads(name: str) -> None:
    """An operator with a different workload would be better off without it."""
    stream = STREAMS[name]()
    references = sum(len(request.hashes) for request in stream)
    for capacity in (100, 600, 1800):
        loss = hits_on(stream, capacity, "lru") - hits_on(stream, capacity, "hazard")
        # Where all blocks are equal, policies differ only by chance.
        assert loss / references < (0.015 if name == "uniform" else FLOOR)


def test_reuse_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of evicted blocks would grow as long as the daemon runs."""
    monkeypatch.setattr(survival, "SAMPLES_MAX", 50)
    reuse = Reuse(100)
    cache = Cache(200, "hazard", reuse)
    for number in range(300):
        cache.serve(PrefixRequest([block(10 * number + i) for i in range(10)], float(number)))
        cache.index.check()
        reuse.check()
    assert 90 <= reuse.known <= 100
    assert reuse.uses(block(0)) == 0
    assert reuse.uses(block(2999)) == 1


def test_hazard_survives_a_stopped_or_jumping_clock() -> None:
    """After a node was suspended for a month it would divide by zero or stop evicting."""
    cache = Cache(30, "hazard")
    for number, request in enumerate(generated(3, 150).requests):
        cache.serve(request._replace(now_s=[0.0, 3e6, 2.0][number % 3]))
    cache.index.check()
    assert len(cache.index) == 30


def test_chance_of_reuse_grows_with_the_horizon() -> None:
    """A storage tier would be offered blocks in the wrong order."""
    reuse = Reuse()
    for number in range(50):
        reuse.use(PrefixRequest([block(0), block(number + 1)], number * 10.0))
    chances = [reuse.chance(block(0), horizon_s) for horizon_s in (1, 10, 100, 1000, 1e7)]
    assert chances == sorted(chances)
    assert 0 < chances[0] < chances[-1] <= 1
    assert reuse.chance(block(0), 100) > reuse.chance(block(7), 100)


def test_unrequested_block_may_be_reused() -> None:
    """Blocks that an engine has just generated would never reach a storage tier."""
    reuse = Reuse()
    reuse.use(PrefixRequest([block(0)], 0.0))
    assert reuse.uses(block(999)) == 0
    assert reuse.chance(block(999), 100) == reuse.chance(block(0), 100) > 0


def test_uses_are_counted_up_to_a_bound() -> None:
    """The use count has a fixed number of bits: an overflow would change a block's class."""
    reuse = Reuse()
    for number in range(USES_MAX + 5):
        assert reuse.uses(block(0)) == min(number, USES_MAX)
        reuse.use(PrefixRequest([block(0)], float(number)))


def test_teaching_only_raises_counts() -> None:
    """A snapshot of an hour ago would make a hot block look cold, or have no effect."""
    reuse = Reuse()
    reuse.use(PrefixRequest([block(0), block(1)], 100.0))
    reuse.teach([block(i) for i in range(4)], [1, 9, 3, 99], [500, 20, 300, NEVER], 110_000)
    assert [reuse.uses(block(i)) for i in range(4)] == [1, 9, 3, 0]
    assert [use and use[1] for use in map(reuse.last_use, map(block, range(4)))] == [
        100_000,
        100_000,
        -190_000,  # Before the machine booted.
        None,
    ]
    assert reuse.worth(block(0)) > reuse.worth(block(2)) > reuse.worth(block(3)) == 0
    reuse.use(PrefixRequest([block(2)], 111.0))
    assert (reuse.uses(block(2)), reuse.last_use(block(2))[1]) == (4, 111_000)  # type: ignore[index]
    reuse.teach([block(2)], [2], [0], 111_500)
    assert (reuse.uses(block(2)), reuse.last_use(block(2))[1]) == (4, 111_500)  # type: ignore[index]
    reuse.teach([block(2)], [10**9], [0], 112_000)
    assert reuse.uses(block(2)) == USES_MAX
    reuse.check()


def test_teaching_is_bounded() -> None:
    """A client that teaches hashes without end would use up the node's memory."""
    reuse = Reuse(100)
    for at in range(0, 1000, 50):
        hashes = [block(at + i) for i in range(50)]
        reuse.teach(hashes, [2] * 50, [0] * 50, at)
        reuse.check()
    assert reuse.uses(block(999)) == 2


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("hot_first", [False, True])
def test_teaching_decides_the_eviction_order(again: bool, hot_first: bool) -> None:
    """After a restart, hot blocks would be evicted as early as cold ones."""
    cache = Cache(40, "hazard")
    cache.reuse.pass_time(50.0)
    hot, cold = ([block(base + i) for i in range(20)] for base in (0, 100))
    for chain in (hot, cold) if hot_first else (cold, hot):
        for at, block_hash in enumerate(chain):
            cache.index.insert(cache.free.pop(), block_hash, chain[at - 1] if at else ROOT)
    if again:
        # By then they have a place among the leaves.
        cache.policy.victim()
        cache.index.evict(0, bool)
    cache.reuse.teach(cold + hot, [1] * 20 + [9] * 20, [9000] * 20 + [3600] * 20, 50_000)
    cache.policy.taught(cache.index.items.values())
    cache.index.check()
    assert len(cache.index.evict(19, lambda _: False)) == 19
    assert set(cache.index.items) == {*hot, cold[0]}
    assert len(cache.index.evict(40, lambda _: False)) == 21
    cache.index.check()


def test_accounting_holds_when_taught_at_any_time() -> None:
    """A leaf would never be found for eviction, or be found twice, and the arena would fill up."""
    rng = random.Random(5)
    cache = Cache(CAPACITY, "hazard")
    for number, request in enumerate(generated(4).requests):
        cache.serve(request)
        known = rng.sample(sorted(cache.index.items), min(8, len(cache.index)))
        cache.reuse.teach(
            known,
            [rng.randint(0, 30) for _ in known],
            [rng.choice([0, 5, 10**6, NEVER]) for _ in known],
            cache.reuse.now_ms,
        )
        cache.policy.taught([cache.index.items[block_hash] for block_hash in known])
        if number % 10 == 0:
            cache.index.check()
    assert len(cache.index.evict(CAPACITY, lambda _: False)) == CAPACITY


def test_counting_in_slices_gives_the_same_result() -> None:
    """The daemon, which counts between other work, would evict in another order than a replay."""
    whole, sliced = Reuse(), Reuse()
    chain = [block(i) for i in range(3 * SLICE + 5)]
    requests = [PrefixRequest(chain[: 40 * number], 7.0 * number) for number in range(25)]
    for request in requests:
        whole.use(request)
        steps = sum(1 for _ in sliced.use_slices(request))
        assert steps >= (len(request.hashes) - 1) // SLICE
        if sliced.rebuild_due:
            sliced.rebuild()
            assert not sliced.rebuild_due
    for block_hash in chain:
        assert whole.last_use(block_hash) == sliced.last_use(block_hash)
        assert whole.uses(block_hash) == sliced.uses(block_hash)
        assert whole.chance(block_hash, 60) == sliced.chance(block_hash, 60)


def test_tables_are_not_rebuilt_for_each_request() -> None:
    """Thousands of requests per second would each wait for a millisecond."""
    reuse = Reuse()
    rebuilt = 0
    for number in range(4000):
        for _ in reuse.use_slices(PrefixRequest([block(number % 50)], number / 1000)):
            pass
        if reuse.rebuild_due:
            reuse.rebuild()
            rebuilt += 1
    assert rebuilt == 4


def test_ghosts_forget_the_oldest_first() -> None:
    """The most recently evicted blocks are the ones that return; forgetting them makes ghosts
    useless."""
    ghosts = Ghosts(80)
    for number in range(100):
        ghosts.put(block(number), number)
    assert 70 <= len(ghosts.records) <= 80
    assert list(ghosts.records.values()) == list(range(100 - len(ghosts.records), 100))
