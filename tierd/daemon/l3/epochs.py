"""The epochs that this node uses in keys of a storage tier, and how it learns of new ones.

Reads the tier's marks, which `tierd.core.l3.epochs` interprets. A reading is valid for
EPOCH_VALID_S if other nodes share the tier, else forever. Without a valid reading the tier is
neither read nor written: uncertainty is a miss. The marks of shared tiers are also kept in the
state directory, because a server may be restored from an old backup.
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
"""Age of a reading at which the next use of the tier starts another one in the background."""

MARGIN_S: Final = 2.0
"""Time that a flush waits beyond EPOCH_VALID_S, for clocks of different speeds and for a node that
was about to use its reading."""

TOUCH_S: Final = 6 * 3600.0
"""How often the marks of a shared tier are written again: lifecycle rules delete objects that are
some days old."""

READS_MAX: Final = 4
"""Maximum readings until one needs no change: one that adds a mark and one that sees it, twice in
case another node adds marks too."""

WAITS_MAX: Final = 3
"""Maximum times that a flush waits for other nodes; it waits again only if the tier lost its mark
meanwhile."""


class News(enum.Enum):
    """What new marks in a tier mean."""

    FLUSHED = "flushed"
    """A flush, usually by another node."""
    LOST = "lost"
    """The tier has lost its marks just after this node had read them, so no mark of a complete
    flush can be among those that this node does not know."""
    UNCERTAIN = "uncertain"
    """The tier has lost its marks, maybe with the mark of a flush that this node has not seen."""


@dataclass(frozen=True, slots=True)
class Times:
    """Clocks and randomness, which a simulation replaces."""

    wall_ms: Callable[[], int]
    awake_s: Callable[[], float]
    """A clock that runs while the machine sleeps: a reading must expire during a long sleep."""
    random: Random

    @classmethod
    def real(cls) -> Times:
        """Return the machine's clocks and randomness."""
        return cls(
            lambda: time.time_ns() // 1_000_000,
            lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
            SystemRandom(),
        )

    @classmethod
    def of_loop(cls, name: str) -> Times:
        """Use the running loop's clock and a fixed seed, so that runs are reproducible."""
        return cls(
            lambda: int(1000 * asyncio.get_running_loop().time()),
            lambda: asyncio.get_running_loop().time(),
            Random(f"epochs of {name}"),
        )


class MarksFile:
    """The marks that this node has seen in one shared tier, kept in the state directory."""

    def __init__(self, directory: Path, place: str) -> None:
        digest = hashlib.sha256(place.encode()).hexdigest()
        self._path = directory / f"marks-{digest[:16]}"

    def read(self) -> list[Mark]:
        """Return the kept marks. Blocking. Skips damaged lines: the tier has the marks as well."""
        try:
            lines = self._path.read_text(encoding="ascii", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("cannot read flush marks from %s: %s", self._path, error)
            return []
        marks = [mark for line in lines if (mark := unpack_mark(line)) is not None]
        if len(marks) < len(lines):
            log.warning("ignoring %d damaged marks in %s", len(lines) - len(marks), self._path)
        return marks

    async def write(self, marks: Iterable[Mark]) -> None:
        """Replace the kept marks. Raises OSError; the file is then unchanged."""
        await replace_file(self._path, _encoded(tuple(marks)))


async def _encoded(marks: Sequence[Mark]) -> AsyncIterator[bytes]:
    yield "".join(f"{pack_mark(mark)}\n" for mark in marks).encode("ascii")


class TierEpochs:
    """The epochs of one tier as this node knows them. `backend` bounds the duration of calls."""

    def __init__(self, backend: Backend, name: str, times: Times) -> None:
        self.on_news: Callable[[News, tuple[str, ...]], None] = lambda *_: None
        """Called with the prefixes of new marks that no flush of this daemon has made. The tier no
        longer has the blocks of these namespaces; they must not be written before `heed`."""
        self._backend = backend
        self._name = name
        self._times = times
        self._view = Epochs()
        self._unheeded: list[tuple[str, ...]] = []
        self._mine: set[Mark] = set()
        """Marks that L2 already follows: those of this incarnation's flushes that took effect, and
        those that it made in place of lost ones."""
        self._file: MarksFile | None = None
        self._settled: frozenset[str] | None = None
        """The marks of the last valid reading."""
        self._read_s = 0.0
        """When that reading began."""
        self._touch_s = 0.0
        """When the marks are next written again."""
        self._alone = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    def remember(self, file: MarksFile) -> None:
        """Keep the marks in a file from now on. Call it before the first reading."""
        self._file = file
        self._view.learn(file.read())

    def now(self, digest: bytes) -> bytes:
        """Return the scope of a namespace by the marks known now."""
        return scope_of(digest, self._view.of(digest))

    def unheeded(self, digest: bytes) -> bool:
        """Whether there is news about a namespace that L2 does not follow yet."""
        return any(digest.hex().startswith(prefixes) for prefixes in self._unheeded)

    def heed(self, prefixes: tuple[str, ...]) -> None:
        """Note that L2 now follows one piece of news."""
        self._unheeded.remove(prefixes)

    def age(self, scope: bytes) -> int:
        """Compare a scope with its namespace's present one.

        Returns 0 if they are equal, a positive number if the scope is older, and a negative number
        if this node does not know its epoch yet.
        """
        digest, epoch = split_scope(scope)
        known = self._view.of(digest)
        return (known > epoch) - (known < epoch)

    async def scope(self, digest: bytes, allowed: Callable[[], bool]) -> bytes:
        """Return the scope of a namespace, valid for a call that begins or ends now.

        Reads the marks first if necessary and `allowed`. Raises BackendError if they cannot be
        read.
        """
        age_s = self._age_s()
        if age_s is None or age_s >= EPOCH_VALID_S:
            if not allowed():
                raise BackendError("flush marks cannot be read while the tier takes no reads")
            reading = self._begin()
            await asyncio.wait([reading])
            if reading.cancelled():
                raise BackendError("the tier is closing")
            reading.result()
        elif age_s >= REFRESH_S and allowed():
            self._begin(touch=True)
        return self.now(digest)

    async def close(self) -> None:
        """Cancel a reading in progress."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def forget(self) -> None:
        """Have the next use read the marks, because the tier was opened again."""
        self._settled = None

    # --- flush ----------------------------------------------------------------------

    async def bar(self, prefix: str) -> Mark:
        """Bar all blocks of namespaces in the tier; return the mark, which has taken effect.

        Raises BackendError if that is not certain. The tier may have the mark even then, which
        does no harm.
        """
        async with self._alone:
            await self._read()
            # The new mark replaces those it covers, so a mark of everything always has room.
            kept = [known for known in self._view.known if not known.prefix.startswith(prefix)]
            if len(kept) >= MARKS_MAX:
                raise BackendError(
                    f"it already has {MARKS_MAX} marks of single namespaces: flush it with --all"
                )
            mark = self._fresh(prefix, (), flush=True)
            # The mark may be there even after an error; the next use of the tier finds out.
            self._settled = None
            await self._backend.add_mark(pack_mark(mark))
            await self._read(own=mark)
            if self._holder(mark) is None:
                raise BackendError("the tier did not keep the mark of the flush")
            self._mine.add(mark)
            assert self._settled is not None
            idle = idle_marks(self._settled)
            if idle:
                # Marks that remain only cost a little time.
                with suppress(BackendError):
                    await self._backend.drop_marks(idle)
            return mark

    async def agree(self, mark: Mark) -> None:
        """Wait until no other node uses marks that it read before `mark` was there.

        Raises BackendError if the tier does not keep the mark until then.
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
        raise BackendError("the tier repeatedly lost the mark of the flush")

    def _holder(self, mark: Mark) -> str | None:
        """Return the mark in the tier that bars the same blocks as `mark`, or None."""
        texts = {text: found for text in self._settled or () if (found := unpack_mark(text))}
        barring = [
            text
            for text, found in texts.items()
            # A mark made in place of lost ones does not tell other nodes of a flush.
            if mark.prefix.startswith(found.prefix) and found.epoch >= mark.epoch and found.flush
        ]
        return max(barring, key=lambda text: texts[text].epoch, default=None)

    # --- reading --------------------------------------------------------------------

    def _age_s(self) -> float | None:
        """Return the age of the last valid reading, or None."""
        if self._settled is None:
            return None
        return self._times.awake_s() - self._read_s if self._backend.shared else 0.0

    def _begin(self, *, touch: bool = False) -> asyncio.Task[None]:
        """Start a reading unless one is in progress; `touch` may write the marks again."""
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
        """Read until a reading is valid. Raises BackendError."""
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
                    "storage tier %s has lost or damaged flush marks: its blocks of namespaces "
                    "%s are no longer served",
                    self._name,
                    ", ".join(f"{prefix}..." for prefix in todo.fresh),
                )
            # If a flush's mark may be lost, other nodes must treat the new mark as a flush.
            flush = any(mark.flush for mark in self._view.known)
            for prefix in todo.fresh:
                fresh = self._fresh(prefix, texts, flush=flush)
                self._mine.add(fresh)
                await self._backend.add_mark(pack_mark(fresh))
            if todo.unreadable:
                await self._backend.drop_marks(todo.unreadable)
        raise BackendError("its marks keep changing: does the tier keep what is written to it?")

    async def _settle(self, texts: frozenset[str], began_s: float, own: Mark | None) -> None:
        """Use a reading from now on, and report its news."""
        known = self._view.known
        news = self._view.learn(filter(None, map(unpack_mark, texts)))
        if news and self._file is not None and self._backend.shared:
            try:
                await self._file.write(self._view.known)
            except OSError as error:
                log.warning("storage tier %s: cannot save its marks: %s", self._name, error)
        # A complete flush has kept its mark for longer than EPOCH_VALID_S.
        just_read = began_s - self._read_s < EPOCH_VALID_S
        self._settled, self._read_s = texts, began_s
        others = [mark for mark in news if mark != own] if known else []
        flushes = [mark for mark in others if mark.flush and mark not in self._mine]
        if flushes:
            self._report(News.FLUSHED, flushes)
        replaced = [mark for mark in others if mark not in flushes]
        if replaced:
            # After another node's flush it is not known which blocks of L2 must not be written.
            others_flush = any(mark.flush and mark not in self._mine for mark in known)
            lost = just_read and not others_flush
            self._report(News.LOST if lost else News.UNCERTAIN, replaced)

    def _report(self, news: News, marks: Sequence[Mark]) -> None:
        prefixes = tuple(mark.prefix for mark in marks)
        self._unheeded.append(prefixes)
        self.on_news(news, prefixes)

    def _fresh(self, prefix: str, texts: Iterable[str], *, flush: bool) -> Mark:
        """Make a mark whose epoch is above all known and read ones."""
        read = (mark.epoch for mark in map(unpack_mark, texts) if mark is not None)
        largest = max(read, default=0)
        salt = self._times.random.getrandbits(SALT_BITS)
        largest = max(largest, self._view.largest)
        return Mark(prefix, fresh_epoch(largest, self._times.wall_ms(), salt, flush=flush))


def _note(task: asyncio.Task[None]) -> None:
    """Ignore the failure of a background reading: the next use of the tier reports it."""
    if not task.cancelled():
        task.exception()
