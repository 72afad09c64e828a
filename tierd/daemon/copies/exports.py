"""Engine memory that one session has exported to the daemon.

A session announces each allocation with EXPORT and sends its descriptors with PART. The daemon
keeps them until DROP_EXPORT or the session's end. An ATTACH describes a layout of blocks in some of
these allocations, which is checked before a copy process gets it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tierd.device import frames
from tierd.errors import RefusedError, RemoteProtocolError
from tierd.shared_memory.exports import ExportKind, PageLayout, layout_error, unpack_runs
from tierd.wire import messages as m

EXPORTS_MAX: Final = 1024
"""Allocations per session."""

PARTS_MAX: Final = 8192
"""Descriptors per session: 160 GB in chunks of 20 MiB."""

HANDLE_BYTES_MAX: Final = 64
"""Size of a CUDA IPC handle."""

LAYERS_MAX: Final = 1024
"""Layer groups per attachment."""


class AttachRequest(NamedTuple):
    """A checked ATTACH, for the copy process of `device`; `fds` belong to the exports."""

    device: bytes
    ask: frames.Attach
    fds: tuple[int, ...]


@dataclass(slots=True)
class _Export:
    kind: ExportKind
    device: bytes
    size_bytes: int
    handle: bytes
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, size in bytes, and a descriptor that this object closes."""

    def frame(self) -> frames.Export:
        parts = [(offset, size_bytes) for offset, size_bytes, _ in self.parts]
        return frames.Export(self.kind, self.device, self.size_bytes, self.handle, parts)

    def close(self) -> None:
        for _, _, fd in self.parts:
            os.close(fd)
        self.parts.clear()


class SessionExports:
    """The allocations of one session, by the client's numbers. Owns their descriptors."""

    def __init__(self) -> None:
        self._exports: dict[int, _Export] = {}
        self._parts = 0

    def add(self, message: m.Export) -> None:
        """Note an allocation. Raises RemoteProtocolError."""
        number, kind, device, size_bytes, handle = message
        if number in self._exports or len(self._exports) >= EXPORTS_MAX:
            raise RemoteProtocolError(
                f"EXPORT {number} is a known number, or exceeds {EXPORTS_MAX} exports"
            )
        try:
            known = ExportKind(kind)
        except ValueError as error:
            raise RemoteProtocolError(f"EXPORT has the unknown kind {kind}") from error
        if len(device) != 16 or len(handle) > HANDLE_BYTES_MAX:
            raise RemoteProtocolError("EXPORT has a device or a handle of a wrong length")
        self._exports[number] = _Export(known, device, size_bytes, handle)

    def add_part(self, message: m.Part, fd: int) -> None:
        """Note a range of an allocation, and own its descriptor. Raises RemoteProtocolError."""
        export = self._exports.get(message.export)
        if export is None or self._parts >= PARTS_MAX:
            os.close(fd)
            raise RemoteProtocolError(
                f"PART of EXPORT {message.export}, which is unknown, or exceeds {PARTS_MAX} parts"
            )
        export.parts.append((message.offset, message.size_bytes, fd))
        self._parts += 1

    def drop(self, message: m.DropExport) -> None:
        """Forget an allocation that no later ATTACH names. Raises RemoteProtocolError."""
        export = self._exports.pop(message.export, None)
        if export is None:
            raise RemoteProtocolError(f"DROP_EXPORT names the unknown export {message.export}")
        self._parts -= len(export.parts)
        export.close()

    def close(self) -> None:
        """Close all descriptors."""
        for export in self._exports.values():
            export.close()
        self._exports.clear()

    def request(self, number: int, message: m.Attach, block_bytes: int) -> AttachRequest:
        """Check an ATTACH of blocks of `block_bytes`, which becomes attachment `number`.

        Raises RemoteProtocolError for a malformed message and RefusedError for a layout that the
        daemon cannot copy.
        """
        exports = [self._exports.get(each) for each in message.exports]
        known = [export for export in exports if export is not None]
        if len(known) < len(exports) or not known or len(message.probe_digest) != 32:
            raise RemoteProtocolError("ATTACH names an unknown export, or has no probe")
        if len(set(message.exports)) < len(exports):
            raise RemoteProtocolError("ATTACH names an export twice")
        try:
            layout = PageLayout(
                unpack_runs(message.runs), message.block_stride, message.block_count
            )
        except ValueError as error:
            raise RemoteProtocolError(f"ATTACH: {error}") from error
        events = m.unpack_handles(message.events)
        devices = {export.device for export in known}
        if len(devices) > 1:
            raise RefusedError("the blocks are on several devices: attach each device separately")
        fault = layout_error(layout, [export.size_bytes for export in known], block_bytes)
        if message.probe_block >= layout.block_count:
            fault = f"probe block {message.probe_block} is not below {layout.block_count}"
        if len(message.layer_ends) > LAYERS_MAX:
            fault = f"a block has at most {LAYERS_MAX} layer groups"
        if fault:
            raise RefusedError(fault)
        ask = frames.Attach(
            number,
            [export.frame() for export in known],
            message.runs,
            layout.block_stride,
            layout.block_count,
            block_bytes,
            events,
            message.probe_block,
            message.probe_digest,
            message.layer_ends,
        )
        return AttachRequest(
            devices.pop(), ask, tuple(fd for export in known for _, _, fd in export.parts)
        )
