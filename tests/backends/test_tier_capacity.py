"""The lid on what nodes keep in a shared store: Redis and S3 with `capacity`."""

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


# --- by itself ----------------------------------------------------------------------


def admitted(lid: SharedCapacity, used_bytes: int, sizes: list[int]) -> int:
    with lid.admit(used_bytes, sizes) as count:
        return count


def test_lid_admits_what_fits_from_the_first_block_on() -> None:
    """A prefix would be stored with a hole, and be useless behind it."""
    lid = SharedCapacity("1KiB", "here")
    assert admitted(lid, 0, [1024]) == 1
    assert admitted(lid, 1, [1024]) == 0
    assert admitted(lid, 0, [512, 600, 10]) == 1
    assert admitted(lid, 2000, [1]) == 0
    assert admitted(SharedCapacity(0, "here"), 1 << 60, [1 << 40] * 3) == 3


def test_lid_counts_what_is_being_written() -> None:
    """Batches that are written at once would each get the room that there is once."""
    lid = SharedCapacity(1000, "here")
    with lid.admit(0, [600]) as first:
        assert first == 1
        assert admitted(lid, 0, [600]) == 0
        assert admitted(lid, 0, [400]) == 1
    with contextlib.suppress(RuntimeError), lid.admit(0, [1000]):
        raise RuntimeError
    assert admitted(lid, 0, [1000]) == 1


def test_lid_tells_once(caplog: pytest.LogCaptureFixture) -> None:
    """A full tier would fill the log with a line a batch, or say nothing."""
    lid = SharedCapacity(1000, "the tier")
    with caplog.at_level(logging.INFO, "tierd_backends"):
        for _ in range(3):
            admitted(lid, 900, [200])
        assert [r.message.split(":")[0] for r in caplog.records] == ["the tier is full"]
        for _ in range(3):
            admitted(lid, 0, [200])
    assert [r.message for r in caplog.records][1:] == ["the tier has room again"]


def test_counting_takes_a_small_part_of_the_time() -> None:
    """A large store would be counted for ever, by every node, and S3 bill each page."""
    lid = SharedCapacity(1, "here")
    assert lid.pause_s(0.1) == shared_capacity.COUNT_PAUSE_S
    assert lid.pause_s(1000) == pytest.approx(50_000)
    assert SharedCapacity(0, "here").pause_s(0.1) is None


@pytest.mark.parametrize("kind", [RedisBackend, S3Backend])
@pytest.mark.parametrize("capacity", ["8G", -1, "much"])
def test_a_wrong_capacity_is_named(kind: type[Backend], capacity: object) -> None:
    """A typing error would be no limit."""
    where = {"url": "redis://x"} if kind is RedisBackend else {"bucket": "some"}
    options = msgspec.convert({**where, "capacity": capacity}, kind.Options)
    with pytest.raises(ConfigError, match=r"capacity: .* is not a size"):
        kind.from_options(options)


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE, number.to_bytes(32, "big"))


@given(st.data())
def test_census_is_right_after_each_count(data: st.DataObject) -> None:
    """A store would be taken for full, or for empty, for good."""
    there = set(data.draw(st.sets(st.integers(0, 20))))
    census = Census()
    for _ in range(2):
        census.begin()
        # A scan shows what is there all the time; what comes meanwhile it may show or not.
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


def test_a_count_in_progress_does_not_lift_the_lid() -> None:
    """A full store would be written to at each count, from its begin on."""
    census = Census()
    census.begin()
    census.seen(key(1), LENGTH)
    assert census.stats().blocks == 1
    census.end()
    census.begin()
    assert census.stats().blocks == 1
    census.begin()  # The first one broke off.
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
    """A tier's class, and options of a store that is empty."""
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        return RedisBackend, {**server.options(), "prefix": request.node.name.partition("[")[0]}
    weed = request.getfixturevalue("weed")
    return S3Backend, weed.options(weed.make_bucket())


@pytest.fixture
def tier(store: tuple[type[Backend], dict[str, object]]) -> Open:
    """Opens a node's tier on that store, counted once."""
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
async def test_no_more_is_stored_than_the_capacity(tier: Open) -> None:
    """A shared server would be filled up by tierd, and others on it starve."""
    blocks = make_chain("full", FITTING + 3, LENGTH)
    async with tier() as backend:
        outcomes = await put(backend, blocks)
        assert outcomes == [Outcome.STORED] * FITTING + [Outcome.REFUSED] * 3
        stats = backend.stats()
        assert stats.capacity_bytes == CAPACITY
        assert (stats.blocks, stats.used_bytes) == (FITTING, FITTING * STORED_BYTES)
        assert full(backend) == 3
        # What is there is no loss.
        again = await put(backend, blocks)
        assert again == [Outcome.PRESENT] * FITTING + [Outcome.REFUSED] * 3
        assert await get(backend, blocks) == [Outcome.HIT] * FITTING + [Outcome.MISS] * 3
        # Batches at once do not share the room for one.
        assert await backend.delete_many(NAMESPACE, [blocks[0].key.block_hash]) == 1
        rivals = [make_chain(f"rival {number}", 1, LENGTH) for number in range(4)]
        stored = await asyncio.gather(*(put(backend, each) for each in rivals))
        assert sorted(each[0].value for each in stored) == ["refused"] * 3 + ["stored"]
        assert full(backend) == 9


@pytest.mark.slow
async def test_the_capacity_is_the_store_s_and_not_a_node_s(tier: Open) -> None:
    """Each node of a fleet, and each life of a node, would fill the store once more."""
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
async def test_room_is_found_by_the_next_count(tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that was full once would never be written to again."""
    monkeypatch.setattr(shared_capacity, "COUNT_PAUSE_S", 0.02)
    monkeypatch.setattr(shared_capacity, "COUNT_SHARE_MAX", 1.0)
    blocks = make_chain("room", FITTING + 2, LENGTH)
    async with tier() as backend, tier(capacity=0) as other:
        assert (await put(backend, blocks)).count(Outcome.REFUSED) == 2
        # As a server that evicts, or expires, or a rule of a bucket's.
        await other.delete_many(NAMESPACE, [b.key.block_hash for b in blocks[:2]])
        await room(backend, 2)
        assert await put(backend, blocks[FITTING:]) == [Outcome.STORED] * 2
        assert await contains(backend, blocks) == [False] * 2 + [True] * FITTING
        # What others store counts as well.
        await other.delete_many(NAMESPACE, [b.key.block_hash for b in blocks])
        await room(backend)
        await put(other, make_chain("others", FITTING, LENGTH))
        async with asyncio.timeout(SOON_S):
            while await put(backend, blocks[:1]) != [Outcome.REFUSED]:
                await backend.delete_many(NAMESPACE, [blocks[0].key.block_hash])
                await asyncio.sleep(0.01)


@pytest.mark.slow
def test_a_full_tier_is_no_failing_one(
    tmp_path: Path, store: tuple[type[Backend], dict[str, object]]
) -> None:
    """A full tier would trip its breaker, and nothing be read from it any more."""
    kind = "redis" if store[0] is RedisBackend else "s3"
    space = namespace(LENGTH)
    times = dict.fromkeys(("deadline_ms", "slow_ms", "timeout_ms"), 20_000)
    options = {**store[1], **times, "capacity": CAPACITY}
    with DaemonProcess(tmp_path, capacity="16MiB", storage=table(kind, options)) as daemon:
        # Until it has counted once, a node does not know what it has not come by.
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
