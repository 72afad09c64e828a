"""What an engine shows of its memory to a daemon that copies for it: allocations and pages.

Plain values, used by both ends. Who opens an allocation, and how, is tierd.device's.
"""

from __future__ import annotations

import enum
import struct
import uuid as uuids
from collections.abc import Sequence
from typing import Final, NamedTuple

HOST_UUID: Final = bytes(16)
"""Stands for the host's own memory where a device's UUID is asked for."""

RUNS_MAX: Final = 65_536
"""Runs of a block: 128 layers of 64 heads with K and V apart are 16,384."""

NO_EVENT: Final = 0xFFFF_FFFF
"""In a copy: nothing has to happen before it."""

_RUN = struct.Struct("<IQQ")
_COUNTER = struct.Struct("<BIQ")
_NATIVE_TAG: Final = b"\0"
_COUNTER_TAG: Final = 1


class ExportKind(enum.IntEnum):
    """How another process gets at an allocation."""

    MEMFD = 0
    """Host memory: one part, a memfd that is sealed against shrinking."""

    CUDA_IPC = 1
    """cudaMalloc: `handle` is the 64-byte cudaIpcMemHandle_t of the allocation's base."""

    CUDA_VMM = 2
    """Reserved addresses: a part a physical chunk, each a POSIX file descriptor."""


class Part(NamedTuple):
    """A stretch of an allocation that has a file descriptor of its own."""

    offset: int
    size_bytes: int
    fd: int


class Export(NamedTuple):
    """One allocation, from its base on; what lies in it is a PageLayout's to say.

    `device` is the 16-byte UUID of the GPU, HOST_UUID for host memory. The descriptors of
    `parts` stay their owner's.
    """

    kind: ExportKind
    device: bytes
    size_bytes: int
    handle: bytes = b""
    parts: tuple[Part, ...] = ()


class Run(NamedTuple):
    """Consecutive bytes of block 0 in an allocation; block b's are `block_stride * b` further."""

    export: int
    """Which of the layout's allocations."""
    offset: int
    length: int


class PageLayout(NamedTuple):
    """Where the blocks of an engine lie: a slot holds the runs one after the other.

    `layout_error` says whether it can be used with allocations of given sizes.
    """

    runs: tuple[Run, ...]
    block_stride: int
    block_count: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all runs together."""
        return sum(run.length for run in self.runs)


def device_text(uuid: bytes) -> str:
    """A device's UUID as NVIDIA's tools write it; "host" for the host's own memory."""
    if uuid == HOST_UUID:
        return "host"
    return f"GPU-{uuids.UUID(bytes=uuid)}"


def layout_error(layout: PageLayout, sizes: Sequence[int], block_bytes: int) -> str:
    """Why blocks of `block_bytes` cannot be copied by this layout; empty if they can.

    Nothing outside of the allocations, whose sizes are given in bytes, is ever touched by a
    layout that passes.
    """
    if not 0 < len(layout.runs) <= RUNS_MAX:
        return f"a block has {len(layout.runs)} runs; 1 to {RUNS_MAX} are possible"
    if layout.block_count < 1 or layout.block_stride < 1:
        return "a layout has at least one block and a stride between blocks"
    if layout.block_stride > max(sizes, default=0):
        return f"its blocks lie {layout.block_stride} bytes apart, more than an allocation has"
    if layout.block_bytes != block_bytes:
        return f"its runs have {layout.block_bytes} bytes, a block {block_bytes}"
    reach = (layout.block_count - 1) * layout.block_stride
    for run in layout.runs:
        if run.export >= len(sizes):
            return f"it names allocation {run.export} of {len(sizes)}"
        if layout.block_count > 1 and run.length > layout.block_stride:
            return (
                f"a run of {run.length} bytes is longer than the {layout.block_stride} bytes "
                "between blocks"
            )
        if run.length < 1 or run.offset + reach + run.length > sizes[run.export]:
            return (
                f"block {layout.block_count - 1} ends beyond its allocation of "
                f"{sizes[run.export]} bytes"
            )
    return ""


def pack_runs(runs: Sequence[Run]) -> bytes:
    """Runs for the wire: allocation u32, offset u64, length u64, little-endian."""
    return b"".join([_RUN.pack(*run) for run in runs])


def unpack_runs(packed: bytes) -> tuple[Run, ...]:
    """The opposite of pack_runs; ValueError for a wrong length or too many."""
    count, rest = divmod(len(packed), _RUN.size)
    if rest or count > RUNS_MAX:
        raise ValueError(f"runs must be at most {RUNS_MAX} times {_RUN.size} bytes")
    return tuple(Run(*fields) for fields in _RUN.iter_unpack(packed))


def native_handle(ipc_handle: bytes) -> bytes:
    """An event's handle: a GPU's own event, by what its runtime exported it as."""
    return _NATIVE_TAG + ipc_handle


def native_of(handle: bytes) -> bytes | None:
    """What the runtime exported; None if the handle is another kind's."""
    return handle[1:] if handle[:1] == _NATIVE_TAG else None


def counter_handle(export: int, offset: int) -> bytes:
    """An event's handle: it happens when the 64-bit counter at that place has reached a value.

    `export` says which of the layout's allocations; the counter is aligned and only grows.
    """
    return _COUNTER.pack(_COUNTER_TAG, export, offset)


def counter_of(handle: bytes) -> tuple[int, int] | None:
    """Allocation and offset of an event's counter; None if the handle is another kind's."""
    if len(handle) != _COUNTER.size or handle[0] != _COUNTER_TAG:
        return None
    _, export, offset = _COUNTER.unpack(handle)
    return export, offset
