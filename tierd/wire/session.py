"""The protocol's order: first HELLO and WELCOME, then any message of the other side.

Sans-io: bytes and descriptors in, messages out. Both ends use it, each with its own handler.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from tierd.errors import RemoteProtocolError
from tierd.wire import messages
from tierd.wire.frames import FrameDecoder, encode_frame
from tierd.wire.messages import Error, FromClient, FromDaemon, Hello, Message, Welcome


class Role(enum.Enum):
    """The local end of the socket."""

    CLIENT = "client"
    DAEMON = "daemon"


Handler = Callable[[FromClient | FromDaemon, tuple[int, ...]], None]


class WireSession:
    """Framing and order of messages, at one end of a connection.

    `handle` is called with each message and its descriptors, which it then owns.
    """

    def __init__(self, role: Role, handle: Handler) -> None:
        self._decoder = FrameDecoder()
        self._handle = handle
        if role is Role.DAEMON:
            self._accepted, self._accepted_later = frozenset({1}), messages.FROM_CLIENT - {1}
        else:
            self._accepted, self._accepted_later = frozenset({64, 71}), messages.FROM_DAEMON - {64}

    def receive(self, data: bytes | bytearray | memoryview, fds: Sequence[int] = ()) -> None:
        """Take bytes and descriptors in order of arrival; handle the messages that they complete.

        Raises RemoteProtocolError at the first invalid message. The session is over then, and the
        caller must close the descriptors from `take_fds`.
        """
        self._decoder.feed(data, fds, self._frame)

    def take_fds(self) -> list[int]:
        """Return the descriptors that belong to no message; the caller must close them."""
        return self._decoder.take_fds()

    def _frame(self, payload: bytes | bytearray | memoryview, fds: tuple[int, ...]) -> None:
        try:
            message = messages.decode(payload, self._accepted)
            kind = type(message)
            if bool(fds) != (kind in messages.WITH_DESCRIPTOR):
                needed = int(kind in messages.WITH_DESCRIPTOR)
                raise RemoteProtocolError(
                    f"{kind.__name__} came with {len(fds)} descriptors, not {needed}"
                )
        except RemoteProtocolError:
            self._decoder.keep(fds)
            raise
        if kind is Hello or kind is Welcome:
            self._accepted = self._accepted_later
        self._handle(message, fds)


def encode(message: Message, fd_count: int = 0) -> bytes:
    """Return the frame of one message."""
    return encode_frame(messages.encode(message), fd_count)


def version_error(theirs: int) -> Error:
    """Return the daemon's answer to a HELLO with a version that it does not support."""
    return Error(
        0,
        f"the daemon speaks protocol version {messages.PROTOCOL_VERSION}, "
        f"the client speaks {theirs}: install the same tierd release on both sides",
    )
