"""Frames on a byte stream that may carry file descriptors.

A frame is an 8-byte head and a payload. One read may return the bytes of several frames with the
descriptors of a later one, so descriptors wait in a FIFO until the frame that declares them is
complete.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from tierd.errors import RemoteProtocolError

_HEAD: Final = struct.Struct("<2sBBI")
_MAGIC: Final = b"TK"
HEAD_BYTES: Final = _HEAD.size

FRAME_BYTES_MAX: Final = 5 << 20
"""Largest payload of a frame: the slots for 64 ranks of a call at its key limit take 4 MiB."""

FDS_PER_FRAME_MAX: Final = 1
"""Most descriptors per frame: the messages with descriptors carry one each."""

FDS_WAITING_MAX: Final = 64
"""Most descriptors received before their frames; a peer that sends more is faulty."""


def encode_frame(payload: bytes, fd_count: int = 0) -> bytes:
    """Return head and payload. Send the descriptors with the first byte of the frame."""
    assert len(payload) <= FRAME_BYTES_MAX
    assert fd_count <= FDS_PER_FRAME_MAX
    return _HEAD.pack(_MAGIC, fd_count, 0, len(payload)) + payload


FrameHandler = Callable[[bytes | bytearray | memoryview, tuple[int, ...]], None]


class FrameDecoder:
    """Cuts a byte stream into frames, regardless of how it was split or merged in transit."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(
        self,
        data: bytes | bytearray | memoryview,
        fds: Sequence[int],
        handle: FrameHandler,
    ) -> None:
        """Take bytes and descriptors in order of arrival; call `handle` for each complete frame.

        `handle` gets the payload, valid until it returns, and descriptors, which it then owns.
        Raises RemoteProtocolError at the first invalid head; the stream is unusable then.
        """
        if not fds and not self._buffer and len(data) >= HEAD_BYTES:
            # The common case: one whole frame in one read, whose payload is not copied.
            magic, fd_count, reserved, length = _HEAD.unpack_from(data)
            if length == len(data) - HEAD_BYTES and magic == _MAGIC and not fd_count | reserved:
                handle(data[HEAD_BYTES:], ())
                return
        if fds:
            self._fds.extend(fds)
            if len(self._fds) > FDS_WAITING_MAX:
                raise RemoteProtocolError(
                    f"{len(self._fds)} descriptors came before their frames; the limit is "
                    f"{FDS_WAITING_MAX}"
                )
        if self._buffer:
            self._buffer += data
            used = self._cut(self._buffer, handle)
            del self._buffer[:used]
        else:
            used = self._cut(data, handle)
            if used < len(data):
                self._buffer += data[used:]

    def _cut(
        self,
        data: bytes | bytearray | memoryview,
        handle: FrameHandler,
    ) -> int:
        offset, size = 0, len(data)
        while size - offset >= HEAD_BYTES:
            magic, fd_count, reserved, length = _HEAD.unpack_from(data, offset)
            if magic != _MAGIC or reserved:
                raise RemoteProtocolError(
                    f"not a frame: the head is {bytes(data[offset : offset + HEAD_BYTES]).hex()}"
                )
            if length > FRAME_BYTES_MAX:
                raise RemoteProtocolError(
                    f"frame of {length} bytes exceeds the limit of {FRAME_BYTES_MAX}"
                )
            if fd_count > FDS_PER_FRAME_MAX:
                raise RemoteProtocolError(
                    f"frame declares {fd_count} descriptors; the limit is {FDS_PER_FRAME_MAX}"
                )
            end = offset + HEAD_BYTES + length
            if size < end:
                break
            if len(self._fds) < fd_count:
                raise RemoteProtocolError(
                    f"frame declares {fd_count} descriptors and came with {len(self._fds)}"
                )
            fds = tuple(self._fds.popleft() for _ in range(fd_count)) if fd_count else ()
            payload = bytes(data[offset + HEAD_BYTES : end])
            offset = end
            handle(payload, fds)
        return offset

    def keep(self, fds: Sequence[int]) -> None:
        """Put back descriptors that no message took, for `take_fds`."""
        self._fds.extend(fds)

    def take_fds(self) -> list[int]:
        """Return the descriptors whose frames never came; the caller must close them."""
        left = list(self._fds)
        self._fds.clear()
        return left
