"""A daemon that stops while a flush delays backups."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.daemon.jobs.test_flush_shared import fleet
from tests.support import blocks
from tests.support.tiers.bench import SPACE, Bench, config, run
from tests.support.tiers.flushing import OTHER, SlowTier, begin, flush, now, until
from tierd.config import WritePolicy
from tierd.daemon.l3.tier import BATCH_BLOCKS_MAX

COUNT = 20


def has(bench: Bench, hashes: Sequence[bytes]) -> int:
    """Return how many blocks of the first namespace the tier serves."""
    return sum(now(bench, block_hash) in bench.raw[0].blocks for block_hash in hashes)


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_stop_writes_blocks_whose_backup_a_flush_delayed(policy: WritePolicy) -> None:
    """Blocks stored during a flush would be in no tier after an orderly restart, and the log would
    report nothing left."""
    raw = SlowTier()

    async def test(bench: Bench) -> None:
        raw.mark_takes_s = 1.0
        begin(bench)
        await until(lambda: raw.marking)
        new = bench.store(COUNT, "new")
        assert await bench.node.drain(10) == 0
        assert has(bench, new) == COUNT
        bench.check_nothing_is_left()

    run(test, config("tier", write_policy=policy), raw=[raw])


def test_stop_reports_blocks_whose_backup_a_flush_delayed_to_the_end() -> None:
    """An operator would take a drain for complete that has written nothing."""

    async def test(first: Bench, second: Bench) -> None:
        other = second.node.register(OTHER)
        await second.acquire(blocks.chain(1)[0])
        await flush(first, SPACE.digest.hex())
        # It learns of the flush at its next lookup.
        await second.acquire(blocks.chain(1)[0])
        await until(lambda: second.node.backups.barred(SPACE.digest))
        second.store(COUNT, "new")
        rest = second.store(COUNT, "rest", other)
        assert await second.node.drain(0.5) == COUNT
        # Other namespaces do not wait.
        assert {key.block_hash for key in second.raw[0].blocks} == set(rest)

    fleet(test)


def test_flush_during_a_stop_delays_only_its_own_namespace() -> None:
    """A stop would abandon waiting backups when a flush begins, and report blocks that it
    writes."""
    raw = SlowTier()

    async def test(bench: Bench) -> None:
        hashes = bench.store(BATCH_BLOCKS_MAX + COUNT)
        raw.takes_s = 0.2
        drain = asyncio.create_task(bench.node.drain(30))
        await until(lambda: raw.calls("put"))
        assert bench.node.backlog() == len(hashes)
        raw.mark_takes_s = 1.0
        work = begin(bench, host=False)
        assert await drain == 0
        assert work.tiers[0].mark is not None
        assert has(bench, hashes[BATCH_BLOCKS_MAX:]) == COUNT
        bench.node.check()
        await work.done.wait()

    run(test, config("tier", write_policy=WritePolicy.WRITE_BACK, write_batches=1), raw=[raw])
