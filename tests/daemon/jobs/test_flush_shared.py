"""Flush of tiers that nodes share: no node serves or rewrites a flushed block."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest

from tests.support.tiers.bench import PAGE, SPACE, Bench, Tier, config
from tests.support.tiers.flushing import begin, flush, until
from tierd.backend import GetRequest, GetResult, Outcome, PutRequest, checksum
from tierd.config import PrefetchConfig, StorageConfig
from tierd.core.l3.epochs import EPOCH_VALID_S, Mark, pack_mark, unpack_mark
from tierd.daemon.jobs.flush import OTHERS_S
from tierd.daemon.l3.epochs import MARGIN_S, REFRESH_S, MarksFile, News
from tierd.daemon.l3.tier import StorageTier, opened
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.errors import BackendError
from tierd.testing.backend import StoredBlock
from tierd.testing.loop import SimulationLoop, VirtualClock, run_simulation
from tierd.types import BlockKey


class Server:
    """The storage server that a fleet's nodes share."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, StoredBlock] = {}
        self.marks: set[str] = set()
        self.late_s = 0.0
        """Delay in s after which a put abandoned by its caller still lands."""
        self.marks_away = False
        self.loses_marks = False


class Shared(Tier):
    """One node's client of the server, which asks it for every block."""

    shared = True

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.blocks, self.kept_marks = server.blocks, server.marks
        self.reads_late_s = 0.0

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        await super().contains_many(namespace, hashes)
        return [BlockKey(namespace, block_hash) in self.blocks for block_hash in hashes]

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        return await self.contains_many(namespace, hashes)

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        self._find_all()
        results = await super().get_into(namespace, requests)
        await asyncio.sleep(self.reads_late_s)
        return results

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        if not self.server.late_s:
            return await super().put_many(namespace, requests)
        late = [
            (BlockKey(namespace, r.block_hash), r.parent, r.checksum, bytes(r.view[: r.length]))
            for r in requests
        ]
        loop = asyncio.get_running_loop()
        loop.call_later(self.server.late_s, self._land, late)
        raise BackendError("no answer within 2 s")

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        keys = [BlockKey(namespace, block_hash) for block_hash in hashes]
        return sum(self.blocks.pop(key, None) is not None for key in keys)

    def _land(self, late: list[tuple[BlockKey, bytes, bytes, bytes]]) -> None:
        from tierd.backend import BlockHeader, pack_header

        for key, parent, digest, payload in late:
            header = pack_header(BlockHeader(key, parent, len(payload), digest))
            self.blocks[key] = StoredBlock(header, payload)

    def _find_all(self) -> None:
        for key in list(self.blocks):
            if key.namespace + key.block_hash not in self._index.items:
                self._admit(key, key.block_hash[::-1], 0)

    async def marks(self) -> list[str]:
        if self.server.marks_away:
            raise BackendError("the server is away")
        return await super().marks()

    async def add_mark(self, mark: str) -> None:
        if self.server.marks_away:
            raise BackendError("the server is away")
        if not self.server.loses_marks:
            await super().add_mark(mark)


def fleet(
    test: Callable[[Bench, Bench], Awaitable[None]],
    server: Server | None = None,
    *,
    state: Path | None = None,
    more: Sequence[StorageConfig] = (),
    seed: int = 0,
) -> None:
    """Run a test on two nodes that share a tier and have separate L2s."""
    server = server or Server()

    async def scenario(loop: SimulationLoop) -> None:
        async with AsyncExitStack() as stack:
            benches: list[Bench] = []

            async def start(name: str, ready: Callable[[], Awaitable[None]]) -> None:
                raw = Shared(server)
                tiers = [StorageTier(config("shared"), raw)]
                if state is not None:
                    tiers[0].epochs.remember(MarksFile(state / name, "place"))
                node = Node(
                    NodeOptions(
                        capacity_bytes=256 * PAGE,
                        lease_ttl_ms=1000,
                        prefetch=PrefetchConfig(min_tokens=0),
                        epoch=name.encode(),
                        segment_bytes=32 * PAGE,
                    ),
                    tiers=tiers,
                    clock=VirtualClock(loop),
                )
                node.incarnations.begin()
                stack.callback(node.memory.arena.close)
                stack.callback(node.incarnations.close)
                async with opened(tiers):

                    async def begun() -> None:
                        benches.append(Bench(loop, node, tiers, [raw], node.register(SPACE)))
                        await ready()

                    await node.run(begun)

            async def both() -> None:
                await start("second", lambda: test(*benches))

            await start("first", both)

    run_simulation(seed, scenario)


def test_complete_flush_applies_to_every_node() -> None:
    """A flush by one node would leave the others serving flushed blocks."""

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(20)
        await first.backed_up()
        assert await second.acquire(hashes) == 20
        second.forget()
        work = begin(first)
        began_s = first.loop.time()
        await until(lambda: work.tiers[0].mark is not None)
        # The other node has not read the mark, so the flush is not complete, and says why.
        assert not work.status()["complete"]
        await until(lambda: work.tiers[0].waits)
        assert "other nodes" in work.tiers[0].waits
        assert await first.acquire(hashes) == 0
        while not work.status()["complete"]:
            await asyncio.sleep(0.5)
        assert EPOCH_VALID_S + MARGIN_S <= first.loop.time() - began_s < EPOCH_VALID_S + 5
        await work.done.wait()
        assert await second.acquire(hashes) == 0
        assert not first.raw[0].blocks
        first.check_nothing_is_left()

    fleet(test)


def test_flush_waits_until_other_nodes_must_have_read_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it were shorter, a node that has just read the marks would still serve old blocks."""

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(20)
        await first.backed_up()
        assert await second.acquire(hashes[:1]) == 1
        work = begin(first)
        await until(lambda: work.tiers[0].mark is not None)
        served_s = 0.0
        began_s = first.loop.time()
        # Further reads of the marks fail, so that it uses the last one until it expires.
        second.raw[0].server.marks_away = True  # type: ignore[attr-defined]
        for number in range(1, 20):
            if await second.acquire(hashes[number : number + 1], 0.1):
                served_s = first.loop.time() - began_s
            second.forget()
            await asyncio.sleep(0.7)
        second.raw[0].server.marks_away = False  # type: ignore[attr-defined]
        assert REFRESH_S < served_s < EPOCH_VALID_S

    monkeypatch.setattr("tierd.daemon.jobs.cleaning.PASSES_MAX", 0)
    fleet(test)


def test_flushed_blocks_in_another_nodes_memory_are_not_written_again() -> None:
    """Another node's L2 would write a flushed block again, and it would be served."""

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(20)
        await first.backed_up()
        assert await second.acquire(hashes) == 20
        await flush(first)
        # It learns of the flush at its next lookup, and then keeps its blocks to itself.
        await second.acquire(hashes + second.store(1, "other"))
        await asyncio.sleep(OTHERS_S + 1)
        second.store(20)
        assert await second.acquire(hashes) == 20
        await second.backed_up()
        assert await first.acquire(hashes) == 0
        # Blocks stored later go to the tier as usual.
        new = second.store(10, "new")
        await second.backed_up()
        assert await first.acquire(new) == 10

    fleet(test)


def test_put_that_lands_after_the_flush_is_not_served() -> None:
    """An abandoned upload that ends after the flush would bring its blocks back."""
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        server.late_s = 60.0
        hashes = first.store(4)
        await first.backed_up()
        assert (await flush(first)).status()["complete"]
        assert not server.blocks
        server.late_s = 0.0
        await asyncio.sleep(60)
        assert len(server.blocks) == 4
        for bench in (first, second):
            assert await bench.acquire(hashes) == 0
        # The next flush finds them, and frees their room.
        work = await flush(first)
        assert (work.tiers[0].blocks, len(server.blocks)) == (4, 0)

    fleet(test, server)


def test_read_that_began_before_the_flush_publishes_nothing() -> None:
    """A slow GET by another node would load a flushed block into its memory afterwards."""

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(8)
        await first.backed_up()
        raw = second.raw[0]
        assert isinstance(raw, Shared)
        await second.acquire(hashes[:1])
        raw.reads_late_s = 1.9
        acquire = asyncio.create_task(second.acquire(hashes, 5.0))
        await until(lambda: raw.calls("get") == 2)
        bar = asyncio.create_task(first.tiers[0].epochs.bar(""))
        await bar
        await asyncio.sleep(0.1)
        assert await acquire in (1, 8)  # Before the flush is complete, either is right.
        second.forget()
        await first.tiers[0].epochs.agree(bar.result())
        assert await second.acquire(hashes, 5.0) == 0

    fleet(test)


def test_unreadable_marks_are_a_miss() -> None:
    """A node that cannot learn of flushes would keep serving."""
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(8)
        await first.backed_up()
        first.forget()
        assert await first.acquire(hashes[:2]) == 2
        server.marks_away = True
        await asyncio.sleep(EPOCH_VALID_S + 1)
        assert await first.acquire(hashes, 3.0) == 2  # From L2.
        work = await flush(first)
        assert not work.status()["complete"]
        assert "away" in work.tiers[0].why
        server.marks_away = False
        await asyncio.sleep(30)
        first.store(8)
        assert await second.acquire(hashes) == 8

    fleet(test, server)


def test_flush_is_not_final_when_a_shared_tier_loses_the_mark() -> None:
    """A flush would be called complete though its mark is stored nowhere."""
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        server.loses_marks = True
        work = await flush(first)
        assert not work.status()["complete"]
        assert not work.tiers[0].final
        assert work.tiers[0].why

    fleet(test, server)


def test_lost_marks_block_all_reads() -> None:
    """A Redis that evicts the marks, or restarts without them, would bring flushed blocks back."""
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(8)
        await first.backed_up()
        kept = dict(server.blocks)
        await flush(first)
        server.blocks.update(kept)
        server.marks.clear()
        await asyncio.sleep(EPOCH_VALID_S + 1)
        for bench in (first, second):
            assert await bench.acquire(hashes) == 0
        scopes = {bench.tiers[0].epochs.now(SPACE.digest) for bench in (first, second)}
        assert len(scopes) == 1
        await asyncio.sleep(OTHERS_S + 1)
        new = first.store(5, "new")
        await first.backed_up()
        assert await second.acquire(new) == 5

    fleet(test, server)


def test_server_that_restarts_empty_is_filled_again() -> None:
    """A Redis that restarts without its data would count as flushed: for 12 s no tier would be
    read, and the hottest blocks would never be written to it again."""
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(20)
        await first.backed_up()
        assert await second.acquire(hashes) == 20
        server.blocks.clear()
        server.marks.clear()
        for number in range(8):
            for bench in (first, second):
                assert not await bench.acquire([bytes([number]) * 32])
            await asyncio.sleep(1)
        began_s = first.loop.time()
        new = first.store(5, "new")
        await until(lambda: len(server.blocks) == 25)
        for bench in (second, first):
            assert await bench.acquire(hashes) == 20
            assert await bench.acquire(new) == 5
        assert first.loop.time() - began_s < OTHERS_S / 2

    fleet(test, server)


@pytest.mark.parametrize("seed", range(2))
def test_uses_do_not_restore_blocks_flushed_by_another_node(seed: int) -> None:
    """Blocks in host memory would be found missing in the tier, and be written to it again."""

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(20)
        await first.backed_up()
        assert await second.acquire(hashes) == 20
        chance = Random(seed)

        async def use() -> None:
            second.node.learning.note([second.space], hashes, 0)
            await asyncio.sleep(chance.expovariate(2.0))

        for _ in range(20):
            await use()
        flushing = asyncio.create_task(flush(first))
        while not flushing.done():
            await use()
        for _ in range(20):
            await use()
        second.forget()
        await second.backed_up()
        assert await second.node.drain(10) == 0
        assert second.raw[0].calls("contains") > 4, "uses were reported"
        assert not first.raw[0].blocks
        assert await first.acquire(hashes) == 0
        second.node.check()

    fleet(test, seed=seed)


def test_backup_that_learns_of_a_flush_is_cancelled() -> None:
    """A queued backup would write the first block of the new epoch."""

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(2)
        await first.backed_up()
        assert await second.acquire(hashes) == 2
        await flush(first)
        payload = memoryview(bytes(PAGE))
        request = PutRequest(hashes[0], hashes[1], checksum(payload), payload, PAGE)
        tier = second.tiers[0]
        # L2 must learn of the flush after the write has begun, in any order of the loop.
        news: list[tuple[News, tuple[str, ...]]] = []
        tier.epochs.on_news = lambda *what: news.append(what)
        assert await tier.put(SPACE.digest, [request]) == [Outcome.ERROR]
        assert not first.raw[0].blocks
        for what in news:
            second.node.flushes.note_news(tier, *what)
        await until(lambda: not tier.epochs.unheeded(SPACE.digest))
        assert await tier.put(SPACE.digest, [request]) == [Outcome.STORED]

    fleet(test)


def test_flush_is_remembered_after_the_server_loses_its_marks() -> None:
    """Another node's L2 would bring back blocks flushed before the server lost its data."""
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(20)
        await first.backed_up()
        assert await second.acquire(hashes) == 20
        await flush(first)
        server.blocks.clear()
        server.marks.clear()
        for bench in (first, second):
            await bench.acquire(bench.store(1, str(id(bench))))
            await asyncio.sleep(OTHERS_S + 1)
        await second.backed_up()
        assert await second.acquire(hashes) == 20, "from its own memory"
        assert await first.acquire(hashes) == 0

    fleet(test, server)


def test_damaged_mark_blocks_reads_once() -> None:
    """A flipped bit in a mark would undo its flush, or empty the tier again and again."""
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        hashes = first.store(8)
        await first.backed_up()
        kept = dict(server.blocks)
        await flush(first, SPACE.digest.hex())
        server.blocks.update(kept)
        (mark,) = [m for m in server.marks if m.startswith(SPACE.digest.hex())]
        server.marks.remove(mark)
        server.marks.add(mark[:-1] + "x")
        await asyncio.sleep(EPOCH_VALID_S + 1)
        assert await second.acquire(hashes) == 0
        assert await first.acquire(hashes) == 0
        assert all(unpack_mark(each) for each in server.marks)
        scope = second.tiers[0].epochs.now(SPACE.digest)
        await asyncio.sleep(EPOCH_VALID_S + 1)
        await second.acquire(hashes)
        assert second.tiers[0].epochs.now(SPACE.digest) == scope

    fleet(test, server)


def test_restored_server_does_not_undo_a_flush_for_restarted_daemons(tmp_path: Path) -> None:
    """A Redis restored from yesterday's dump would serve blocks flushed since, to a daemon that has
    restarted meanwhile."""
    server = Server()
    hashes: list[bytes] = []
    yesterday: list[tuple[dict[BlockKey, StoredBlock], set[str]]] = []

    async def before(first: Bench, second: Bench) -> None:
        hashes.extend(first.store(8))
        await first.backed_up()
        yesterday.append((dict(server.blocks), set(server.marks)))
        assert (await flush(first)).status()["complete"]

    async def after(first: Bench, second: Bench) -> None:
        # The first node remembers the flush, and has asked when it opened the tier.
        for bench in (first, second):
            assert await bench.acquire(hashes) == 0

    fleet(before, server, state=tmp_path)
    ((blocks_then, marks_then),) = yesterday
    server.blocks.update(blocks_then)
    server.marks.clear()
    server.marks.update(marks_then)
    fleet(after, server, state=tmp_path)


async def test_remembered_marks_are_kept_per_server_and_may_be_damaged(tmp_path: Path) -> None:
    """Marks of one server would be taken for another's, or a damaged file stop the daemon."""
    mine, other = MarksFile(tmp_path / "state", "one"), MarksFile(tmp_path / "state", "two")
    marks = [Mark("", 5), Mark("aabb", 9)]
    assert mine.read() == []
    await mine.write(marks)
    assert mine.read() == marks
    assert other.read() == []
    (path,) = (tmp_path / "state").iterdir()
    raw = bytearray(path.read_bytes())
    for place in range(len(raw)):
        path.write_bytes(bytes(raw[:place]) + bytes([raw[place] ^ 0x41]) + bytes(raw[place + 1 :]))
        assert set(mine.read()) < set(marks)


def test_marks_of_flushes_by_namespace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flush would leave a mark, until every lookup is slow and no page holds them."""
    monkeypatch.setattr("tierd.daemon.l3.epochs.MARKS_MAX", 4)
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        for number in range(3):
            await first.tiers[0].epochs.bar(f"{number:08x}")
            await first.tiers[0].epochs.bar(f"{number:08x}")
        assert len(server.marks) == 4
        with pytest.raises(BackendError, match="--all"):
            await first.tiers[0].epochs.bar("12345678")
        await first.tiers[0].epochs.bar("")
        assert len(server.marks) == 1
        await first.tiers[0].epochs.bar("12345678")

    fleet(test, server)


def test_marks_are_rewritten_before_lifecycle_rules_delete_them() -> None:
    """A lifecycle rule that drops old objects would drop the marks, and with them every block."""
    server = Server()

    async def test(first: Bench, second: Bench) -> None:
        (mark,) = server.marks
        added: list[str] = []
        raw = first.raw[0]

        async def add(mark: str) -> None:
            added.append(mark)

        raw.add_mark = add  # type: ignore[method-assign]
        for _ in range(14):
            await first.acquire([bytes(32)], 1.0)
            await asyncio.sleep(REFRESH_S + 1)
            await first.acquire([bytes(32)], 1.0)
            await asyncio.sleep(3600)
        assert added == [mark] * 3
        assert pack_mark(first.tiers[0].epochs._view.known[0]) == mark

    fleet(test, server)
