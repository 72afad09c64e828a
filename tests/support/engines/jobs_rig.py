"""A worker of the vLLM connector, with a fake daemon that makes its copies."""

from __future__ import annotations

import os
import random
import time
from typing import cast

import numpy as np

from tests.support.engines.connector_bench import ROOT, SIZES, block_hash, namespace
from tests.support.engines.fake_client import FakeClient, FakeDaemon, FakeJob
from tierd.client import Client
from tierd.device.engine_host import HostExport
from tierd_connectors.common.guard import Boundary
from tierd_connectors.common.namespaces import NO_ADAPTER, of_adapters
from tierd_connectors.common.work import Load, StoreItem
from tierd_connectors.vllm.worker.export import Shown
from tierd_connectors.vllm.worker.layerwise import Layerwise, layer_groups
from tierd_connectors.vllm.worker.layout import PageMap, Stretch, TensorView, blocks_of
from tierd_connectors.vllm.worker.mover import Mover
from tierd_connectors.vllm.worker.queues import HostOrder

BLOCKS = SIZES["B"]


def close_descriptors(mover: Mover) -> None:
    """Close descriptors that an engine keeps until it ends. No thread may be running."""
    jobs = mover._jobs
    if jobs is not None and jobs._gate is not None:
        jobs._gate.close()
        os.close(jobs._gate_fd)
        jobs._gate = None
    os.close(mover._wakeup)


class Rig:
    """A mover that a test drives by hand, with engine memory that a fake daemon maps."""

    def __init__(
        self,
        layout: str = "LBHNC",
        *,
        layerwise: bool = False,
        loras: dict[str, str] | None = None,
    ) -> None:
        shape = [SIZES[axis] for axis in layout]
        self.memory = HostExport(int(np.prod(shape)) * 4)
        array = np.frombuffer(self.memory.view, np.float32).reshape(shape)
        self.logical = array.transpose([layout.index(axis) for axis in "LBHNC"])
        views = [
            TensorView(
                layer.ctypes.data,
                self.memory.address,
                layer.shape,
                layer.strides,
                4,
                self.memory,
            )
            for layer in self.logical
        ]
        self.blocks = blocks_of(views, BLOCKS)
        self.pages = PageMap(self.blocks, views)
        self.namespace = namespace(block_bytes=self.blocks.block_bytes)
        self.namespaces = of_adapters(self.namespace, loras or {})
        self.daemon = FakeDaemon(copying=False)
        self.client = FakeClient(self.daemon)
        self.boundary = Boundary()
        self.random = np.random.default_rng(1)
        self.layers = [f"layer{i}" for i in range(len(views))]
        groups = layer_groups(self.layers, views, self.blocks) if layerwise else None
        self.layerwise = Layerwise(groups) if groups is not None else None
        self.mover = Mover(
            cast("Client", self.client),
            self.namespace,
            self.pages,
            0,
            self.boundary,
            HostOrder(),
            self.layerwise,
            loras,
        )

    def way(self) -> Shown:
        memory = Stretch(self.memory.address, self.memory.export.size_bytes)
        layout = self.blocks.within([memory])
        return Shown([self.memory.export], layout, [], HostOrder(), self.memory)

    def attach(self) -> None:
        self.mover.attach([self.way()])
        assert self.mover.attached
        # As in `start`, without the thread.
        self.mover._in_use = True

    def close(self) -> None:
        """Close descriptors that an engine keeps until it ends. No thread may be running."""
        close_descriptors(self.mover)
        self.memory._close_fd()

    def write(self, block: int) -> bytes:
        """The engine computes a block again, with new content."""
        self.logical[:, block] = self.random.random(self.logical[:, block].shape, np.float32)
        return self.content(block)

    def content(self, block: int) -> bytes:
        slot = memoryview(bytearray(self.blocks.block_bytes))
        self.pages.gather(block, slot)
        return bytes(slot)

    def item(self, block: int, name: bytes = b"", adapter: str = NO_ADAPTER) -> StoreItem:
        return StoreItem(name or block_hash(block), ROOT, block, adapter)

    def stored(self, name: bytes, adapter: str = NO_ADAPTER) -> bytes | None:
        slot = self.daemon.blocks.get((self.namespaces[adapter].digest, name))
        return None if slot is None else bytes(self.daemon.slots[slot][: self.blocks.block_bytes])

    def store(self, blocks: list[int]) -> list[bytes]:
        """Store blocks with new content; returns the content."""
        contents = [self.write(block) for block in blocks]
        self.mover.submit_stores([self.item(block) for block in blocks])
        self.finish()
        assert [self.stored(block_hash(block)) for block in blocks] == contents
        return contents

    def load(
        self,
        blocks: list[int],
        into: list[int],
        lease_ms: int = 60_000,
        adapter: str = NO_ADAPTER,
    ) -> Load:
        digest = self.namespaces[adapter].digest
        slots = [self.daemon.blocks[digest, block_hash(b)] for b in blocks]
        expires_ns = time.monotonic_ns() + lease_ms * 1_000_000
        load = Load(f"r{into}", self.daemon.epoch, expires_ns, into, [slots], adapter)
        self.mover.submit_load(load)
        return load

    def work(self) -> None:
        """Let the mover do everything that it can do now."""
        while self.mover._work():
            pass

    def finish(self) -> None:
        """The daemon makes every copy, and the mover finishes them."""
        end = time.monotonic() + 5
        self.work()
        while not self.mover.settled:
            self.daemon.copy()
            self.work()
            assert time.monotonic() < end

    def failed(self) -> list[int] | None:
        """Failed blocks of the one load that has ended; None if none has."""
        finished = self.mover.take_finished()
        assert len(finished) < 2
        return finished[0].failed_blocks if finished else None


class Troubles:
    """A rig whose daemon has random faults."""

    def __init__(self, seed: int, *, layerwise: bool = False) -> None:
        self.chance = random.Random(seed)
        self.rig = Rig(layerwise=layerwise, loras={"one": "1", "two": "1"})
        self.rig.attach()
        self.late: list[FakeJob] = []
        self.adapters = {n.digest: adapter for adapter, n in self.rig.namespaces.items()}

    def advance(self) -> None:
        """One step of a random job of any daemon, also of ended sessions."""
        jobs = [*self.rig.daemon.jobs, *self.late]
        if jobs:
            job = self.chance.choice(jobs)
            job.advance()
            if job.over:
                self.rig.daemon.jobs = [j for j in self.rig.daemon.jobs if j is not job]
                self.late = [j for j in self.late if j is not job]

    def lose_session(self) -> None:
        self.rig.daemon.drop_session()
        self.late += self.rig.daemon.jobs
        self.rig.daemon.jobs.clear()

    def kill(self) -> None:
        self.rig.daemon.kill()
        self.rig.daemon.up = True

    def fail(self) -> None:
        if self.rig.daemon.jobs:
            self.rig.daemon.jobs.pop().fail()
