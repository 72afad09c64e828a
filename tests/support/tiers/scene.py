"""A daemon with traffic and a storage tier, for tests of faults of the tier's server."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ParamSpec

from tests.support.daemon_process import DaemonProcess
from tests.support.traffic import (
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
"""Allowed delay of an answer after its deadline."""

QUICK_MS = 200
"""An acquire that waits for no tier takes a few ms, more on a busy machine; one that waits for a
tier in vain takes longer than this: its deadline."""

WAIT_S = 20.0
"""Timeout for expected events, on the slowest machine; no verdict depends on it."""

TRAFFIC_S = 1.0
"""Traffic asks a tier for blocks within this time, however busy the machine is."""

CONNECTIONS = 4
"""Connections per pool of a tier's client, which keeps as many as it has needed at once."""

GROWTH_BYTES_MAX = 8 << 20
"""Anonymous memory that a daemon and its workers may gain after the first fault: allocators keep
some, about 3 MiB after all kinds of faults, and no more after repeated ones."""

STALL_MS = 50
"""A process that is ready to run and waits this long for a CPU shows a machine that is busy with
other work; other processes may have waited as well."""

TRIES = 3
"""Runs of a scene, as long as the machine stalls this process in each of them."""

_P = ParamSpec("_P")


class StalledError(AssertionError):
    """Answers were late, but the process that waited for them was stalled at that time."""


def again_if_stalled(test: Callable[_P, None]) -> Callable[_P, None]:
    """Run a test again after a StalledError: only a stall of the machine is forgiven."""

    @functools.wraps(test)
    def played(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for _ in range(TRIES - 1):
            with suppress(StalledError):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return played


WRITTEN = {"write_policy": "write_through"}
"""Endless traffic must be written endlessly, whatever a write budget says."""


CLOSE_S = 5.0
"""Time after which connections of a probe or an abandoned call are closed."""


def table(kind: str, options: Mapping[str, object]) -> str:
    """A `[[storage]]` table as TOML."""
    lines = [
        f"{key} = {json.dumps(value)}"
        for key, value in {"type": kind, **WRITTEN, **options}.items()
    ]
    return "\n".join(["[[storage]]", *lines, ""])


def is_idle(status: dict) -> bool:
    """Whether a daemon has no lease, reservation, or block to back up."""
    host = status["host"]
    return not (
        host["leases"]
        or host["writing_blocks"]
        or host["backlog_blocks"]
        or any(tier["backup_queue"] for tier in status["storage"])
    )


def check_returned(before: Footprint, after: Footprint, connections_max: int) -> None:
    """Assert that an idle daemon holds no more than before: open files exactly, connections up to
    its pools' sizes, memory up to what allocators keep."""
    assert after.processes == before.processes, (before, after)
    assert after.files == before.files, (before, after)
    assert after.connections <= connections_max, (before, after)
    assert after.anonymous_bytes <= before.anonymous_bytes + GROWTH_BYTES_MAX, (before, after)


class Scene:
    """A daemon with one tier of type `kind`, and traffic that needs it, until `close`.

    The tier's client has `pools` connection pools.
    """

    def __init__(
        self, directory: Path, kind: str, options: Mapping[str, object], *, pools: int
    ) -> None:
        self.kind = kind
        self._connections_max = pools * CONNECTIONS
        storage = table(kind, {**options, "connections": CONNECTIONS})
        self.daemon = DaemonProcess(directory, capacity=HOST_CAPACITY, storage=storage)
        probe, deadline = options["probe_ms"], options["deadline_ms"]
        assert isinstance(probe, int)
        assert isinstance(deadline, int)
        self.back_s = (probe + deadline) / 1000 + TRAFFIC_S
        """A recovered tier is used again within this time: the next probe, and one trial call."""
        self._first: Footprint | None = None
        self._open = ExitStack()
        self._open.enter_context(self.daemon)
        self._status = Client(self.daemon.socket, name="scene", map_segments=False)
        self._open.callback(self._status.close)
        self.traffic = self._open.enter_context(Traffic(self.daemon))

    def close(self) -> None:
        """Stop the traffic and the daemon."""
        self._open.close()

    # --- state ----------------------------------------------------------------------

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
        """Blocks that were read from the tier or written to it since the start."""
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

    # --- waiting --------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> float:
        """Wait for `condition()`; returns the seconds. A client's fault fails it at once."""

        def met() -> object:
            assert not self.traffic.faults, self.traffic.faults[:3]
            return condition()

        try:
            return wait_until(met, timeout_s, what)
        except AssertionError as error:
            log = self.daemon.log.read_text()[-3000:]
            raise AssertionError(f"{error}; tier: {self.tier()}; log: {log}") from None

    def wait_more(self, what: str, *counters: str, count: int = 1) -> float:
        """Wait until the sum of some counters has risen by `count`; returns the seconds."""
        before = self.counter(*counters)
        return self.wait(lambda: self.counter(*counters) >= before + count, what)

    def wait_in_use(self) -> None:
        """Wait until blocks are read from the tier and written to it."""
        self.wait_more("the tier is not read", "get_hit_total", count=10)
        self.wait_more("the tier is not written", "put_stored_total", "put_present_total")

    # --- verdicts -------------------------------------------------------------------

    @contextmanager
    def judged(self) -> Iterator[Scene]:
        """Around a fault that comes and goes. Before it, the tier is in use. After it, the
        invariants must hold, and the daemon must hold no more resources than before the first
        fault."""
        self.wait_in_use()
        self._first = self._first or self.settle()
        began = time.monotonic()
        yield self
        self._check(began, self._first, self.settle(self._first.files))

    def settle(self, files: int | None = None) -> Footprint:
        """Pause the traffic until the daemon is idle, and for a while until it has that number of
        open files; returns its resources. Resumes the traffic."""
        self.traffic.pause()
        self.wait(lambda: is_idle(self.status()), "the daemon does not become idle")
        if files is not None:
            # A connection that is being opened or closed is an open file like any other.
            with suppress(AssertionError):
                wait_until(lambda: footprint(self.pid()).files == files, CLOSE_S, "open files")
        held = footprint(self.pid())
        self.traffic.resume()
        return held

    def _check(self, began: float, before: Footprint, after: Footprint) -> None:
        assert not self.traffic.faults, self.traffic.faults[:3]
        check_returned(before, after, self._connections_max)
        log = self.daemon.log.read_text()
        assert "Traceback" not in log, log[-6000:]
        assert not self.status()["counters"].get("internal_errors_total", 0), log[-6000:]
        self.at_most(0, DEADLINE_MS + SLACK_MS, self.traffic.since(began))

    def at_most(self, count: int, allowed_ms: float, samples: Sequence[Sample]) -> None:
        """Fail if more than `count` acquires took longer than allowed, not counting stalls of this
        process; with StalledError if the machine alone may have been the reason."""
        long = [s for s in samples if s.seconds * 1000 > allowed_ms]
        slow = [s for s in long if s.seconds * 1000 - self.traffic.stall_ms(s) > allowed_ms]
        if len(slow) <= count:
            return
        told = [(round(s.seconds * 1000), round(self.traffic.stall_ms(s))) for s in slow]
        late = self.status()["counters"].get("answers_late_total", 0)
        what = f"{len(slow)} and not {count} of {len(samples)} took over {allowed_ms} ms; each "
        what += f"one's ms, and of a stall beside it: {told}; late from the daemon: {late}"
        unexplained = sum(stall < STALL_MS for _, stall in told)
        raise StalledError(what) if unexplained <= count else AssertionError(what)
