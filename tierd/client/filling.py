"""Slots that this process is writing to, and the sockets that the daemon sees them by."""

from __future__ import annotations

import os
import socket

from tierd.client.values import Reservation


class Filling:
    """Reservations that are being filled, by the socket of their session.

    Once a socket is closed the daemon gives the slots reserved over it to others. So it stays
    open, and so does the guard that came over it, until nobody of this process writes to them.
    """

    def __init__(self) -> None:
        self._sockets: dict[Reservation, socket.socket] = {}
        self.guards: dict[socket.socket, int] = {}
        """Descriptors of guards, which are closed with their sockets."""

    def begin(self, reservation: Reservation, sock: socket.socket) -> None:
        """Its slots are written to from now on."""
        self._sockets[reservation] = sock

    def socket_of(self, reservation: Reservation) -> socket.socket | None:
        """The socket of a reservation that is being filled."""
        return self._sockets.get(reservation)

    def end(self, reservation: Reservation, now: socket.socket | None) -> bool:
        """Nobody writes to its slots any more; whether its session, if `now` is its, goes on."""
        sock = self._sockets.pop(reservation, None)
        if sock is None or sock is now:
            return sock is not None
        if sock not in self._sockets.values():
            self._close(sock)
        return False

    def lost(self, sock: socket.socket) -> None:
        """A session is over; its socket is closed now, or once its slots have been filled."""
        if sock not in self._sockets.values():
            self._close(sock)

    def guard(self, sock: socket.socket | None, fd: int) -> None:
        """Keep the guard of a session; takes the descriptor."""
        if sock is None or sock in self.guards:
            os.close(fd)
        else:
            self.guards[sock] = fd

    def _close(self, sock: socket.socket) -> None:
        sock.close()
        guard = self.guards.pop(sock, None)
        if guard is not None:
            os.close(guard)
