"""Slots that this process is writing, and the sockets that keep them reserved."""

from __future__ import annotations

import os
import socket

from tierd.client.values import Reservation


class Filling:
    """Reservations that are being filled, by the socket of their session.

    When a socket closes, the daemon gives the slots that were reserved over it to other sessions.
    So the socket and its guard stay open until no thread of this process writes to these slots.
    """

    def __init__(self) -> None:
        self._sockets: dict[Reservation, socket.socket] = {}
        self.guards: dict[socket.socket, int] = {}
        """Descriptors of guards, which are closed with their sockets."""

    def begin(self, reservation: Reservation, sock: socket.socket) -> None:
        """Note that the slots of a reservation are written from now on."""
        self._sockets[reservation] = sock

    def socket_of(self, reservation: Reservation) -> socket.socket | None:
        """Return the socket of a reservation that is being filled; None: it is not."""
        return self._sockets.get(reservation)

    def end(self, reservation: Reservation, now: socket.socket | None) -> bool:
        """Note that no thread writes the slots. Returns whether `now` is their socket."""
        sock = self._sockets.pop(reservation, None)
        if sock is None or sock is now:
            return sock is not None
        if sock not in self._sockets.values():
            self._close(sock)
        return False

    def lost(self, sock: socket.socket) -> None:
        """End a session. Closes its socket now, or once no slot of it is being written."""
        if sock not in self._sockets.values():
            self._close(sock)

    def guard(self, sock: socket.socket | None, fd: int) -> None:
        """Keep the guard of a session. Takes over the descriptor."""
        if sock is None or sock in self.guards:
            os.close(fd)
        else:
            self.guards[sock] = fd

    def _close(self, sock: socket.socket) -> None:
        sock.close()
        guard = self.guards.pop(sock, None)
        if guard is not None:
            os.close(guard)
