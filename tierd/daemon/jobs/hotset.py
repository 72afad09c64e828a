"""Snapshots of this node's hot set, so that uses and their order survive the daemon.

A snapshot is gathered from L2 and written to the state directory at intervals and at a stop; a
start reads it. It keeps the blocks of the previous snapshot that L2 lacks, older by the time in
between, until hotter blocks replace them or they were not used for AGE_S_MAX. So a boot, a crash
loop or a night without traffic does not lose the hot set. A failure is logged and counted, and
affects nothing else.
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
"""A block that L2 lacks and that was not used for a week leaves the hot set."""

WORK_S: Final = 0.0005
PAUSE_S: Final = 0.001
"""A thread that writes a snapshot works for WORK_S and then pauses, so that the loop can run.
bench/results/hotset.json has the duration of a snapshot and its effect on the loop's latency."""

STOP_S: Final = 20.0
"""Maximum time that a stop waits for its snapshot, several times what a million blocks take
(bench/results/hotset.json). After that the last periodic snapshot stays."""

TICK_S: Final = 1.0


async def next_turn() -> None:
    """Let the loop do other work."""
    await asyncio.sleep(0)


async def gather(
    host: HostTier, clock: Clock, pause: Callable[[], Awaitable[None]] = next_turn
) -> Gathered:
    """Gather the blocks of L2 in slices; blocks that come or go meanwhile may be left out."""
    gathered = Gathered()
    for space in list(host.spaces.values()):
        forest = gathered.forest(space.namespace)
        for blocks in resident(space, lambda: clock.monotonic_ns() // MS):
            forest.add(*blocks)
            await pause()
    return gathered


def state_directory(configured: str, environ: Mapping[str, str]) -> Path | None:
    """Return the configured state directory, or else the service manager's; None without one."""
    named = configured or environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(named) if named else None


class _Pace:
    """Makes a thread pause now and then, and ends its work once `over` is set."""

    def __init__(self, pause_s: float) -> None:
        self.over = False
        self._pause_s = pause_s
        self._since_s = time.perf_counter()

    def step(self) -> None:
        """Pause if it is time. Raises _OverError if the work is to end."""
        if self.over:
            raise _OverError
        if self._pause_s and time.perf_counter() - self._since_s > WORK_S:
            time.sleep(self._pause_s)
            self._since_s = time.perf_counter()


class _OverError(Exception):
    """The work is to end."""


class Snapshots:
    """The hot set's file in a state directory.

    Only one daemon writes it. A second daemon on the same directory runs without snapshots, because
    serving the cache matters more.
    """

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
        # Snapshots are written one at a time; the pace is that of the latest one.
        self._writing = asyncio.Lock()
        self._pace = _Pace(PAUSE_S)

    # --- opening and closing --------------------------------------------------------

    def open(self) -> None:
        """Create and lock the directory. Blocking; never raises."""
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
        """Unlock the directory."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def run(self) -> None:
        """Read the snapshot, and then write one every interval, until `finish`."""
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
        """Write a snapshot at a stop, within `stop_s`."""
        self._stopping = True
        if not (stop_s := self.stop_s):
            return
        self._pace.over = True  # A snapshot in progress would only delay this one.
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
        """Maximum time that a stop needs for its snapshot; 0 if it writes none."""
        return 0.0 if self._lock_fd is None or not self._config.interval_s else STOP_S

    def status(self) -> dict[str, object]:
        """Return the hot set's part of STATUS; the age is None before the first snapshot."""
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
        """Teach the uses in the snapshot, also for namespaces that are not open yet."""
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
        # The least valuable first: a full book forgets the blocks first that were taught first.
        for hot, age_s in reversed(found):
            hashes = hot.run.hashes
            assert len(hashes) <= TAUGHT_MAX
            now_ms = self._clock.monotonic_ns() // 1_000_000
            uses, ages_s = [hot.run.uses] * len(hashes), [age_s] * len(hashes)
            self._host.teach(hot.namespaces[0], hashes, uses, ages_s, now_ms)
            blocks += len(hashes)
            await asyncio.sleep(0)
        log.info("hot set %s: learned the uses of %d blocks", self._path, blocks)

    def _read(self, pace: _Pace) -> Iterator[tuple[Hot, int]]:
        """Yield the snapshot's runs, each with the present age of its last use. Blocking.

        Raises OSError and ConfigError.
        """
        with self._path.open("rb") as file:
            hot_set = HotSet(file, str(self._path))
            # Never negative: the clock may have been set back.
            passed_s = max(0, int(self._wall_s()) - hot_set.written_s)
            for hot in hot_set:
                pace.step()
                # A block without a known use was resident when the snapshot was written.
                age_s = 0 if hot.run.age_s == NEVER else hot.run.age_s
                yield hot, min(NEVER, age_s + passed_s)

    def _keep_aside(self, why: str) -> None:
        """Move the file aside, so that the next snapshot does not overwrite it."""
        bad = self._path.with_name(f"{FILE}.bad")
        with contextlib.suppress(OSError):
            os.replace(self._path, bad)
        self._failed(f"{why}; it is kept as {bad}")

    # --- writing --------------------------------------------------------------------

    async def write(self, pause_s: float) -> None:
        """Replace the snapshot; a failure is logged and counted."""
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
        """Write the file and rename it. Blocking; after a failure the previous file is there."""
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
            # Not after a stop has given up: the next daemon may use the directory by now.
            pace.step()
            os.replace(draft, self._path)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        assert self._lock_fd is not None
        os.fsync(self._lock_fd)

    def _take_in_last(self, gathered: Gathered, pace: _Pace) -> None:
        """Add the runs of the previous snapshot that are not too old."""
        for hot, age_s in self._read(pace):
            if age_s <= AGE_S_MAX:
                hashes = hot.run.hashes
                for namespace in hot.namespaces:
                    forest = gathered.forest(namespace)
                uses, ages_s = [hot.run.uses] * len(hashes), [age_s] * len(hashes)
                forest.add(hashes, [hot.run.parent, *hashes[:-1]], uses, ages_s)
