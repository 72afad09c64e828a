"""INVENTORY and TEACH: pages of the blocks in L2 and tiers, and uses learned from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import PAGE, SPACE, Bench, Tier, key, run
from tierd.backend import BlockHeader, checksum, pack_header
from tierd.backend import Scanned as Step
from tierd.daemon.jobs import inventory
from tierd.daemon.jobs.inventory import InventoryListings
from tierd.errors import BackendError, RemoteProtocolError
from tierd.eviction.policy import PrefixRequest
from tierd.testing.backend import StoredBlock
from tierd.testing.loop import VirtualClock
from tierd.types import NEVER
from tierd.wire import messages as m


class Asker:
    """A session that asks for pages."""

    def __init__(self, bench: Bench) -> None:
        self.said: list[m.FromDaemon] = []
        node, clock = bench.node, VirtualClock(bench.loop)
        self.inventory = InventoryListings(
            node.host, node.tiers, clock, node.spawn, self.said.append
        )

    async def page(self, source: int, digest: bytes = SPACE.digest) -> m.FromDaemon:
        self.inventory.ask(m.Inventory(7, digest, source))
        async with asyncio.timeout(60):
            while not self.said or self.inventory._answering is not None:
                await asyncio.sleep(0.001)
        return self.said.pop()

    async def all(self, source: int, digest: bytes = SPACE.digest) -> list[m.Listed]:
        pages: list[m.Listed] = []
        while not pages or pages[-1].more:
            page = await self.page(source, digest)
            assert isinstance(page, m.Listed)
            pages.append(page)
        return pages


def listed(pages: Sequence[m.Listed]) -> dict[bytes, tuple[bytes, int, int]]:
    """Return parent, uses and age of each block; asserts that no block occurs twice."""
    found: dict[bytes, tuple[bytes, int, int]] = {}
    for page in pages:
        hashes, parents = m.split_hashes(page.hashes), m.split_hashes(page.parents)
        uses, ages = m.unpack_slots(page.uses), m.unpack_slots(page.ages_s)
        assert len(hashes) == len(parents) == len(uses) == len(ages) <= inventory.PAGE_BLOCKS
        assert not found.keys() & set(hashes)
        found.update(zip(hashes, zip(parents, uses, ages, strict=True), strict=True))
    return found


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "PAGE_BLOCKS", 16)
    monkeypatch.setattr(inventory, "SLICE", 5)


@pytest.mark.usefixtures("small_pages")
def test_inventory_lists_l2_and_each_tier_whole() -> None:
    """A hot set would lack blocks, or their uses."""

    async def test(bench: Bench) -> None:
        hashes, parents = blocks.chain(40)
        bench.store(40)
        short = bench.store(8, "short")
        await bench.backed_up()
        bench.space.reuse.use(PrefixRequest(hashes[:3], bench.loop.now_ns / 1e9))
        bench.space.reuse.use(PrefixRequest(hashes[:1], bench.loop.now_ns / 1e9))
        await asyncio.sleep(90)
        asker = Asker(bench)
        for source in (0, 1, 2):
            pages = await asker.all(source)
            assert len(pages) == 4  # 48 blocks are three full pages and an empty one.
            found = listed(pages)
            assert set(found) == {*hashes, *short}
            assert [found[h][0] for h in hashes] == parents
            assert [found[h][1:] for h in hashes[:4]] == [(2, 90), (1, 90), (1, 90), (0, NEVER)]
        bench.forget()
        assert listed(await asker.all(0)) == {}
        assert len(listed(await asker.all(2))) == 48
        bench.check_nothing_is_left()

    run(test, blocks_in_l2=2048)


@pytest.mark.usefixtures("small_pages")
def test_inventory_of_a_namespace_unknown_to_l2() -> None:
    """After a restart the tiers could not be listed for an engine that has not connected yet."""
    other = blocks.namespace(PAGE, model="other")

    async def test(bench: Bench) -> None:
        bench.store(20)
        await bench.backed_up()
        hashes, parents = blocks.chain(7, "other")
        for block_hash, parent in zip(hashes, parents, strict=True):
            where, raw = key(block_hash, other), blocks.payload(other, block_hash)
            header = pack_header(BlockHeader(where, parent, PAGE, checksum(raw)))
            bench.raw[0].blocks[where] = StoredBlock(header, raw)
        asker = Asker(bench)
        assert listed(await asker.all(0, other.digest)) == {}
        found = listed(await asker.all(1, other.digest))
        assert found == {h: (p, 0, NEVER) for h, p in zip(hashes, parents, strict=True)}
        assert len(listed(await asker.all(1))) == 20

    run(test)


class Scanned(Tier):
    """A tier that counts the progress of a scan."""

    seen = 0
    ended = False
    fails_at = -1

    async def scan(self) -> AsyncIterator[Step]:
        try:
            async for step in super().scan():
                for header in step.headers:
                    if self.seen == self.fails_at:
                        raise BackendError("the disk is gone")
                    self.seen += 1
                    yield Step([header])
        finally:
            self.ended = True


def scanned(test: Callable[[Bench, Scanned, Asker], Awaitable[None]]) -> None:
    tier = Scanned()

    async def stored(bench: Bench) -> None:
        bench.store(200)
        await bench.backed_up()
        await test(bench, tier, Asker(bench))
        bench.check_nothing_is_left()

    run(stored, raw=[tier], blocks_in_l2=2048)


@pytest.mark.usefixtures("small_pages")
def test_scan_pauses_between_pages_and_ends_with_its_session() -> None:
    """A tier of millions of blocks would be read at full speed into the daemon's memory, and the
    scan would continue after the operator's Ctrl-C."""

    async def test(bench: Bench, tier: Scanned, asker: Asker) -> None:
        await asker.page(1)
        await asyncio.sleep(100)
        assert 16 <= tier.seen <= 48
        await asker.page(1)
        await asyncio.sleep(100)
        assert 32 <= tier.seen <= 64
        assert not tier.ended
        asker.inventory.close()
        await asyncio.sleep(1)
        assert tier.ended

    scanned(test)


@pytest.mark.usefixtures("small_pages")
def test_inventory_of_another_source_restarts_and_ends_the_scan() -> None:
    """A second listing would continue where the first one was."""

    async def test(bench: Bench, tier: Scanned, asker: Asker) -> None:
        await asker.page(1)
        assert len(listed(await asker.all(0))) == 200
        assert tier.ended
        assert len(listed(await asker.all(1))) == 200

    scanned(test)


@pytest.mark.usefixtures("small_pages")
def test_failed_scan_is_reported_and_can_be_restarted() -> None:
    """Half of a tier would pass for its whole content."""

    async def test(bench: Bench, tier: Scanned, asker: Asker) -> None:
        tier.fails_at = 40
        said = [await asker.page(1) for _ in range(3)]
        assert [type(page) for page in said] == [m.Listed, m.Listed, m.Error]
        assert said[-1] == m.Error(7, "tier0: the disk is gone")
        tier.seen, tier.fails_at = 0, -1
        assert len(listed(await asker.all(1))) == 200

    scanned(test)


def test_session_may_ask_for_one_page_at_a_time() -> None:
    """Thousands of pages requested at once would fill the daemon's memory."""

    async def test(bench: Bench) -> None:
        asker = Asker(bench)
        asker.inventory.ask(m.Inventory(1, SPACE.digest, 0))
        asker.inventory.ask(m.Inventory(2, SPACE.digest, 0))
        assert asker.said == [m.Error(2, "this session waits for another INVENTORY")]
        for wrong in (m.Inventory(3, b"short", 0), m.Inventory(3, SPACE.digest, 3)):
            with pytest.raises(RemoteProtocolError, match="INVENTORY names"):
                asker.inventory.ask(wrong)
        asker.inventory.close()

    run(test)


def test_taught_blocks_are_evicted_after_untaught_ones() -> None:
    """After a restart, adopted or warmed blocks would be evicted in their order of arrival."""

    async def test(bench: Bench) -> None:
        hot = bench.store(100, "hot")
        cold = bench.store(100, "cold")
        node = bench.node
        node.teach(SPACE, cold + hot, [1] * 100 + [6] * 100, [90_000] * 100 + [60] * 100)
        new = bench.store(100, "new")  # There is room for only 256 blocks.
        left = bench.space.items
        assert sum(block_hash in left for block_hash in hot) == 100
        assert sum(block_hash in left for block_hash in cold) < 60
        assert sum(block_hash in left for block_hash in new) == 100
        node.check()

    run(test)
    other = blocks.namespace(PAGE, tp_size=2)

    async def unopened(bench: Bench) -> None:
        hashes, _ = blocks.chain(3)
        bench.node.teach(other, hashes, [2, 2, 2], [10, 10, NEVER])
        assert other.digest not in bench.node.host.spaces
        book = bench.node.register(blocks.namespace(PAGE, tp_size=2, tp_rank=1)).reuse
        assert [book.uses(block_hash) for block_hash in hashes] == [2, 2, 0]

    run(unopened)
