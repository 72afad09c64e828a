"""Copies that the daemon makes for a vLLM worker: never a stale block, never a late write."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.engines.connector_bench import block_hash
from tests.support.engines.jobs_rig import BLOCKS, Rig, Troubles
from tierd.shared_memory.gate import GATE_JOBS
from tierd_connectors.common.namespaces import of_generation
from tierd_connectors.common.work import Load
from tierd_connectors.vllm.worker import jobs as vllm_jobs
from tierd_connectors.vllm.worker import mover as vllm_mover
from tierd_connectors.vllm.worker.export import HostPool, Shown
from tierd_connectors.vllm.worker.layout import (
    BlockPages,
    LayoutError,
    Stretch,
)

if TYPE_CHECKING:
    pass


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.attach()
    yield made
    made.mover.stop(0)
    assert made.boundary.errors == 0
    if made.mover._thread is None:
        made.close()


def test_freed_memory_fails_the_probe(rig: Rig) -> None:
    """After a sleep the daemon would copy to and from freed pages."""
    attachment = rig.daemon.attachments[0]
    rig.mover._probe(False)
    left = attachment.content(0)
    block, digest = rig.mover._probe(False)
    assert block == 0
    assert hashlib.sha256(attachment.content(0)).digest() == digest
    assert hashlib.sha256(left).digest() != digest


# The way there and back


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC", "LBNHC", "BHNLC"])
@pytest.mark.parametrize("storer", ["daemon", "worker"])
def test_daemon_and_worker_fill_slots_equally(layout: str, storer: str) -> None:
    """KV stored by the one would be loaded by the other with its layers in another order."""
    rig = Rig(layout)
    if storer == "daemon":
        rig.attach()
    before = rig.store([1, 2])
    if storer == "daemon":
        assert rig.daemon.ended_copies == 1
        rig.mover._jobs = None
    else:
        rig.attach()
    rig.load([1, 2], [4, 5])
    rig.finish()
    assert rig.failed() == []
    assert [rig.content(4), rig.content(5)] == before
    assert rig.daemon.ended_copies == 1
    assert rig.boundary.errors == 0


@pytest.mark.parametrize("by", ["daemon", "worker"])
def test_failed_store_returns_its_slots(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Slots that are not filled would stay reserved until the engine ends."""
    rig = Rig()
    if by == "daemon":
        rig.attach()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a driver's error")

    if by == "daemon":
        monkeypatch.setattr(rig.client, "begin_store", fail)
    else:
        monkeypatch.setattr(rig.pages, "gather_many", fail)
    rig.mover.submit_stores([rig.item(1)])
    rig.mover._work()
    assert rig.daemon.aborts == 1
    assert rig.boundary.errors == 1
    assert rig.mover.settled
    rig.close()


def test_mover_thread_loads_and_stores() -> None:
    """The mover would copy only when a test calls it."""
    rig = Rig()
    rig.daemon.copying = True
    rig.attach()
    rig.mover.start()
    before = rig.write(1)
    rig.mover.submit_stores([rig.item(1)])
    wait_for(lambda: rig.mover.settled)
    rig.load([1], [4])
    rig.mover.wait_finished(5)
    assert rig.failed() == []
    assert rig.content(4) == before
    assert rig.daemon.ended_copies == 2
    rig.mover.stop(1)
    assert rig.client.closed
    assert rig.boundary.errors == 0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_several_copies_are_in_progress_at_once(rig: Rig) -> None:
    """The daemon would wait for the engine between two copies, and the other way round."""
    rig.store([1])
    for block in (2, 3, 4):
        rig.load([1], [block])
    rig.mover.submit_stores([rig.item(b, block_hash(b, salt=1)) for b in (1, 5)])
    rig.work()
    assert [job.job is None for job in rig.daemon.jobs] == [False, False, False, True]
    rig.finish()
    assert len(rig.mover.take_finished()) == 3


def test_present_blocks_are_not_copied(rig: Rig) -> None:
    """A prefix that is stored already would be copied again, or never counted as stored."""
    rig.store([1])
    rig.mover.tally.drain()
    rig.mover.submit_stores([rig.item(1)])
    rig.work()
    assert rig.daemon.jobs == []
    assert rig.mover.settled
    assert rig.mover.tally.drain() == {}


# The fence


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_fence_during_a_copy(rig: Rig, steps: int) -> None:
    """What a new owner wrote during the copy would be published under the old hash."""
    before = {block: rig.write(block) for block in (1, 2, 3)}
    rig.mover.submit_stores([rig.item(block) for block in (1, 2, 3)])
    rig.work()
    (job,) = rig.daemon.jobs
    for _ in range(steps):
        job.advance()
    rig.mover.fence({2})
    rig.write(2)
    rig.finish()
    assert rig.stored(block_hash(1)) == before[1]
    assert rig.stored(block_hash(2)) is None
    assert rig.stored(block_hash(3)) is None, "its parent is missing"
    assert rig.mover.tally.drain()["store_blocks_dropped"] == 2


def test_fence_covers_only_earlier_stores(rig: Rig) -> None:
    """A block's next content would not be stored, because its previous content was fenced."""
    rig.write(1)
    rig.mover.submit_stores([rig.item(1)])
    rig.work()
    rig.mover.fence({1})
    after = rig.write(1)
    rig.mover.submit_stores([rig.item(1, block_hash(1, salt=1))])
    rig.finish()
    assert rig.stored(block_hash(1)) is None
    assert rig.stored(block_hash(1, salt=1)) == after


# Loads that go wrong


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_daemon_dies_during_a_load(rig: Rig, steps: int) -> None:
    """Half a load would be taken for a whole one, or never be reported."""
    before = rig.store([1, 2])
    rig.load([1, 2], [4, 5])
    rig.work()
    for _ in range(steps):
        rig.daemon.jobs[0].advance()
    rig.daemon.kill()
    rig.work()
    assert rig.failed() == [], "the lease outlives the daemon, and the worker can copy"
    assert [rig.content(4), rig.content(5)] == before
    assert rig.mover.settled


def test_load_fails_at_once_when_its_slots_can_no_longer_arrive(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker would spin beside the engine until it gives up, since nothing is waited for
    where there is no connection."""
    rig.store([1, 2])
    rig.load([1, 2], [4, 5])
    rig.daemon.kill()
    waits: list[float] = []
    monkeypatch.setattr(rig.client, "lease_views", lambda *_: None)
    monkeypatch.setattr(rig.client, "wait", waits.append)
    rig.work()
    assert rig.failed() == [4, 5]
    assert len(waits) < 3


@pytest.mark.parametrize("end", ["done", "dead"])
def test_load_does_not_end_while_it_is_written(rig: Rig, end: str) -> None:
    """The engine would reuse pages that a daemon, out of reach, is still writing."""
    before = rig.store([1, 2])
    rig.load([1, 2], [4, 5])
    rig.work()
    (job,) = rig.daemon.jobs
    job.advance()
    job.advance()
    rig.daemon.drop_session()
    rig.work()
    assert rig.failed() is None
    assert rig.mover._pause_s() < 0.005, "it is asked again soon"
    if end == "done":
        job.advance()
    else:
        job.die()
    rig.work()
    assert rig.failed() == []
    assert [rig.content(4), rig.content(5)] == before


def test_delayed_request_of_a_called_off_load_writes_nothing(rig: Rig) -> None:
    """A daemon that was stopped would write pages that have new owners by then."""
    rig.store([1, 2])
    rig.load([1, 2], [4, 5])
    rig.work()
    (late,) = rig.daemon.jobs
    rig.daemon.drop_session()
    rig.daemon.jobs.clear()
    rig.work()
    assert rig.failed() == []
    mine = rig.write(4)
    # Its place in the gate is another load's by then.
    assert late.job is not None
    rig.mover._jobs._next_job = late.job + GATE_JOBS  # type: ignore[union-attr]  # attached
    rig.load([1], [0])
    rig.work()
    late.advance()
    assert not late.writing
    while not late.over:
        late.advance()
    assert rig.content(4) == mine


def test_loads_in_progress_have_distinct_gate_places(rig: Rig) -> None:
    """Two loads in one place of the gate: the second would be refused, or both called off."""
    rig.store([1])
    rig.load([1], [4])
    rig.work()
    jobs = rig.mover._jobs
    assert jobs is not None
    jobs._next_job += GATE_JOBS - 1
    rig.load([1], [5])
    rig.work()
    first, second = rig.daemon.jobs
    assert first.job is not None
    assert second.job is not None
    assert second.job > first.job
    assert second.job % GATE_JOBS != first.job % GATE_JOBS
    rig.finish()
    assert len(rig.mover.take_finished()) == 2


def test_device_failure_falls_back_to_the_worker(rig: Rig) -> None:
    """A GPU's error would lose a prefix that the worker can copy, or publish half a block."""
    before = rig.store([1])
    rig.mover.submit_stores([rig.item(2)])
    rig.load([1], [4])
    rig.work()
    for job in rig.daemon.jobs:
        job.advance()
        job.fail()
    rig.work()
    assert rig.failed() == []
    assert rig.content(4) == before[0]
    assert rig.stored(block_hash(2)) is None
    assert rig.mover.settled


def test_silent_daemon_falls_back_to_the_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user would wait for a daemon that hangs until the lease ends."""
    before = rig.store([1])
    load = rig.load([1], [4])
    rig.work()
    assert rig.failed() is None
    monkeypatch.setattr(vllm_jobs, "PATIENCE_S", 0.0)
    rig.work()
    assert rig.failed() == []
    assert rig.content(4) == before[0]
    assert load.expires_ns > time.monotonic_ns()


def test_expired_lease_fails_a_requested_load(rig: Rig) -> None:
    """A slot that was reused during the copy would be served as the prefix."""
    rig.store([1])
    rig.load([1], [4], lease_ms=1)
    rig.work()
    time.sleep(0.002)
    rig.work()
    assert rig.failed() == [4]


# The attachment


def test_refused_attachment_is_logged_once_and_the_worker_copies(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator would not learn why copies take the engine's time, or get none at all."""
    before = rig.store([1])
    rig.load([1], [4])
    rig.work()
    rig.daemon.kill()
    rig.daemon.up, rig.daemon.refuse = True, "another GPU: set CUDA_VISIBLE_DEVICES"
    with caplog.at_level(logging.INFO, logger="vllm.tierd"):
        rig.work()
        assert rig.failed() == []
        assert rig.content(4) == before[0]
        rig.load([1], [5])
        rig.mover.submit_stores([rig.item(2)])
        rig.work()
    assert rig.failed() == []
    assert rig.content(5) == before[0]
    assert rig.stored(block_hash(2)) == rig.content(2)
    (line,) = caplog.messages
    assert "CUDA_VISIBLE_DEVICES" in line
    assert rig.daemon.attachments == []


def test_refused_export_tries_the_next_way() -> None:
    """Without a shared /dev/shm the engine would copy itself, though counters would do."""
    rig = Rig()
    rig.daemon.refuse = "no event"
    ways = [rig.way(), rig.way()]

    def one_after_the_other() -> Iterator[Shown]:
        yield ways[0]
        rig.daemon.refuse = ""
        yield ways[1]

    rig.mover.attach(one_after_the_other())
    assert rig.mover.attached
    assert len(rig.daemon.attachments) == 1


def test_worker_copies_when_no_export_is_possible(caplog: pytest.LogCaptureFixture) -> None:
    """An engine whose memory cannot be shown would not start."""
    rig = Rig()

    def none() -> Iterator[Shown]:
        raise LayoutError("this vLLM is too old")
        yield rig.way()

    with caplog.at_level(logging.INFO, logger="vllm.tierd"):
        rig.mover.attach(none())
    assert "too old" in caplog.text
    rig.store([1])
    assert rig.daemon.ended_copies == 0


def test_pages_in_use_are_not_probed() -> None:
    """A request's KV would be overwritten when the daemon comes back."""
    rig = Rig()
    blocks = set()
    for _ in range(60):
        rig.mover.attach([rig.way()])
        blocks.add(rig.daemon.probed[-1])
        rig.daemon.attachments.clear()
    assert len(blocks) > 1, "the stride is not proved"
    assert not rig.logical.any(), "what the probe wrote has gone"
    rig.attach()
    rig.mover.start()
    mine = [rig.write(block) for block in range(1, BLOCKS)]
    for _ in range(5):
        rig.daemon.drop_session()
        seen = len(rig.daemon.probed)
        rig.mover._wake()
        wait_for(lambda seen=seen: len(rig.daemon.probed) > seen)  # type: ignore[misc]
        assert rig.daemon.probed[-1] == 0
    assert [rig.content(block) for block in range(1, BLOCKS)] == mine
    rig.mover.stop(0)


def test_start_does_not_wait_for_a_late_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon that hangs would keep the engine from starting."""
    rig = Rig()
    monkeypatch.setattr(vllm_mover, "ATTACH_S", 0.05)
    monkeypatch.setattr(rig.daemon, "attach", lambda: None)
    started = time.monotonic()
    rig.mover.attach([rig.way()])
    assert time.monotonic() - started < 2
    assert not rig.mover.attached
    assert rig.client.closed, "or it would be attached by a page that is in use by then"


def test_reset_waits_for_copies_in_progress(rig: Rig) -> None:
    """Slots of the old namespace would be copied as the new one's, or pages be forgotten."""
    before = rig.store([1])
    rig.load([1], [4])
    rig.mover.submit_stores([rig.item(2)])
    rig.work()
    old = rig.daemon.attachments[0]
    fresh = of_generation(rig.namespace, "x")
    rig.mover.use(fresh)
    rig.mover.submit_stores([rig.item(3)])
    rig.work()
    assert rig.daemon.attachments == [old]
    assert len(rig.daemon.jobs) == 2
    rig.finish()
    assert rig.failed() == []
    assert rig.content(4) == before[0]
    assert (fresh.digest, block_hash(3)) in rig.daemon.blocks
    assert (rig.namespace.digest, block_hash(3)) not in rig.daemon.blocks
    (new,) = rig.daemon.attachments
    assert new is not old
    assert new.handle.namespace == fresh


def test_reset_at_any_moment_is_safe(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked right after a reset would be stored where its hash means something else."""
    rig.store([1])
    fresh = of_generation(rig.namespace, "x")
    collect = rig.mover._collect

    def reset_meanwhile() -> bool:
        monkeypatch.undo()
        rig.mover.use(fresh)
        # As if the slots were the new namespace's, which has none yet.
        rig.daemon.owners.clear()
        rig.load([1], [4])
        rig.mover.submit_stores([rig.item(3)])
        assert not rig.mover._begin()
        return collect()

    monkeypatch.setattr(rig.mover, "_collect", reset_meanwhile)
    rig.finish()
    assert rig.failed() == []
    assert (fresh.digest, block_hash(3)) in rig.daemon.blocks
    assert (rig.namespace.digest, block_hash(3)) not in rig.daemon.blocks


def test_engine_end_during_a_load_is_safe(rig: Rig) -> None:
    """The engine's memory would be written after it was given back."""
    rig.daemon.copying = False
    rig.store([1])
    rig.mover.start()
    rig.load([1], [4])
    wait_for(lambda: bool(rig.daemon.jobs))
    (job,) = rig.daemon.jobs
    job.advance()
    stopping = threading.Thread(target=rig.mover.stop, args=(0.0,))
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive(), "it is being written"
    while not job.over:
        job.advance()
    stopping.join(5)
    assert not stopping.is_alive()
    assert rig.client.closed


# Where it lies


def test_runs_are_split_at_allocation_ends() -> None:
    """A page that spans two allocations would be read beyond the end of the first one."""
    blocks = BlockPages((Stretch(1000, 300), Stretch(2000, 50)), 400, 2)
    layout = blocks.within([Stretch(2000, 600), Stretch(1100, 700), Stretch(900, 200)])
    assert list(layout.runs) == [(2, 100, 100), (1, 0, 200), (0, 0, 50)]
    assert layout.block_bytes == blocks.block_bytes
    with pytest.raises(LayoutError, match="outside of all 1 exported"):
        blocks.within([Stretch(1000, 300)])


def test_memory_outside_the_pool_is_refused() -> None:
    """With an older vLLM, memory without KV would be exported."""
    with pytest.raises(LayoutError, match=r"0\.32"):
        HostPool().show(BlockPages((Stretch(1000, 8),), 8, 2))


# Everything at once


class World(Troubles):
    """One engine's random run: steps, loads, resets, and a daemon that fails in any way."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.truth: dict[tuple[bytes, bytes], bytes] = {}
        self.shadow = [self.rig.write(block) for block in range(BLOCKS)]
        self.loading: dict[str, tuple[list[int], list[bytes]]] = {}
        self.names = 0

    def run(self) -> None:
        actions = [
            *[self.step] * 4,
            *[self.load] * 3,
            *[self.work] * 6,
            *[self.advance] * 8,
            self.lose_session,
            self.kill,
            self.fail,
            self.forget,
        ]
        for _ in range(self.chance.randrange(10, 60)):
            self.chance.choice(actions)()
            self.check()
        self.end()

    def free(self) -> list[int]:
        owned = {block for into, _ in self.loading.values() for block in into}
        # Block 0 is the null block.
        return [block for block in range(1, BLOCKS) if block not in owned]

    def step(self) -> None:
        """The engine recomputes some blocks, and stores some of them."""
        free = self.free()
        blocks = self.chance.sample(free, min(len(free), self.chance.randrange(1, 4)))
        self.rig.mover.fence(frozenset(blocks))
        items = []
        for block in blocks:
            self.shadow[block] = self.rig.write(block)
            if self.chance.random() < 0.8:
                self.names += 1
                # The same names for all adapters.
                name = block_hash(self.names // 3, salt=7)
                digest, adapter = self.chance.choice(list(self.adapters.items()))
                if (digest, name) not in self.truth:
                    self.truth[digest, name] = self.shadow[block]
                    items.append(self.rig.item(block, name, adapter))
        self.rig.mover.submit_stores(items)

    def load(self) -> None:
        digest, adapter = self.chance.choice(list(self.adapters.items()))
        held = [block for block in self.rig.daemon.blocks.items() if block[0][0] == digest]
        free = self.free()
        if not held or not free or not self.rig.daemon.up:
            return
        count = min(len(free), len(held), self.chance.randrange(1, 4))
        into, taken = self.chance.sample(free, count), self.chance.sample(held, count)
        self.rig.mover.fence(frozenset(into))
        self.names += 1
        request = f"r{self.names}"
        expires_ns = time.monotonic_ns() + 60_000_000_000
        slots = [slot for _, slot in taken]
        self.loading[request] = into, [self.truth[key] for key, _ in taken]
        self.rig.mover.submit_load(
            Load(request, self.rig.daemon.epoch, expires_ns, into, [slots], adapter)
        )

    def work(self) -> None:
        self.rig.mover._work()

    def forget(self) -> None:
        self.rig.mover.forget_stores()

    def check(self) -> None:
        for request, failed in self.rig.mover.take_finished():
            into, contents = self.loading.pop(request)
            for block, content in zip(into, contents, strict=True):
                if failed:
                    self.shadow[block] = self.rig.content(block)
                else:
                    assert self.rig.content(block) == content, "a load brought something else"
                    self.shadow[block] = content
        for block in self.free():
            assert self.rig.content(block) == self.shadow[block], "a page was written late"
        for key, slot in self.rig.daemon.blocks.items():
            held = bytes(self.rig.daemon.slots[slot][: self.rig.blocks.block_bytes])
            assert held == self.truth[key], "a stale block, or another adapter's, was committed"

    def end(self) -> None:
        """Nothing is left, once every job has come to its end."""
        for _ in range(1000):
            if self.rig.mover.settled and not (self.late or self.rig.daemon.jobs):
                break
            self.advance()
            self.work()
            self.check()
        assert not self.loading
        assert self.rig.mover.settled
        assert self.rig.boundary.errors == 0
        self.rig.mover.stop(0)
        self.check()


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 1000, 100)])
def test_random_engine_runs_with_daemon_copies(seeds: range) -> None:
    """In some order of events a wrong byte would be stored, loaded, or written too late."""
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        world.rig.close()
