"""The sockets that the daemon listens on: its own, or one that the service manager holds."""

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
"""Of sockaddr_un, with its closing zero."""


class EngineSocket(NamedTuple):
    """Where engines connect."""

    listener: socket.socket
    own: Path | None
    """Its path, if this process made it and so gives it its mode."""

    def open_to(self, allowed: Collection[int]) -> None:
        """Let the users that are allowed reach it: all of them if it is not only root and the
        daemon's own, for the daemon has each one's id from the kernel, and turns others away.

        A socket of the service manager's has the mode that its unit gives it.
        """
        if self.own is None:
            return
        everybody = any(uid not in (0, os.getuid()) for uid in allowed)
        try:
            self.own.chmod(0o666 if everybody else 0o660)
        except OSError as error:
            log.warning("cannot change the mode of %s: %s", self.own, error)


@contextlib.contextmanager
def engine_socket(path: Path, manager: ServiceManager) -> Iterator[EngineSocket]:
    """Where engines connect: what the manager passed, else a socket of our own.

    One that was passed stays: engines that connect while no daemon runs wait for the next one.
    Raises ConfigError, also if what was passed is another socket than `path`.
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
    """A listening socket for metrics and health, if one is configured. Raises ConfigError."""
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
    """A listening socket at `path`, which no other tierd has; removed afterwards.

    A socket that a killed daemon left is taken over, and a living one's is not touched.
    Raises ConfigError.
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
    """Raise ConfigError for sockets that could not be listened on, wherever tierd is started."""
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
    """Why the sockets could not be listened on here; the tierd `aside` is about to let go of
    them. Nothing is made."""
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
    """The lock file beside a socket, which says what tierd has it."""
    return Path(f"{path}.lock")


def _taken(path: Path, holder: str) -> str:
    return f"another tierd (pid {holder}) serves on {path}: stop it or set another socket"


def check_path(path: Path) -> None:
    """Raise ConfigError if no socket can have this name."""
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path {path} is longer than the {PATH_BYTES_MAX} bytes that unix allows"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be the one tierd that serves on `path`: a lock file beside it says who is alive."""
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
        raise ConfigError(f"cannot replace stale socket {path}: {error}") from error


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
