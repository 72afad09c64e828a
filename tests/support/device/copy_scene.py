"""An engine's memory on the host, in one of vLLM's layouts, for tests of copies."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from tierd.device.engine_host import HostEvent, HostExport
from tierd.shared_memory.gate import Gate, make_gate
from tierd_connectors.vllm.worker.layout import PageMap, Stretch, TensorView, blocks_of

if TYPE_CHECKING:
    from tierd.shared_memory.exports import PageLayout

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
_MARGIN = 4096


class Pages:
    """KV tensors of a layout in exported memory, surrounded by bytes that must not change."""

    def __init__(
        self, layout: str, blocks: int = 6, sizes: tuple[int, int, int, int] = (3, 2, 4, 8)
    ) -> None:
        """`sizes` are layers, heads, tokens and channels; an element has 4 bytes."""
        counts = dict(zip("LHNCB", (*sizes, blocks), strict=True))
        shape = [counts[axis] for axis in layout]
        used = int(np.prod(shape)) * 4
        self.memory = HostExport(used + 2 * _MARGIN)
        self.raw = np.frombuffer(self.memory.view, np.uint8)
        tensor = np.ndarray(shape, np.float32, self.memory.view, _MARGIN)
        layers = tensor.transpose([layout.index(axis) for axis in "LBHNC"])
        views = [
            TensorView(
                layer.ctypes.data, self.memory.address, layer.shape, layer.strides, 4, tensor
            )
            for layer in layers
        ]
        found = blocks_of(views, blocks)
        self.map = PageMap(found, [tensor])
        self.layout: PageLayout = found.within(
            [Stretch(self.memory.address, self.memory.export.size_bytes)]
        )
        self.block_bytes = found.block_bytes
        self.blocks = blocks
        self.event = HostEvent(self.memory, 0, 0)
        self.fill(1)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere except in the event."""
        self.raw[8:] = np.random.default_rng(seed).integers(0, 256, len(self.raw) - 8, np.uint8)

    def block(self, block: int) -> bytes:
        """A block's bytes as the connector would put them into a slot."""
        slot = bytearray(self.block_bytes)
        self.map.gather(block, memoryview(slot))
        return bytes(slot)

    def digest(self, block: int) -> bytes:
        return hashlib.sha256(self.block(block)).digest()


class Slots:
    """Host memory with slots a few bytes apart by default; the bytes between must not change."""

    def __init__(self, size_bytes: int, count: int, gap: int = 64, seed: int = 2) -> None:
        self.size_bytes = size_bytes
        self.raw = np.random.default_rng(seed).integers(0, 256, (count, size_bytes + gap), np.uint8)
        self.raw = np.ascontiguousarray(self.raw)

    def address(self, *indices: int) -> np.ndarray:
        first = np.uint64(self.raw.ctypes.data)
        return np.array(indices, np.uint64) * np.uint64(self.raw.strides[0]) + first

    def content(self, index: int) -> bytes:
        return self.raw[index, : self.size_bytes].tobytes()


class EngineGate:
    """A gate and the engine's view of it."""

    def __init__(self) -> None:
        self.fd = make_gate()
        self.gate = Gate(self.fd)
        self._stack = ExitStack()
        self._stack.callback(os.close, self.fd)
        self._stack.callback(self.gate.close)
        self.close = self._stack.close
