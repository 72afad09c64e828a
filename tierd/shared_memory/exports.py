"""An engine's memory as exported to a daemon that copies for it: allocations and pages.

Plain values, used by both ends. `tierd.device` opens the allocations.
"""

from __future__ import annotations

import enum
import struct
import uuid as uuids
from collections.abc import Sequence
from typing import Final, NamedTuple

HOST_UUID: Final = bytes(16)
"""Stands for host memory in place of a device's UUID."""

RUNS_MAX: Final = 65_536
"""Most runs of a block: 128 layers of 64 heads with separate K and V have 16,384."""

NO_EVENT: Final = 0xFFFF_FFFF
"""Event number of a copy that waits for no event."""

_RUN = struct.Struct("<IQQ")
_COUNTER = struct.Struct("<BIQ")
_NATIVE_TAG: Final = b"\0"
_COUNTER_TAG: Final = 1


class ExportKind(enum.IntEnum):
    """How another process opens an allocation."""

    MEMFD = 0
    """Host memory: one part, a memfd sealed against shrinking."""

    CUDA_IPC = 1
    """cudaMalloc: `handle` is the 64-byte cudaIpcMemHandle_t of the allocation's base."""

    CUDA_VMM = 2
    """Reserved addresses: one part per physical chunk, each a POSIX file descriptor."""


class Part(NamedTuple):
    """A stretch of an allocation with its own file descriptor."""

    offset: int
    size_bytes: int
    fd: int


class Export(NamedTuple):
    """One whole allocation; a PageLayout describes its content.

    `device` is the 16-byte UUID of the GPU, or HOST_UUID for host memory. The descriptors in
    `parts` belong to the caller that made them.
    """

    kind: ExportKind
    device: bytes
    size_bytes: int
    handle: bytes = b""
    parts: tuple[Part, ...] = ()


class Run(NamedTuple):
    """Consecutive bytes of block 0 in an allocation; block b lies `block_stride * b` further on."""

    export: int
    """Index of the allocation in the layout."""
    offset: int
    length: int


class PageLayout(NamedTuple):
    """Where an engine's blocks lie. A slot holds a block's runs one after the other.

    `layout_error` checks a layout against allocations of given sizes.
    """

    runs: tuple[Run, ...]
    block_stride: int
    block_count: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all runs together."""
        return sum(run.length for run in self.runs)


def device_text(uuid: bytes) -> str:
    """Return a device's UUID as NVIDIA's tools write it; "host" for host memory."""
    if uuid == HOST_UUID:
        return "host"
    return f"GPU-{uuids.UUID(bytes=uuid)}"


def layout_error(layout: PageLayout, sizes: Sequence[int], block_bytes: int) -> str:
    """Return why this layout cannot copy blocks of `block_bytes`; empty: it can.

    Copies by a layout that passes never touch memory outside the allocations. `sizes` are the
    allocations' sizes in bytes.
    """
    if not 0 < len(layout.runs) <= RUNS_MAX:
        return f"a block has {len(layout.runs)} runs; 1 to {RUNS_MAX} are possible"
    if layout.block_count < 1 or layout.block_stride < 1:
        return (
            f"the layout has {layout.block_count} blocks, {layout.block_stride} bytes apart: both "
            "must be at least 1"
        )
    if layout.block_stride > max(sizes, default=0):
        return f"its blocks lie {layout.block_stride} bytes apart, more than any allocation has"
    if layout.block_bytes != block_bytes:
        return f"its runs have {layout.block_bytes} bytes, but a block has {block_bytes}"
    reach = (layout.block_count - 1) * layout.block_stride
    for run in layout.runs:
        if run.export >= len(sizes):
            return f"a run names allocation {run.export}; there are {len(sizes)}"
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
    """Encode runs for the wire: allocation u32, offset u64, length u64, little-endian."""
    return b"".join([_RUN.pack(*run) for run in runs])


def unpack_runs(packed: bytes) -> tuple[Run, ...]:
    """Undo `pack_runs`. Raises ValueError for a wrong length or too many runs."""
    count, rest = divmod(len(packed), _RUN.size)
    if rest or count > RUNS_MAX:
        raise ValueError(
            f"runs have {len(packed)} bytes: must be {_RUN.size} each, at most {RUNS_MAX}"
        )
    return tuple(Run(*fields) for fields in _RUN.iter_unpack(packed))


def native_handle(ipc_handle: bytes) -> bytes:
    """Return an event's handle for a GPU event that the GPU's runtime exported."""
    return _NATIVE_TAG + ipc_handle


def native_of(handle: bytes) -> bytes | None:
    """Return the runtime's handle of a GPU event; None for another kind of event."""
    return handle[1:] if handle[:1] == _NATIVE_TAG else None


def counter_handle(export: int, offset: int) -> bytes:
    """Return an event's handle for a 64-bit counter: it happens when the counter reaches a value.

    `export` is the index of the layout's allocation. The counter is aligned and only grows.
    """
    return _COUNTER.pack(_COUNTER_TAG, export, offset)


def counter_of(handle: bytes) -> tuple[int, int] | None:
    """Return allocation and offset of an event's counter; None for another kind of event."""
    if len(handle) != _COUNTER.size or handle[0] != _COUNTER_TAG:
        return None
    _, export, offset = _COUNTER.unpack(handle)
    return export, offset
