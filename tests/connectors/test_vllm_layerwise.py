"""Loads that are reported before they have ended: no layer reads what is not there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.connectors.test_vllm_connector_unit import Bench, FakeRequest, block_hash
from tests.connectors.test_vllm_jobs import BLOCKS, Rig, Troubles
from tests.support.engines.fake_client import FakeJob
from tierd_connectors.vllm.work import Load
from tierd_connectors.vllm.worker import jobs as vllm_jobs
from tierd_connectors.vllm.worker import layerwise as vllm_layerwise
from tierd_connectors.vllm.worker.layerwise import Layerwise, LostLoadError, layer_groups
from tierd_connectors.vllm.worker.layout import LayoutError, TensorView, blocks_of

LAYERS = ["layer0", "layer1", "layer2"]
GROUPS = len(LAYERS)


def layered(rig: Rig) -> Layerwise:
    assert rig.layerwise is not None
    return rig.layerwise


def forward(rig: Rig, begun: list[str] = [], layers: list[str] = LAYERS) -> None:  # noqa: B006
    """A step that computes."""
    layered(rig).begin_step(begun)
    for layer in layers:
        layered(rig).wait_layer(layer)
    layered(rig).end_step(idle=False)


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


def begin(rig: Rig, *, life_ms: int = 60_000) -> FakeJob:
    """A load into block 4, reported early; the daemon's job."""
    rig.load([1], [4], life_ms=life_ms)
    rig.work()
    (job,) = rig.daemon.jobs
    job.advance()
    job.advance()
    rig.work()
    return job


class Background:
    """Something that waits, in a thread of its own."""

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


def test_first_layers_are_enough(rig: Rig) -> None:
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
def test_not_before_every_layer_is_known_to_wait(layers: list[str] | None) -> None:
    """In full CUDA graphs nobody asks for a layer, and it would read what is not there."""
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


def test_a_short_lease_is_not_enough(rig: Rig) -> None:
    """The worker could not see the load through when the daemon fails."""
    begin(rig, life_ms=5_000)
    assert rig.failed() is None
    rig.finish()
    assert rig.failed() == []


def test_unmapped_slots_are_not_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker could not see the load through when the daemon fails."""
    monkeypatch.setattr(rig.client, "lease_views", lambda *_: None)
    begin(rig)
    assert rig.failed() is None
    rig.finish()
    assert rig.failed() == []


# Layers wait


def test_each_layer_waits_for_its_own(rig: Rig) -> None:
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


def test_a_layer_of_another_name_waits_for_all(rig: Rig) -> None:
    """A layer that reads another's KV would read it before it is there."""
    job = begin(rig)
    layered(rig).begin_step(["r[4]"])
    waiting = Background(layered(rig).wait_layer, "shares")
    job.advance()
    assert waiting.waits
    job.advance()
    waiting.end()


def test_only_what_the_engine_knows_is_waited_for(rig: Rig) -> None:
    """Others' steps would wait for a load that nobody reads yet."""
    begin(rig)
    forward(rig)
    forward(rig, begun=["another"])
    layered(rig).begin_step(["r[4]"])
    assert Background(layered(rig).wait_layer, "layer2").waits
    rig.finish()
    # Once begun it is waited for in every step, for others may have found the blocks.
    layered(rig).wait_layer("layer2")


def test_begun_stays_begun(rig: Rig) -> None:
    """A request that hits the blocks a step later would read what is not there."""
    begin(rig)
    layered(rig).begin_step(["r[4]"])
    layered(rig).end_step(idle=True)
    layered(rig).begin_step([])
    waiting = Background(layered(rig).wait_layer, "layer1")
    assert waiting.waits
    rig.finish()
    waiting.end()


def test_a_pass_without_hooks_ends_the_engine(rig: Rig) -> None:
    """It may have read KV that was not there, and its tokens would go to users."""
    begin(rig)
    layered(rig).begin_step(["r[4]"])
    with pytest.raises(LostLoadError):
        layered(rig).end_step(idle=False)


def test_hooks_that_stop_are_waited_for_before(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """What was reported while they were seen would be read by a pass that does not wait."""
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
def test_a_new_owner_waits_for_the_end(rig: Rig, steps: int) -> None:
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
@pytest.mark.parametrize("lives", [1, 3])
def test_a_reported_load_survives_the_daemon(rig: Rig, steps: int, lives: int) -> None:
    """vLLM has no way back: it would compute and cache KV that never came."""
    job = begin(rig)
    assert rig.failed() == []
    for _ in range(steps):
        job.advance()
    for _ in range(lives):
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


def test_a_reported_load_survives_the_device(rig: Rig) -> None:
    """The same for an error of the GPU's copy engine."""
    begin(rig).fail()
    rig.work()
    forward(rig, ["r[4]"])
    assert rig.content(4) == rig.content(1)
    assert rig.mover.settled


def test_a_frozen_writer_holds_up_new_owners_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused daemon would stop the engine, or write over a new owner's KV when it goes on."""
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


def test_a_load_that_is_lost_ends_the_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_wait_is_endless(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hangs tells nobody why."""
    begin(rig)
    monkeypatch.setattr(vllm_layerwise, "LIMIT_S", 0.01)
    with pytest.raises(LostLoadError, match="still being written"):
        forward(rig, ["r[4]"])
    rig.finish()


def test_the_engine_ends_with_a_reported_load(rig: Rig) -> None:
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
def test_groups_begin_small(layout: str, layers: int, sizes: list[int]) -> None:
    """The first layer would wait for half of the load, or copies be too small to be fast."""
    names, made = views(layers, layout)
    blocks = blocks_of(made, 2)
    groups = layer_groups(names, made, blocks)
    members = [index for index, size in enumerate(sizes) for _ in range(size)]
    assert [groups.group_of[name] for name in names] == members
    assert groups.ends == [sum(sizes[: i + 1]) * 24 for i in range(len(sizes))]
    assert groups.ends[-1] == blocks.block_bytes


def test_layers_that_are_mixed_in_a_slot() -> None:
    """A layer would be taken for copied while parts of it are not."""
    names, made = views(4, "BHLC")
    with pytest.raises(LayoutError):
        layer_groups(names, made, blocks_of(made, 2))


def test_layers_that_share_their_kv() -> None:
    """A layer without KV of its own would not be known, or be counted as one more."""
    names, made = views(4, "LBHC")
    groups = layer_groups([*names, "shares"], [*made, made[2]], blocks_of(made, 2))
    assert groups.group_of["shares"] == groups.group_of["l2"] == 2
    assert len(groups.ends) == 4


# The scheduler's side


def test_the_lease_is_kept_to_the_end() -> None:
    """A worker that copies the rest of a load itself would read slots that others have by then."""
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
def test_the_lease_of_a_load_that_has_ended_is_given_back(finishing: dict[str, int] | None) -> None:
    """Slots would stay until the lease expires."""
    bench = Bench()
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    bench.load(FakeRequest("a", 14), 0)
    bench.side.finished_loads({"a"}, (), finishing)
    assert bench.daemon.leases == {}


def test_kept_leases_end_with_the_engine() -> None:
    """The same."""
    bench = Bench()
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    bench.load(FakeRequest("a", 14), 0)
    bench.side.finished_loads({"a"}, (), {"a": 1})
    bench.side.close()
    assert bench.daemon.leases == {}


# Everything at once


class Turns:
    """A condition for one thread: whoever waits on it lets something else happen."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait(self, timeout_s: float) -> None:
        self._world.elsewhere()


class World(Troubles):
    """An engine that computes while layers are loaded, hands blocks out again at any time, and
    finds blocks in its cache; a daemon that fails in any way."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, layerwise=True)
        self.layerwise = layered(self.rig)
        self.layerwise._cond = Turns(self)  # type: ignore[assignment]
        self.content = [self.rig.write(block) for block in range(BLOCKS)]
        self.names = 0
        self.truth: dict[tuple[bytes, bytes], bytes] = {}
        self.asked: dict[str, dict[int, bytes]] = {}
        self.told: dict[str, set[int]] = {}
        self.compared = 0
        forward(self.rig)

    def run(self) -> None:
        mine = [*[self.step] * 5, *[self.load] * 4]
        for _ in range(self.chance.randrange(10, 40)):
            for _ in range(self.chance.randrange(8)):
                self.elsewhere()
            self.chance.choice(mine)()
            self.take()
        self.settle()
        self.step()
        self.settle()
        assert not self.asked
        assert self.rig.mover.settled
        assert self.rig.boundary.errors == 0
        assert not any(self.layerwise.take_changes().values())
        self.rig.mover.stop(0)

    def settle(self) -> None:
        """Nothing is left, once every job has come to its end."""
        for _ in range(2000):
            if self.rig.mover.settled and not (self.late or self.rig.daemon.jobs):
                break
            self.elsewhere()
            self.take()

    # The engine

    def take(self) -> None:
        """The engine is told of loads; it may begin with them some steps later."""
        for request, failed in self.rig.mover.take_finished():
            wanted = self.asked.pop(request)
            if failed:
                for block in wanted:
                    self.content[block] = self.rig.content(block)
            else:
                for block, content in wanted.items():
                    self.content[block] = content
                self.told[request] = set(wanted)

    def step(self) -> None:
        """Some blocks get a new owner, whatever they held, and a forward pass reads all others."""
        begun = [request for request in self.told if self.chance.random() < 0.7]
        for request in begun:
            del self.told[request]
        free = self.free()
        new = self.chance.sample(free, min(len(free), self.chance.randrange(3)))
        self.give_out(new)
        self.layerwise.begin_step(begun)
        later = {*new, *(block for blocks in self.told.values() for block in blocks)}
        for layer, name in enumerate(LAYERS):
            for block in new:
                # A layer's new KV is written before it is asked for.
                part = self.rig.logical[layer, block]
                part[...] = self.rig.random.random(part.shape, "float32")
            self.layerwise.wait_layer(name)
            for block in free:
                if block not in later:
                    self.compare(block, layer)
        self.layerwise.end_step(idle=False)
        items = []
        for block in new:
            self.content[block] = self.rig.content(block)
            self.names += 1
            # The same names for all adapters.
            name_of = block_hash(self.names // 3, salt=7)
            digest, adapter = self.chance.choice(list(self.adapters.items()))
            if (digest, name_of) not in self.truth:
                self.truth[digest, name_of] = self.content[block]
                items.append(self.rig.item(block, name_of, adapter))
        self.rig.mover.submit_stores(items)

    def free(self) -> list[int]:
        """What is not being loaded, as far as the engine knows; block 0 is the null block."""
        owned = {block for wanted in self.asked.values() for block in wanted}
        return [block for block in range(1, BLOCKS) if block not in owned]

    def give_out(self, blocks: list[int]) -> None:
        """These blocks get a new owner in this step."""
        for told in self.told.values():
            told.difference_update(blocks)
        self.layerwise.settle(blocks)
        self.rig.mover.fence(frozenset(blocks))

    def compare(self, block: int, layer: int) -> None:
        size = self.rig.blocks.block_bytes // GROUPS
        part = slice(layer * size, (layer + 1) * size)
        assert self.rig.content(block)[part] == self.content[block][part], "a wrong byte is read"
        self.compared += 1

    def load(self) -> None:
        free = self.free()
        digest, adapter = self.chance.choice(list(self.adapters.items()))
        held = [block for block in self.rig.daemon.blocks.items() if block[0][0] == digest]
        if not held or not free:
            return
        count = min(len(free), len(held), self.chance.randrange(1, 4))
        into, taken = self.chance.sample(free, count), self.chance.sample(held, count)
        self.give_out(into)
        self.names += 1
        request = f"r{self.names}"
        epoch, slots = self.rig.daemon.epoch, [slot for _, slot in taken]
        self.asked[request] = {
            block: self.truth[key] for block, (key, _) in zip(into, taken, strict=True)
        }
        expires_ns = time.monotonic_ns() + 60_000_000_000
        self.rig.mover.submit_load(Load(request, epoch, expires_ns, into, [slots], adapter))

    # What others do meanwhile

    def elsewhere(self) -> None:
        common = [*[self.rig.mover._work] * 16, *[self.advance] * 16]
        rare = [self.lose_session, self.kill, self.fail, self.lose_patience]
        self.chance.choice([*common, *rare])()
        for key, slot in self.rig.daemon.blocks.items():
            held = bytes(self.rig.daemon.slots[slot][: self.rig.blocks.block_bytes])
            assert held == self.truth[key], "a stale block, or another adapter's, was committed"

    def lose_patience(self) -> None:
        """Every load takes too long, also one that is being written."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_jobs, "PATIENCE_S", 0.0)
            self.rig.mover._work()


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 300, 100)])
def test_three_hundred_lives(seeds: range) -> None:
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
