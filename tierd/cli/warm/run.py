"""Has the daemon bring wants, several calls at a time, and an engine compute what no tier has.

One thread talks to the daemon and decides; others only wait for the engine. All that is held is
what is in flight and some wants that were read ahead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, NamedTuple

from tierd.cli.common.engine import EngineAwayError, EngineRefusedError, EngineServer
from tierd.cli.common.operator import Operator, whole
from tierd.cli.warm.report import COLD, WarmReport
from tierd.cli.warm.sources import WantedBlocks
from tierd.errors import ConfigError
from tierd.types import Namespace
from tierd.wire.messages import Warmed, Warmth

CALLS_MAX: Final = 4
"""WARMs under way: enough that the daemon has the next one's reads when one ends."""

CALL_BLOCKS_MAX: Final = 512
CALL_BYTES_MAX: Final = 256 << 20
"""Of one call: progress is told at its end, and it is what an interruption may have to repeat."""

AHEAD_BLOCKS: Final = 2 * CALLS_MAX * CALL_BLOCKS_MAX
"""Blocks read ahead of the calls."""

FULL_CALLS: Final = 3
"""Calls in turn that found room for nothing, after which what is worth less is not tried."""

CALL_S_MAX: Final = 3600.0
"""Deadline of a call, if the command has none."""

MARGIN_S: Final = 0.03
"""By how much a call's deadline is before the command's: its answer still counts."""

STORE_S: Final = 15.0
"""Longest that an engine may take to store what it has computed."""

STORE_POLL_S: Final = 0.2

HEAR_S: Final = 0.2
"""Longest wait for an answer before looking at the rest."""

ENGINE_LOOK_S: Final = 0.02
"""The same while an engine computes, whose answers come by another way."""


@dataclass(slots=True)
class WarmOptions:
    """How the command has its wants warmed."""

    target: int = 0
    room_bytes: int | None = None
    """What there is room for where it is brought; None: nobody knows."""
    bytes_per_s: int = 0
    pin_s: float = 0.0
    verify: bool = False
    end_s: float | None = None
    """time.monotonic() of the deadline."""

    def left_s(self) -> float:
        """Until the deadline."""
        return CALL_S_MAX if self.end_s is None else self.end_s - time.monotonic()


@dataclass(slots=True)
class _Unit:
    """A want under way."""

    want: WantedBlocks
    outcomes: bytearray
    asked: int
    """Blocks, from the first on, that the daemon is asked for; for the others there is no room."""
    left: int
    """Answers to come: one for each piece and rank."""
    warm: int = 0
    """Blocks that are there, by the answers so far."""
    before: bytes | None = None
    """Its outcomes when an engine was asked to compute it."""
    store_end_s: float = 0.0


class _Piece(NamedTuple):
    unit: _Unit
    start: int
    stop: int


@dataclass(slots=True)
class _Call:
    pieces: list[_Piece]
    namespace: Namespace
    hashes: list[bytes]
    """Each once: prompts share prefixes."""


class Replays:
    """An engine computing prompts, a few at a time."""

    def __init__(self, engine: EngineServer, concurrency: int) -> None:
        self.pending = 0
        self._engine = engine
        self._todo: SimpleQueue[_Unit] = SimpleQueue()
        self._ended: SimpleQueue[tuple[_Unit, EngineAwayError | EngineRefusedError | None]] = (
            SimpleQueue()
        )
        for _ in range(concurrency):
            # Nobody waits for them at the end: what the engine still computes is in vain.
            threading.Thread(target=self._work, daemon=True).start()

    def begin(self, unit: _Unit) -> None:
        """Have a unit's prompt computed; `ended` tells of it."""
        self.pending += 1
        self._todo.put(unit)

    def ended(self) -> Iterator[tuple[_Unit, EngineAwayError | EngineRefusedError | None]]:
        """Those that have come to an end since, and what was wrong."""
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
    """Warms wants."""

    operator: Operator
    order: WarmOptions
    report: WarmReport
    replays: Replays | None
    replays_max: int
    """Units that may wait for the engine or its stores; no more is read meanwhile."""
    on_finished: Callable[[WantedBlocks], None]
    """A want is warm."""
    on_progress: Callable[[], None]
    wrong: ConfigError | None = None
    """What was wrong with the input that ended it."""
    _handles: dict[bytes, int] = field(default_factory=dict)
    _pieces: deque[_Piece] = field(default_factory=deque)
    _ahead_blocks: int = 0
    _ready: deque[_Call] = field(default_factory=deque)
    _calls: dict[int, _Call] = field(default_factory=dict)
    _storing: deque[tuple[float, _Unit]] = field(default_factory=deque)
    """Computed units, and when to ask for them again."""
    _full_calls: int = 0
    _open: dict[int, _Unit] = field(default_factory=dict)
    """Units of which not all is known, by identity."""

    def run(self, wants: Iterator[WantedBlocks]) -> None:
        """Warm all of them, or those before a wrong one, or until the deadline.

        Raises DisconnectedError and RefusedError, and whatever else `wants` does.
        """
        more = True
        while more or self._open:
            if self.order.left_s() <= 0:
                self.report.late = True  # Whether more was to be read, or answers are to come.
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
        """Blocks of which not all is known yet, and how many of them are there already."""
        units = self._open.values()
        return sum(len(unit.outcomes) for unit in units), sum(unit.warm for unit in units)

    def give_up(self) -> None:
        """Count what is not known of as too late."""
        for unit in self._open.values():
            known = unit.before or bytes([Warmth.LATE]) * len(unit.outcomes)
            outcomes = bytes(Warmth.LATE if each in COLD else each for each in known)
            self.report.finished(unit.want.label, outcomes)
        self._open.clear()

    def _may_read(self) -> bool:
        waiting = len(self._storing) + (self.replays.pending if self.replays else 0)
        return self._ahead_blocks < AHEAD_BLOCKS and waiting < self.replays_max

    def _patience_s(self) -> float:
        busy = self.replays is not None and (self.replays.pending or self._storing)
        return max(0.0, min(ENGINE_LOOK_S if busy else HEAR_S, self.order.left_s()))

    # --- asking -------------------------------------------------------------------------

    def _begin(self, want: WantedBlocks) -> None:
        if want.done is not None:
            self._take_room(want, want.done)
            self.report.finished_before(want.done)
            return
        asked = self._take_room(want, len(want.hashes))
        unit = _Unit(want, bytearray(len(want.hashes)), asked, 0)
        self._open[id(unit)] = unit
        if asked and want.uses:
            self._teach(want)
        self._ask(unit)

    def _take_room(self, want: WantedBlocks, blocks: int) -> int:
        """For how many of the blocks there is room: of what is ordered by its worth, the last
        must not push out the first."""
        if not want.by_worth or self.order.room_bytes is None:
            return blocks
        if self._full_calls >= FULL_CALLS:
            return 0
        fit = max(0, min(blocks, self.order.room_bytes // _slot_bytes(want)))
        self.order.room_bytes -= fit * _slot_bytes(want)
        return fit

    def _teach(self, want: WantedBlocks) -> None:
        """What has been used elsewhere is worth room here. Ranks share what is known of uses."""
        count = len(want.hashes)
        handle = self._handle(want.ranks[0])
        self.operator.teach(handle, want.hashes, [want.uses] * count, [want.age_s] * count)

    def _ask(self, unit: _Unit) -> None:
        size = self._blocks_per_call(unit.want.ranks)
        unit.warm = 0
        unit.outcomes[:] = bytes([Warmth.NO_ROOM]) * len(unit.outcomes)
        unit.outcomes[: unit.asked] = bytes([Warmth.HERE]) * unit.asked
        for start in range(0, unit.asked, size):
            self._pieces.append(_Piece(unit, start, min(start + size, unit.asked)))
            unit.left += len(unit.want.ranks)
        self._ahead_blocks += unit.asked
        if not unit.asked:
            self._finish(unit)
        self._send()

    def _send(self) -> None:
        """Keep enough calls under way: those of the ranks of some blocks next to each other."""
        while len(self._calls) < CALLS_MAX:
            if not self._ready and not self._gather():
                return
            call = self._ready.popleft()
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

    def _gather(self) -> bool:
        """Make calls of the next pieces of the same ranks; whether there are any."""
        if not self._pieces:
            return False
        ranks = self._pieces[0].unit.want.ranks
        room = self._blocks_per_call(ranks)
        pieces: list[_Piece] = []
        while self._pieces and self._pieces[0].unit.want.ranks == ranks:
            room -= self._pieces[0].stop - self._pieces[0].start
            if pieces and room < 0:
                break
            pieces.append(self._pieces.popleft())
        self._ahead_blocks -= sum(piece.stop - piece.start for piece in pieces)
        all_hashes = (h for unit, start, stop in pieces for h in unit.want.hashes[start:stop])
        hashes = list(dict.fromkeys(all_hashes))
        self._ready.extend(_Call(pieces, rank, hashes) for rank in ranks)
        return True

    def _blocks_per_call(self, ranks: Sequence[Namespace]) -> int:
        """At a limited rate so many that a call ends about every second."""
        size_bytes = min(CALL_BYTES_MAX, self.order.bytes_per_s or CALL_BYTES_MAX)
        largest = max(rank.block_bytes for rank in ranks)
        return max(1, min(CALL_BLOCKS_MAX, size_bytes // largest))

    def _handle(self, namespace: Namespace) -> int:
        handle = self._handles.get(namespace.digest)
        if handle is None:
            handle = self._handles[namespace.digest] = self.operator.register(namespace)
        return handle

    # --- hearing ------------------------------------------------------------------------

    def _hear(self, timeout_s: float) -> None:
        """Take in whatever has come, or the first that comes."""
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
        self.report.unproven += whole(reply.body["unproven"])
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
            # HERE and BROUGHT come first: a block is as warm as it is in the coldest rank.
            unit.outcomes[start:stop] = bytes(map(max, unit.outcomes[start:stop], some))
            if call.namespace == unit.want.ranks[-1]:
                unit.warm += sum(each <= Warmth.BROUGHT for each in unit.outcomes[start:stop])
            unit.left -= 1
            if not unit.left:
                self._answered(unit)

    def _answered(self, unit: _Unit) -> None:
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

    def _computed(self, unit: _Unit, error: EngineAwayError | EngineRefusedError | None) -> None:
        if error is None:
            unit.store_end_s = time.monotonic() + STORE_S
            self._ask(unit)
            return
        if isinstance(error, EngineAwayError):
            self.report.engine_away = str(error)
        self._refused(unit, str(error))

    def _refused(self, unit: _Unit, why: str) -> None:
        """The engine does not compute it: what the tiers had of it is all there will be."""
        unit.outcomes = bytearray(unit.before or unit.outcomes)
        unit.before = None
        self._finish(unit, why)

    def _finish(self, unit: _Unit, why: str | None = None) -> None:
        del self._open[id(unit)]
        if unit.want.by_worth and self.order.room_bytes is not None:
            missed = sum(outcome > Warmth.BROUGHT for outcome in unit.outcomes[: unit.asked])
            self.order.room_bytes += missed * _slot_bytes(unit.want)
        self.report.finished(unit.want.label, bytes(unit.outcomes), unit.before, why)
        if not unit.outcomes or max(unit.outcomes) <= Warmth.BROUGHT:
            self.on_finished(unit.want)


def _slot_bytes(want: WantedBlocks) -> int:
    """What a block takes in host memory, in all ranks."""
    return sum(rank.slot_bytes for rank in want.ranks)
