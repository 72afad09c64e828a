"""Exports an engine's KV memory to the daemon, with the events that order copies after its work.

Each way to export it is a `Shown`, which the daemon accepts or refuses as a whole. CUDA has two
ways: native events need a /dev/shm that both containers share; counters need an engine whose
streams may write memory. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from tierd.device.api import CannotOpenError
from tierd.device.engine_cuda import Counters, Events, Exports, MemorySpan
from tierd.device.engine_host import HostExport
from tierd.shared_memory.exports import Export, PageLayout, layout_error
from tierd_connectors.vllm.worker.layout import BlockPages, LayoutError, Stretch
from tierd_connectors.vllm.worker.queues import DeviceOrder, HostOrder
from tierd_connectors.vllm.worker.torch import StreamOrder

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.tierd")


class Shown(NamedTuple):
    """The engine's memory as it is exported to the daemon."""

    exports: Sequence[Export]
    layout: PageLayout
    events: Sequence[bytes]
    order: DeviceOrder
    """Marks the engine's work with these events."""
    owner: object
    """Keeps memory, events and descriptors alive while the export is used."""


class HostPool:
    """Allocates the KV of a CPU engine in memory that the daemon can map.

    From 0.32 on, vLLM asks the connector for a context, and allocates all KV inside it with one
    torch.zeros of bytes. `memory` stays None with other versions.
    """

    def __init__(self) -> None:
        self.memory: HostExport | None = None

    def context(self) -> AbstractContextManager[object]:
        """Return a context that catches the next allocation of bytes."""
        torch = importlib.import_module("torch")
        base = importlib.import_module("torch.overrides").TorchFunctionMode
        pool = self

        class Catch(base):  # type: ignore[misc,valid-type]  # torch is not typed here
            def __torch_function__(
                self,
                func: object,
                types: object,
                args: Sequence[object] = (),
                kwargs: Mapping[str, object] | None = None,
            ) -> object:
                given = kwargs or {}
                if func is torch.zeros and pool.memory is None and len(args) == 1:
                    size_bytes, device = args[0], torch.device(given.get("device") or "cpu")
                    plain = given.get("dtype") is torch.int8 and device.type == "cpu"
                    if plain and isinstance(size_bytes, int):
                        return pool.allocate(size_bytes)
                return func(*args, **given)  # type: ignore[operator]  # torch's own

        return Catch()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return a tensor of zeroed bytes, valid as long as the pool."""
        torch = importlib.import_module("torch")
        self.memory = HostExport(size_bytes)
        return torch.frombuffer(self.memory.view, dtype=torch.int8)

    def show(self, blocks: BlockPages) -> Shown:
        """Export the allocated memory. Raises LayoutError if the blocks do not lie in it."""
        if self.memory is None:
            raise LayoutError(
                "this vLLM did not allocate its KV in the connector's memory: transfer 'host_ipc' "
                "needs vLLM 0.32"
            )
        export = self.memory.export
        layout = _within(blocks, [Stretch(self.memory.address, export.size_bytes)])
        return Shown([export], layout, [], HostOrder(), self)


def show_cuda(tensors: Sequence[torch.Tensor], blocks: BlockPages) -> Iterator[Shown]:
    """Yield the ways to export KV on a GPU, best first. Raises CannotOpenError or LayoutError."""
    ordinal = tensors[0].device.index
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    spans = [MemorySpan(address, size_bytes) for address, size_bytes in storages.items()]
    try:
        events = Events(ordinal)
    except CannotOpenError as error:
        logger.info("tierd: %s; counters are used instead", error)
    else:
        exports = Exports(ordinal, spans)
        layout = _within(blocks, _allocations(exports, spans))
        order = StreamOrder(events)
        yield Shown(exports.exports, layout, events.handles, order, (exports, events))
        exports.close()
        events.close()
    counters = Counters(ordinal)
    spans.append(counters.span)
    exports = Exports(ordinal, spans)
    layout = _within(blocks, _allocations(exports, spans))
    handles = counters.handles(exports.places[-1])
    yield Shown(exports.exports, layout, handles, StreamOrder(counters), (exports, counters))


def _allocations(exports: Exports, spans: Sequence[MemorySpan]) -> list[Stretch]:
    """Return the addresses and lengths of the exports in this process."""
    bases = {
        place.export: span.address - place.offset
        for span, place in zip(spans, exports.places, strict=True)
    }
    return [
        Stretch(bases[index], export.size_bytes) for index, export in enumerate(exports.exports)
    ]


def _within(blocks: BlockPages, allocations: Sequence[Stretch]) -> PageLayout:
    layout = blocks.within(allocations)
    sizes = [allocation.length for allocation in allocations]
    error = layout_error(layout, sizes, blocks.block_bytes)
    if error:
        raise LayoutError(error)
    return layout
