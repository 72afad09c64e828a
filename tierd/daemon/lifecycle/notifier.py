"""Notifies the service manager while the daemon runs: its status line, and the watchdog.

All messages are sent from the event loop, so that they stop when the loop hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Final

from tierd.daemon.http.admin import Admin, Phase
from tierd.daemon.http.health import Health
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.daemon.node import Node
from tierd.sizes import about

log = logging.getLogger("tierd")

STATUS_S: Final = 5.0
"""Interval of status lines. With 1,024 namespaces, making one takes 20 ms of the loop."""

HURRY_S: Final = 0.5
"""Interval of status lines during start and stop, when an operator may be waiting."""

EXTEND_S: Final = 30.0
"""Extension of the start timeout, requested every HURRY_S while the daemon starts: it may start for
as long as its loop runs, whatever TimeoutStartSec says."""

FEEDS: Final = 4
"""WATCHDOG=1 messages per watchdog time; sd_watchdog_enabled(3) recommends two."""

LINE_CHARS_MAX: Final = 500


def extension() -> str:
    """Return the message that asks for more time to start."""
    return f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}"


class Notifier:
    """Notifies one service manager about the node."""

    def __init__(self, manager: ServiceManager, node: Node, admin: Admin, health: Health) -> None:
        self.refused = ""
        """Why the last reload was refused; empty if it was applied."""
        self._manager = manager
        self._node = node
        self._admin = admin
        self._health = health
        self._said = ""
        self._unwell = False

    @contextlib.asynccontextmanager
    async def notifying(self) -> AsyncIterator[None]:
        """Send notifications until the block ends."""
        tasks = [asyncio.create_task(self._health.probe(), name="health")]
        if self._manager.present:
            tasks.append(asyncio.create_task(self._report_status(), name="status"))
        if self._manager.watchdog_us:
            tasks.append(asyncio.create_task(self._feed(), name="watchdog"))
        for task in tasks:
            task.add_done_callback(_log_bug)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def ready(self) -> None:
        """Report that the daemon serves, after its start or a reload."""
        if self._admin.phase is not Phase.STOPPING:
            self._manager.notify("READY=1", self._line())

    def stopping(self, budget_s: float) -> None:
        """Report that the daemon stops, which may take `budget_s`."""
        self._manager.notify(
            "STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(budget_s * 1e6)}", self._line()
        )

    def _line(self) -> str:
        backlog = self._node.left()
        self._said = status_line(self._admin.phase, self._node.status(), backlog, self.refused)
        return f"STATUS={self._said}"

    async def _report_status(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = 0.0
        while True:
            phase = self._admin.phase
            if phase is not Phase.SERVING or loop.time() >= due_s:
                due_s = loop.time() + STATUS_S
                before, line = self._said, self._line()
                news = [line] if self._said != before else []
                if phase is Phase.STARTING:
                    news.append(extension())
                if news:
                    self._manager.notify(*news)
            self._manager.flush()
            await asyncio.sleep(HURRY_S)

    async def _feed(self) -> None:
        interval_s = self._manager.watchdog_us / 1e6 / FEEDS
        while True:
            self.feed()
            await asyncio.sleep(interval_s)

    def feed(self) -> None:
        """Send WATCHDOG=1 unless the daemon is in trouble."""
        trouble = self._health.trouble
        if not trouble:
            self._manager.notify("WATCHDOG=1")
            if self._unwell:
                log.warning("the daemon is healthy again, and sends WATCHDOG=1 again")
        elif not self._unwell:
            log.error(
                "%s: WATCHDOG=1 is withheld, and the service manager ends tierd after %.0f s",
                trouble,
                self._manager.watchdog_us / 1e6,
            )
        self._unwell = bool(trouble)


def status_line(phase: Phase, status: Mapping[str, object], backlog: int, refused: str) -> str:
    """Return the status line of a node; `backlog` blocks wait for tiers."""
    host, counters = status["host"], status["counters"]
    tiers = status["storage"]
    assert isinstance(host, Mapping)
    assert isinstance(counters, Mapping)
    assert isinstance(tiers, list)
    parts = [f"L2 {about(host['used_bytes'])} of {about(host['capacity_bytes'])}"]
    if asked := counters.get("requested_blocks_total", 0):
        hits = counters.get("loaded_blocks_total", 0)
        parts[0] += f" ({hits} hits of {asked} blocks = {100 * hits / asked:.0f} %)"
    parts += [f"{tier['name']} {tier['state']}" for tier in tiers]
    if phase is Phase.STOPPING:
        parts = [f"{backlog} blocks wait for backup", *parts[1:]]
    if refused:
        parts.insert(0, f"RELOAD REFUSED ({refused})")
    return f"{phase.value}: {', '.join(parts)}".replace("\n", " ")[:LINE_CHARS_MAX]


def _log_bug(task: asyncio.Task[None]) -> None:
    """Log a bug. Engines are still served; without WATCHDOG=1 the manager restarts tierd."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the task %s ended by a bug of tierd", task.get_name(), exc_info=error)
