"""Namespaces that a client has registered, or wants registered, in whatever session."""

from __future__ import annotations

from collections.abc import Callable

from tierd.client.connection import DaemonConnection
from tierd.client.known import KnownIncarnations
from tierd.client.values import Handle
from tierd.errors import RemoteProtocolError
from tierd.wire import messages as m


class Registrations:
    """All handles of a client. `on_registered` hears of each that can be used now."""

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
        # Unregistered before the daemon has answered; and numbers of those of this session.
        self._leaving: dict[Handle, bool] = {}
        self._ended: set[int] = set()

    def add(self, handle: Handle) -> None:
        """Have a handle registered, in this session and in later ones."""
        self._handles.append(handle)
        if self._connection.sock is not None:
            self._send(handle)

    def drop(self, handle: Handle) -> None:
        """Have a handle registered in no later session."""
        self._handles.remove(handle)

    def send_all(self) -> None:
        """A session begins."""
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
            self._leaving[handle] = worthless

    def _end(self, number: int, worthless: bool) -> None:
        self._ended.add(number)
        self._connection.send(m.Unregister(number, worthless))

    def has_ended(self, number: int) -> bool:
        """Whether the number was a handle's of this session that is used no more."""
        return number in self._ended

    def of_number(self, number: int) -> Handle | None:
        """The handle that has the number in this session."""
        return next((h for h in self._handles if h.number == number), None)

    def lost(self) -> None:
        """The session is over."""
        for handle in self._handles:
            handle.number = None
        self._registering.clear()
        self._leaving.clear()
        self._ended.clear()

    def registered(self, message: m.Registered) -> None:
        """The daemon has accepted a namespace. Raises RemoteProtocolError if it is another one."""
        handle = self._registering.pop(message.call, None)
        now = self._incarnations.now
        if handle is None or now is None:
            raise RemoteProtocolError(f"REGISTERED answers no call {message.call}")
        if message.slot_bytes != handle.slot_bytes or not message.slots_per_segment:
            raise RemoteProtocolError(
                f"REGISTERED has {message.slots_per_segment} slots per segment, of "
                f"{message.slot_bytes} bytes each; the namespace's slots have {handle.slot_bytes}"
            )
        if handle in self._leaving:
            self._end(message.handle, self._leaving.pop(handle))
            return
        handle.refusal = None
        now.slots_per_segment[handle] = message.slots_per_segment
        handle.number = message.handle
        self._on_registered(handle)

    def refused(self, call: int, reason: str) -> bool:
        """An ERROR came; whether it answers a REGISTER."""
        handle = self._registering.pop(call, None)
        if handle is None:
            return False
        handle.refusal = reason
        self._leaving.pop(handle, None)
        return True
