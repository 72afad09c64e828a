"""Copies between an engine's tensors and slots with torch, for KV in GPU memory.

Copies go through this process's own pinned memory. The slots themselves must not be pinned here:
the daemon decommits a segment's memory and fills it again later, and a device would then write to
pages that no longer belong to the segment.

Not yet run on a GPU; tests run it on tensors in host memory.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from tierd.client import copy
from tierd.shared_memory.exports import NO_EVENT
from tierd_connectors.vllm.worker.layout import BlockPages, Stretch, regular
from tierd_connectors.vllm.worker.queues import StreamPoint

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.tierd")

STAGING_BYTES = 32 << 20
"""Size of the pinned memory that copies go through, or one block if a block is larger."""


class TorchPages:
    """`Pages` of tensors on one device, copied on a separate stream from the model's.

    The engine owns the tensors; this object keeps them alive. One thread at a time may use it.
    """

    def __init__(self, blocks: BlockPages, tensors: Sequence[torch.Tensor]) -> None:
        """Raises LayoutError if the blocks do not lie in the tensors' storages."""
        self._torch = importlib.import_module("torch")
        self.blocks = blocks
        storages = list({s.data_ptr(): s for s in (t.untyped_storage() for t in tensors)}.values())
        layout = blocks.within([Stretch(s.data_ptr(), s.nbytes()) for s in storages])
        self._parts: list[tuple[int, int, torch.Tensor]] = []
        start = 0
        for index, runs in groupby(layout.runs, key=lambda run: run.export):
            whole = self._torch.empty(0, dtype=self._torch.int8, device=tensors[0].device)
            whole.set_(storages[index])
            for part in regular([Stretch(run.offset, run.length) for run in runs]):
                first, length = part[0]
                spacing = part[1].address - first if len(part) > 1 else length
                pages = whole.as_strided(
                    (len(part), blocks.count, length), (spacing, blocks.stride, 1), first
                )
                end = start + len(part) * length
                self._parts.append((start, end, pages))
                start = end
        cuda = tensors[0].device.type == "cuda"
        self._stream = self._torch.cuda.Stream(tensors[0].device) if cuda else None
        self._staging = self._allocate(max(STAGING_BYTES, blocks.block_bytes), pinned=cuda)
        self._view = memoryview(self._staging.numpy()).cast("B")
        self._at_once = self._staging.numel() // blocks.block_bytes

    def gather_many(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        size = self.blocks.block_bytes
        for start in range(0, len(blocks), self._at_once):
            some = blocks[start : start + self._at_once]
            with self._beside():
                for place, block in enumerate(some):
                    for part, pages in self._rows(block, place):
                        part.copy_(pages, non_blocking=True)
            for place, slot in enumerate(slots[start : start + len(some)]):
                copy(slot[:size], self._view[place * size : (place + 1) * size])

    def scatter_many(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        size = self.blocks.block_bytes
        for start in range(0, len(blocks), self._at_once):
            some = blocks[start : start + self._at_once]
            for place, slot in enumerate(slots[start : start + len(some)]):
                copy(self._view[place * size : (place + 1) * size], slot[:size])
            with self._beside():
                for place, block in enumerate(some):
                    for part, pages in self._rows(block, place):
                        pages.copy_(part, non_blocking=True)

    def _allocate(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        try:
            return self._torch.empty(size_bytes, dtype=self._torch.int8, pin_memory=pinned)
        except RuntimeError as error:
            logger.warning(
                "tierd: %d MiB of memory cannot be pinned, so copies are slower: raise the limit "
                "of locked memory (ulimit -l, or the container's memlock): %s",
                size_bytes >> 20,
                error,
            )
            return self._torch.empty(size_bytes, dtype=self._torch.int8)

    def _rows(self, block: int, place: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each part of a block in the staging memory, with the pages that it mirrors."""
        assert 0 <= block < self.blocks.count
        first = place * self.blocks.block_bytes
        raw = self._staging[first : first + self.blocks.block_bytes]
        return [
            (raw[start:end].view(pages.shape[0], pages.shape[2]), pages[:, block])
            for start, end, pages in self._parts
        ]

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Run this thread's copies on the separate stream, and wait for them at the end."""
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # Also after an error: the copies may still write staging memory and pages.
                self._stream.synchronize()


class Recorder(Protocol):
    """Records events that the daemon can wait for."""

    def record(self, stream: int) -> tuple[int, int]:
        """Record the next event behind the stream's work so far. Returns its number and value."""


class StreamOrder:
    """`DeviceOrder` of an engine on a GPU. Marks the calling thread's current stream."""

    def __init__(self, recorder: Recorder | None) -> None:
        """Without a recorder, only this process can wait for a mark."""
        self._cuda = importlib.import_module("torch").cuda
        self._recorder = recorder

    def mark(self) -> StreamPoint:
        stream = self._cuda.current_stream()
        event, value = NO_EVENT, 0
        if self._recorder is not None:
            event, value = self._recorder.record(stream.cuda_stream)
        # Blocking, because the mover's thread would otherwise spin on one of the engine's cores.
        here = self._cuda.Event(blocking=True)
        here.record(stream)
        return StreamPoint(event, value, here.synchronize)
