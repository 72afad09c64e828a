"""The daemon as this user meets it: configuration, socket, answer, versions, service, tiers."""

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
"""A STATUS takes some milliseconds; an engine's call waits behind the same loop."""

SYSTEMCTL_S: Final = 3.0

_CLIENT: Final = re.compile(r"(?P<name>.*) \(tierd (?P<version>[^()]+)\)")
"""What a client of tierd's own calls itself."""

_MUST_AGREE: Final = ("hash_root", "block_tokens", "block_bytes", "groups", "layout")
_TOLD: Final = ("hash_root", "block_tokens")
"""Fields in which two engines of one model should not differ; the others follow from them."""


@dataclass
class Scene:
    """What is known of the node while it is looked at."""

    config_path: Path
    socket: str
    user: str | None = None
    config: Config | None = None
    status: dict[str, object] | None = None
    pid: int = 0
    """The daemon's process, 0 if it is not known."""
    root: Path = Path("/")

    @property
    def daemon_uid(self) -> int | None:
        """Whose process the daemon is, None if that is not known."""
        try:
            return (self.root / f"proc/{self.pid}").stat().st_uid if self.pid else None
        except OSError:
            return None


def read_config(scene: Scene) -> ConfigError | None:
    """Load the configuration into the scene, or say why that cannot be done."""
    try:
        scene.config = load(scene.config_path, os.environ)
    except ConfigError as error:
        return error
    return None


def look_at_config(scene: Scene, error: ConfigError | None) -> Finding:
    """What there is to say of it, once it is known whether a daemon runs."""
    if error is None:
        return Finding(Level.OK, "configuration", "config", f"{scene.config_path} is sound")
    away = isinstance(error.__cause__, FileNotFoundError)
    if isinstance(error.__cause__, PermissionError) or (away and scene.status is not None):
        return Finding(
            Level.NOTE,
            "configuration",
            "config_unseen",
            str(error),
            "the tiers cannot be looked at",
            "name the daemon's file by --config; run this as root or as tierd's user",
        )
    return Finding(
        Level.FAULT,
        "configuration",
        "config",
        str(error),
        "tierd does not start with it, and a reload changes nothing",
        "mend the file, or name another by --config; `tierd config check` tells more",
    )


def look_at_daemon(scene: Scene) -> Iterator[Finding]:
    """Reach the daemon, and keep its status in the scene."""
    path = Path(scene.socket)
    try:
        found = path.stat()
    except FileNotFoundError:
        yield Finding(
            Level.FAULT,
            "daemon",
            "no_socket",
            f"there is no {path}",
            "engines find no tierd and compute everything themselves",
            "start it: systemctl start tierd; or name its socket by --socket",
        )
        return
    except PermissionError as error:
        yield _denied(path, f"{path} cannot be seen: {error.strerror}")
        return
    if not stat.S_ISSOCK(found.st_mode):
        yield Finding(
            Level.FAULT,
            "daemon",
            "not_a_socket",
            f"{path} is no socket",
            "tierd does not start while something else has this name",
            "remove it, or set another `socket`",
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
        yield _denied(path, f"{path} lets this user not connect: {error.strerror}")
        return
    except ConnectionRefusedError:
        yield Finding(
            Level.FAULT,
            "daemon",
            "nobody_listens",
            f"nobody listens on {path}: a daemon left it when it was killed",
            "engines compute everything themselves until tierd runs again",
            "systemctl start tierd; then journalctl -u tierd tells how the last one ended",
        )
        return
    except (OSError, RefusedError, TierdError) as error:
        uid_refused = "allow_uids" in str(error)
        yield Finding(
            Level.FAULT,
            "daemon",
            "refused" if uid_refused else "bad_answer",
            str(error),
            "this user's engines and commands are turned away"
            if uid_refused
            else "what answers is no tierd of this protocol, or one that is in trouble",
            "add the uid to allow_uids (with root's, 0, and tierd's own), then reload tierd"
            if uid_refused
            else "compare `tierd --version` with the daemon's; journalctl -u tierd",
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
        "every call of an engine waits behind the same loop" if slow else "",
        "see whether the machine has cores and memory to spare: top, /proc/pressure"
        if slow
        else "",
    )
    if version != __version__:
        yield Finding(
            Level.WARNING,
            "daemon",
            "version_skew",
            f"the daemon is tierd {version}, this command {__version__}",
            "one of them has not been upgraded, or the daemon not been restarted since",
            "systemctl restart tierd keeps host memory; or run this from the same installation",
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
                f"{named['name']} runs tierd {named['version']}, the daemon {version}",
                "they understand each other, or the session would have ended; neither was tried "
                "with the other",
                f"pip install tierd=={version} in the engine's environment, and restart it",
            )
    refused = whole(table(status["counters"]).get("clients_refused_total", 0))
    if refused:
        yield Finding(
            Level.WARNING,
            "daemon",
            "clients_refused",
            f"{refused} clients were turned away since the daemon started",
            "an engine of a user who is not in allow_uids runs without tierd",
            "journalctl -u tierd names their processes; add their uids to allow_uids, and reload",
        )


def _denied(path: Path, what: str) -> Finding:
    return Finding(
        Level.FAULT,
        "daemon",
        "denied",
        what,
        "engines of this user run without tierd",
        f"add the user to the group of {path.parent} and of the socket (`ls -ld`), and its uid to "
        "allow_uids",
    )


def _listener_pid(path: Path) -> int:
    """Who listens: of a socket that the service manager made, that is process 1. OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        sock.connect(os.fspath(path))
        size = struct.calcsize("3i")
        pid: int = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )[0]
    return pid if pid > 1 else 0


def _user(scene: Scene, found: os.stat_result) -> Iterator[Finding]:
    """Whether `--user` may connect, by the socket's mode and allow_uids."""
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
            f"user {scene.user} may not reach {path}: see the mode of {(closed or [path])[-1]}",
            "an engine of this user runs without tierd",
            "let the user into that directory: chmod o+x"
            if closed
            else "add its uid to allow_uids, and reload tierd: that opens the socket",
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
            "tierd turns this user's engines away",
            f"set allow_uids to {sorted((allowed or own) | {uid})}, and reload tierd",
        )


def user_of(text: str) -> tuple[int, set[int]]:
    """The id and groups of a user given by name or number, which may be one that only a container
    knows. Raises KeyError."""
    try:
        who = pwd.getpwuid(int(text)) if text.isdecimal() else pwd.getpwnam(text)
    except KeyError:
        if not text.isdecimal():
            raise
        return int(text), set()
    return who.pw_uid, set(os.getgrouplist(who.pw_name, who.pw_gid))


def _may(found: os.stat_result, uid: int, groups: set[int], bit: int) -> bool:
    """Whether a user has a permission, 1 to search or 2 to write, by the mode alone."""
    if uid == 0:
        return True
    if found.st_uid == uid:
        return bool(found.st_mode & bit << 6)
    return bool(found.st_mode & (bit << 3 if found.st_gid in groups else bit))


def look_at_tiers(status: Mapping[str, object]) -> Iterator[Finding]:
    """What the daemon itself says of its tiers."""
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
                f"the daemon does not use it: {tier['why'] or '; '.join(shut) or tier['state']}",
                "its blocks are computed again, and it gets no new ones",
                "mend what the reason names; tierd tries again by itself (probe_ms)",
            )
        corrupt = table(tier["counters"]).get("corrupt_total", 0)
        if corrupt:
            yield Finding(
                Level.WARNING,
                subject,
                "tier_corrupt",
                f"{corrupt} blocks were damaged when they were read; none was served",
                "a disk, cable or memory that damages bytes will do so again",
                "tierd scrub; smartctl -a and the kernel's log for the disk",
            )
        transit = table(tier["counters"]).get("damaged_in_transit_total", 0)
        if transit:
            yield Finding(
                Level.WARNING,
                subject,
                "tier_transit",
                f"{transit} reads were damaged on their way, but not twice alike; none was served",
                "the blocks are sound and kept; what damages them here will do so again",
                "look at this node's network, cables, disk controller and memory",
            )


_NO_FIELDS: Final = frozenset({"digest", "blocks", "memory_bytes", "sessions"})
"""What a status has of a namespace besides its fields."""


def look_at_namespaces(status: Mapping[str, object]) -> Iterator[Finding]:
    """Engines that could share blocks, and do not for one field."""
    used = [space for space in tables(status["namespaces"]) if space["sessions"]]
    for at, one in enumerate(used):
        for other in used[at + 1 :]:
            differ = {name for name in one if one[name] != other[name] and name not in _NO_FIELDS}
            told = [name for name in _TOLD if name in differ]
            if not told or differ - set(_MUST_AGREE):
                continue
            remedy = {
                "hash_root": "give all engines one PYTHONHASHSEED, or none",
                "block_tokens": "give all engines one --block-size",
            }[told[0]]
            yield Finding(
                Level.WARNING,
                "engine",
                "cannot_share",
                f"two engines of {one['model']} differ in {told[0]}: {one[told[0]]} and "
                f"{other[told[0]]}",
                "neither finds what the other has stored",
                remedy,
            )


def read_service() -> dict[str, str]:
    """What systemd says of tierd.service; empty where there is no systemd that answers."""
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
    """The unit, as far as there is one."""
    if service.get("LoadState") != "loaded":
        if status is not None:
            yield Finding(
                Level.NOTE,
                "service",
                "no_unit",
                "tierd is no service of systemd's here",
                "host memory is lost when it stops, and nobody starts it again",
                "sudo tierd install-units, unless something else runs it",
            )
        return
    state = service.get("ActiveState", "")
    if state == "failed":
        yield Finding(
            Level.FAULT,
            "service",
            "unit_failed",
            f"tierd.service has failed: {service.get('Result', '')}",
            "systemd has given up starting it",
            "journalctl -u tierd says why; then systemctl reset-failed tierd, and start it",
        )
    elif state != "active" and status is not None:
        yield Finding(
            Level.WARNING,
            "service",
            "unit_inactive",
            f"a tierd answers, but tierd.service is {state}",
            "host memory is lost when that one stops, and nobody starts it again",
            "stop it, and systemctl start tierd",
        )
    restarts = service.get("NRestarts", "0")
    if state == "active" and restarts not in ("", "0"):
        yield Finding(
            Level.WARNING,
            "service",
            "restarts",
            f"systemd has restarted tierd {restarts} times",
            "it ended by itself, or by its watchdog",
            "journalctl -u tierd -p warning; `systemctl restart tierd` counts from 0 again",
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
            "systemd keeps no descriptor of host memory",
            "a restart starts cold",
            "tierd install-units writes a unit with FileDescriptorStoreMax=; restart tierd once",
        )
    if service.get("WatchdogUSec") in ("0", "infinity"):
        yield Finding(
            Level.WARNING,
            "service",
            "no_watchdog",
            "the unit has no WatchdogSec=",
            "a daemon that hangs is not restarted",
            "tierd install-units",
        )
    else:
        yield Finding(
            Level.OK,
            "service",
            "unit",
            f"tierd.service is active; systemd keeps {kept or 'no'} descriptors of host memory",
        )
