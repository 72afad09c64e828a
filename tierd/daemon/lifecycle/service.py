"""The service manager: notifications to it, and descriptors that it keeps for the daemon.

The protocols are sd_notify(3), sd_listen_fds(3) and systemd's file descriptor store, which other
managers implement as well. Without a manager, all calls do nothing.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import MutableMapping, Sequence
from typing import Final

log = logging.getLogger("tierd")

FIRST_FD: Final = 3
"""The first passed descriptor: sd_listen_fds(3)."""

UNSENT_MAX: Final = 1 << 16
"""Queued messages to a manager that does not read: more than an arena has segments."""

_BUSY: Final = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
_DONT_WAIT: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class ServiceManager:
    """The manager that started this process, if there is one.

    Owns the descriptors that the manager passed until they are taken. Used by one thread; never
    blocks.
    """

    def __init__(
        self,
        address: str = "",
        *,
        watchdog_us: int = 0,
        passed: Sequence[tuple[str, int]] = (),
    ) -> None:
        """`address` is NOTIFY_SOCKET, empty without a manager; `passed` names descriptors."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._passed = list(passed)
        self.watchdog_us = watchdog_us
        """Longest time between two WATCHDOG=1 messages; 0 if there is no watchdog."""
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> ServiceManager:
        """Return the manager named in the environment, and remove its variables, which are not for
        child processes."""
        address = environ.pop("NOTIFY_SOCKET", "")
        watchdog = environ.pop("WATCHDOG_USEC", "0"), environ.pop("WATCHDOG_PID", "")
        listen = [environ.pop(f"LISTEN_{what}", "") for what in ("PID", "FDS", "FDNAMES")]
        own = str(os.getpid())
        watchdog_us = int(watchdog[0]) if watchdog[0].isdecimal() else 0
        if watchdog[1] not in ("", own):
            watchdog_us = 0
        passed: list[tuple[str, int]] = []
        if listen[0] == own and listen[1].isdecimal():
            names = listen[2].split(":")
            for number in range(int(listen[1])):
                fd = FIRST_FD + number
                os.set_inheritable(fd, False)
                passed.append((names[number] if number < len(names) else "unknown", fd))
        return cls(address, watchdog_us=watchdog_us, passed=passed)

    @property
    def present(self) -> bool:
        """Whether there is a manager, which may keep descriptors for the next incarnation."""
        return self._socket is not None

    def take_listeners(self) -> list[socket.socket]:
        """Return the passed listening sockets, which the caller owns from now on."""
        found = []
        for name, fd in list(self._passed):
            copy = os.dup(fd)
            try:
                sock = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listening:
                sock.close()
                continue
            self._passed.remove((name, fd))
            os.close(fd)
            sock.set_inheritable(False)
            found.append(sock)
        return found

    def take_kept(self) -> list[tuple[str, int]]:
        """Return all other passed descriptors by name; the caller owns them from now on."""
        kept, self._passed = self._passed, []
        return kept

    def notify(self, *assignments: str) -> None:
        """Send a state, such as "READY=1", or several at once."""
        self._send("\n".join(assignments).encode(), ())

    def keep(self, name: str, fds: Sequence[int]) -> None:
        """Have descriptors kept for the next incarnation; they stay the caller's.

        `name` has at most 255 printable characters and no colon. A manager that keeps no
        descriptors, or has no room for them, does not report that.
        """
        if self.present:
            self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0".encode(), tuple(fds))

    def forget(self, name: str) -> None:
        """Have the descriptors that are kept under a name closed."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}".encode(), ())

    def flush(self) -> None:
        """Send queued messages; to be called every second or so."""
        while self._unsent and self._try(*self._unsent[0]):
            _, fds = self._unsent.popleft()
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Send nothing more, and close the descriptors that were not taken."""
        waiting = [fd for _, fds in self._unsent for fd in fds]
        for fd in (*waiting, *(fd for _, fd in self._passed)):
            os.close(fd)
        self._unsent.clear()
        self._passed.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: bytes, fds: tuple[int, ...]) -> None:
        if self._socket is None:
            return
        self.flush()
        if self._unsent or not self._try(message, fds):
            if len(self._unsent) >= UNSENT_MAX:
                log.error("the service manager does not read its socket; a message to it is lost")
                return
            self._unsent.append((message, tuple(os.dup(fd) for fd in fds)))

    def _try(self, message: bytes, fds: tuple[int, ...]) -> bool:
        """Send a message; returns False if it must be tried again."""
        assert self._socket is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([message], rights, _DONT_WAIT, self._address)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            log.warning("cannot send %r to the service manager: %s", message.split(b"\n")[0], error)
        return True
