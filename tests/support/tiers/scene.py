"""A daemon with traffic and a storage tier, as tests of faults of the tier's server need it."""

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
"""An answer may come so much after its deadline."""

QUICK_MS = 200
"""An acquire that waits for no tier takes a few ms, more on a machine that is busy; one that waits
for a tier in vain takes longer than this, its deadline."""

WAIT_S = 20.0
"""Until what must come has come, on the slowest machine; nothing is judged by it."""

TRAFFIC_S = 1.0
"""Traffic asks a tier for something in that time, however busy the machine is."""

CONNECTIONS = 4
"""Of each pool of a tier's client, which keeps as many as it has needed at once."""

GROWTH_BYTES_MAX = 8 << 20
"""Anonymous memory that a daemon and its workers may have gained since before the first fault:
allocators keep some, about 3 MiB after all faults there are, and no more after many."""

STALL_MS = 50
"""A process that is ready to run and has not been run for so long tells of a machine that is busy
with something else; it says nothing about who of the others had to wait as well."""

TRIES = 3
"""Times that a scene is played while the machine lets this process wait in each of them."""

_P = ParamSpec("_P")


class StalledError(AssertionError):
    """Answers were late, but the process that waited for them was not run at that time."""


def again_if_stalled(test: Callable[_P, None]) -> Callable[_P, None]:
    """Play a test again after a StalledError: nothing is forgiven but a machine's moment."""

    @functools.wraps(test)
    def played(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for _ in range(TRIES - 1):
            with suppress(StalledError):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return played


WRITTEN = {"write_policy": "write_through"}
"""Traffic that goes on for ever must be written for ever, whatever a budget would say."""


def table(kind: str, options: Mapping[str, object]) -> str:
    """A `[[storage]]` table as TOML."""
    lines = [
        f"{key} = {json.dumps(value)}"
        for key, value in {"type": kind, **WRITTEN, **options}.items()
    ]
    return "\n".join(["[[storage]]", *lines, ""])


def is_idle(status: dict) -> bool:
    """Whether a daemon has nothing under way: no lease, reservation, or block to back up."""
    host = status["host"]
    return not (
        host["leases"]
        or host["writing_blocks"]
        or host["backlog_blocks"]
        or any(tier["backup_queue"] for tier in status["storage"])
    )


def check_returned(before: Footprint, after: Footprint, connections_max: int) -> None:
    """Assert that an idle daemon holds no more than it did: open files exactly, connections as
    its pools may have them, memory as allocators keep it."""
    assert after.processes == before.processes, (before, after)
    assert after.files == before.files, (before, after)
    assert after.connections <= connections_max, (before, after)
    assert after.anonymous_bytes <= before.anonymous_bytes + GROWTH_BYTES_MAX, (before, after)


class Scene:
    """A daemon with one tier of type `kind`, and traffic that needs it, until `close`.

    The tier's client has `pools` of connections.
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
        self._first = self._first or self.settle()
        began = time.monotonic()
        yield self
        self._check(began, self._first, self.settle())

    def settle(self) -> Footprint:
        """Stop the traffic until nothing is under way; what is held then. Starts it again."""
        self.traffic.pause()
        self.wait(lambda: is_idle(self.status()), "something stays under way")
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
        """Fail if more than `count` acquires took longer than allowed, without what this process
        itself stood still; with StalledError if the machine alone may have been why."""
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
