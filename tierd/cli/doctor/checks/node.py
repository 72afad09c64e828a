"""Checks of the daemon: configuration, socket, answer, versions, service and tiers."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierd import __version__
from tierd.cli.common.operator import Operator, table, tables, whole
from tierd.cli.common.text import latency
from tierd.cli.doctor.checks.finding import Finding, Level
from tierd.config import Config, load
from tierd.errors import ConfigError, RefusedError, TierdError

SLOW_ANSWER_S: Final = 0.1
"""A slower STATUS is a warning: it takes a few milliseconds, and engines wait for the same loop."""

SYSTEMCTL_S: Final = 3.0

_CLIENT: Final = re.compile(r"(?P<name>.*) \(tierd (?P<version>[^()]+)\)")
"""How tierd's own clients name themselves."""

_MUST_AGREE: Final = ("hash_root", "block_tokens", "block_bytes", "groups", "layout")
_TOLD: Final = ("hash_root", "block_tokens")
"""Fields in which two engines of one model should not differ. The rest of `_MUST_AGREE`
follows from them."""


@dataclass
class Scene:
    """What the checks know about the node so far."""

    config_path: Path
    socket: str
    user: str | None = None
    config: Config | None = None
    status: dict[str, object] | None = None
    pid: int = 0
    """Process id of the daemon, 0 if unknown."""
    root: Path = Path("/")

    @property
    def daemon_uid(self) -> int | None:
        """User id of the daemon's process, None if unknown."""
        try:
            return (self.root / f"proc/{self.pid}").stat().st_uid if self.pid else None
        except OSError:
            return None


def read_config(scene: Scene) -> ConfigError | None:
    """Load the configuration into the scene; return the error if that fails."""
    try:
        scene.config = load(scene.config_path, os.environ)
    except ConfigError as error:
        return error
    return None


def look_at_config(scene: Scene, error: ConfigError | None) -> Finding:
    """Return the finding about the configuration. Call it after `look_at_daemon`."""
    if error is None:
        return Finding(Level.OK, "configuration", "config", f"{scene.config_path} is valid")
    away = isinstance(error.__cause__, FileNotFoundError)
    if isinstance(error.__cause__, PermissionError) or (away and scene.status is not None):
        return Finding(
            Level.NOTE,
            "configuration",
            "config_unseen",
            str(error),
            "the tiers cannot be checked",
            "pass the daemon's file with --config; run this as root or as tierd's user",
        )
    return Finding(
        Level.FAULT,
        "configuration",
        "config",
        str(error),
        "tierd does not start with this file, and a reload has no effect",
        "correct the file, or pass another with --config; `tierd config check` lists all problems",
    )


def look_at_daemon(scene: Scene) -> Iterator[Finding]:
    """Connect to the daemon and keep its status in the scene."""
    path = Path(scene.socket)
    try:
        found = path.stat()
    except FileNotFoundError:
        yield Finding(
            Level.FAULT,
            "daemon",
            "no_socket",
            f"no socket at {path}",
            "engines run without tierd and recompute every prefix",
            "start tierd: systemctl start tierd; or pass its socket with --socket",
        )
        return
    except PermissionError as error:
        yield _denied(path, f"cannot access {path}: {error.strerror}")
        return
    if not stat.S_ISSOCK(found.st_mode):
        yield Finding(
            Level.FAULT,
            "daemon",
            "not_a_socket",
            f"{path} is not a socket",
            "tierd does not start while another file has this name",
            "remove the file, or set another path in `socket`",
        )
        return
    yield from _connect(scene, path)
    yield from _user(scene, found)


def _connect(scene: Scene, path: Path) -> Iterator[Finding]:
    try:
        scene.pid = _listener_pid(path)
        with Operator(scene.socket, "tierd doctor") as operator:
            began_s = time.perf_counter()
            status = operator.status()
            took_s = time.perf_counter() - began_s
    except PermissionError as error:
        yield _denied(path, f"this user may not connect to {path}: {error.strerror}")
        return
    except ConnectionRefusedError:
        yield Finding(
            Level.FAULT,
            "daemon",
            "nobody_listens",
            f"no process listens on {path}: the daemon was killed and left the socket behind",
            "engines recompute every prefix until tierd runs again",
            "systemctl start tierd; journalctl -u tierd shows how the previous daemon ended",
        )
        return
    except (OSError, RefusedError, TierdError) as error:
        uid_refused = "allow_uids" in str(error)
        yield Finding(
            Level.FAULT,
            "daemon",
            "refused" if uid_refused else "bad_answer",
            str(error),
            "tierd refuses this user's engines and commands"
            if uid_refused
            else "the server is not a tierd of this protocol version, or tierd has failed",
            "add the uid to allow_uids (keep root's, 0, and tierd's own), then reload tierd"
            if uid_refused
            else "compare `tierd --version` with the daemon's version; journalctl -u tierd",
        )
        return
    scene.status = status
    version = str(status["version"])
    slow = took_s > SLOW_ANSWER_S
    yield Finding(
        Level.WARNING if slow else Level.OK,
        "daemon",
        "answers",
        f"tierd {version} answers in {latency(took_s)}",
        "every call from an engine waits for the same event loop" if slow else "",
        "check that the machine has idle cores and free memory: top, /proc/pressure"
        if slow
        else "",
    )
    if version != __version__:
        yield Finding(
            Level.WARNING,
            "daemon",
            "version_skew",
            f"the daemon is tierd {version}, this command is tierd {__version__}",
            "one of them was not upgraded, or the daemon was not restarted after an upgrade",
            "systemctl restart tierd (host memory is kept), or run the command from the daemon's "
            "installation",
        )
    yield from _clients(status, version)


def _clients(status: Mapping[str, object], version: str) -> Iterator[Finding]:
    clients = table(status.get("clients", {}))
    for client in clients:
        named = _CLIENT.fullmatch(client)
        if named is not None and named["version"] not in (version, __version__):
            yield Finding(
                Level.WARNING,
                "engine",
                "connector_skew",
                f"{named['name']} runs tierd {named['version']}, the daemon runs {version}",
                "their protocols are compatible, but this pair of versions is not tested",
                f"pip install tierd=={version} in the engine's environment, and restart the engine",
            )
    refused = whole(table(status["counters"]).get("clients_refused_total", 0))
    if refused:
        yield Finding(
            Level.WARNING,
            "daemon",
            "clients_refused",
            f"tierd has refused {refused} clients since it started",
            "engines of users who are not in allow_uids run without tierd",
            "journalctl -u tierd names the refused processes; add their uids to allow_uids and "
            "reload tierd",
        )


def _denied(path: Path, what: str) -> Finding:
    return Finding(
        Level.FAULT,
        "daemon",
        "denied",
        what,
        "engines of this user run without tierd",
        f"add the user to the group of {path.parent} and of the socket (`ls -ld`), and add the "
        "uid to allow_uids",
    )


def _listener_pid(path: Path) -> int:
    """Return the listener's process id, 0 for a socket that systemd made. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        sock.connect(os.fspath(path))
        size = struct.calcsize("3i")
        pid: int = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )[0]
    return pid if pid > 1 else 0


def _user(scene: Scene, found: os.stat_result) -> Iterator[Finding]:
    """Check by the socket's mode and allow_uids whether `--user` may connect."""
    if scene.user is None:
        return
    uid, groups = user_of(scene.user)
    path = Path(scene.socket)
    closed = [parent for parent in path.parents if not _may(parent.stat(), uid, groups, 0o1)]
    if closed or not _may(found, uid, groups, 0o2):
        yield Finding(
            Level.FAULT,
            "daemon",
            "user_denied",
            f"user {scene.user} cannot reach {path}: check the mode of {(closed or [path])[-1]}",
            "engines of this user run without tierd",
            "give the user access to that directory: chmod o+x"
            if closed
            else "add the uid to allow_uids and reload tierd: this opens the socket to the user",
        )
    daemon_uid = scene.daemon_uid
    allowed = set(scene.config.allow_uids if scene.config else [])
    own = {0, found.st_uid if daemon_uid is None else daemon_uid}
    if scene.config is not None and uid not in (allowed or own):
        yield Finding(
            Level.FAULT,
            "daemon",
            "user_not_allowed",
            f"user {scene.user} has uid {uid}, which is not in allow_uids",
            "tierd refuses this user's engines",
            f"set allow_uids to {sorted((allowed or own) | {uid})} and reload tierd",
        )


def user_of(text: str) -> tuple[int, set[int]]:
    """Return the uid and groups of a user given by name or uid. Raises KeyError for an unknown
    name; an unknown uid is accepted, since it may exist only in a container."""
    try:
        who = pwd.getpwuid(int(text)) if text.isdecimal() else pwd.getpwnam(text)
    except KeyError:
        if not text.isdecimal():
            raise
        return int(text), set()
    return who.pw_uid, set(os.getgrouplist(who.pw_name, who.pw_gid))


def _may(found: os.stat_result, uid: int, groups: set[int], bit: int) -> bool:
    """Return whether the mode gives a user a permission: 1 to search, 2 to write."""
    if uid == 0:
        return True
    if found.st_uid == uid:
        return bool(found.st_mode & bit << 6)
    return bool(found.st_mode & (bit << 3 if found.st_gid in groups else bit))


def look_at_tiers(status: Mapping[str, object]) -> Iterator[Finding]:
    """Check the tiers by the daemon's status."""
    for tier in tables(status["storage"]):
        subject = f"tier {tier['name']}"
        if tier["state"] in ("failing", "unavailable"):
            shut = [
                f"{what}: {table(circuit)['why']}"
                for what, circuit in table(tier["circuits"]).items()
                if table(circuit)["state"] != "closed"
            ]
            yield Finding(
                Level.WARNING,
                subject,
                "tier_away",
                "the daemon does not use this tier: "
                f"{tier['why'] or '; '.join(shut) or tier['state']}",
                "engines recompute its blocks, and it receives no new ones",
                "fix the stated cause; tierd retries by itself (probe_ms)",
            )
        corrupt = table(tier["counters"]).get("corrupt_total", 0)
        if corrupt:
            yield Finding(
                Level.WARNING,
                subject,
                "tier_corrupt",
                f"{corrupt} blocks were corrupt when read; tierd served none of them",
                "a faulty disk, cable or memory will corrupt more blocks",
                "run tierd scrub; check the disk with smartctl -a and the kernel's log",
            )
        transit = table(tier["counters"]).get("damaged_in_transit_total", 0)
        if transit:
            yield Finding(
                Level.WARNING,
                subject,
                "tier_transit",
                f"{transit} reads were corrupted in transit and differed on a second read; tierd "
                "served none of them",
                "the stored blocks are intact and kept, but this node will corrupt more reads",
                "check this node's network, cables, disk controller and memory",
            )


_NO_FIELDS: Final = frozenset({"digest", "blocks", "memory_bytes", "sessions"})
"""Entries of a namespace in the status that are not fields of the namespace."""


def look_at_namespaces(status: Mapping[str, object]) -> Iterator[Finding]:
    """Report pairs of engines that could share blocks but differ in one setting."""
    used = [space for space in tables(status["namespaces"]) if space["sessions"]]
    for at, one in enumerate(used):
        for other in used[at + 1 :]:
            differ = {name for name in one if one[name] != other[name] and name not in _NO_FIELDS}
            told = [name for name in _TOLD if name in differ]
            if not told or differ - set(_MUST_AGREE):
                continue
            remedy = {
                "hash_root": "set the same PYTHONHASHSEED for all engines, or leave it unset",
                "block_tokens": "set the same --block-size for all engines",
            }[told[0]]
            yield Finding(
                Level.WARNING,
                "engine",
                "cannot_share",
                f"two engines of {one['model']} differ in {told[0]}: {one[told[0]]} and "
                f"{other[told[0]]}",
                "neither engine finds the other's blocks",
                remedy,
            )


def read_service() -> dict[str, str]:
    """Return systemd's properties of tierd.service; empty if no systemd answers."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return {}
    names = "LoadState,ActiveState,Result,NRestarts,MainPID,NFileDescriptorStore,WatchdogUSec"
    try:
        done = subprocess.run(
            ["systemctl", "show", "tierd.service", f"--property={names}"],
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def look_at_service(
    service: Mapping[str, str], status: Mapping[str, object] | None
) -> Iterator[Finding]:
    """Check the systemd unit."""
    if service.get("LoadState") != "loaded":
        if status is not None:
            yield Finding(
                Level.NOTE,
                "service",
                "no_unit",
                "tierd does not run as a systemd service",
                "when it stops, host memory is lost and systemd does not restart it",
                'sudo "$(command -v tierd)" install-units, unless '
                "another service manager runs tierd",
            )
        return
    state = service.get("ActiveState", "")
    if state == "failed":
        yield Finding(
            Level.FAULT,
            "service",
            "unit_failed",
            f"tierd.service has failed: {service.get('Result', '')}",
            "systemd no longer tries to start it",
            "journalctl -u tierd shows the cause; then systemctl reset-failed tierd and "
            "systemctl start tierd",
        )
    elif state != "active" and status is not None:
        yield Finding(
            Level.WARNING,
            "service",
            "unit_inactive",
            f"a tierd answers, but tierd.service is {state}",
            "when that tierd stops, host memory is lost and systemd does not restart it",
            "stop that tierd, then systemctl start tierd",
        )
    restarts = service.get("NRestarts", "0")
    if state == "active" and restarts not in ("", "0"):
        yield Finding(
            Level.WARNING,
            "service",
            "restarts",
            f"systemd has restarted tierd {restarts} times",
            "tierd exited by itself, or the watchdog killed it",
            "journalctl -u tierd -p warning; `systemctl restart tierd` resets this count",
        )
    if state == "active" and status is not None:
        yield from _kept(service, status)


def _kept(service: Mapping[str, str], status: Mapping[str, object]) -> Iterator[Finding]:
    kept = service.get("NFileDescriptorStore", "")
    if table(status["host"])["allocated_bytes"] and kept == "0":
        yield Finding(
            Level.WARNING,
            "service",
            "nothing_kept",
            "systemd keeps no file descriptor of host memory",
            "host memory is empty after a restart",
            "tierd install-units writes a unit with FileDescriptorStoreMax=; then restart tierd "
            "once",
        )
    if service.get("WatchdogUSec") in ("0", "infinity"):
        yield Finding(
            Level.WARNING,
            "service",
            "no_watchdog",
            "the unit has no WatchdogSec=",
            "systemd does not restart a daemon that hangs",
            "tierd install-units",
        )
    else:
        yield Finding(
            Level.OK,
            "service",
            "unit",
            f"tierd.service is active; systemd keeps {kept or 'no'} file descriptors of host "
            "memory",
        )
