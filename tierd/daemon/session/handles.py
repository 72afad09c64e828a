"""The namespaces that one session has registered, by the client's handles.

A namespace is registered with the node once per handle, and unregistered once, by UNREGISTER or at
the session's end. A client that maps segments is sent each segment of its namespaces.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Protocol

from tierd.core.l2.space import Space
from tierd.daemon.node import Node
from tierd.errors import RefusedError, RemoteProtocolError
from tierd.memory.arena import Segment as ArenaSegment
from tierd.types import Namespace
from tierd.wire import messages as m

HANDLES_MAX: Final = 1024
"""Registrations per session."""


class Send(Protocol):
    """Sends a message to the client, with at most one descriptor, which stays the caller's."""

    def __call__(self, message: m.FromDaemon, fd: int | None = None) -> None: ...


class Handles:
    """The registrations of one session."""

    def __init__(self, node: Node, send: Send) -> None:
        self.lease_ttl_s = 0
        """The lease time that WELCOME announced. For as long the client may come back with the
        segments that it has mapped."""
        self._node = node
        self._send = send
        self._spaces: dict[int, Space] = {}
        self._mapping: set[int] = set()
        """Handles whose client maps the segments."""
        self._next_handle = 0
        self._guard: int | None = None
        """Open while the client may write to slots, for the next incarnation of the daemon."""
        self._closed = False
        node.listen(self._announce)

    def register(self, message: m.Register) -> None:
        """Register a namespace and answer with its handle. Raises NamespaceError, RefusedError for
        a namespace that the daemon cannot take, and OSError if descriptors have run out."""
        if len(self._spaces) >= HANDLES_MAX:
            raise RefusedError(f"a session registers at most {HANDLES_MAX} namespaces")
        if message.want_segments and self._guard is None:
            self._guard = self._node.writer_guard()
            if self._guard is not None:
                self._send(m.Guard(), self._guard)
        namespace = Namespace.from_fields(message.namespace)
        space = self._node.register(namespace, to_store=message.want_segments)
        if self._closed:
            # A send in the lines above found the client gone, and `close` does not run again.
            self._node.unregister(space)
            return
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._spaces[handle] = space
        self._send(m.Registered(message.call, handle, space.slot_bytes, space.slots_per_segment))
        if message.want_segments:
            self._mapping.add(handle)
            # A decommitted segment is announced when it is filled: a client that faulted it in
            # before would take memory that the daemon does not count.
            for index, segment in self._node.live_segments(space):
                self._send(m.Segment(handle, index), segment.fd)

    def unregister(self, message: m.Unregister) -> None:
        """Give up a handle. Raises RemoteProtocolError."""
        self.space(message.handle)
        self._drop(message.handle, worthless=message.worthless)

    def space(self, handle: int) -> Space:
        """Return the space of a handle. Raises RemoteProtocolError."""
        space = self._spaces.get(handle)
        if space is None:
            raise RemoteProtocolError(f"handle {handle} is not registered")
        return space

    def spaces(self, handles: Sequence[int]) -> list[Space]:
        """Return the spaces of a call that may name several. Raises RemoteProtocolError."""
        if not 1 <= len(handles) <= m.HANDLES_PER_CALL_MAX:
            raise RemoteProtocolError(
                f"a call names 1 to {m.HANDLES_PER_CALL_MAX} handles, not {len(handles)}"
            )
        return [self.space(handle) for handle in handles]

    def close(self) -> None:
        """Unregister everything: the client is gone."""
        self._closed = True
        self._node.unlisten(self._announce)
        for handle in list(self._spaces):
            self._drop(handle, known_s=self.lease_ttl_s)
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None

    def _drop(self, handle: int, known_s: int = 0, *, worthless: bool = False) -> None:
        """Unregister; the client may come back within `known_s` with the segments it has mapped."""
        maps = handle in self._mapping
        self._mapping.discard(handle)
        space = self._spaces.pop(handle)
        self._node.unregister(space, known_s if maps else 0, worthless=worthless)

    def _announce(self, space: Space, index: int, segment: ArenaSegment) -> None:
        """Send a segment that was created, or filled again, to a client that maps its space."""
        # A copy: a send to a client that has gone ends the session.
        for handle in list(self._mapping):
            if self._spaces.get(handle) is space:
                self._send(m.Segment(handle, index), segment.fd)
