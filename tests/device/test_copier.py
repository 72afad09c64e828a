"""Jobs of engines that wait, cancel, die or fail: which copies are made, and in which order.

All on host memory, by the rules of `tierd.device.copier`.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.device.copy_scene import LAYOUTS, EngineGate, Pages, Slots
from tierd.device import batches
from tierd.device.api import Addresses, CannotOpenError, DeviceError, Direction
from tierd.device.choice import Choice
from tierd.device.copier import Copier
from tierd.device.host import HostDevice
from tierd.device.plan import Strategy
from tierd.shared_memory.exports import NO_EVENT, PageLayout, Run, counter_handle
from tierd.shared_memory.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LOAD, STORE = Direction.LOAD, Direction.STORE


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


class ControlledDevice(HostDevice):
    """A host device whose copies can be held up, counted and made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.copies = 0
        self.bytes = {LOAD: 0, STORE: 0}
        self.fail_after: int | None = None
        self.sticky = False
        self.gone = False

    def copy(
        self,
        pages: Addresses,
        slots: Addresses,
        lengths: Addresses,
        direction: Direction,
        stream: int,
    ) -> None:
        if self.fail_after is not None and self.copies >= self.fail_after:
            raise DeviceError("the copy was refused", sticky=self.sticky)
        self._streams[stream].add(lambda: self.go.wait(20))
        super().copy(pages, slots, lengths, direction, stream)
        self.copies += 1
        self.bytes[direction] += int(lengths.sum())

    def query(self, event: int) -> bool:
        if self.gone:
            raise DeviceError("the device is gone", sticky=True)
        return super().query(event)


class Rig:
    """A copier, an engine, and the answers to its jobs."""

    def __init__(self, device: ControlledDevice | None = None, **options: object) -> None:
        self.device = device or ControlledDevice()
        self.answers: dict[int, tuple[int, str]] = {}
        self.order: list[int] = []
        self.lost: list[str] = []
        self.copier = Copier(
            self.device,
            on_done=self._done,
            on_lost=self.lost.append,
            **options,  # type: ignore[arg-type] # Only tests pass them on.
        )
        self._close: list[Callable[[], None]] = []

    def _done(self, job: int, blocks: int, reason: str) -> None:
        assert job not in self.answers
        self.answers[job] = blocks, reason
        self.order.append(job)

    def engine(
        self, number: int = 1, layout: str = "LBHNC", blocks: int = 6, ends: Sequence[int] = ()
    ) -> tuple[Pages, EngineGate]:
        pages, gate = Pages(layout, blocks), EngineGate()
        self.attach(number, pages, gate, ends=ends)
        return pages, gate

    def attach(
        self, number: int, pages: Pages, gate: EngineGate, *, ends: Sequence[int] = ()
    ) -> str:
        self._close.append(gate.close)
        how = self.copier.attach(
            number,
            [pages.memory.export],
            pages.layout,
            block_bytes=pages.block_bytes,
            events=[pages.event.handle],
            gate_fd=gate.fd,
            layer_ends=ends,
            probe_block=1,
            probe_digest=pages.digest(1),
        )
        self.device.copies = 0
        self.device.bytes = {LOAD: 0, STORE: 0}
        return how

    def submit(
        self,
        job: int,
        direction: Direction,
        blocks: Sequence[int],
        slots: Addresses,
        *,
        engine: int = 1,
        value: int | None = None,
    ) -> None:
        self.copier.submit(
            job,
            engine,
            direction,
            np.array(blocks, np.uint32),
            slots,
            event=NO_EVENT if value is None else 0,
            value=value or 0,
            gate_job=job,
        )

    def answer(self, job: int) -> tuple[int, str]:
        until(lambda: job in self.answers)
        return self.answers[job]

    def close(self) -> None:
        self.device.go.set()
        if not self.lost:
            self.copier.shut()
        self.device.shut()
        for close in self._close:
            close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> int:
    """Batches of one block of the usual scene, two of them on the stream at most."""
    size = 768
    monkeypatch.setattr(batches, "BATCH_BYTES", size)
    monkeypatch.setattr(batches, "_FLYING_BYTES_MAX", 2 * size)
    return size


def force(monkeypatch: pytest.MonkeyPatch, strategy: Strategy) -> None:
    choice = Choice(dict.fromkeys(Direction, strategy), f"{strategy.value}, as forced")
    monkeypatch.setattr("tierd.device.copier.choose", lambda *_: choice)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, Strategy.DIRECT)


# What is copied


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_survives_the_way_through_a_slot(
    monkeypatch: pytest.MonkeyPatch, rig: Rig, layout: str, strategy: Strategy
) -> None:
    """KV would come back as another block's, or another layer's."""
    force(monkeypatch, strategy)
    pages, gate = rig.engine(layout=layout)
    slots = Slots(pages.block_bytes, 6)
    before = [pages.block(block) for block in range(6)]
    rig.submit(1, STORE, [4, 0, 3], slots.address(2, 1, 0))
    assert rig.answer(1) == (3, "")
    assert [slots.content(i) for i in range(3)] == [before[3], before[0], before[4]]
    gate.gate.prepare(2)
    rig.submit(2, LOAD, [1, 2], slots.address(2, 0))
    assert rig.answer(2) == (2, "")
    after = [pages.block(block) for block in range(6)]
    assert after == [before[0], before[4], before[3], *before[3:]]
    assert gate.gate.progress(2) == 1
    assert gate.gate.call_off(2)


def test_job_of_no_blocks_ends(rig: Rig) -> None:
    """A call without an answer would be waited for until its session ends."""
    rig.engine()
    rig.submit(1, STORE, [], np.empty(0, np.uint64))
    assert rig.answer(1) == (0, "")


@pytest.mark.usefixtures("direct")
def test_large_job_is_cut_into_batches(rig: Rig, small_batches: int) -> None:
    """A load would wait behind gigabytes of another one's."""
    pages, _ = rig.engine(blocks=40)
    slots = Slots(pages.block_bytes, 40)
    rig.device.go.clear()
    rig.submit(1, STORE, range(40), slots.address(*range(40)))
    until(lambda: rig.device.copies == 2)
    time.sleep(0.01)
    assert rig.device.copies == 2
    assert rig.copier.stalled_s() > 0
    rig.device.go.set()
    assert rig.answer(1) == (40, "")
    assert rig.device.copies == 40
    assert rig.copier.stalled_s() == 0
    assert all(slots.content(i) == pages.block(i) for i in range(40))


def test_copies_end_where_pinned_memory_does(rig: Rig) -> None:
    """Slots at the end of one segment and the start of the next would be one failing copy."""
    pages, _ = rig.engine(layout="BLHNC")
    slots = Slots(pages.block_bytes, 4, 0)
    middle = int(slots.address(2)[0])
    rig.device.pin(int(slots.address(0)[0]), 2 * pages.block_bytes)
    rig.device.pin(middle, 2 * pages.block_bytes)
    rig.submit(1, STORE, [0, 1, 2, 3], slots.address(0, 1, 2, 3))
    assert rig.answer(1) == (0, "a copy crosses the end of memory that was pinned as a whole")
    rig.copier.know_memory([middle, int(slots.address(0)[0])])
    rig.submit(2, STORE, [0, 1, 2, 3], slots.address(0, 1, 2, 3))
    assert rig.answer(2) == (4, "")


# Order


@pytest.mark.slow
def test_store_waits_for_the_kernel_that_computes_its_pages(rig: Rig) -> None:
    """The bytes of the page's previous request would be stored under this one's hash."""
    pages, _ = rig.engine()
    slots = Slots(pages.block_bytes, 6)
    for round_ in range(1, 101):
        rig.submit(round_, STORE, range(6), slots.address(*range(6)), value=pages.event.promise())
        if round_ % 10 == 0:
            time.sleep(0.002)
            assert round_ not in rig.answers
        pages.fill(100 + round_)
        pages.event.record()
        assert rig.answer(round_) == (6, "")
        assert all(slots.content(i) == pages.block(i) for i in range(6))


@pytest.mark.slow
def test_load_waits_for_the_kernel_that_still_reads_its_pages(rig: Rig) -> None:
    """A step under way would read a new request's KV."""
    pages, gate = rig.engine()
    slots = Slots(pages.block_bytes, 6)
    for round_ in range(1, 51):
        gate.gate.prepare(round_)
        before = pages.block(0)
        rig.submit(round_, LOAD, [0], slots.address(round_ % 6), value=pages.event.promise())
        time.sleep(0.0005)
        assert pages.block(0) == before
        pages.event.record()
        assert rig.answer(round_) == (1, "")
        assert pages.block(0) == slots.content(round_ % 6)


def test_peer_that_never_records_delays_no_other_job() -> None:
    """One hung engine would stop the copies of all other engines on the device."""
    now = [0.0]
    rig = Rig(clock=lambda: now[0], job_limit_s=5.0)
    hung, gate = rig.engine(1)
    well, _ = rig.engine(2)
    slots = Slots(hung.block_bytes, 6)
    before = hung.raw.copy()
    value = hung.event.promise()
    rig.submit(1, STORE, [0], slots.address(0), value=value)
    rig.submit(2, LOAD, [0], slots.address(0), value=value)
    for job in range(10, 20):
        rig.submit(job, Direction.STORE, [1], slots.address(1), engine=2)
        rig.submit(job + 10, LOAD, [2], slots.address(1), engine=2, value=well.event.record())
        assert rig.answer(job) == rig.answer(job + 10) == (1, "")
    assert 1 not in rig.answers
    now[0] = 5.1
    for job in (1, 2):
        assert rig.answer(job) == (0, "given up after 5 s, before its event happened")
    # The event happens after all: an ended job is not copied.
    kept = slots.content(0)
    hung.event.record()
    rig.submit(3, STORE, [3], slots.address(3), value=hung.event.record())
    rig.submit(4, LOAD, [], slots.address())
    assert rig.answer(3) == (1, "")
    assert slots.content(0) == kept
    assert (hung.raw[8:] == before[8:]).all()
    assert gate.gate.call_off(2)
    rig.close()


def test_detach_does_not_wait_for_an_event_that_never_happens(rig: Rig) -> None:
    """The memory of an engine that has died would stay taken, and no new one would start."""
    pages, _ = rig.engine()
    slots = Slots(pages.block_bytes, 1)
    rig.submit(1, STORE, [0], slots.address(0), value=pages.event.promise())
    until(lambda: bool(rig.copier._lanes[STORE]._waiting))
    rig.copier.detach(1)
    assert rig.answers == {1: (0, "cancelled, before its event happened")}
    assert not rig.device._opened
    assert not rig.device.pinned_bytes
    streams = len(rig.device._streams)
    pages, _ = rig.engine()
    rig.submit(2, STORE, [0], slots.address(0), value=pages.event.record())
    assert rig.answer(2) == (1, "")
    assert len(rig.device._streams) == streams, "the stream that waited is used again"


class StuckDevice(ControlledDevice):
    """A device whose streams keep waiting for a counter after its owner has ended."""

    def close_event(self, event: int) -> None:
        pass


def test_memory_is_not_unmapped_while_a_stream_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU would fault there, which ends the copies of every engine."""
    monkeypatch.setattr("tierd.device.copier._DRAIN_LIMIT_S", 0.05)
    rig = Rig(StuckDevice())
    pages, _ = rig.engine()
    rig.submit(1, STORE, [0], Slots(768, 1).address(0), value=pages.event.promise())
    until(lambda: bool(rig.copier._lanes[STORE]._waiting))
    with pytest.raises(DeviceError, match="not done"):
        rig.copier.detach(1)
    assert rig.device._opened
    rig.close()


@pytest.mark.slow
@pytest.mark.usefixtures("direct")
def test_layer_groups_are_in_place_in_order(rig: Rig, small_batches: int) -> None:
    """A layer would be computed on pages that are still being loaded."""
    pages = Pages("LBHNC", 20)
    layer = pages.block_bytes // 3
    ends = [layer, 2 * layer, 3 * layer]
    gate = EngineGate()
    rig.attach(1, pages, gate, ends=ends)
    slots = Slots(pages.block_bytes, 20)
    for job in range(1, 21):
        pages.fill(job)
        gate.gate.prepare(job)
        rig.submit(job, LOAD, range(20), slots.address(*range(20)))
        seen = 0
        while seen < 3:
            progress = gate.gate.progress(job)
            assert progress >= seen
            if progress > seen:
                end = ends[progress - 1]
                assert all(pages.block(i)[:end] == slots.content(i)[:end] for i in range(20))
                seen = progress
        assert rig.answer(job) == (20, "")


# Ends


def test_called_off_load_writes_nothing(rig: Rig) -> None:
    """A page would be written that another request has by now."""
    pages, gate = rig.engine()
    slots = Slots(pages.block_bytes, 1)
    before = pages.raw.copy()
    assert gate.gate.call_off(1)
    rig.submit(1, LOAD, [0], slots.address(0))
    assert rig.answer(1) == (0, "called off")
    rig.submit(2, LOAD, [0], slots.address(0), value=pages.event.promise())
    until(lambda: bool(rig.copier._lanes[LOAD]._waiting))
    assert gate.gate.call_off(2)
    assert rig.answer(2) == (0, "called off, before its event happened")
    assert (pages.raw == before).all()


@pytest.mark.usefixtures("direct")
def test_load_called_off_while_it_writes_stops_soon(rig: Rig, small_batches: int) -> None:
    """An engine that preempts would wait for all of a long load."""
    pages, gate = rig.engine(blocks=40)
    slots = Slots(pages.block_bytes, 40)
    rig.device.go.clear()
    rig.submit(1, LOAD, range(40), slots.address(*range(40)))
    until(lambda: rig.device.copies == 2)
    assert not gate.gate.call_off(1)
    rig.device.go.set()
    assert rig.answer(1) == (2, "called off")
    assert gate.gate.call_off(1)
    assert rig.device.copies == 2


@pytest.mark.usefixtures("direct")
def test_job_delayed_by_the_cap_is_given_up() -> None:
    """The daemon would take a process for hung that only keeps to its cap, and kill it."""
    now = [0.0]
    rig = Rig(clock=lambda: now[0], bandwidth_max=768 * 50, job_limit_s=2)
    pages, gate = rig.engine(blocks=10)
    slots = Slots(pages.block_bytes, 10)
    rig.submit(1, LOAD, range(10), slots.address(*range(10)))
    until(lambda: rig.device.copies == 1)
    rig.submit(2, STORE, range(10), slots.address(*range(10)))
    now[0] = 2.0
    assert rig.answer(1) == (1, "given up after 2 s")
    now[0] = 4.0
    assert rig.answer(2)[1] == "given up after 2 s"
    assert gate.gate.call_off(1)
    rig.close()


@pytest.mark.usefixtures("direct")
def test_load_has_not_ended_before_its_last_copy_has() -> None:
    """Pages would be freed while the device writes them: here the cap delays the next batch."""
    rig = Rig(clock=lambda: 0.0, bandwidth_max=768 * 50)
    pages, gate = rig.engine(blocks=10)
    slots = Slots(pages.block_bytes, 10)
    rig.device.go.clear()
    rig.submit(1, LOAD, range(10), slots.address(*range(10)))
    until(lambda: rig.device.copies == 1)
    for _ in range(20):
        assert not gate.gate.call_off(1)
        time.sleep(0.001)
    assert not rig.answers
    rig.device.go.set()
    assert rig.answer(1) == (1, "called off")
    assert gate.gate.call_off(1)
    rig.close()


@pytest.mark.slow
def test_no_page_is_written_after_its_load_was_called_off(rig: Rig) -> None:
    """Abort and preemption race every load: a stale write is another request's wrong answer."""
    pages, gate = rig.engine(blocks=32)
    slots = Slots(pages.block_bytes, 32)
    rounds = random.Random(4)
    ends = set()
    delay_s = 1e-4
    for job in range(1, 401):
        gate.gate.prepare(job)
        rig.submit(job, LOAD, range(32), slots.address(*range(32)))
        end = time.perf_counter() + delay_s * rounds.random()
        while time.perf_counter() < end:
            pass
        while not gate.gate.call_off(job):
            pass
        pages.raw[8:] = job % 251
        reason = rig.answer(job)[1]
        assert (pages.raw[8:] == job % 251).all()
        ends.add(reason)
        delay_s *= 1.2 if reason else 1 / 1.2
    assert ends == {"", "called off"}


@pytest.mark.usefixtures("direct")
def test_cancel_returns_once_nothing_is_in_flight(rig: Rig, small_batches: int) -> None:
    """Slots and pages of an engine that has gone would be reused under a copy."""
    pages, _ = rig.engine(blocks=40)
    other, _ = rig.engine(2)
    slots = Slots(pages.block_bytes, 40)
    rig.device.go.clear()
    rig.submit(1, STORE, range(40), slots.address(*range(40)))
    rig.submit(2, STORE, [0], slots.address(0))
    rig.submit(3, STORE, [1], slots.address(1), value=pages.event.promise())
    rig.submit(4, STORE, [2], slots.address(2), engine=2)
    until(lambda: rig.device.copies == 2 and bool(rig.copier._lanes[STORE]._waiting))
    cancel = threading.Thread(target=rig.copier.cancel, args=(1,))
    cancel.start()
    until(lambda: rig.copier._attachments[1].cancelled)
    time.sleep(0.005)
    assert cancel.is_alive()
    rig.device.go.set()
    cancel.join()
    assert [rig.answers[job] for job in (1, 2, 3)] == [
        (2, "cancelled"),
        (0, "cancelled"),
        (0, "cancelled, before its event happened"),
    ]
    assert rig.answer(4) == (1, "")
    assert slots.content(2) == other.block(2)
    rig.submit(5, STORE, [0], slots.address(0))
    rig.submit(6, STORE, [0], slots.address(0), engine=77)
    assert rig.answers[5] == rig.answers[6] == (0, "cancelled")


@pytest.mark.usefixtures("direct", "small_batches")
def test_cancel_does_not_wait_for_other_attachments(rig: Rig) -> None:
    """An engine that has died would keep its GPU memory until another one's long job is done."""
    pages, _ = rig.engine(1, blocks=40)
    rig.engine(2)
    slots = Slots(pages.block_bytes, 40)
    rig.device.go.clear()
    rig.submit(1, STORE, range(40), slots.address(*range(40)))
    until(lambda: rig.device.copies == 2)
    rig.submit(2, STORE, [0], slots.address(0), engine=2)
    rig.copier.detach(2)
    assert rig.answers == {2: (0, "cancelled")}
    rig.device.go.set()
    assert rig.answer(1) == (40, "")


@pytest.mark.usefixtures("direct")
def test_failed_copy_ends_its_job(rig: Rig, small_batches: int) -> None:
    """Blocks that were not copied would be read; or sound ones of other jobs would be lost."""
    pages, gate = rig.engine(blocks=10)
    slots = Slots(pages.block_bytes, 10)
    before = [pages.block(block) for block in range(10)]
    rig.device.fail_after = 3
    rig.submit(1, LOAD, range(10), slots.address(*range(10)))
    assert rig.answer(1) == (3, "the copy was refused")
    assert gate.gate.call_off(1), "it is no longer written"
    assert [pages.block(i) for i in range(3)] == [slots.content(i) for i in range(3)]
    assert [pages.block(i) for i in range(3, 10)] == before[3:]
    rig.device.fail_after = None
    gate.gate.prepare(2)
    rig.submit(2, LOAD, range(10), slots.address(*range(10)))
    assert rig.answer(2) == (10, "")
    assert not rig.lost


@pytest.mark.usefixtures("direct", "small_batches")
def test_block_with_half_of_its_layers_does_not_count(rig: Rig) -> None:
    """A block of which only the first layers are there would be used."""
    pages = Pages("LBHNC", 4)
    layer = pages.block_bytes // 3
    rig.attach(1, pages, EngineGate(), ends=[layer, 2 * layer, 3 * layer])
    slots = Slots(pages.block_bytes, 4)
    rig.device.fail_after = 3
    rig.submit(1, LOAD, range(4), slots.address(*range(4)))
    assert rig.answer(1) == (0, "the copy was refused"), "of the second group"


@pytest.mark.usefixtures("direct", "small_batches")
def test_lost_device_is_reported_and_keeps_memory_it_may_write(rig: Rig) -> None:
    """An engine would reuse pages that a dying GPU writes, or wait for answers that never come."""
    pages, gate = rig.engine(blocks=10)
    slots = Slots(pages.block_bytes, 10)
    rig.device.go.clear()
    rig.submit(1, LOAD, range(10), slots.address(*range(10)))
    rig.submit(2, LOAD, [0], slots.address(0))
    until(lambda: rig.device.copies == 2)
    rig.submit(3, LOAD, [0], slots.address(0), value=pages.event.promise())
    until(lambda: not rig.copier._lanes[LOAD]._inbox._arrived)
    rig.device.gone = True
    until(lambda: bool(rig.lost))
    assert rig.lost == ["the device is gone"]
    assert rig.answers == {2: (0, "the device is gone"), 3: (0, "the device is gone")}
    assert not gate.gate.call_off(1), "until the process has died"
    rig.submit(4, LOAD, [0], slots.address(0))
    assert rig.answers[4] == (0, "the device is gone")
    with pytest.raises(DeviceError, match="is gone") as caught:
        rig.copier.cancel(1)
    assert caught.value.sticky
    rig.close()


# The cap


@pytest.mark.usefixtures("direct")
def test_cap_holds_and_loads_come_first() -> None:
    """Copies would take the bus from the engine's own traffic, and loads wait for stores."""
    now = [0.0]
    rig = Rig(clock=lambda: now[0], bandwidth_max=768 * 500)
    pages, gate = rig.engine(blocks=40)
    slots = Slots(pages.block_bytes, 40)
    moved = rig.device.bytes
    assert pages.block_bytes == 768
    rig.submit(1, STORE, range(40), slots.address(*range(40)))
    until(lambda: moved[STORE] >= 10 * 768)
    gate.gate.prepare(2)
    rig.submit(2, LOAD, range(40), slots.address(*range(40)))
    until(lambda: rig.copier._lanes[LOAD]._cap._loads_want)
    while 2 not in rig.answers:
        # At most what time allows, one burst, and one batch that made debts.
        assert moved[LOAD] + moved[STORE] <= 768 * (500 * now[0] + 10 + 10)
        assert moved[STORE] <= 20 * 768, "stores waited for the load"
        now[0] += 0.002
        time.sleep(0.0005)
    while 1 not in rig.answers:
        assert moved[LOAD] + moved[STORE] <= 768 * (500 * now[0] + 10 + 10)
        now[0] += 0.002
        time.sleep(0.0005)
    assert rig.answers == {1: (40, ""), 2: (40, "")}
    assert now[0] >= (80 - 20) / 500
    rig.close()


# What is refused


def test_engine_whose_probe_fails_is_refused(rig: Rig) -> None:
    """Wrong memory would be served as KV, or overwritten."""
    pages, gate = Pages("LBHNC"), EngineGate()
    size = pages.block_bytes
    good = {
        "block_bytes": size,
        "events": [pages.event.handle],
        "gate_fd": gate.fd,
        "layer_ends": [],
        "probe_block": 1,
        "probe_digest": pages.digest(1),
    }
    wide = PageLayout((Run(0, 0, size),), size, 1 << 40)
    cases: list[tuple[PageLayout, dict[str, object], str]] = [
        (pages.layout, {"block_bytes": size + 4}, "its runs have"),
        (wide, {}, "ends beyond its allocation"),
        (PageLayout((Run(0, 0, size),), 4, 6), {}, "longer than the 4 bytes"),
        (pages.layout, {"probe_digest": bytes(32)}, "reads differently"),
        (pages.layout, {"probe_block": 2}, "reads differently"),
        (pages.layout, {"probe_block": 6}, "the probe is block 6, but there are 6 blocks"),
        (pages.layout, {"layer_ends": [4, 4, size]}, "layer groups"),
        (pages.layout, {"layer_ends": [4]}, "layer groups"),
        (pages.layout, {"layer_ends": [-1, size]}, "layer groups"),
        (pages.layout, {"gate_fd": pages.memory.export.parts[0].fd}, "the engine's gate"),
        (pages.layout, {"events": [pages.event.handle, counter_handle(3, 0)]}, "outside"),
        (pages.layout, {"events": [bytes(65)]}, "not a GPU's handles"),
    ]
    for layout, change, reason in cases:
        with pytest.raises(CannotOpenError, match=reason):
            rig.copier.attach(1, [pages.memory.export], layout, **(good | change))  # type: ignore[arg-type] # Wrong on purpose.
        assert not rig.device._opened
        assert not rig.device.pinned_bytes
        assert not rig.device._allocated
    assert "GB/s" in rig.copier.attach(1, [pages.memory.export], pages.layout, **good)  # type: ignore[arg-type] # Of several types.
    gate.close()


def test_job_beyond_its_attachment_is_refused(rig: Rig) -> None:
    """A peer would read and write any address of the device."""
    rig.engine()
    slots = Slots(768, 2)
    for blocks, indices, event, reason in (
        ([6], [0], NO_EVENT, "block 6; the attachment has 6 blocks"),
        ([0, 1], [0], NO_EVENT, "2 blocks and 1 slots"),
        ([0], [0], 1, "event 1; the attachment has 1 events"),
    ):
        with pytest.raises(ValueError, match=reason):
            rig.copier.submit(
                1, 1, STORE, np.array(blocks, np.uint32), slots.address(*indices), event=event
            )
    rig.copier.detach(1)
    assert not rig.answers


def test_layouts_are_measured_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every restarted engine would wait for a measurement, and disturb other engines."""
    rig.engine(1)
    monkeypatch.setattr("tierd.device.copier.choose", None)
    rig.engine(2)
    rig.copier.detach(1)
    rig.engine(1, blocks=12)


def test_shut_leaves_no_thread_and_no_mapping() -> None:
    """Threads and mappings of each copying process would add up in a test, or at its end."""
    before = threading.active_count()
    rig = Rig()
    pages, gate = rig.engine()
    slots = Slots(pages.block_bytes, 6)
    for job in range(1, 30):
        direction = LOAD if job % 2 else STORE
        rig.submit(job, direction, [job % 6], slots.address(job % 6), value=pages.event.record())
    rig.copier.shut()
    assert len(rig.answers) == 29
    assert not rig.device._opened
    assert not rig.device._allocated
    view = Gate(gate.fd)
    assert all(view.call_off(job) for job in range(1, 30))
    view.close()
    rig.close()
    assert threading.active_count() == before
