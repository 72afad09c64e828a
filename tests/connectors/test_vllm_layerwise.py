"""Loads that are reported before they end: no layer reads KV that is not loaded yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines.connector_bench import Bench, FakeRequest
from tests.support.engines.fake_client import FakeJob
from tests.support.engines.jobs_rig import Rig
from tests.support.engines.layers import LAYERS, World, forward, layered
from tierd_connectors.vllm.worker import jobs as vllm_jobs
from tierd_connectors.vllm.worker import layerwise as vllm_layerwise
from tierd_connectors.vllm.worker.layerwise import LostLoadError, layer_groups
from tierd_connectors.vllm.worker.layout import LayoutError, TensorView, blocks_of


@pytest.fixture
def rig() -> Iterator[Rig]:
    """With a forward pass behind it, and block 1 stored."""
    made = Rig(layerwise=True)
    made.attach()
    made.store([1])
    forward(made)
    yield made
    made.mover.stop(0)
    assert made.boundary.errors == 0
    if made.mover._thread is None:
        made.close()


def begin(rig: Rig, *, lease_ms: int = 60_000) -> FakeJob:
    """A load into block 4, reported early; the daemon's job."""
    rig.load([1], [4], lease_ms=lease_ms)
    rig.work()
    (job,) = rig.daemon.jobs
    job.advance()
    job.advance()
    rig.work()
    return job


class Background:
    """A call that waits, in its own thread."""

    def __init__(self, call: Any, *arguments: object) -> None:
        self.error: Exception | None = None
        self._call, self._arguments = call, arguments
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call(*self._arguments)
        except LostLoadError as error:
            self.error = error

    @property
    def waits(self) -> bool:
        self._thread.join(0.03)
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(5)
        assert not self._thread.is_alive()


# Reports


def test_load_is_reported_after_its_first_layers(rig: Rig) -> None:
    """A request would wait for all layers of its prefix, or begin before the first is there."""
    rig.load([1], [4])
    rig.work()
    (job,) = rig.daemon.jobs
    job.advance()
    rig.work()
    assert rig.failed() is None
    job.advance()
    rig.work()
    assert rig.failed() == []
    assert layered(rig).take_changes() == {"r[4]": 1}
    rig.finish()
    assert rig.failed() is None, "it is reported once"
    assert layered(rig).take_changes() == {"r[4]": -1}
    assert rig.content(4) == rig.content(1)
    assert rig.mover.tally.drain()["load_early_starts"] == 1


@pytest.mark.parametrize("layers", [None, [], LAYERS[:2]])
def test_no_early_report_before_every_layer_waits(layers: list[str] | None) -> None:
    """In full CUDA graphs no hook waits for a layer, which would read KV that is not loaded yet."""
    rig = Rig(layerwise=True)
    rig.attach()
    rig.store([1])
    if layers is not None:
        forward(rig, layers=layers)
        forward(rig)
    begin(rig)
    assert rig.failed() is None
    rig.finish()
    assert rig.failed() == []
    assert layered(rig).take_changes() == {}
    rig.mover.stop(0)


def test_no_early_report_with_a_short_lease(rig: Rig) -> None:
    """The worker could not see the load through when the daemon fails."""
    begin(rig, lease_ms=5_000)
    assert rig.failed() is None
    rig.finish()
    assert rig.failed() == []


def test_no_early_report_with_unmapped_slots(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker could not see the load through when the daemon fails."""
    monkeypatch.setattr(rig.client, "lease_views", lambda *_: None)
    begin(rig)
    assert rig.failed() is None
    rig.finish()
    assert rig.failed() == []


# Layers wait


def test_each_layer_waits_for_its_own_group(rig: Rig) -> None:
    """A layer would read KV that is not there, or wait for that of later ones."""
    job = begin(rig)
    assert rig.failed() == []
    layered(rig).begin_step(["r[4]"])
    layered(rig).wait_layer("layer0")
    for index in (1, 2):
        waiting = Background(layered(rig).wait_layer, f"layer{index}")
        assert waiting.waits
        job.advance()
        waiting.end()
        page = rig.logical[index]
        assert (page[4] == page[1]).all()
    layered(rig).end_step(idle=False)


def test_unknown_layer_waits_for_the_whole_load(rig: Rig) -> None:
    """A layer that reads another's KV would read it before it is there."""
    job = begin(rig)
    layered(rig).begin_step(["r[4]"])
    waiting = Background(layered(rig).wait_layer, "shares")
    job.advance()
    assert waiting.waits
    job.advance()
    waiting.end()


def test_layers_wait_only_for_reported_loads(rig: Rig) -> None:
    """Other requests' steps would wait for a load that no request reads yet."""
    begin(rig)
    forward(rig)
    forward(rig, begun=["another"])
    layered(rig).begin_step(["r[4]"])
    assert Background(layered(rig).wait_layer, "layer2").waits
    rig.finish()
    # Once begun it is waited for in every step, for others may have found the blocks.
    layered(rig).wait_layer("layer2")


def test_reported_load_stays_reported(rig: Rig) -> None:
    """A request that hits the blocks a step later would read KV that is not loaded."""
    begin(rig)
    layered(rig).begin_step(["r[4]"])
    layered(rig).end_step(idle=True)
    layered(rig).begin_step([])
    waiting = Background(layered(rig).wait_layer, "layer1")
    assert waiting.waits
    rig.finish()
    waiting.end()


def test_forward_pass_without_hooks_ends_the_engine(rig: Rig) -> None:
    """It may have read KV that was not there, and its tokens would go to users."""
    begin(rig)
    layered(rig).begin_step(["r[4]"])
    with pytest.raises(LostLoadError):
        layered(rig).end_step(idle=False)


def test_loads_complete_before_a_pass_without_hooks(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Loads reported before the hooks stopped would be read by a pass that does not wait."""
    begin(rig)
    with caplog.at_level(logging.WARNING, logger="vllm.tierd"):
        forward(rig, layers=[])
        forward(rig, layers=[])
    assert len(caplog.messages) == 1
    waiting = Background(layered(rig).begin_step, ["r[4]"])
    assert waiting.waits
    rig.finish()
    waiting.end()
    assert waiting.error is None
    layered(rig).end_step(idle=False)


# Blocks get new owners


@pytest.mark.parametrize("steps", [0, 1])
def test_new_owner_of_a_block_waits_for_the_load(rig: Rig, steps: int) -> None:
    """The rest of a preempted request's load would be written over another's KV."""
    job = begin(rig)
    for _ in range(steps):
        job.advance()
    layered(rig).settle([2, 3])
    for blocks in ([3, 4], None):
        waiting = Background(layered(rig).settle, blocks)
        assert waiting.waits
    rig.finish()
    waiting.end()
    mine = rig.write(4)
    while not job.over:
        job.advance()
    assert rig.content(4) == mine


# Loads that go wrong


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("incarnations", [1, 3])
def test_reported_load_survives_the_daemons_end(rig: Rig, steps: int, incarnations: int) -> None:
    """vLLM has no way back: it would compute and cache KV that never came."""
    job = begin(rig)
    assert rig.failed() == []
    for _ in range(steps):
        job.advance()
    for _ in range(incarnations):
        rig.daemon.kill()
        rig.daemon.restart()
    waiting = Background(forward, rig, ["r[4]"])
    rig.work()
    waiting.end()
    assert waiting.error is None
    assert rig.content(4) == rig.content(1)
    assert rig.failed() is None
    assert layered(rig).take_changes() == {"r[4]": 0}
    assert rig.mover.settled


def test_reported_load_survives_a_device_failure(rig: Rig) -> None:
    """The same for an error of the GPU's copy engine."""
    begin(rig).fail()
    rig.work()
    forward(rig, ["r[4]"])
    assert rig.content(4) == rig.content(1)
    assert rig.mover.settled


def test_frozen_writer_delays_only_new_owners(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused daemon would stop the engine, or overwrite a new owner's KV when it resumes."""
    job = begin(rig)
    monkeypatch.setattr(vllm_jobs, "PATIENCE_S", 0.0)
    rig.work()
    forward(rig, ["r[4]"])
    assert rig.content(4) == rig.content(1)
    owner = Background(layered(rig).settle, [4])
    assert owner.waits
    assert not rig.mover.settled
    while not job.over:
        job.advance()
    rig.work()
    owner.end()
    assert owner.error is None
    assert rig.content(4) == rig.content(1)


def test_lost_load_ends_the_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that slept for longer than its lease would compute with another prefix's KV."""
    begin(rig)
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + 61_000_000_000)
    rig.daemon.kill()
    rig.work()
    for wait in (lambda: layered(rig).settle([4]), lambda: forward(rig, ["r[4]"])):
        with pytest.raises(LostLoadError):
            wait()
    assert rig.mover.settled


def test_every_wait_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging engine does not say why."""
    begin(rig)
    monkeypatch.setattr(vllm_layerwise, "LIMIT_S", 0.01)
    with pytest.raises(LostLoadError, match="still being written"):
        forward(rig, ["r[4]"])
    rig.finish()


def test_engine_end_with_a_reported_load_is_safe(rig: Rig) -> None:
    """It would be reported twice, which makes vLLM assert."""
    job = begin(rig)
    assert rig.failed() == []
    rig.mover.start()
    stopping = Background(rig.mover.stop, 0.0)
    assert stopping.waits
    while not job.over:
        job.advance()
    stopping.end()
    assert rig.failed() is None


# Groups of layers


def views(layers: int, layout: str) -> tuple[list[str], list[TensorView]]:
    """Layers with 2 blocks of 3 heads of 8 bytes."""
    sizes = {"L": layers, "B": 2, "H": 3, "C": 8}
    strides, stride = {}, 1
    for axis in reversed(layout):
        strides[axis] = stride
        stride *= sizes[axis]
    inner = [strides[axis] for axis in "BHC"]
    made = [
        TensorView(1 << 20 | index * strides["L"], 1 << 20, (2, 3, 8), tuple(inner), 1, None)
        for index in range(layers)
    ]
    return [f"l{index}" for index in range(layers)], made


@pytest.mark.parametrize("layout", ["LBHC", "BLHC"])
@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        (1, [1]),
        (2, [1, 1]),
        (4, [1, 1, 1, 1]),
        (16, [1, 1, 2, 4, 4, 4]),
        (32, [1, 1, 2, 4, 8, 8, 8]),
        (80, [1, 1, 2, 4, 8, 16, 20, 20, 8]),
    ],
)
def test_layer_groups_grow(layout: str, layers: int, sizes: list[int]) -> None:
    """The first layer would wait for half of the load, or copies be too small to be fast."""
    names, made = views(layers, layout)
    blocks = blocks_of(made, 2)
    groups = layer_groups(names, made, blocks)
    members = [index for index, size in enumerate(sizes) for _ in range(size)]
    assert [groups.group_of[name] for name in names] == members
    assert groups.ends == [sum(sizes[: i + 1]) * 24 for i in range(len(sizes))]
    assert groups.ends[-1] == blocks.block_bytes


def test_interleaved_layers_are_refused() -> None:
    """A layer would count as copied before all of its parts are."""
    names, made = views(4, "BHLC")
    with pytest.raises(LayoutError):
        layer_groups(names, made, blocks_of(made, 2))


def test_layers_that_share_kv_are_in_one_group() -> None:
    """A layer that shares another's KV would be unknown, or counted twice."""
    names, made = views(4, "LBHC")
    groups = layer_groups([*names, "shares"], [*made, made[2]], blocks_of(made, 2))
    assert groups.group_of["shares"] == groups.group_of["l2"] == 2
    assert len(groups.ends) == 4


# The scheduler's side


def test_lease_is_held_until_the_load_completes() -> None:
    """A worker that copies the rest of a load would read slots that hold other blocks by then."""
    bench = Bench(ranks=2)
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    bench.load(FakeRequest("a", 14), 0)
    bench.side.finished_loads((), (), {"a": 1})
    assert bench.step(idle=True).begun == []
    bench.side.finished_loads({"a"}, (), {"a": 1})
    assert bench.step(idle=True).begun == ["a"]
    assert bench.step(idle=True).begun == []
    assert len(bench.daemon.leases) == bench.side.leases_held == 1
    bench.side.finish("a")
    bench.side.finished_loads((), (), {"a": -1})
    assert len(bench.daemon.leases) == bench.side.leases_held == 1
    bench.side.finished_loads((), (), {"a": -1})
    assert bench.daemon.leases == {}
    assert bench.side.leases_held == bench.daemon.double_releases == 0


@pytest.mark.parametrize("finishing", [None, {}, {"a": 0}])
def test_lease_of_a_completed_load_is_released(finishing: dict[str, int] | None) -> None:
    """Slots would stay until the lease expires."""
    bench = Bench()
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    bench.load(FakeRequest("a", 14), 0)
    bench.side.finished_loads({"a"}, (), finishing)
    assert bench.daemon.leases == {}


def test_held_leases_are_released_at_the_engines_end() -> None:
    """The same."""
    bench = Bench()
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    bench.load(FakeRequest("a", 14), 0)
    bench.side.finished_loads({"a"}, (), {"a": 1})
    bench.side.close()
    assert bench.daemon.leases == {}


# Everything at once


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 300, 100)])
def test_random_engine_runs_with_early_reports(seeds: range) -> None:
    """In some order of events a layer would read, or the daemon hold, a wrong byte."""
    early = 0.0
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert world.compared
        world.rig.close()
        early += world.rig.mover.tally.drain().get("load_early_starts", 0)
    assert early > len(seeds) / 2
