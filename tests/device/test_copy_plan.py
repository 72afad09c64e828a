"""Every way to copy blocks moves the bytes that the connector itself would move, and no other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.device.copy_scene import LAYOUTS, Pages, Slots
from tierd.device.api import Addresses, Device, DeviceError, Direction
from tierd.device.choice import choose, compact, finish
from tierd.device.host import HostDevice
from tierd.device.plan import NO_BOUNDS, CopyPlan, Strategy, group_plans, issue, merged
from tierd.shared_memory.exports import PageLayout, Run, layout_error

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS, SLOTS = 6, 8


@pytest.fixture(scope="module")
def device() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    device.shut()


class Scene:
    """One layout's pages as the device sees them, and slots."""

    def __init__(self, device: HostDevice, layout: str, gap: int) -> None:
        self.device = device
        self.pages = Pages(layout, BLOCKS)
        self.slots = Slots(self.pages.block_bytes, SLOTS, gap)
        self.base = device.open(self.pages.memory.export)
        self.stream = device.create_stream(urgent=False)
        self.staging = device.allocate(BLOCKS * self.pages.block_bytes)

    def close(self) -> None:
        self.device.free(self.staging)
        self.device.close(self.base)

    def move(self, plan: CopyPlan, way: tuple[Strategy, Direction], pairs: list[tuple[int, int]]):
        blocks = np.array([block for block, _ in pairs], np.uint64)
        slots = self.slots.address(*[slot for _, slot in pairs])
        issue(self.device, self.stream, plan, way, blocks, slots, NO_BOUNDS, self.staging)
        finish(self.device, self.stream)


pairings = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, SLOTS - 1)),
    min_size=1,
    max_size=BLOCKS,
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
) | st.just([(0, 1), (1, 2), (2, 3), (4, 4), (5, 5)])


@settings(deadline=None, max_examples=150)
@given(
    layout=st.sampled_from(LAYOUTS),
    strategy=st.sampled_from(Strategy),
    pairs=pairings,
    cuts=st.lists(st.integers(1, 191), max_size=4, unique=True).map(sorted),
    gap=st.sampled_from((0, 64)),
)
def test_every_way_moves_the_connectors_bytes(
    device: HostDevice,
    layout: str,
    strategy: Strategy,
    pairs: list[tuple[int, int]],
    cuts: list[int],
    gap: int,
) -> None:
    """KV of another block, layer or request would be served, or overwritten."""
    scene = Scene(device, layout, gap)
    pages, slots = scene.pages, scene.slots
    ends = [4 * cut for cut in cuts] + [pages.block_bytes]
    assert not layout_error(pages.layout, [len(pages.raw)], pages.block_bytes)
    before, slots_before = pages.raw.copy(), slots.raw.copy()

    scene.move(CopyPlan(pages.layout, [scene.base]), (strategy, Direction.STORE), pairs)
    assert (pages.raw == before).all()
    for block, slot in pairs:
        assert slots.content(slot) == pages.block(block)
        slots_before[slot, : pages.block_bytes] = slots.raw[slot, : pages.block_bytes]
    assert (slots.raw == slots_before).all()

    slots.raw[:] = np.random.default_rng(5).integers(0, 256, slots.raw.shape, np.uint8)
    slots_before = slots.raw.copy()
    for plan in group_plans(pages.layout, [scene.base], ends):
        scene.move(plan, (strategy, Direction.LOAD), pairs)
    assert (slots.raw == slots_before).all()
    loaded = pages.raw.copy()
    pages.raw[:] = before
    for block, slot in pairs:
        pages.map.scatter(memoryview(slots.raw[slot]), block)
    assert (pages.raw == loaded).all()
    scene.close()


def test_layer_group_is_moved_alone(device: HostDevice) -> None:
    """The engine would start a layer whose pages are not there yet, or have them written later."""
    scene = Scene(device, "LBHNC", 0)
    layer = scene.pages.block_bytes // 3
    plans = group_plans(scene.pages.layout, [scene.base], [layer, 2 * layer, 3 * layer])
    before = scene.pages.block(2)
    scene.move(plans[1], (Strategy.DIRECT, Direction.LOAD), [(2, 0)])
    after, slot = scene.pages.block(2), scene.slots.content(0)
    assert after == before[:layer] + slot[layer : 2 * layer] + before[2 * layer :]
    scene.close()


# Pieces


def arrays(
    plan: CopyPlan, blocks: list[int], slots: list[int], bounds: list[int]
) -> list[list[int]]:
    found = plan.direct(
        np.array(blocks, np.uint64), np.array(slots, np.uint64), np.array(bounds, np.uint64)
    )
    return [array.tolist() for array in found]


def test_neighbours_on_both_sides_are_one_piece() -> None:
    """Each block of a contiguous load would cost a descriptor: slow on every bus."""
    plan = CopyPlan(PageLayout((Run(0, 100, 60), Run(0, 160, 40)), 100, 50), [1000])
    assert plan.run_count == 1
    assert arrays(plan, [3, 4, 5, 8, 9], [0, 100, 200, 300, 500], []) == [
        [1400, 1900, 2000],
        [0, 300, 500],
        [300, 100, 100],
    ]


def test_pieces_end_where_pinned_memory_does() -> None:
    """A copy that crosses two registrations fails, and its whole batch with it."""
    plan = CopyPlan(PageLayout((Run(0, 0, 100),), 100, 50), [0])
    bounds = [0, 200, 300, 1000]
    assert arrays(plan, [0, 1, 2, 3, 4], [0, 100, 200, 300, 400], bounds) == [
        [0, 200, 300],
        [0, 200, 300],
        [200, 100, 200],
    ]
    assert arrays(plan, [0, 1], [1000, 1100], bounds) == [[0], [1000], [200]]


def test_regular_runs_are_one_piece_per_block() -> None:
    """A layer-outermost cache would be as many copies as it has layers."""
    runs = tuple(Run(0, 1000 * layer, 10) for layer in range(8))
    plan = CopyPlan(PageLayout(runs, 10, 100), [0])
    pieces = plan.pitched(np.array([2, 5], np.uint64), np.array([4000, 5000], np.uint64))
    assert pieces == [(20, 1000, 4000, 10, 10, 8), (50, 1000, 5000, 10, 10, 8)]
    assert plan.strategies == list(Strategy)


def test_rows_too_far_apart_for_cuda_are_not_a_stretch() -> None:
    """cudaMemcpy2D refuses a pitch above 2 GiB, which a large cache's layers exceed."""
    for distance, possible in (((1 << 31) - 1, True), (1 << 31, False)):
        runs = tuple(Run(0, distance * layer, 10) for layer in range(8))
        plan = CopyPlan(PageLayout(runs, 10, 100), [0])
        assert (Strategy.PITCHED in plan.strategies) == possible
    backwards = tuple(Run(0, 1000 * layer, 10) for layer in reversed(range(8)))
    assert Strategy.PITCHED not in CopyPlan(PageLayout(backwards, 10, 100), [0]).strategies


def test_irregular_runs_are_split_into_stretches() -> None:
    """Heads of another size, or a hole between two caches, would be read at a wrong distance."""
    starts = (0, 100, 200, 350, 450, 1000)
    runs = tuple(Run(0, at, 10) for at in starts) + tuple(Run(1, at, 20) for at in (0, 50))
    plan = CopyPlan(PageLayout(runs, 10, 1), [0, 5000])
    pieces = plan.pitched(np.array([0], np.uint64), np.array([0], np.uint64))
    found = [
        (piece.page, piece.page_pitch, piece.slot, piece.width, piece.rows) for piece in pieces
    ]
    assert found == [
        (0, 100, 0, 10, 3),
        (350, 100, 30, 10, 2),
        (1000, 10, 50, 10, 1),
        (5000, 50, 60, 20, 2),
    ]


def test_merging_nothing_copies_no_array() -> None:
    """New arrays would be built for every batch of scattered blocks."""
    pages = np.array([0, 100], np.uint64)
    lengths = np.array([10, 10], np.uint64)
    assert merged(pages, pages, lengths, NO_BOUNDS)[0] is pages


# Choice


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scratch_blocks_have_the_shape_of_the_real_ones(layout: str) -> None:
    """The measured blocks would differ from the blocks copied later."""
    found = Pages(layout, 40).layout
    scratch = compact(found, 4)
    size = max(run.offset + run.length for run in scratch.runs) + 3 * scratch.block_stride
    assert size == 4 * found.block_bytes
    assert not layout_error(scratch, [size], found.block_bytes)
    assert [run.length for run in scratch.runs] == [run.length for run in found.runs]


def test_distant_blocks_are_measured_in_little_memory() -> None:
    """Scratch memory would not fit into the device beside an engine that has filled it."""
    layout = PageLayout((Run(0, 0, 4096), Run(0, 1 << 20, 4096)), 1 << 30, 64)

    class Counting(HostDevice):
        largest = 0

        def allocate(self, size_bytes: int) -> int:
            self.largest = max(self.largest, size_bytes)
            return super().allocate(size_bytes)

    device = Counting()
    stream = device.create_stream(urgent=False)
    choose(device, stream, layout, [layout.block_bytes], CopyPlan(layout, [0]))
    assert device.largest <= 32 << 20
    device.shut()


class SlowDevice(HostDevice):
    """A device on which small pieces cost time."""

    cost_s = 0.0

    def copy(
        self,
        pages: Addresses,
        slots: Addresses,
        lengths: Addresses,
        direction: Direction,
        stream: int,
    ) -> None:
        super().copy(pages, slots, lengths, direction, stream)
        time.sleep(self.cost_s * len(pages))


class NoGatherDevice(HostDevice):
    """A device whose gather kernel does nothing."""

    def gather(
        self, pages: Addresses, lengths: Addresses, staging: int, direction: Direction, stream: int
    ) -> None:
        pass


def chosen(device: Device) -> tuple[set[Strategy], str]:
    layout = Pages("LHBNC", 40).layout
    stream = device.create_stream(urgent=False)
    try:
        choice = choose(
            device, stream, layout, [100, layout.block_bytes], CopyPlan(layout, [1 << 30])
        )
    finally:
        device.shut()
    return set(choice.ways.values()), choice.how


@pytest.mark.slow
def test_slow_way_is_not_chosen() -> None:
    """Loads would run at a fraction of the bus's speed."""
    device = SlowDevice()
    device.cost_s = 20e-6
    ways, how = chosen(device)
    assert Strategy.DIRECT not in ways
    assert "GB/s" in how


def test_way_that_moves_wrong_bytes_is_not_chosen() -> None:
    """A kernel that is broken on some GPU would corrupt KV there."""
    ways, how = chosen(NoGatherDevice())
    assert Strategy.STAGED not in ways
    assert "staged moves wrong bytes" in how


class FailingDevice(HostDevice):
    """A device that refuses copies, or whose work never seems to be done."""

    refused = False
    lost = False

    def copy(
        self,
        pages: Addresses,
        slots: Addresses,
        lengths: Addresses,
        direction: Direction,
        stream: int,
    ) -> None:
        if self.refused and direction is Direction.STORE:
            raise DeviceError("the copy was refused")
        super().copy(pages, slots, lengths, direction, stream)

    def query(self, event: int) -> bool:
        if self.lost:
            raise DeviceError("the device is gone", sticky=True)
        return super().query(event)


@pytest.mark.parametrize("lost", [False, True])
def test_failed_measurement_frees_only_memory_that_is_not_written(lost: bool) -> None:
    """Scratch memory of failed attachments would add up, or be unmapped under a copy."""
    device = FailingDevice()
    device.refused, device.lost = not lost, lost
    stream = device.create_stream(urgent=False)
    layout = Pages("LBHNC", 6).layout
    with pytest.raises(DeviceError, match="is gone" if lost else "refused"):
        choose(device, stream, layout, [layout.block_bytes], CopyPlan(layout, [0]))
    assert bool(device.pinned_bytes) == bool(device._allocated) == lost
    device.shut()
