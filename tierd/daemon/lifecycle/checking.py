"""Checks a configuration, alike for `tierd serve`, a reload and `tierd config check`.

Reports all problems at once. Opens, takes and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tierd.backend import Backend
from tierd.config import Config, read
from tierd.core.l2.sharing import segment_bytes
from tierd.daemon.l2.pressure import ThisMachine
from tierd.daemon.l3.backends import make_backend
from tierd.daemon.lifecycle.listening import check_sockets, lock_of, socket_problems
from tierd.errors import ConfigError
from tierd.limits import shortfalls
from tierd.locks import holder_of, parent_of
from tierd.memory.arena import check_capacity
from tierd.memory.placement import find_node


def checked(
    path: Path, environ: Mapping[str, str], *, beside: bool = False, elsewhere: bool = False
) -> Config:
    """Return the configuration if tierd can serve with it. Raises ConfigError with all problems.

    `beside` allows that another tierd serves on its socket; this process itself is always allowed.
    `elsewhere` leaves out the checks that depend on this machine.
    """
    config, problems = read(path, environ)
    found = [*refusals(config, beside=beside, elsewhere=elsewhere)]
    problems += [f"{path}: {problem}" for problem in found]
    if problems:
        raise ConfigError(*problems)
    return config


def refusals(config: Config, *, beside: bool = False, elsewhere: bool = False) -> Iterator[str]:
    """Yield the problems of a configuration with valid keys; see `checked`."""
    backends: dict[str, Backend] = {}
    for tier in config.storage:
        try:
            backends.setdefault(tier.name, make_backend(tier))
        except ConfigError as error:
            yield from error.problems
    yield from _shared_places(config, backends)
    bad_sockets = [*_raised(lambda: check_sockets(config))]
    yield from bad_sockets
    if elsewhere:
        return
    yield from _raised(lambda: check_capacity(config.host.capacity))
    yield from _raised(lambda: find_node(config.host.numa_node))
    serving = holder_of(lock_of(Path(config.socket)))
    aside = serving if beside or serving == os.getpid() else 0
    if not bad_sockets:
        yield from socket_problems(config, aside)
    for name, backend in backends.items():
        for problem in backend.refusals(lambda pid: bool(aside) and aside in (pid, parent_of(pid))):
            yield f"storage ({name}): {problem}"


def warnings(config: Config) -> Iterator[str]:
    """Yield the limits of this process that keep host memory small; `serve` only warns of them.

    The memory that a serving tierd has allocated already is not considered.
    """
    serving = holder_of(lock_of(Path(config.socket))) > 0
    yield from shortfalls(
        config.host.capacity,
        segment_bytes(config.host.capacity),
        missing_bytes=0 if serving else config.host.capacity,
        available_bytes=ThisMachine().sample().available_bytes,
    )


def _shared_places(config: Config, backends: Mapping[str, Backend]) -> Iterator[str]:
    """Yield tiers that share one place: neither would know which blocks the other drops."""
    found: dict[tuple[str, str], str] = {}
    for tier in config.storage:
        if tier.name not in backends or not (place := backends[tier.name].place):
            continue
        real = os.path.realpath(place) if place.startswith("/") else place
        other = found.setdefault((tier.type, real), tier.name)
        if other != tier.name:
            yield (
                f"storage ({other}) and storage ({tier.name}) are both at {place}: give each "
                "its own place"
            )


def _raised(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except ConfigError as error:
        yield from error.problems
