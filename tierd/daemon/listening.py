"""The sockets that the daemon listens on: its own, or one that the service manager holds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from tierd.config import AdminConfig, Config
from tierd.daemon.admin import tcp_address, tcp_listener
from tierd.daemon.service import ServiceManager
from tierd.errors import ConfigError

PATH_BYTES_MAX = 107
"""Of sockaddr_un, with its closing zero."""


@contextlib.contextmanager
def engine_socket(path: Path, manager: ServiceManager) -> Iterator[socket.socket]:
    """Where engines connect: what the manager passed, else a socket of our own.

    One that was passed stays: engines that connect while no daemon runs wait for the next one.
    Raises ConfigError, also if what was passed is another socket than `path`.
    """
    passed = manager.take_listeners()
    if not passed:
        with listening_socket(path) as listener:
            yield listener
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
            yield passed[names.index(str(path))]


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
    """Raise ConfigError for a socket that could not be listened on, wherever tierd is started."""
    check_path(Path(config.socket))
    if config.admin.listen.startswith("/"):
        check_path(Path(config.admin.listen))
    elif config.admin.listen:
        tcp_address(config.admin)


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
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use socket {path}: {error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"another tierd (pid {holder}) serves on {path}: stop it or set another socket"
            ) from error
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
