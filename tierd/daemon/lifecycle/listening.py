"""The sockets that the daemon listens on: created here, or passed by the service manager."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from tierd.config import AdminConfig, Config
from tierd.daemon.http.admin import tcp_address, tcp_listener
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.errors import ConfigError
from tierd.locks import holder_of

log = logging.getLogger("tierd")

PATH_BYTES_MAX = 107
"""Longest path of a unix socket: sun_path of sockaddr_un without its final zero byte."""


class EngineSocket(NamedTuple):
    """The socket to which engines connect."""

    listener: socket.socket
    own: Path | None
    """Its path if this process created it, and so sets its mode; None if it was passed."""

    def open_to(self, allowed: Collection[int]) -> None:
        """Set the socket's mode so that the allowed users can connect.

        For users besides root and the daemon's own, all users may connect: the daemon gets each
        client's uid from the kernel and refuses the others. A socket passed by the service manager
        keeps the mode from its unit.
        """
        if self.own is None:
            return
        others = any(uid not in (0, os.getuid()) for uid in allowed)
        try:
            self.own.chmod(0o666 if others else 0o660)
        except OSError as error:
            log.warning("cannot change the mode of %s: %s", self.own, error)


@contextlib.contextmanager
def engine_socket(path: Path, manager: ServiceManager) -> Iterator[EngineSocket]:
    """Yield the socket for engines: passed by the service manager, else created at `path`.

    A passed socket outlives the daemon: engines that connect while no daemon runs wait for the next
    one. Raises ConfigError, also if the passed socket has another path.
    """
    passed = manager.take_listeners()
    if not passed:
        with listening_socket(path) as listener:
            yield EngineSocket(listener, path)
        return
    with contextlib.ExitStack() as stack:
        for sock in passed:
            stack.enter_context(sock)
        names = [sock.getsockname() for sock in passed]
        if str(path) not in names:
            raise ConfigError(
                f"the service manager listens on {', '.join(map(str, names))}, but socket is "
                f"{path}: make socket and ListenStream= of tierd.socket the same"
            )
        with _locked(path):
            yield EngineSocket(passed[names.index(str(path))], None)


@contextlib.contextmanager
def admin_socket(config: AdminConfig) -> Iterator[socket.socket | None]:
    """Yield a listening socket for HTTP, None if not configured. Raises ConfigError."""
    if not config.listen:
        yield None
    elif config.listen.startswith("/"):
        with listening_socket(Path(config.listen)) as listener:
            yield listener
    else:
        with tcp_listener(config) as listener:
            yield listener


@contextlib.contextmanager
def listening_socket(path: Path) -> Iterator[socket.socket]:
    """Yield a listening socket at `path`, which is removed afterwards.

    Replaces a socket that a killed daemon left. Raises ConfigError, also if another tierd serves on
    `path`.
    """
    with _locked(path):
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener:
            _bind(listener, path)
            try:
                yield listener
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()


def check_sockets(config: Config) -> None:
    """Raise ConfigError for sockets on which no machine could listen."""
    problems = []
    paths = [config.socket]
    if config.admin.listen.startswith("/"):
        paths.append(config.admin.listen)
    for path in paths:
        try:
            check_path(Path(path))
        except ConfigError as error:
            problems.append(str(error))
    if len(paths) != len({*map(os.path.realpath, paths)}):
        problems.append(f"socket and admin.listen are both {config.socket}: change one of them")
    if config.admin.listen and len(paths) == 1:
        try:
            tcp_address(config.admin)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(*problems)


def socket_problems(config: Config, aside: int) -> Iterator[str]:
    """Yield why this machine could not listen on the sockets; creates nothing.

    `aside` is the pid of a tierd that is about to release them, 0 if there is none.
    """
    for path in (Path(config.socket), Path(config.admin.listen)):
        if not path.is_absolute() and path != Path(config.socket):
            continue
        if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
            yield f"{path} exists and is not a socket: remove it or set another socket"
        holder = holder_of(lock_of(path))
        if holder not in (0, aside):
            yield _taken(path, str(holder))
        there = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
        if not there.is_dir():
            yield f"cannot use socket {path}: {there} is not a directory"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield f"cannot use socket {path}: this user may not write into {there}"
    if config.admin.listen and not config.admin.listen.startswith("/"):
        try:
            tcp_listener(config.admin).close()
        except ConfigError as error:
            cause = error.__cause__
            if not aside or not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                yield str(error)


def lock_of(path: Path) -> Path:
    """Return the lock file of a socket, which names the tierd that serves on it."""
    return Path(f"{path}.lock")


def _taken(path: Path, holder: str) -> str:
    return f"another tierd (pid {holder}) serves on {path}: stop it or set another socket"


def check_path(path: Path) -> None:
    """Raise ConfigError if the path is too long for a socket."""
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path {path} is longer than the {PATH_BYTES_MAX} bytes that unix allows"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file of `path`, so that no other tierd serves on it. Raises ConfigError."""
    check_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use socket {path}: {error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(_taken(path, holder)) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket: remove it or set another socket")
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot replace the stale socket {path}: {error}") from error


def _bind(listener: socket.socket, path: Path) -> None:
    old = os.umask(0o117)
    try:
        listener.bind(os.fspath(path))
        listener.listen(128)
    except OSError as error:
        why = "its directory is missing" if error.errno == errno.ENOENT else str(error)
        raise ConfigError(f"cannot listen on {path}: {why}") from error
    finally:
        os.umask(old)
