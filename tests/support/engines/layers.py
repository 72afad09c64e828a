"""A forward pass layer by layer, for tests of loads that are reported early."""

from __future__ import annotations

import time

import pytest

from tests.support.engines.connector_bench import block_hash
from tests.support.engines.jobs_rig import BLOCKS, Rig, Troubles
from tierd_connectors.common.work import Load
from tierd_connectors.vllm.worker import jobs as vllm_jobs
from tierd_connectors.vllm.worker.layerwise import Layerwise

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


class SteppedCondition:
    """A condition for one thread: a thread that waits on it lets another event happen."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait(self, timeout_s: float) -> None:
        self._world.elsewhere()


class World(Troubles):
    """An engine that computes while layers are loaded, reuses blocks at any time, and finds blocks
    in its cache; and a daemon that fails in any way."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, layerwise=True)
        self.layerwise = layered(self.rig)
        self.layerwise._cond = SteppedCondition(self)  # type: ignore[assignment]
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
        """No state is left once every job has ended."""
        for _ in range(2000):
            if self.rig.mover.settled and not (self.late or self.rig.daemon.jobs):
                break
            self.elsewhere()
            self.take()

    # The engine

    def take(self) -> None:
        """The engine learns of loads; it may begin with them some steps later."""
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
        """Some blocks get a new owner, whatever they hold, and a forward pass reads all others."""
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
        """Blocks without a load, as far as the engine knows; block 0 is the null block."""
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
        assert self.rig.content(block)[part] == self.content[block][part], "a wrong byte was read"
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

    # Other actors

    def elsewhere(self) -> None:
        common = [*[self.rig.mover._work] * 16, *[self.advance] * 16]
        rare = [self.lose_session, self.kill, self.fail, self.lose_patience]
        self.chance.choice([*common, *rare])()
        for key, slot in self.rig.daemon.blocks.items():
            held = bytes(self.rig.daemon.slots[slot][: self.rig.blocks.block_bytes])
            assert held == self.truth[key], "a stale block, or another adapter's, was committed"

    def lose_patience(self) -> None:
        """Every load times out, also one that is writing."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_jobs, "PATIENCE_S", 0.0)
            self.rig.mover._work()
