"""Flush: no block from before it is served afterwards, by L2 or any tier."""

from __future__ import annotations

import asyncio

import pytest

from tests.support import blocks
from tests.support.tiers.bench import SPACE, Bench, Tier, config, key, run
from tests.support.tiers.flushing import OTHER, SlowTier, begin, flush, now, until
from tierd.backend import (
    BlockHeader,
    GetRequest,
    Outcome,
    PutRequest,
    checksum,
    pack_header,
)
from tierd.config import WritePolicy
from tierd.daemon.jobs import flush as flush_module
from tierd.daemon.session.orders import Orders
from tierd.errors import RefusedError, RemoteProtocolError
from tierd.testing.backend import StoredBlock
from tierd.testing.simulation.keeper import Keeper
from tierd.types import BlockKey, Namespace
from tierd.wire import messages as m

NS = 10**9


def plant(
    raw: Tier, namespace: Namespace, block_hash: bytes, where: BlockKey | None = None
) -> None:
    """Store a block as another node would."""
    payload = blocks.payload(namespace, block_hash)
    where = where or key(block_hash, namespace)
    header = pack_header(BlockHeader(where, blocks.ROOT, len(payload), checksum(payload)))
    raw.blocks[where] = StoredBlock(header, payload)


async def flush_tiers(bench: Bench) -> list[dict[str, object]]:
    """Flush everything; returns the tiers' part of the status."""
    status = (await flush(bench)).status()
    assert status["complete"]
    tiers = status["tiers"]
    assert isinstance(tiers, list)
    return tiers


def test_flushed_blocks_are_not_served_and_the_counts_are_right() -> None:
    """A flush would report success, and the cleared blocks would be served again (34)."""

    async def test(bench: Bench) -> None:
        first, second = bench.store(20), bench.store(10, "second")
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(second) == 10  # In L2 again, and in both tiers.
        work = await flush(bench)
        assert work.status() == {
            "complete": True,
            "host": {"flushed": True, "blocks": 10, "leased": 0},
            "tiers": [
                {
                    "name": f"tier{i}",
                    "shared": False,
                    "final": True,
                    "waits": "",
                    "blocks": 30,
                    "left": 0,
                    "garbage": "",
                    "why": "",
                }
                for i in range(2)
            ],
            "namespaces": {SPACE.digest.hex(): 70},
        }
        for hashes in (first, second):
            assert await bench.acquire(hashes) == 0
        assert not bench.raw[0].blocks
        assert not bench.raw[1].blocks
        bench.check_nothing_is_left()
        # The node goes on as before.
        bench.store(20)
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(first) == 20

    run(test)


def test_flush_of_one_namespace_keeps_the_others() -> None:
    """Flushing one model would cost every other model its cache."""

    async def test(bench: Bench) -> None:
        other = bench.node.register(OTHER)
        mine, theirs = bench.store(10), bench.store(10, space=other)
        await bench.backed_up()
        work = await flush(bench, SPACE.digest.hex()[:8])
        assert work.status()["namespaces"] == {SPACE.digest.hex(): 30}
        assert await bench.acquire(mine) == 0
        assert await bench.acquire(theirs, spaces=[other]) == 10
        bench.forget()
        assert await bench.acquire(theirs, spaces=[other]) == 10
        bench.check_nothing_is_left()

    run(test)


def test_flush_of_a_namespace_known_only_to_a_tier() -> None:
    """After a restart, a namespace that no engine has used yet would outlive a flush."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(10)
        await bench.backed_up()
        work = await flush(bench, "", host=False)
        assert [tier.blocks for tier in work.tiers] == [10, 10]
        for raw in bench.raw:
            plant(raw, OTHER, hashes[0])
            await raw.close()
            await raw.open()
        assert OTHER.digest not in bench.node.host.spaces
        work = await flush(bench, OTHER.digest.hex())
        assert work.status()["namespaces"] == {OTHER.digest.hex(): 2}
        assert await bench.acquire(hashes) == 10

    run(test)


def test_promotion_under_way_is_not_published_after_a_flush() -> None:
    """A slow read that ends after the flush would put a flushed block back (11)."""

    raw = SlowTier()

    async def test(bench: Bench) -> None:
        hashes = bench.store(40)
        await bench.backed_up()
        bench.forget()
        raw.late_s = 0.5
        acquire = asyncio.create_task(bench.acquire(hashes, 8.0))
        await until(lambda: raw.calls("get") >= 1)
        raw.late_s = 0.0
        again = asyncio.create_task(bench.acquire(hashes, 8.0))  # It joins the read under way.
        await asyncio.sleep(0)
        work = await flush(bench)
        assert work.status()["complete"]
        assert bench.node.promotions.under_way  # The read is still under way.
        assert len(raw.blocks) == 0
        new = bench.store(4, "new")
        assert await bench.acquire(new) == 4
        assert await acquire == await again == 0
        await until(lambda: not bench.node.promotions.under_way)
        assert await bench.acquire(hashes) == 0
        # Neither read's second batch had begun, and the lower tier was not asked.
        assert raw.calls("get") == 1
        assert bench.raw[1].calls("get") == 0
        await bench.backed_up()
        bench.check_nothing_is_left()

    below = Tier()
    run(
        test,
        config("tier", read_batches=1),
        config("below"),
        raw=[raw, below],
        blocks_in_l2=1024,
    )


def test_acquire_does_not_join_a_promotion_from_before_the_flush() -> None:
    """Blocks stored after a flush would miss while an old read still hangs."""
    raw = SlowTier()

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        raw.late_s = 1.5
        acquire = asyncio.create_task(bench.acquire(hashes, 8.0))
        await until(lambda: raw.calls("get") >= 1)
        raw.late_s = 0.0
        await flush(bench)
        plant(raw, SPACE, hashes[0], now(bench, hashes[0]))
        scope = now(bench, hashes[0]).namespace
        raw._index.insert(900, scope + hashes[0], scope + blocks.ROOT)
        began_s = bench.loop.time()
        await bench.acquire(hashes[:1], 8.0)
        assert bench.loop.time() - began_s < 0.1
        assert await acquire == 0
        assert await bench.acquire(hashes) == 1

    run(test, config("tier"), raw=[raw])


def test_nothing_is_promoted_during_a_flush() -> None:
    """A request during a flush would promote blocks that the tier has not dropped yet."""

    raw = SlowTier()

    async def test(bench: Bench) -> None:
        hashes = bench.store(200)
        await bench.backed_up()
        bench.forget()
        raw.delete_takes_s = 0.1
        work = begin(bench)
        await until(lambda: raw.deleting)
        while not work.done.is_set():
            assert await bench.acquire(hashes) == 0
            await asyncio.sleep(0.02)
        assert raw.calls("get") == 0
        assert await bench.acquire(hashes) == 0
        bench.check_nothing_is_left()

    run(test, raw=[raw])


def test_flush_drops_queued_and_running_backups() -> None:
    """A block queued for backup, or just being written, would be in the tier again."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        raw.takes_s = 0.3
        hashes = bench.store(100)
        queue = bench.node.backups.queues[0]
        await until(lambda: queue.waiting and queue.writing)
        work = await flush(bench)
        assert work.status()["complete"]
        assert work.tiers[0].blocks == 32  # The blocks that were in flight.
        assert raw.calls("put") == 1
        assert not raw.blocks
        assert not bench.node.backlog()
        raw.takes_s = 0.0
        assert await bench.acquire(hashes) == 0
        bench.check_nothing_is_left()

    run(test, config("tier", write_batches=1), blocks_in_l2=1024)


def test_flush_drops_blocks_that_wait_for_a_checksum() -> None:
    """A block whose checksum was being computed would be written after the flush."""

    async def test(bench: Bench) -> None:
        for pause_s in (0.0, flush_module.POLL_S / 4, 0.006):
            hashes = bench.store(60)
            await asyncio.sleep(pause_s)
            work = await flush(bench)
            assert work.status()["complete"]
            await bench.backed_up()
            assert not bench.raw[0].blocks
            assert await bench.acquire(hashes) == 0
            bench.check_nothing_is_left()

    run(test, config("tier"))


def test_blocks_stored_during_a_flush_are_kept_and_backed_up() -> None:
    """Blocks that an engine stores during a long flush would be lost, or never backed up."""

    raw = SlowTier()

    async def test(bench: Bench) -> None:
        old = bench.store(200)
        await bench.backed_up()
        raw.mark_takes_s = 1.0
        work = begin(bench)
        await until(lambda: raw.marking)
        new = bench.store(20, "new")
        assert await bench.acquire(new) == 20
        await work.done.wait()
        assert work.status()["complete"]
        assert work.host_blocks == 200
        assert await bench.acquire(new) == 20
        await bench.backed_up()
        assert set(raw.blocks) == {now(bench, h) for h in new}
        assert await bench.acquire(old) == 0
        bench.check_nothing_is_left()

    run(test, raw=[raw], blocks_in_l2=1024)


def test_leased_slots_are_not_reused_after_a_flush() -> None:
    """A flush would take slots from an engine that reads them, or reuse a leased slot."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(10)
        await bench.backed_up()
        deadline_ns = bench.loop.now_ns + 10**9
        lease = await bench.node.acquire(1, [bench.space], hashes, deadline_ns)
        assert lease is not None
        work = await flush(bench)
        assert work.status()["host"] == {"flushed": True, "blocks": 10, "leased": 10}
        assert await bench.acquire(hashes) == 0
        # The arena is filled again, and no leased slot is overwritten.
        for number in range(40):
            bench.store(20, f"fill {number}")
        for block_hash, slot in zip(hashes, lease.parts[0][1], strict=True):
            assert bench.node.memory.payload(bench.space, slot) == blocks.payload(SPACE, block_hash)
        bench.node.host.release(lease.lease_id, 1)
        await bench.backed_up()
        bench.check_nothing_is_left()

    run(test)


def test_acquire_waiting_during_a_flush_gets_no_flushed_block() -> None:
    """An ACQUIRE that waits for a tier during the flush would be answered with old blocks."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(60)
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes[:20]) == 20
        (raw,) = bench.raw
        raw.hangs = {"contains"}
        acquire = asyncio.create_task(bench.acquire(hashes, 1.5))
        await until(lambda: ("contains", 40) in raw.log)
        raw.hangs = set()
        assert (await flush(bench)).status()["complete"]
        assert await acquire == 0
        await until(lambda: not len(bench.node.tasks))
        bench.check_nothing_is_left()

    run(test, config("tier"))


def test_flush_cancels_write_back_of_evicting_blocks() -> None:
    """Evicting blocks would be served again, from the tier or from L2."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        hashes = bench.store(64)
        raw.hangs = {"put"}
        bench.forget()
        assert bench.space.evicting
        await until(lambda: raw.calls("put"))
        raw.hangs = set()
        work = await flush(bench)
        assert work.status()["complete"]
        assert await bench.acquire(hashes) == 0
        await bench.backed_up()
        assert not raw.blocks
        bench.check_nothing_is_left()

    run(test, config("tier", write_policy=WritePolicy.WRITE_BACK))


def test_evicting_block_is_not_revived_during_a_flush() -> None:
    """An evicting block that is being written and is requested would be in L2 again."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        hashes = bench.store(32)
        raw.takes_s = 0.5
        bench.forget()
        await until(lambda: raw.calls("put"))
        assert bench.space.evicting
        work = begin(bench)
        await asyncio.sleep(0.1)
        assert await bench.acquire(hashes, 0.1) == 0
        await work.done.wait()
        assert work.status()["complete"]
        assert await bench.acquire(hashes) == 0
        bench.check_nothing_is_left()

    run(test, config("tier", write_policy=WritePolicy.WRITE_BACK))


def test_flush_names_a_tier_that_is_unavailable() -> None:
    """A flush would be called complete while a tier still serves its blocks."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(10)
        await bench.backed_up()
        bench.raw[1]._opened = False  # Every call raises BackendError from here on.
        work = await flush(bench)
        status = work.status()
        assert not status["complete"]
        assert [tier.final for tier in work.tiers] == [True, False]
        assert "not open" in work.tiers[1].why
        bench.raw[1]._opened = True
        assert await bench.acquire(hashes) == 10  # The warning was right.
        work = await flush(bench)
        assert work.status()["complete"]
        assert await bench.acquire(hashes) == 0

    run(test)


def test_flush_retries_failed_deletes_and_reports_leftovers() -> None:
    """One failed call of many would leave blocks behind."""

    raw = SlowTier()

    async def test(bench: Bench) -> None:
        hashes = bench.store(200)
        await bench.backed_up()
        raw.delete_fails = 1
        work = await flush(bench)
        assert work.status()["complete"]
        assert work.tiers[0].blocks == 200
        assert not raw.blocks
        assert await bench.acquire(hashes) == 0
        raw.delete_fails = 1000
        again = bench.store(10, "again")
        await bench.backed_up()
        (output,) = await flush_tiers(bench)
        assert (output["final"], output["left"], output["garbage"]) == (
            True,
            10,
            "the disk is on fire",
        )
        assert len(raw.blocks) == 10
        assert await bench.acquire(again) == 0

    run(test, raw=[raw], blocks_in_l2=1024)


def test_flush_of_one_tier_keeps_host_memory_and_other_tiers() -> None:
    """The tier would keep blocks, or L2 would take its blocks for already backed up."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(20)
        await bench.backed_up()
        work = await flush(bench, host=False, tiers=[0])
        assert work.status()["host"] == {"flushed": False, "blocks": 0, "leased": 0}
        assert not bench.raw[0].blocks
        assert len(bench.raw[1].blocks) == 20
        assert await bench.acquire(hashes) == 20
        # Blocks that an engine stores again are written again.
        bench.store(20)
        await bench.backed_up()
        assert len(bench.raw[0].blocks) == 20
        bench.check_nothing_is_left()

    run(test)


def test_reads_and_writes_across_a_flush_fail() -> None:
    """A read or write that started before a flush would be taken for a later one."""
    raw = SlowTier()

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        (tier,) = bench.tiers
        length = SPACE.block_bytes
        view = memoryview(bytearray(length))
        raw.late_s = 0.5
        get = asyncio.create_task(tier.get(SPACE.digest, [GetRequest(hashes[0], view, length)]))
        raw.takes_s = 0.5
        digest = checksum(blocks.payload(SPACE, hashes[1]))
        put = asyncio.create_task(
            tier.put(SPACE.digest, [PutRequest(hashes[1], blocks.ROOT, digest, view, length)])
        )
        await until(lambda: raw.calls("get") and raw.calls("put") == 2)
        await tier.epochs.bar("")
        assert [result.outcome for result in await get] == [Outcome.ERROR]
        assert await put == [Outcome.ERROR]

    run(test, config("tier"), raw=[raw])


def test_flush_is_incomplete_when_a_tier_loses_its_mark() -> None:
    """A disk that loses the mark would serve flushed blocks again."""

    class Forgetful(Tier):
        async def add_mark(self, mark: str) -> None:
            pass

    async def test(bench: Bench) -> None:
        bench.store(4)
        await bench.backed_up()
        work = await flush(bench)
        assert not work.status()["complete"]
        assert "mark" in work.tiers[0].why

    run(test, config("tier"), raw=[Forgetful()])


def kill_after(steps: int) -> tuple[bool, bool, int]:
    """Kill a daemon `steps` steps of the loop into a flush; returns whether the flush was complete,
    whether it had ended, and how many blocks the next daemon serves."""
    keeper, raw = Keeper(), Tier()
    hashes: list[bytes] = []
    seen: list[tuple[bool, bool]] = []
    found: list[int] = []

    async def first(bench: Bench) -> None:
        hashes.extend(bench.store(20))
        await bench.backed_up()
        lease = await bench.node.acquire(1, [bench.space], hashes[:5], bench.loop.now_ns + NS)
        assert lease is not None
        work = begin(bench)
        for _ in range(steps):
            await asyncio.sleep(0)
        seen.append((bool(work.status()["complete"]), work.done.is_set()))

    async def second(bench: Bench) -> None:
        found.append(await bench.acquire(hashes))

    run(first, config("tier"), raw=[raw], manager=keeper)
    again = Tier()
    again.blocks, again.kept_marks = raw.blocks, raw.kept_marks
    run(second, config("tier"), raw=[again], manager=keeper)
    keeper.close()
    return *seen[0], found[0]


def test_flush_killed_at_any_step_brings_no_block_back_once_complete() -> None:
    """A crash during or after a flush would bring flushed blocks back: from L2, whose memory
    outlives the daemon, or from the tier."""
    steps, ended, incomplete = 0, False, []
    while not ended:
        complete, ended, found = kill_after(steps)
        assert not complete or not found, f"{found} blocks are back, killed after {steps} steps"
        if not complete:
            incomplete.append(found)
        steps += 1
    assert len(incomplete) > 1
    assert max(incomplete) == 20


def test_second_flush_is_refused_while_one_runs() -> None:
    """Two concurrent flushes would lift each other's bar while blocks can still come back."""

    raw = SlowTier()

    async def test(bench: Bench) -> None:
        bench.store(200)
        await bench.backed_up()
        raw.delete_takes_s = 0.1
        work = begin(bench)
        with pytest.raises(RefusedError, match="is in progress"):
            begin(bench)
        await work.done.wait()
        assert (await flush(bench)).status()["complete"]

    run(test, raw=[raw])


def test_flush_of_a_large_arena_does_not_block_the_loop() -> None:
    """A flush of a large arena would delay every engine's calls."""

    async def test(bench: Bench) -> None:
        for number in range(10):
            bench.store(100, number)
        turns = 0
        work = begin(bench)
        while not work.done.is_set():
            turns += 1
            await asyncio.sleep(0)
        assert work.host_blocks == 1000
        assert turns > 1000 // flush_module.SLICE

    run(test, config("tier"), blocks_in_l2=2048)


def test_flush_continues_after_its_session_closes() -> None:
    """Ctrl-C, or an operator's lost terminal, would leave a flush half done."""
    raw = SlowTier()

    async def test(bench: Bench) -> None:
        hashes = bench.store(20)
        await bench.backed_up()
        raw.mark_takes_s = 0.6
        said: list[m.FromDaemon] = []
        orders = Orders(bench.node, said.append)
        orders.flush(m.Flush(1, "", True, [0]))
        orders.flush(m.Flush(2, "", True, [0]))
        with pytest.raises(RemoteProtocolError):
            orders.flush(m.Flush(3, "", True, [1]))
        with pytest.raises(RemoteProtocolError):
            orders.flush(m.Flush(4, "../..", True, [0]))
        await until(lambda: raw.marking)
        orders.close()
        other = Orders(bench.node, said.append)
        other.flush(m.Flush(5, "", True, [0]))
        refused = [(each.call, each.reason) for each in said if isinstance(each, m.Error)]
        assert refused == [
            (2, "this session follows another order already"),
            (5, "another flush is in progress"),
        ]
        await until(lambda: not raw.blocks)
        await until(lambda: not len(bench.node.tasks))
        assert not any(isinstance(each, m.Done) for each in said)
        assert await bench.acquire(hashes) == 0
        other.flush(m.Flush(6, "", True, [0]))
        await until(lambda: isinstance(said[-1], m.Done))
        done = said[-1]
        assert isinstance(done, m.Done)
        assert (done.call, done.body["complete"]) == (6, True)

    run(test, config("tier"), raw=[raw])
