"""Registers a client's namespaces in each session, and ends registrations."""

from __future__ import annotations

from collections.abc import Callable

from tierd.client.connection import DaemonConnection
from tierd.client.known import KnownIncarnations
from tierd.client.values import Handle
from tierd.errors import RemoteProtocolError
from tierd.wire import messages as m


class Registrations:
    """All handles of a client. Calls `on_registered` with each handle that becomes usable."""

    def __init__(
        self,
        connection: DaemonConnection,
        incarnations: KnownIncarnations,
        *,
        map_segments: bool,
        on_registered: Callable[[Handle], None],
    ) -> None:
        self._connection = connection
        self._incarnations = incarnations
        self._map_segments = map_segments
        self._on_registered = on_registered
        self._handles: list[Handle] = []
        self._registering: dict[int, Handle] = {}
        self._unregistered: dict[Handle, bool] = {}
        """Handles unregistered before the daemon answered, each with `worthless`."""
        self._ended: set[int] = set()
        """Numbers of this session's handles that were unregistered."""

    def add(self, handle: Handle) -> None:
        """Register a handle, in this session and in each later one."""
        self._handles.append(handle)
        if self._connection.sock is not None:
            self._send(handle)

    def drop(self, handle: Handle) -> None:
        """Stop registering a handle in later sessions."""
        self._handles.remove(handle)

    def send_all(self) -> None:
        """Register all handles, at the start of a session."""
        for handle in self._handles:
            self._send(handle)

    def _send(self, handle: Handle) -> None:
        call = self._connection.next_call()
        handle.refusal = None
        self._registering[call] = handle
        self._connection.send(m.Register(call, handle.namespace.to_fields(), self._map_segments))

    def unregister(self, handle: Handle, worthless: bool) -> None:
        """End the use of a handle; a second call does nothing."""
        if handle not in self._handles:
            return
        self._handles.remove(handle)
        handle.refusal = "the client has unregistered it"
        self._incarnations.forget(handle)
        number, handle.number = handle.number, None
        if number is not None:
            self._end(number, worthless)
        elif handle in self._registering.values():
            self._unregistered[handle] = worthless

    def _end(self, number: int, worthless: bool) -> None:
        self._ended.add(number)
        self._connection.send(m.Unregister(number, worthless))

    def has_ended(self, number: int) -> bool:
        """Whether the number belonged to a handle that was unregistered in this session."""
        return number in self._ended

    def of_number(self, number: int) -> Handle | None:
        """Return the handle with this number in this session; None: there is none."""
        return next((h for h in self._handles if h.number == number), None)

    def lost(self) -> None:
        """Forget all numbers: the session is over."""
        for handle in self._handles:
            handle.number = None
        self._registering.clear()
        self._unregistered.clear()
        self._ended.clear()

    def registered(self, message: m.Registered) -> None:
        """Take the daemon's answer. Raises RemoteProtocolError if it does not fit the call."""
        handle = self._registering.pop(message.call, None)
        now = self._incarnations.now
        if handle is None or now is None:
            raise RemoteProtocolError(f"REGISTERED answers no call {message.call}")
        if message.slot_bytes != handle.slot_bytes or not message.slots_per_segment:
            raise RemoteProtocolError(
                f"REGISTERED has {message.slots_per_segment} slots per segment, of "
                f"{message.slot_bytes} bytes each; the namespace's slots have {handle.slot_bytes}"
            )
        if handle in self._unregistered:
            self._end(message.handle, self._unregistered.pop(handle))
            return
        handle.refusal = None
        now.slots_per_segment[handle] = message.slots_per_segment
        handle.number = message.handle
        self._on_registered(handle)

    def refused(self, call: int, reason: str) -> bool:
        """Take an ERROR. Returns whether it answers a REGISTER."""
        handle = self._registering.pop(call, None)
        if handle is None:
            return False
        handle.refusal = reason
        self._unregistered.pop(handle, None)
        return True
