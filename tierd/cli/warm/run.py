"""Runs a warm: the daemon loads wants, several calls at a time; an engine computes the rest.

One thread talks to the daemon and decides; the other threads only wait for the engine. Memory
holds the wants in flight and a bounded number read ahead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from tierd.cli.common.engine import EngineAwayError, EngineRefusedError, EngineServer
from tierd.cli.common.operator import Operator, whole
from tierd.cli.warm.calls import CALLS_MAX, CallQueue, WarmCall, WarmUnit
from tierd.cli.warm.report import COLD, WarmReport
from tierd.cli.warm.sources import WantedBlocks
from tierd.errors import ConfigError
from tierd.types import Namespace
from tierd.wire.messages import Warmed, Warmth

FULL_CALLS: Final = 3
"""Consecutive calls without space for any block, after which less valuable blocks are skipped."""

CALL_S_MAX: Final = 3600.0
"""Deadline of a call if the command has none."""

MARGIN_S: Final = 0.03
"""Time between a call's deadline and the command's, so that its answer still counts."""

STORE_S: Final = 15.0
"""Longest wait for an engine to store the blocks that it computed."""

STORE_POLL_S: Final = 0.2

HEAR_S: Final = 0.2
"""Longest wait for an answer of the daemon, before the other queues are checked."""

ENGINE_LOOK_S: Final = 0.02
"""Longest wait for an answer of the daemon while an engine computes: the engine's answers come
through another queue."""


@dataclass(slots=True)
class WarmOptions:
    """How to warm the wants."""

    target: int = 0
    room_bytes: int | None = None
    """Space in the target; None if unknown."""
    bytes_per_s: int = 0
    pin_s: float = 0.0
    verify: bool = False
    end_s: float | None = None
    """time.monotonic() of the deadline."""

    def left_s(self) -> float:
        """Return the seconds until the deadline; CALL_S_MAX without a deadline."""
        return CALL_S_MAX if self.end_s is None else self.end_s - time.monotonic()


class Replays:
    """Lets an engine compute prompts, `concurrency` at a time."""

    def __init__(self, engine: EngineServer, concurrency: int) -> None:
        self.pending = 0
        self._engine = engine
        self._todo: SimpleQueue[WarmUnit] = SimpleQueue()
        self._ended: SimpleQueue[tuple[WarmUnit, EngineAwayError | EngineRefusedError | None]] = (
            SimpleQueue()
        )
        for _ in range(concurrency):
            # Daemon threads: the command does not wait for prompts still computed at its end.
            threading.Thread(target=self._work, daemon=True).start()

    def begin(self, unit: WarmUnit) -> None:
        """Queue a unit's prompt for the engine; `ended` reports its end."""
        self.pending += 1
        self._todo.put(unit)

    def ended(self) -> Iterator[tuple[WarmUnit, EngineAwayError | EngineRefusedError | None]]:
        """Yield the units that have ended since the last call, each with its error or None."""
        while not self._ended.empty():
            self.pending -= 1
            yield self._ended.get()

    def _work(self) -> None:
        while True:
            unit = self._todo.get()
            error: EngineAwayError | EngineRefusedError | None = None
            want = unit.want
            assert want.tokens is not None
            try:
                self._engine.compute(want.tokens, model=want.model, salt=want.salt)
            except (EngineAwayError, EngineRefusedError) as failed:
                error = failed
            self._ended.put((unit, error))


@dataclass(slots=True)
class Warmer:
    """Warms wants through the daemon and, if given, an engine."""

    operator: Operator
    order: WarmOptions
    report: WarmReport
    replays: Replays | None
    replays_max: int
    """Limit of units that wait for the engine or its stores; at it, reading pauses."""
    on_finished: Callable[[WantedBlocks], None]
    """Called with each want that is warm."""
    on_progress: Callable[[], None]
    wrong: ConfigError | None = None
    """The error in the input that ended the run."""
    _handles: dict[bytes, int] = field(default_factory=dict)
    _queue: CallQueue = field(init=False)
    _calls: dict[int, WarmCall] = field(default_factory=dict)
    """Calls in flight, by number."""
    _storing: deque[tuple[float, WarmUnit]] = field(default_factory=deque)
    """Computed units, each with the time at which to ask the daemon for it again."""
    _full_calls: int = 0
    _open: dict[int, WarmUnit] = field(default_factory=dict)
    """Unfinished units by id()."""

    def __post_init__(self) -> None:
        self._queue = CallQueue(self.order.bytes_per_s)

    def run(self, wants: Iterator[WantedBlocks]) -> None:
        """Warm the wants until their end, the first malformed one or the deadline.

        Raises DisconnectedError, RefusedError and what `wants` raises except ConfigError.
        """
        more = True
        while more or self._open:
            if self.order.left_s() <= 0:
                self.report.late = True  # Input or answers are outstanding.
                return
            if more and self._may_read():
                want = self._next(wants)
                if want is None:
                    more = False
                else:
                    self._begin(want)
            self._hear(0.0 if more and self._may_read() else self._patience_s())
            self.on_progress()

    def _next(self, wants: Iterator[WantedBlocks]) -> WantedBlocks | None:
        try:
            return next(wants, None)
        except ConfigError as error:
            self.wrong = error
            return None

    def under_way(self) -> tuple[int, int]:
        """Return the number of blocks in unfinished units, and how many of them are warm."""
        units = self._open.values()
        return sum(len(unit.outcomes) for unit in units), sum(unit.warm for unit in units)

    def give_up(self) -> None:
        """Report the unfinished units as too late."""
        for unit in self._open.values():
            known = unit.before or bytes([Warmth.LATE]) * len(unit.outcomes)
            outcomes = bytes(Warmth.LATE if each in COLD else each for each in known)
            self.report.finished(unit.want.label, outcomes)
        self._open.clear()

    def _may_read(self) -> bool:
        waiting = len(self._storing) + (self.replays.pending if self.replays else 0)
        return self._queue.has_room and waiting < self.replays_max

    def _patience_s(self) -> float:
        busy = self.replays is not None and (self.replays.pending or self._storing)
        return max(0.0, min(ENGINE_LOOK_S if busy else HEAR_S, self.order.left_s()))

    # --- sending ------------------------------------------------------------------------

    def _begin(self, want: WantedBlocks) -> None:
        if want.done is not None:
            self._take_room(want, want.done)
            self.report.finished_before(want.done)
            return
        asked = self._take_room(want, len(want.hashes))
        unit = WarmUnit(want, bytearray(len(want.hashes)), asked, 0)
        self._open[id(unit)] = unit
        if asked and want.uses:
            self._teach(want)
        self._ask(unit)

    def _take_room(self, want: WantedBlocks, blocks: int) -> int:
        """Reserve space; return for how many of the blocks there is space. In a source ordered by
        worth, the last blocks must not evict the first."""
        if not want.by_worth or self.order.room_bytes is None:
            return blocks
        if self._full_calls >= FULL_CALLS:
            return 0
        fit = max(0, min(blocks, self.order.room_bytes // _slot_bytes(want)))
        self.order.room_bytes -= fit * _slot_bytes(want)
        return fit

    def _teach(self, want: WantedBlocks) -> None:
        """Teach the daemon the uses of a want on another node. All ranks share use counts."""
        count = len(want.hashes)
        handle = self._handle(want.ranks[0])
        self.operator.teach(handle, want.hashes, [want.uses] * count, [want.age_s] * count)

    def _ask(self, unit: WarmUnit) -> None:
        unit.warm = 0
        unit.outcomes[:] = bytes([Warmth.NO_ROOM]) * len(unit.outcomes)
        unit.outcomes[: unit.asked] = bytes([Warmth.HERE]) * unit.asked
        self._queue.add(unit)
        if not unit.asked:
            self._finish(unit)
        self._send()

    def _send(self) -> None:
        """Keep CALLS_MAX calls in flight."""
        while len(self._calls) < CALLS_MAX:
            call = self._queue.next()
            if call is None:
                return
            number = self.operator.begin_warm(
                self._handle(call.namespace),
                call.hashes,
                target=self.order.target,
                deadline_s=max(0.0, min(self.order.left_s() - MARGIN_S, CALL_S_MAX)),
                bytes_per_s=self.order.bytes_per_s,
                pin_s=self.order.pin_s,
                verify=self.order.verify,
            )
            self._calls[number] = call

    def _handle(self, namespace: Namespace) -> int:
        handle = self._handles.get(namespace.digest)
        if handle is None:
            handle = self._handles[namespace.digest] = self.operator.register(namespace)
        return handle

    # --- receiving ----------------------------------------------------------------------

    def _hear(self, timeout_s: float) -> None:
        """Process all answers that have arrived, or wait for the first one."""
        reply = self.operator.next_warmed(timeout_s if self._calls else 0.0)
        if reply is None and not self._calls and timeout_s:
            time.sleep(min(timeout_s, ENGINE_LOOK_S))
        while reply is not None:
            self._warmed(reply)
            reply = self.operator.next_warmed(0.0)
        if self.replays is not None:
            for unit, error in self.replays.ended():
                self._computed(unit, error)
        now_s = time.monotonic()
        while self._storing and self._storing[0][0] <= now_s:
            self._ask(self._storing.popleft()[1])
        self._send()

    def _warmed(self, reply: Warmed) -> None:
        call = self._calls.pop(reply.call)
        outcomes = reply.outcomes
        brought = outcomes.count(Warmth.BROUGHT)
        self.report.bytes_read += brought * call.namespace.block_bytes
        warm = brought + outcomes.count(Warmth.HERE)
        self.report.had_bytes += warm * call.namespace.block_bytes
        self.report.unverified += whole(reply.body["unverified"])
        if self.order.pin_s and not self.order.target:
            kept_bytes = whole(reply.body["pinned"]) * call.namespace.block_bytes
            self.report.kept_bytes = (self.report.kept_bytes or 0) + kept_bytes
        if warm:
            self._full_calls = 0
        elif Warmth.NO_ROOM in outcomes:
            self._full_calls += 1
        fates = dict(zip(call.hashes, outcomes, strict=True))
        for unit, start, stop in call.pieces:
            some = [fates[block_hash] for block_hash in unit.want.hashes[start:stop]]
            # HERE and BROUGHT are the least values: the coldest rank decides.
            unit.outcomes[start:stop] = bytes(map(max, unit.outcomes[start:stop], some))
            if call.namespace == unit.want.ranks[-1]:
                unit.warm += sum(each <= Warmth.BROUGHT for each in unit.outcomes[start:stop])
            unit.left -= 1
            if not unit.left:
                self._answered(unit)

    def _answered(self, unit: WarmUnit) -> None:
        cold = not COLD.isdisjoint(unit.outcomes)
        if unit.before is not None:
            if cold and time.monotonic() < unit.store_end_s:
                self._storing.append((time.monotonic() + STORE_POLL_S, unit))
            else:
                self._finish(unit)
        elif cold and self.replays is not None and unit.want.tokens is not None:
            if self.report.engine_away:
                self._refused(unit, self.report.engine_away)
            else:
                unit.before = bytes(unit.outcomes)
                self.replays.begin(unit)
        else:
            self._finish(unit)

    def _computed(self, unit: WarmUnit, error: EngineAwayError | EngineRefusedError | None) -> None:
        if error is None:
            unit.store_end_s = time.monotonic() + STORE_S
            self._ask(unit)
            return
        if isinstance(error, EngineAwayError):
            self.report.engine_away = str(error)
        self._refused(unit, str(error))

    def _refused(self, unit: WarmUnit, why: str) -> None:
        """Finish a unit that the engine does not compute, with the outcomes of the tiers."""
        unit.outcomes = bytearray(unit.before or unit.outcomes)
        unit.before = None
        self._finish(unit, why)

    def _finish(self, unit: WarmUnit, why: str | None = None) -> None:
        del self._open[id(unit)]
        if unit.want.by_worth and self.order.room_bytes is not None:
            missed = sum(outcome > Warmth.BROUGHT for outcome in unit.outcomes[: unit.asked])
            self.order.room_bytes += missed * _slot_bytes(unit.want)
        self.report.finished(unit.want.label, bytes(unit.outcomes), unit.before, why)
        if not unit.outcomes or max(unit.outcomes) <= Warmth.BROUGHT:
            self.on_finished(unit.want)


def _slot_bytes(want: WantedBlocks) -> int:
    """Return the bytes that one block takes in host memory, of all ranks."""
    return sum(rank.slot_bytes for rank in want.ranks)
