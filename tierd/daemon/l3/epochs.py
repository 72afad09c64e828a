"""By which epochs a storage tier is asked, and how this node learns of them.

Reads a tier's marks, which `tierd.core.l3.epochs` judges, and goes by a reading for EPOCH_VALID_S
if other nodes share the tier, else for ever. Without a reading that holds good nothing is asked of
the tier and nothing put into it: uncertain is a miss. Of shared tiers what has been seen is
remembered in the state directory as well, since a server may come back as it was yesterday.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from typing import Final

from tierd.backend import Backend
from tierd.core.l3.epochs import (
    EPOCH_VALID_S,
    MARKS_MAX,
    SALT_BITS,
    Epochs,
    Mark,
    fresh_epoch,
    idle_marks,
    pack_mark,
    scope_of,
    split_scope,
    unpack_mark,
)
from tierd.daemon.lifecycle.state_files import replace_file
from tierd.errors import BackendError

log = logging.getLogger("tierd")

REFRESH_S: Final = 4.0
"""Age of a reading at which the next use of the tier has it read anew, without waiting for it."""

MARGIN_S: Final = 2.0
"""What a flush waits beyond EPOCH_VALID_S: clocks that run at different speeds, and a node that
was just about to use what it had read."""

TOUCH_S: Final = 6 * 3600.0
"""How often marks of a shared tier are stored anew: lifecycle rules drop what is old,
counted in days."""

READS_MAX: Final = 4
"""Readings until one needs nothing done: one that makes a mark and one that sees it, and the same
once more if another node does so too."""

WAITS_MAX: Final = 3
"""Times that a flush waits for other nodes; again only if the tier lost its mark meanwhile."""


class News(enum.Enum):
    """What marks that are news tell of."""

    FLUSHED = "flushed"
    """A flush, by another node as a rule."""
    LOST = "lost"
    """The tier has lost its marks, just after this node had read them: no complete flush's was
    among them."""
    DOUBTFUL = "doubtful"
    """The tier has lost its marks, and maybe that of a flush that this node has not heard of."""


@dataclass(frozen=True, slots=True)
class Times:
    """Clocks and chance, which a simulation owns."""

    wall_ms: Callable[[], int]
    awake_s: Callable[[], float]
    """Goes on while the machine sleeps: a reading must not outlast that."""
    random: Random

    @classmethod
    def real(cls) -> Times:
        """This machine's."""
        return cls(
            lambda: time.time_ns() // 1_000_000,
            lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
            SystemRandom(),
        )

    @classmethod
    def of_loop(cls, name: str) -> Times:
        """The running loop's clock for all of them: the same in each run."""
        return cls(
            lambda: int(1000 * asyncio.get_running_loop().time()),
            lambda: asyncio.get_running_loop().time(),
            Random(f"epochs of {name}"),
        )


class MarksFile:
    """The marks that this node has seen in one shared tier, in the state directory. Reading
    blocks, which a start may."""

    def __init__(self, directory: Path, place: str) -> None:
        digest = hashlib.sha256(place.encode()).hexdigest()
        self._path = directory / f"marks-{digest[:16]}"

    def read(self) -> list[Mark]:
        """What was kept. A line that is damaged says nothing: the tier has the marks as well."""
        try:
            lines = self._path.read_text(encoding="ascii", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("the marks in %s cannot be read: %s", self._path, error)
            return []
        marks = [mark for line in lines if (mark := unpack_mark(line)) is not None]
        if len(marks) < len(lines):
            log.warning("%d marks in %s are damaged", len(lines) - len(marks), self._path)
        return marks

    async def write(self, marks: Iterable[Mark]) -> None:
        """Keep these instead of what was kept. Raises OSError; all stays as it was then."""
        await replace_file(self._path, _encoded(tuple(marks)))


async def _encoded(marks: Sequence[Mark]) -> AsyncIterator[bytes]:
    yield "".join(f"{pack_mark(mark)}\n" for mark in marks).encode("ascii")


class TierEpochs:
    """The epochs of one tier as this node knows them. Calls go to `backend`, which bounds them."""

    def __init__(self, backend: Backend, name: str, times: Times) -> None:
        self.on_news: Callable[[News, tuple[str, ...]], None] = lambda *_: None
        """Told of the prefixes of marks that are news, and are no flush's that goes on here: what
        they are about is not in the tier any more, and is not to be written before `heed`."""
        self._backend = backend
        self._name = name
        self._times = times
        self._view = Epochs()
        self._unheeded: list[tuple[str, ...]] = []
        self._mine: set[Mark] = set()
        """Marks of this incarnation's flushes that were in force at once, and those that it made in
        the place of lost ones: of them L2 knows."""
        self._file: MarksFile | None = None
        self._settled: frozenset[str] | None = None
        """The marks at the last reading that holds good."""
        self._read_s = 0.0
        """When that began."""
        self._touch_s = 0.0
        """When the marks are to be stored anew."""
        self._alone = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    def remember(self, file: MarksFile) -> None:
        """Keep in a file what is seen. Before the first reading."""
        self._file = file
        self._view.learn(file.read())

    def now(self, digest: bytes) -> bytes:
        """The scope of a namespace, as far as is known."""
        return scope_of(digest, self._view.of(digest))

    def unheeded(self, digest: bytes) -> bool:
        """Whether there is news of a namespace that L2 has not heard of."""
        return any(digest.hex().startswith(prefixes) for prefixes in self._unheeded)

    def heed(self, prefixes: tuple[str, ...]) -> None:
        """L2 has drawn the consequences of one piece of news."""
        self._unheeded.remove(prefixes)

    def age(self, scope: bytes) -> int:
        """Whether a scope is its namespace's (0), one of before (above 0), or one that this node
        has not heard of yet (below 0)."""
        digest, epoch = split_scope(scope)
        known = self._view.of(digest)
        return (known > epoch) - (known < epoch)

    async def scope(self, digest: bytes, allowed: Callable[[], bool]) -> bytes:
        """The scope of a namespace, good for a call that begins, or has ended, now.

        Reads the marks first if need be, but not while `allowed` says that this is in vain.
        Raises BackendError if they cannot be read.
        """
        age_s = self._age_s()
        if age_s is None or age_s >= EPOCH_VALID_S:
            if not allowed():
                raise BackendError("its marks cannot be read while it takes no reads")
            reading = self._begin()
            await asyncio.wait([reading])
            if reading.cancelled():
                raise BackendError("the tier is closing")
            reading.result()
        elif age_s >= REFRESH_S and allowed():
            self._begin(touch=True)
        return self.now(digest)

    async def close(self) -> None:
        """End what is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def forget(self) -> None:
        """The tier is opened anew: the next use reads its marks."""
        self._settled = None

    # --- flush ----------------------------------------------------------------------

    async def bar(self, prefix: str) -> Mark:
        """Bar all that the tier has of namespaces: the mark, which is in the tier and in force.

        Raises BackendError if that is not certain; the mark may be there all the same then, and
        does no harm.
        """
        async with self._alone:
            await self._read()
            # What it makes idle goes: a mark of everything is never one too many.
            kept = [known for known in self._view.known if not known.prefix.startswith(prefix)]
            if len(kept) >= MARKS_MAX:
                raise BackendError(
                    f"it has marks of {MARKS_MAX} flushes by name: flush it with --all once"
                )
            mark = self._fresh(prefix, (), flush=True)
            # Whether or not it is there: the next use of the tier finds out.
            self._settled = None
            await self._backend.add_mark(pack_mark(mark))
            await self._read(own=mark)
            if self._holder(mark) is None:
                raise BackendError("it does not keep the mark of the flush")
            self._mine.add(mark)
            assert self._settled is not None
            idle = idle_marks(self._settled)
            if idle:
                # Marks that are left over cost a little time and no more.
                with suppress(BackendError):
                    await self._backend.drop_marks(idle)
            return mark

    async def agree(self, mark: Mark) -> None:
        """Return when no other node goes by marks that it read before `mark` was there.

        Raises BackendError if the tier does not keep the mark for so long.
        """
        for _ in range(WAITS_MAX):
            async with self._alone:
                await self._read()
            held = self._holder(mark)
            await asyncio.sleep(EPOCH_VALID_S + MARGIN_S)
            async with self._alone:
                await self._read()
            if held is not None and self._settled is not None and held in self._settled:
                return
        raise BackendError("it loses the marks of flushes again and again")

    def _holder(self, mark: Mark) -> str | None:
        """The mark in the tier that bars what `mark` does; None if there is none."""
        texts = {text: found for text in self._settled or () if (found := unpack_mark(text))}
        barring = [
            text
            for text, found in texts.items()
            # One that took the place of lost ones tells other nodes nothing of a flush.
            if mark.prefix.startswith(found.prefix) and found.epoch >= mark.epoch and found.flush
        ]
        return max(barring, key=lambda text: texts[text].epoch, default=None)

    # --- reading --------------------------------------------------------------------

    def _age_s(self) -> float | None:
        """How old the reading is by which this node goes; None if there is none."""
        if self._settled is None:
            return None
        return self._times.awake_s() - self._read_s if self._backend.shared else 0.0

    def _begin(self, *, touch: bool = False) -> asyncio.Task[None]:
        """Read, unless a reading is under way; with `touch` nobody waits for it."""
        if self._reading is None or self._reading.done():
            work = self._read_alone(touch)
            self._reading = asyncio.create_task(work, name=f"marks-{self._name}")
            self._reading.add_done_callback(_note)
        return self._reading

    async def _read_alone(self, touch: bool) -> None:
        async with self._alone:
            await self._read()
            if touch and self._times.awake_s() >= self._touch_s:
                self._touch_s = self._times.awake_s() + TOUCH_S
                for mark in self._view.known:
                    await self._backend.add_mark(pack_mark(mark))

    async def _read(self, own: Mark | None = None) -> None:
        """Read until a reading holds good. Raises BackendError."""
        for _ in range(READS_MAX):
            began_s = self._times.awake_s()
            texts = frozenset(await self._backend.marks())
            if texts == self._settled:
                self._read_s = began_s
                return
            todo = self._view.todo(texts)
            if not todo.fresh and not todo.unreadable:
                await self._settle(texts, began_s, own)
                return
            if texts:
                log.warning(
                    "storage tier %s has lost marks, or has damaged ones: what it had of "
                    "namespaces %s is not served any more",
                    self._name,
                    ", ".join(f"{prefix}..." for prefix in todo.fresh),
                )
            # Where a flush may be among what is lost, other nodes are to take it for one.
            flush = any(mark.flush for mark in self._view.known)
            for prefix in todo.fresh:
                fresh = self._fresh(prefix, texts, flush=flush)
                self._mine.add(fresh)
                await self._backend.add_mark(pack_mark(fresh))
            if todo.unreadable:
                await self._backend.drop_marks(todo.unreadable)
        raise BackendError("its marks do not come to rest: does it keep what it is given?")

    async def _settle(self, texts: frozenset[str], began_s: float, own: Mark | None) -> None:
        """Go by a reading from now on."""
        known = self._view.known
        news = self._view.learn(filter(None, map(unpack_mark, texts)))
        if news and self._file is not None and self._backend.shared:
            try:
                await self._file.write(self._view.known)
            except OSError as error:
                log.warning("the marks of storage tier %s are not kept: %s", self._name, error)
        # A flush that is complete has kept its mark for longer than that.
        just_read = began_s - self._read_s < EPOCH_VALID_S
        self._settled, self._read_s = texts, began_s
        others = [mark for mark in news if mark != own] if known else []
        flushes = [mark for mark in others if mark.flush and mark not in self._mine]
        if flushes:
            self._tell(News.FLUSHED, flushes)
        replaced = [mark for mark in others if mark not in flushes]
        if replaced:
            # After another node's flush it is not known which blocks of L2 must not get there.
            heard = any(mark.flush and mark not in self._mine for mark in known)
            self._tell(News.LOST if just_read and not heard else News.DOUBTFUL, replaced)

    def _tell(self, news: News, marks: Sequence[Mark]) -> None:
        prefixes = tuple(mark.prefix for mark in marks)
        self._unheeded.append(prefixes)
        self.on_news(news, prefixes)

    def _fresh(self, prefix: str, texts: Iterable[str], *, flush: bool) -> Mark:
        """A mark above all that are known, or read."""
        read = (mark.epoch for mark in map(unpack_mark, texts) if mark is not None)
        largest = max(read, default=0)
        salt = self._times.random.getrandbits(SALT_BITS)
        largest = max(largest, self._view.largest)
        return Mark(prefix, fresh_epoch(largest, self._times.wall_ms(), salt, flush=flush))


def _note(task: asyncio.Task[None]) -> None:
    """A reading that nobody waits for has failed: the next one that is waited for says so."""
    if not task.cancelled():
        task.exception()
