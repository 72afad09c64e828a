"""A fake service manager: receives a daemon's notifications, keeps its descriptors, restarts it.

It does the work of systemd's file descriptor store, so that a restart takes milliseconds and can be
inspected. test_systemd.py uses the real systemd.
"""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_FIRST_FD = 3

# Puts the descriptors where sd_listen_fds(3) expects them, and becomes the daemon.
_LAUNCH = """
import fcntl, os, sys
fds = [int(word) for word in sys.argv[1].split(",") if word]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 600) for fd in fds]
for fd in fds:
    os.close(fd)
for number, fd in enumerate(high):
    os.dup2(fd, 3 + number, inheritable=True)
    os.close(fd)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServiceManager:
    """Keeps descriptors by name, and the last value of every state. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.address = str(directory / "notify.sock")
        self.kept: list[tuple[str, int]] = []
        self.states: list[dict[str, str]] = []
        """Every message, in order."""
        self.listeners: list[tuple[str, socket.socket]] = []
        """Listening sockets that are passed on as well, by name."""
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ServiceManager:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        stop = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with stop:
            stop.sendto(b"", self.address)
        self._thread.join()
        self._socket.close()
        for _, fd in self.kept:
            os.close(fd)
        for _, listener in self.listeners:
            listener.close()

    def start(
        self, arguments: Sequence[str], *, log: int, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process that gets all kept descriptors; `log` is its stdout and stderr."""
        with self._changed:
            passed = [(name, sock.fileno()) for name, sock in self.listeners] + self.kept
            names, fds = [name for name, _ in passed], [fd for _, fd in passed]
            environ = {
                **os.environ,
                **(env or {}),
                "NOTIFY_SOCKET": self.address,
                "LISTEN_FDS": str(len(fds)),
                "LISTEN_FDNAMES": ":".join(names),
            }
            launch = [sys.executable, "-S", "-c", _LAUNCH, ",".join(map(str, fds))]
            return subprocess.Popen(
                [*launch, sys.executable, *arguments],
                pass_fds=fds,
                env=environ,
                stdout=log,
                stderr=log,
            )

    def names(self) -> set[str]:
        """Names of the kept descriptors."""
        with self._changed:
            return {name for name, _ in self.kept}

    def lose(self) -> None:
        """Close all kept descriptors, as at a reboot."""
        with self._changed:
            for _, fd in self.kept:
                os.close(fd)
            self.kept.clear()

    def wait_for(self, key: str, value: str | None = None, timeout_s: float = 20.0) -> None:
        """Wait until a state has been notified, with the given value if there is one."""
        with self._changed:
            told = self._changed.wait_for(
                lambda: any(key in state and value in (None, state[key]) for state in self.states),
                timeout_s,
            )
        assert told, f"{key} was not notified: {self.states[-5:]}"

    def forget_states(self) -> None:
        """Forget past states, so that `wait_for` waits for new ones."""
        with self._changed:
            self.states.clear()

    def _run(self) -> None:
        while True:
            data, control, _, _ = self._socket.recvmsg(
                1 << 16, socket.CMSG_SPACE(4 * 64), socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                return
            fds = array.array("i")
            for _, _, raw in control:
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
            lines = [line.partition("=") for line in data.decode().split("\n")]
            state = {key: value for key, _, value in lines}
            with self._changed:
                self._take(state, list(fds))
                self.states.append(state)
                del self.states[:-10_000]
                self._changed.notify_all()

    def _take(self, state: Mapping[str, str], fds: list[int]) -> None:
        name = state.get("FDNAME", "stored")
        if "FDSTORE" in state:
            for fd in fds:
                if any(os.path.sameopenfile(fd, known) for _, known in self.kept):
                    os.close(fd)
                else:
                    self.kept.append((name, fd))
            return
        for fd in fds:
            os.close(fd)
        if "FDSTOREREMOVE" in state:
            for entry in [entry for entry in self.kept if entry[0] == name]:
                os.close(entry[1])
                self.kept.remove(entry)
