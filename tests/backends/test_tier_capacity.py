"""The shared capacity of a store that several nodes fill: Redis and S3 with `capacity`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.blocks import chain, namespace, payload
from tests.support.daemon_process import DaemonProcess
from tests.support.tiers.scene import table
from tierd.backend import HEADER_BYTES, Backend, Outcome
from tierd.errors import ConfigError
from tierd.testing.suite import NAMESPACE, contains, get, make_chain, put, running
from tierd.types import BlockKey
from tierd_backends.common import shared_capacity
from tierd_backends.common.shared_capacity import SharedCapacity
from tierd_backends.redis import RedisBackend
from tierd_backends.redis.census import Census
from tierd_backends.s3 import S3Backend
from tierd_backends.s3.usage import Usage

LENGTH = 5000
STORED_BYTES = HEADER_BYTES + LENGTH
FITTING = 6
CAPACITY = FITTING * STORED_BYTES + STORED_BYTES // 2
SOON_S = 20.0

Open = Callable[..., contextlib.AbstractAsyncContextManager[Backend]]


# --- the rules, without a server ----------------------------------------------------


def admitted(shared: SharedCapacity, used_bytes: int, sizes: list[int]) -> int:
    with shared.admit(used_bytes, sizes) as count:
        return count


def test_shared_capacity_admits_the_first_blocks_that_fit() -> None:
    """A prefix would be stored with a hole, and the blocks behind it would be useless."""
    shared = SharedCapacity("1KiB", "here")
    assert admitted(shared, 0, [1024]) == 1
    assert admitted(shared, 1, [1024]) == 0
    assert admitted(shared, 0, [512, 600, 10]) == 1
    assert admitted(shared, 2000, [1]) == 0
    assert admitted(SharedCapacity(0, "here"), 1 << 60, [1 << 40] * 3) == 3


def test_shared_capacity_counts_blocks_being_written() -> None:
    """Batches that are written at the same time would each get all of the room."""
    shared = SharedCapacity(1000, "here")
    with shared.admit(0, [600]) as first:
        assert first == 1
        assert admitted(shared, 0, [600]) == 0
        assert admitted(shared, 0, [400]) == 1
    with contextlib.suppress(RuntimeError), shared.admit(0, [1000]):
        raise RuntimeError
    assert admitted(shared, 0, [1000]) == 1


def test_shared_capacity_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    """A full tier would log one line per batch, or none."""
    shared = SharedCapacity(1000, "the tier")
    with caplog.at_level(logging.INFO, "tierd_backends"):
        for _ in range(3):
            admitted(shared, 900, [200])
        assert [r.message.split(":")[0] for r in caplog.records] == ["the tier is full"]
        for _ in range(3):
            admitted(shared, 0, [200])
    assert [r.message for r in caplog.records][1:] == ["the tier has room again"]


def test_counting_takes_a_small_part_of_the_time() -> None:
    """Every node would count a large store all the time, and S3 would bill each page."""
    shared = SharedCapacity(1, "here")
    assert shared.pause_s(0.1) == shared_capacity.COUNT_PAUSE_S
    assert shared.pause_s(1000) == pytest.approx(50_000)
    assert SharedCapacity(0, "here").pause_s(0.1) is None


@pytest.mark.parametrize("kind", [RedisBackend, S3Backend])
@pytest.mark.parametrize("capacity", ["8G", -1, "much"])
def test_malformed_capacity_is_reported(kind: type[Backend], capacity: object) -> None:
    """A typing error would mean no limit."""
    where = {"url": "redis://x"} if kind is RedisBackend else {"bucket": "some"}
    options = msgspec.convert({**where, "capacity": capacity}, kind.Options)
    with pytest.raises(ConfigError, match=r"capacity: .* is not a size"):
        kind.from_options(options)


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE, number.to_bytes(32, "big"))


@given(st.data())
def test_census_is_right_after_each_count(data: st.DataObject) -> None:
    """A store would be taken for full, or for empty, permanently."""
    there = set(data.draw(st.sets(st.integers(0, 20))))
    census = Census()
    for _ in range(2):
        census.begin()
        # A scan shows each block that is present throughout, and may show those stored meanwhile.
        steady, fresh = sorted(there), set()
        for number in steady:
            if data.draw(st.booleans()):
                other = data.draw(st.integers(21, 40))
                if other not in there:
                    there.add(other)
                    fresh.add(other)
                    census.stored(key(other), LENGTH)
            census.seen(key(number), LENGTH)
        for other in sorted(fresh):
            if data.draw(st.booleans()):
                census.seen(key(other), LENGTH)
        census.end()
        assert census.stats().blocks == len(there)
        assert census.stats().used_bytes == len(there) * STORED_BYTES
        there -= set(list(there)[:2])  # What the server evicts shows at the next count.


def test_last_complete_count_shows_during_the_next_one() -> None:
    """A full store would be written to from the start of each count."""
    census = Census()
    census.begin()
    census.seen(key(1), LENGTH)
    assert census.stats().blocks == 1
    census.end()
    census.begin()
    assert census.stats().blocks == 1
    census.begin()  # The second count broke off.
    census.stored(key(2), LENGTH)
    census.dropped(key(1))
    census.stored(key(3), LENGTH)
    assert census.stats().blocks == 2
    census.end()
    assert census.stats().index_complete

    usage = Usage()
    usage.begin()
    usage.listed([10, 10], "b", complete=False)
    assert usage.stats().used_bytes == 20
    usage.listed([], "", complete=True)
    usage.begin()
    assert usage.stats().used_bytes == 20
    usage.listed([10], "a", complete=False)
    usage.changed("A", 1, 10)  # Behind the listing.
    usage.changed("c", 1, 10)  # Ahead of it.
    assert usage.stats().used_bytes == 40
    usage.listed([10], "c", complete=True)
    assert (usage.stats().blocks, usage.stats().used_bytes) == (3, 30)


# --- on real servers ----------------------------------------------------------------


@pytest.fixture(params=["redis", "s3"])
def store(request: pytest.FixtureRequest) -> tuple[type[Backend], dict[str, object]]:
    """A tier's class, and options for an empty store."""
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        return RedisBackend, {**server.options(), "prefix": request.node.name.partition("[")[0]}
    weed = request.getfixturevalue("weed")
    return S3Backend, weed.options(weed.make_bucket())


@pytest.fixture
def tier(store: tuple[type[Backend], dict[str, object]]) -> Open:
    """Opens one node's tier on that store."""
    kind, where = store

    @contextlib.asynccontextmanager
    async def opened(**more: object) -> AsyncIterator[Backend]:
        options = {**where, "timeout_ms": 10_000, "capacity": CAPACITY, **more}
        async with running(kind.from_options(msgspec.convert(options, kind.Options))) as backend:
            yield backend

    return opened


def full(backend: Backend) -> int:
    return backend.counters["skipped_full_total"]


async def room(backend: Backend, blocks: int = 1) -> None:
    """Return when a count has found room; a count may fall between two deletions."""
    async with asyncio.timeout(SOON_S):
        while backend.stats().used_bytes + blocks * STORED_BYTES > CAPACITY:
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_tier_stores_no_more_than_its_capacity(tier: Open) -> None:
    """tierd would fill a shared server, and its other users would get no room."""
    blocks = make_chain("full", FITTING + 3, LENGTH)
    async with tier() as backend:
        outcomes = await put(backend, blocks)
        assert outcomes == [Outcome.STORED] * FITTING + [Outcome.REFUSED] * 3
        stats = backend.stats()
        assert stats.capacity_bytes == CAPACITY
        assert (stats.blocks, stats.used_bytes) == (FITTING, FITTING * STORED_BYTES)
        assert full(backend) == 3
        # Blocks that are present are not skipped.
        again = await put(backend, blocks)
        assert again == [Outcome.PRESENT] * FITTING + [Outcome.REFUSED] * 3
        assert await get(backend, blocks) == [Outcome.HIT] * FITTING + [Outcome.MISS] * 3
        # Of concurrent batches only one gets the room for one block.
        assert await backend.delete_many(NAMESPACE, [blocks[0].key.block_hash]) == 1
        rivals = [make_chain(f"rival {number}", 1, LENGTH) for number in range(4)]
        stored = await asyncio.gather(*(put(backend, each) for each in rivals))
        assert sorted(each[0].value for each in stored) == ["refused"] * 3 + ["stored"]
        assert full(backend) == 9


@pytest.mark.slow
async def test_capacity_bounds_the_store_and_not_one_node(tier: Open) -> None:
    """Each node of a fleet, and each incarnation of a node, would fill the store once more."""
    blocks = make_chain("fleet", FITTING + 1, LENGTH)
    async with tier() as backend:
        await put(backend, blocks[:FITTING])
    async with tier() as backend:
        assert await put(backend, blocks) == [Outcome.PRESENT] * FITTING + [Outcome.REFUSED]
        assert full(backend) == 1
    async with tier(capacity=0) as backend:
        assert await put(backend, blocks[FITTING:]) == [Outcome.STORED]
        assert full(backend) == 0


@pytest.mark.slow
async def test_next_count_finds_room(tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that was full once would never be written to again."""
    monkeypatch.setattr(shared_capacity, "COUNT_PAUSE_S", 0.02)
    monkeypatch.setattr(shared_capacity, "COUNT_SHARE_MAX", 1.0)
    blocks = make_chain("room", FITTING + 2, LENGTH)
    async with tier() as backend, tier(capacity=0) as other:
        assert (await put(backend, blocks)).count(Outcome.REFUSED) == 2
        # A server's eviction, expiry or lifecycle rule does the same.
        await other.delete_many(NAMESPACE, [b.key.block_hash for b in blocks[:2]])
        await room(backend, 2)
        assert await put(backend, blocks[FITTING:]) == [Outcome.STORED] * 2
        assert await contains(backend, blocks) == [False] * 2 + [True] * FITTING
        # Blocks that other nodes store count as well.
        await other.delete_many(NAMESPACE, [b.key.block_hash for b in blocks])
        await room(backend)
        await put(other, make_chain("others", FITTING, LENGTH))
        async with asyncio.timeout(SOON_S):
            while await put(backend, blocks[:1]) != [Outcome.REFUSED]:
                await backend.delete_many(NAMESPACE, [blocks[0].key.block_hash])
                await asyncio.sleep(0.01)


@pytest.mark.slow
def test_full_shared_tier_is_not_failing(
    tmp_path: Path, store: tuple[type[Backend], dict[str, object]]
) -> None:
    """A full tier would open its breaker, and would no longer be read."""
    kind = "redis" if store[0] is RedisBackend else "s3"
    space = namespace(LENGTH)
    times = dict.fromkeys(("deadline_ms", "slow_ms", "timeout_ms"), 20_000)
    options = {**store[1], **times, "capacity": CAPACITY}
    with DaemonProcess(tmp_path, capacity="16MiB", storage=table(kind, options)) as daemon:
        # Before its first count a node does not know what the store holds.
        daemon.wait_tier(kind, "ready")
        client = daemon.client()
        handle = client.register(space)
        for number in range(8):
            hashes, parents = chain(FITTING, number)
            wanted = [(h, p, payload(space, h)) for h, p in zip(hashes, parents, strict=True)]
            assert all(client.put(handle, wanted))
            (shown,) = daemon.wait_backed_up()["storage"]
        client.close()
        assert shown["state"] == "ready"
        assert shown["capacity_bytes"] == CAPACITY
        assert FITTING * STORED_BYTES <= shown["used_bytes"] <= CAPACITY
        assert shown["counters"]["put_stored_total"] == FITTING
        assert shown["counters"]["put_refused_total"] == 7 * FITTING
        assert shown["counters"]["skipped_full_total"] == 7 * FITTING
        assert [c["opened_total"] for c in shown["circuits"].values()] == [0, 0]
        assert daemon.log.read_text().count(" is full: capacity is ") == 1
