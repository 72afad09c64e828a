"""The protocol's order: HELLO and WELCOME first, then anything of the other side's.

Sans-io: bytes and descriptors in, messages out. Both ends use it; what they do
with a message is theirs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from tierd.errors import RemoteProtocolError
from tierd.wire import messages
from tierd.wire.frames import FrameDecoder, encode_frame
from tierd.wire.messages import Error, FromClient, FromDaemon, Hello, Message, Welcome


class Role(enum.Enum):
    """Which end of the socket this is."""

    CLIENT = "client"
    DAEMON = "daemon"


Handler = Callable[[FromClient | FromDaemon, tuple[int, ...]], None]


class WireSession:
    """One connection's framing and order, for one end of it.

    `handle` is called with each message and its descriptors, which it owns.
    """

    def __init__(self, role: Role, handle: Handler) -> None:
        self._decoder = FrameDecoder()
        self._handle = handle
        if role is Role.DAEMON:
            self._accepted, self._accepted_later = frozenset({1}), messages.FROM_CLIENT - {1}
        else:
            self._accepted, self._accepted_later = frozenset({64, 71}), messages.FROM_DAEMON - {64}

    def receive(self, data: bytes | bytearray | memoryview, fds: Sequence[int] = ()) -> None:
        """Take bytes and descriptors as they arrived and handle the messages they complete.

        Raises RemoteProtocolError at the first wrong one; the session is over then, and
        `take_fds` says what to close.
        """
        self._decoder.feed(data, fds, self._frame)

    def take_fds(self) -> list[int]:
        """Descriptors that belong to no message, for the owner of the stream to close."""
        return self._decoder.take_fds()

    def _frame(self, payload: bytes | bytearray | memoryview, fds: tuple[int, ...]) -> None:
        try:
            message = messages.decode(payload, self._accepted)
            kind = type(message)
            if bool(fds) != (kind in messages.WITH_DESCRIPTOR):
                raise RemoteProtocolError(f"{kind.__name__} came with {len(fds)} descriptors")
        except RemoteProtocolError:
            self._decoder.keep(fds)
            raise
        if kind is Hello or kind is Welcome:
            self._accepted = self._accepted_later
        self._handle(message, fds)


def encode(message: Message, fd_count: int = 0) -> bytes:
    """The frame of one message."""
    return encode_frame(messages.encode(message), fd_count)


def version_error(theirs: int) -> Error:
    """What a daemon answers to a HELLO of a version that it does not speak."""
    return Error(
        0,
        f"this tierd speaks protocol version {messages.PROTOCOL_VERSION}, "
        f"the client speaks {theirs}: install the same tierd release on both sides",
    )
