"""A daemon with traffic and a storage tier, as tests of faults of the tier's server need it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.daemon_process import DaemonProcess
from tests.traffic import (
    DEADLINE_MS,
    HOST_CAPACITY,
    Footprint,
    Sample,
    Traffic,
    footprint,
    wait_until,
)
from tierd.client import Client

SLACK_MS = 100
"""An answer may come so much after its deadline, beside what the machine itself adds."""

QUICK_MS = 100
"""An acquire that waits for no tier takes at most this: a few ms on a machine that is idle."""

WAIT_S = 20.0
"""Until what must come has come, on the slowest machine; nothing is judged by it."""

TRAFFIC_S = 1.0
"""Traffic asks a tier for something in that time, however busy the machine is."""

CONNECTIONS_MAX = 4
"""A tier may keep so many connections more than it had before: its pool of eight was in use, but
perhaps not all of it. All faults of a kind of server together have to do with these."""

GROWTH_BYTES_MAX = 8 << 20
"""Anonymous memory that a daemon and its workers may have gained: allocators keep some. After all
faults together it is 2 or 3 MB."""


def table(kind: str, options: Mapping[str, object]) -> str:
    """A `[[storage]]` table as TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"type": kind, **options}.items()]
    return "\n".join(["[[storage]]", *lines, ""])


class Scene:
    """A daemon with one tier of type `kind`, and traffic that needs it, until `close`."""

    def __init__(self, directory: Path, kind: str, options: Mapping[str, object]) -> None:
        self.kind = kind
        self.daemon = DaemonProcess(directory, capacity=HOST_CAPACITY, storage=table(kind, options))
        probe, deadline = options["probe_ms"], options["deadline_ms"]
        assert isinstance(probe, int)
        assert isinstance(deadline, int)
        self.back_s = (probe + deadline) / 1000 + TRAFFIC_S
        """So soon a tier that is well again is used: the next probe, and one call on trial."""
        self._first: Footprint | None = None
        self._open = ExitStack()
        self._open.enter_context(self.daemon)
        self._status = Client(self.daemon.socket, name="scene", map_segments=False)
        self._open.callback(self._status.close)
        self.traffic = self._open.enter_context(Traffic(self.daemon))

    def close(self) -> None:
        """Stop the traffic and the daemon."""
        self._open.close()

    # --- looking --------------------------------------------------------------------

    def status(self) -> dict:
        """The daemon's status."""
        status: dict = self._status.status()
        return status

    def tier(self) -> dict:
        """The status of the tier."""
        (tier,) = self.status()["storage"]
        found: dict = tier
        return found

    def counter(self, *names: str) -> int:
        """The sum of some counters of the tier, which must exist."""
        counters = self.tier()["counters"]
        return sum(counters[name] for name in names)

    def used(self) -> int:
        """Blocks that came from the tier or went to it since the start."""
        return self.counter("get_hit_total", "put_stored_total")

    def stopped(self, what: str) -> bool:
        """Whether the breaker is open for "reads", or for "writes"."""
        return self.tier()["circuits"][what]["state"] in ("open", "half_open")

    def opened(self, what: str) -> int:
        """How often it has opened, failed trials included."""
        return int(self.tier()["circuits"][what]["opened_total"])

    def pid(self) -> int:
        """The daemon's process."""
        assert self.daemon.process is not None
        return self.daemon.process.pid

    def slow(self, started: float, ended: float) -> list[Sample]:
        """Acquires between two times that had to wait for something."""
        samples = self.traffic.since(started, ended)
        return [s for s in samples if self.traffic.lateness_ms(s, QUICK_MS) > 0]

    # --- waiting --------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> float:
        """Until `condition()`; the seconds that took. A client's complaint fails it at once."""

        def met() -> object:
            assert not self.traffic.faults, self.traffic.faults[:3]
            return condition()

        try:
            return wait_until(met, timeout_s, what)
        except AssertionError as error:
            log = self.daemon.log.read_text()[-3000:]
            raise AssertionError(f"{error}; tier: {self.tier()}; log: {log}") from None

    def wait_more(self, what: str, *counters: str, count: int = 1) -> float:
        """Until some counters have gone up together by `count`; the seconds that took."""
        before = self.counter(*counters)
        return self.wait(lambda: self.counter(*counters) >= before + count, what)

    def wait_in_use(self) -> None:
        """Until blocks come from the tier and go to it."""
        self.wait_more("the tier is not read", "get_hit_total", count=10)
        self.wait_more("the tier is not written", "put_stored_total", "put_present_total")

    # --- judging --------------------------------------------------------------------

    @contextmanager
    def judged(self) -> Iterator[Scene]:
        """Around a fault that comes and goes. Before it the tier is in use; after it everything
        must be right that always is, and no more must be held than before the first one."""
        self.wait_in_use()
        self._first = self._first or self._settle()
        began = time.monotonic()
        yield self
        self._check(began, self._first, self._settle())

    def _settle(self) -> Footprint:
        """Stop the traffic until nothing is under way; what is held then. Starts it again."""
        self.traffic.pause()
        self.wait(self._idle, "something stays under way")
        held = footprint(self.pid())
        self.traffic.resume()
        return held

    def _idle(self) -> bool:
        status = self.status()
        host = status["host"]
        return not (
            host["leases"]
            or host["writing_blocks"]
            or host["backlog_blocks"]
            or any(tier["backup_queue"] for tier in status["storage"])
        )

    def _check(self, began: float, before: Footprint, after: Footprint) -> None:
        assert not self.traffic.faults, self.traffic.faults[:3]
        late_ms, sample = self.traffic.latest(self.traffic.since(began), DEADLINE_MS)
        assert late_ms <= SLACK_MS, f"answered {late_ms:.0f} ms late: {sample}"
        # By the daemon's own clock as well, of which nothing is taken off.
        assert not self.status()["counters"].get("answers_late_total", 0)
        assert after.processes == before.processes, (before, after)
        assert after.descriptors <= before.descriptors + CONNECTIONS_MAX, (before, after)
        assert after.anonymous_bytes <= before.anonymous_bytes + GROWTH_BYTES_MAX, (before, after)
        log = self.daemon.log.read_text()
        assert "Traceback" not in log, log[-6000:]
        assert not self.status()["counters"].get("internal_errors_total", 0), log[-6000:]
