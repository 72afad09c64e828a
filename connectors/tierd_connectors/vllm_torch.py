"""Copies between an engine's tensors and slots by torch: for KV that only a GPU can address.

Not yet run on a GPU; in tests it runs on tensors in host memory.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierd.exports import NO_EVENT
from tierd_connectors.vllm_layout import Blocks, Stretch, regular
from tierd_connectors.vllm_queues import Mark

if TYPE_CHECKING:
    import torch

    from tierd.mapping import SharedMapping

logger = logging.getLogger("vllm.tierd")

_PORTABLE = 1
"""Flag of cudaHostRegister: pinned for every context of this process."""


class TorchPages:
    """`Pages` of tensors on one device, copied on a stream beside the one that runs the model.

    The tensors stay the engine's, and live as long as this. One thread at a time.
    """

    def __init__(self, blocks: Blocks, tensors: Sequence[torch.Tensor]) -> None:
        """Raises LayoutError for blocks that do not lie in these tensors' storages."""
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
        self._pinned: list[tuple[SharedMapping, int]] = []
        self._pinning = cuda

    def gather_many(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        with self._beside():
            for block, slot in zip(blocks, slots, strict=True):
                for part, pages in self._rows(block, slot):
                    part.copy_(pages, non_blocking=True)

    def scatter_many(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        with self._beside():
            for slot, block in zip(slots, blocks, strict=True):
                for part, pages in self._rows(block, slot):
                    pages.copy_(part, non_blocking=True)

    def pin(self, mappings: Sequence[SharedMapping]) -> bool:
        # A segment a call: no copy crosses its border, and a stop waits for no more.
        known = [mapping for mapping, _ in self._pinned]
        for mapping, address in [pair for pair in self._pinned if pair[0] not in mappings]:
            self._torch.cuda.cudart().cudaHostUnregister(address)
            self._pinned.remove((mapping, address))
        for mapping in mappings if self._pinning else ():
            # Faulted in by us it costs a third of what it costs the driver, with its locks held.
            if mapping in known or mapping.populated_bytes < mapping.size_bytes:
                continue
            address = np.frombuffer(mapping.view, np.uint8).ctypes.data
            error = self._torch.cuda.cudart().cudaHostRegister(
                address, mapping.size_bytes, _PORTABLE
            )
            if int(error) != 0:
                self._pinning = False
                self._forget_error()
                logger.warning(
                    "tierd: cudaHostRegister failed (%s) after %d MiB, so copies are slower: raise "
                    "the limit of locked memory (ulimit -l, or the container's memlock)",
                    error,
                    sum(pinned.size_bytes for pinned, _ in self._pinned) >> 20,
                )
                return False
            self._pinned.append((mapping, address))
            return True
        return False

    def _rows(self, block: int, slot: memoryview) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of the slot, and the pages that it is a copy of."""
        assert 0 <= block < self.blocks.count
        raw = self._torch.frombuffer(slot, dtype=self._torch.int8, count=self.blocks.block_bytes)
        return [
            (raw[start:end].view(pages.shape[0], pages.shape[2]), pages[:, block])
            for start, end, pages in self._parts
        ]

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Copies of this thread go to the stream, and have been made at the end."""
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # Also after an error: until then slots and pages may still be written.
                self._stream.synchronize()

    def _forget_error(self) -> None:
        """A failed call is reported once more by this thread's next kernel: have it be this one."""
        with contextlib.suppress(RuntimeError), self._beside():
            self._parts[0][2].new_ones(1)


class Recorder(Protocol):
    """Events that the daemon knows, too."""

    def record(self, stream: int) -> tuple[int, int]:
        """The next event and its value, which happens after what the stream has been given."""


class StreamOrder:
    """`Order` of an engine on a GPU. Marks the stream that is current in the calling thread."""

    def __init__(self, recorder: Recorder | None) -> None:
        """Without a recorder nobody but this process is told."""
        self._cuda = importlib.import_module("torch").cuda
        self._recorder = recorder

    def mark(self) -> Mark:
        stream = self._cuda.current_stream()
        event, value = NO_EVENT, 0
        if self._recorder is not None:
            event, value = self._recorder.record(stream.cuda_stream)
        # Blocking: the mover's thread would spin otherwise, with a core of the engine's.
        here = self._cuda.Event(blocking=True)
        here.record(stream)
        return Mark(event, value, here.synchronize)
