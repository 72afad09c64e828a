"""The hot set of this node: gathered from L2, written to the state directory now and then and at
a stop, and read at the start, so that uses and their order outlive the daemon.

A snapshot is never poorer than the one before it: what that had and L2 lacks stays in it, older
by the time in between, until hotter blocks take its place or it has not been used for AGE_S_MAX.
So neither a boot, nor a crash loop, nor a night without traffic costs the hot set that a warm
needs. It is a help and no more: whatever goes wrong with it is told, counted, and harms nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from tierd import __version__
from tierd.clock import Clock
from tierd.config import HotsetConfig
from tierd.core.host import HostTier
from tierd.core.l3.prefetch import MS
from tierd.daemon.jobs.inventory import resident
from tierd.errors import ConfigError
from tierd.hotset import Gathered, Hot, HotSet, pieces
from tierd.types import NEVER
from tierd.wire.messages import TAUGHT_MAX

log = logging.getLogger("tierd")

FILE: Final = "hotset.jsonl"

AGE_S_MAX: Final = 7 * 86_400
"""What has not been used for a week leaves the hot set once L2 lacks it."""

WORK_S: Final = 0.0005
PAUSE_S: Final = 0.001
"""A thread that makes a snapshot holds the interpreter for so long, and then lets the loop have it:
bench/results/hotset.json says how long that takes, and what the loop feels of it."""

STOP_S: Final = 20.0
"""Longest wait of a stop for its snapshot, several times what a million blocks take
(bench/results/hotset.json); beyond it the last periodic one stays."""

TICK_S: Final = 1.0


async def next_turn() -> None:
    """Let the loop do what else it has to."""
    await asyncio.sleep(0)


async def gather(
    host: HostTier, clock: Clock, pause: Callable[[], Awaitable[None]] = next_turn
) -> Gathered:
    """What L2 has, in slices: blocks that come or go meanwhile may be in it or not."""
    gathered = Gathered()
    for space in list(host.spaces.values()):
        forest = gathered.forest(space.namespace)
        for blocks in resident(space, lambda: clock.monotonic_ns() // MS):
            forest.add(*blocks)
            await pause()
    return gathered


def state_directory(configured: str, environ: Mapping[str, str]) -> Path | None:
    """Where state is kept: as configured, or as a service manager says."""
    named = configured or environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(named) if named else None


class _Pace:
    """How a thread works: a while, then not. `over`: its work is not wanted any more."""

    def __init__(self, pause_s: float) -> None:
        self.over = False
        self._pause_s = pause_s
        self._since_s = time.perf_counter()

    def step(self) -> None:
        """Between two steps of the work."""
        if self.over:
            raise _OverError
        if self._pause_s and time.perf_counter() - self._since_s > WORK_S:
            time.sleep(self._pause_s)
            self._since_s = time.perf_counter()


class _OverError(Exception):
    """The work is not wanted any more."""


class Snapshots:
    """The hot set's file in a state directory. One daemon writes it: a second one on the same
    directory serves all the same, since an engine's cache is worth more than this."""

    def __init__(
        self,
        directory: Path,
        config: HotsetConfig,
        host: HostTier,
        clock: Clock,
        counters: Counter[str],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._path = directory / FILE
        self._config = config
        self._host = host
        self._clock = clock
        self._counters = counters
        self._wall_s = wall_s
        self._lock_fd: int | None = None
        self._why = ""
        self._written_s: float | None = None
        self._stopping = False
        # One at a time; and how the one that is being written does it.
        self._writing = asyncio.Lock()
        self._pace = _Pace(PAUSE_S)

    # --- life -----------------------------------------------------------------------

    def open(self) -> None:
        """Take the directory, made if it is missing. Blocking; never raises."""
        directory = self._path.parent
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise
            self._lock_fd = fd
        except BlockingIOError:
            self._failed("another tierd uses this state directory, and only one may write to it")
        except OSError as error:
            self._failed(str(error))

    def close(self) -> None:
        """Let go of the directory."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def run(self) -> None:
        """Read the snapshot there is, and write one every interval, until `finish`."""
        if self._lock_fd is None:
            return
        await self.load()
        due_s = self._now_s() + self._config.interval_s
        while self._config.interval_s and not self._stopping:
            await asyncio.sleep(min(TICK_S, self._config.interval_s))
            if self._now_s() >= due_s and not self._stopping:
                await self.write(PAUSE_S)
                due_s = self._now_s() + self._config.interval_s

    async def finish(self) -> None:
        """Write one at a stop, if that can be done within `stop_s`."""
        self._stopping = True
        if not (stop_s := self.stop_s):
            return
        self._pace.over = True  # One that is being written would only delay this one.
        try:
            async with asyncio.timeout(stop_s):
                await self.write(0.0)
        except TimeoutError:
            age_s = self._age_s()
            before = "from before this start" if age_s is None else f"written {age_s:.0f} s ago"
            self._failed(
                f"a stop waits at most {stop_s:g} s for its snapshot, which was not written by "
                f"then; the one {before} stays"
            )

    @property
    def stop_s(self) -> float:
        """How long a stop may take for its snapshot; 0 if it writes none."""
        return 0.0 if self._lock_fd is None or not self._config.interval_s else STOP_S

    def status(self) -> dict[str, object]:
        """For STATUS; no age if none was written yet."""
        return {"age_s": self._age_s(), "why": self._why}

    def _age_s(self) -> float | None:
        return None if self._written_s is None else round(self._now_s() - self._written_s, 3)

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    def _failed(self, why: str) -> None:
        self._counters["hotset_failed_total"] += 1
        if why != self._why:
            log.warning("hot set %s: %s", self._path, why)
        self._why = why

    # --- reading --------------------------------------------------------------------

    async def load(self) -> None:
        """Teach the books what the snapshot tells of uses; what is open and what will be."""
        found: list[tuple[Hot, int]] = []
        try:
            found = await asyncio.to_thread(lambda: list(self._read(_Pace(PAUSE_S))))
        except FileNotFoundError:
            return
        except OSError as error:
            self._failed(str(error))
        except ConfigError as error:
            self._keep_aside(str(error))
        blocks = 0
        # The least worth first: a book that is full forgets what it was taught of first.
        for hot, age_s in reversed(found):
            hashes = hot.run.hashes
            assert len(hashes) <= TAUGHT_MAX
            now_ms = self._clock.monotonic_ns() // 1_000_000
            uses, ages_s = [hot.run.uses] * len(hashes), [age_s] * len(hashes)
            self._host.teach(hot.namespaces[0], hashes, uses, ages_s, now_ms)
            blocks += len(hashes)
            await asyncio.sleep(0)
        log.info("hot set %s: uses of %d blocks are known from it", self._path, blocks)

    def _read(self, pace: _Pace) -> Iterator[tuple[Hot, int]]:
        """Runs of the snapshot, and how long ago each was used last, as of now. Blocking.

        Raises OSError and ConfigError.
        """
        with self._path.open("rb") as file:
            hot_set = HotSet(file, str(self._path))
            # Never younger: the clock may have been set back.
            passed_s = max(0, int(self._wall_s()) - hot_set.written_s)
            for hot in hot_set:
                pace.step()
                # What nobody is known to have used yet was there, at least.
                age_s = 0 if hot.run.age_s == NEVER else hot.run.age_s
                yield hot, min(NEVER, age_s + passed_s)

    def _keep_aside(self, why: str) -> None:
        """Out of the way of the next snapshot, for whoever can make something of it."""
        bad = self._path.with_name(f"{FILE}.bad")
        with contextlib.suppress(OSError):
            os.replace(self._path, bad)
        self._failed(f"{why}; it is kept as {bad}")

    # --- writing --------------------------------------------------------------------

    async def write(self, pause_s: float) -> None:
        """Write a snapshot in the place of the one before; a failure is told and counted."""
        async with self._writing:
            self._pace = pace = _Pace(pause_s)
            try:
                gathered = await gather(self._host, self._clock)
                await asyncio.to_thread(partial(self._write, gathered, pace))
            except OSError as error:
                self._failed(str(error))
            except ConfigError as error:
                self._keep_aside(str(error))
            except _OverError:
                pass
            else:
                self._why = ""
                self._written_s = self._now_s()
                self._counters["hotset_written_total"] += 1
            finally:
                pace.over = True

    def _write(self, gathered: Gathered, pace: _Pace) -> None:
        """Blocking, but courteous. The file is there whole, or as it was before."""
        with contextlib.suppress(FileNotFoundError):
            self._take_in_last(gathered, pace)
        size = self._config.size
        draft = self._path.with_name(f"{FILE}.new")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for piece in pieces(
                    gathered.families(),
                    written_s=int(self._wall_s()),
                    version=__version__,
                    size_bytes=self._host.capacity_bytes if size is None else size,
                ):
                    file.write(piece)
                    pace.step()
                file.flush()
                os.fsync(file.fileno())
            # Not after a stop has given it up: the next daemon may use the directory by now.
            pace.step()
            os.replace(draft, self._path)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        assert self._lock_fd is not None
        os.fsync(self._lock_fd)

    def _take_in_last(self, gathered: Gathered, pace: _Pace) -> None:
        """Add what the snapshot before has, and L2 may lack, as far as it is not too old."""
        for hot, age_s in self._read(pace):
            if age_s <= AGE_S_MAX:
                hashes = hot.run.hashes
                for namespace in hot.namespaces:
                    forest = gathered.forest(namespace)
                uses, ages_s = [hot.run.uses] * len(hashes), [age_s] * len(hashes)
                forest.add(hashes, [hot.run.parent, *hashes[:-1]], uses, ages_s)
