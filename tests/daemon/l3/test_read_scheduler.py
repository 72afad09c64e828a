"""The read scheduler: lanes with a bound on bytes in flight, and their order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.daemon.l3.read_scheduler import ReadLane, ReadScheduler, ReadTurn
from tierd.testing.loop import SimulationLoop, run_simulation


@dataclass(eq=False)
class Reader:
    """A reader that takes a turn and keeps it until told to finish."""

    turn: ReadTurn
    task: asyncio.Task[None]
    enough: asyncio.Event
    rank: list[int]
    has: bool = False

    @property
    def waits(self) -> bool:
        return not self.has and not self.task.done()


class Rig:
    """A read scheduler with readers in several lanes."""

    def __init__(self, counts: list[int], bytes_max: int) -> None:
        self.lanes = [ReadLane(count) for count in counts]
        self.counts = counts
        self.bytes_max = bytes_max
        self.turns = ReadScheduler(self.lanes, bytes_max)
        self.readers: list[Reader] = []

    async def begin(self, lane: int, size: int, rank: int) -> Reader:
        now = [rank, len(self.readers)]
        turn = ReadTurn(self.lanes[lane], size, lambda: (now[0], now[1]))
        enough = asyncio.Event()

        async def read() -> None:
            async with self.turns.take(turn):
                reader.has = True
                await enough.wait()
            reader.has = False

        reader = Reader(turn, asyncio.create_task(read()), enough, now)
        self.readers.append(reader)
        await settled()
        return reader

    def check(self) -> None:
        """Assert that no bound is exceeded, and that no reader waits that could have a turn."""
        having = [r for r in self.readers if r.has]
        in_flight = sum(r.turn.size_bytes for r in having)
        assert self.turns.bytes_in_flight == in_flight
        assert in_flight <= self.bytes_max or len(having) == 1
        able = []
        for lane, count in zip(self.lanes, self.counts, strict=True):
            assert lane.free == count - sum(r.turn.lane is lane for r in having)
            if lane.free:
                able += [r for r in self.readers if r.waits and r.turn.lane is lane]
        if able:
            first = min(able, key=lambda r: r.rank)
            assert in_flight, "a reader waits although no turn is taken"
            assert in_flight + first.turn.size_bytes > self.bytes_max


async def settled() -> None:
    await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def scenario(loop: SimulationLoop) -> None:
        await test()

    run_simulation(0, scenario)


def test_batch_larger_than_the_byte_bound_is_read_alone() -> None:
    """Blocks larger than the bound would never be read."""

    async def test() -> None:
        rig = Rig([4, 4], 10)
        small = await rig.begin(0, 1, 0)
        large = await rig.begin(1, 25, 1)
        late = await rig.begin(0, 1, 2)
        assert [r.has for r in rig.readers] == [True, False, False], "no reader overtakes it"
        small.enough.set()
        await settled()
        assert [r.has for r in rig.readers] == [False, True, False]
        large.enough.set()
        await settled()
        assert late.has

    run(test)


def test_cancelled_waiter_lets_the_next_reader_proceed() -> None:
    """A request aborted while it waits for bytes would keep all others waiting."""

    async def test() -> None:
        rig = Rig([4], 10)
        await rig.begin(0, 6, 0)
        first = await rig.begin(0, 6, 1)
        second = await rig.begin(0, 3, 2)
        assert not second.has
        first.task.cancel()
        await settled()
        assert second.has
        rig.check()

    run(test)


def test_full_lane_does_not_block_other_lanes() -> None:
    """A tier that hangs would keep the blocks of all others from being read."""

    async def test() -> None:
        rig = Rig([1, 1], 100)
        await rig.begin(0, 1, 0)
        assert not (await rig.begin(0, 1, 1)).has
        assert (await rig.begin(1, 1, 2)).has

    run(test)


steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "cancel", "revoke", "earlier", "later"]),
        st.integers(0, 2),
        st.integers(1, 12),
        st.integers(0, 20),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 12), steps)
def test_turns_go_to_the_first_reader_that_fits(counts, bytes_max, steps) -> None:
    """A wake-up would be lost and a tier never read again, or a late request be served first."""

    async def test() -> None:
        rig = Rig(counts, bytes_max)
        for what, lane, size, number in steps:
            waiting = [r for r in rig.readers if r.waits]
            having = [r for r in rig.readers if r.has]
            if what == "begin":
                await rig.begin(lane % len(counts), size, number)
            elif what == "end" and having:
                having[number % len(having)].enough.set()
            elif what == "cancel" and (waiting or having):
                some = waiting or having
                some[number % len(some)].task.cancel()
            elif what == "revoke" and waiting:
                waiting[number % len(waiting)].turn.granted.cancel()
            elif waiting:
                reader = waiting[number % len(waiting)]
                reader.rank[0] += size if what == "later" else -size
                if what == "earlier":
                    reader.turn.earlier()
            await settled()
            if what == "cancel":
                # A reader cancelled during its turn gives the turn back.
                for reader in rig.readers:
                    reader.has = reader.has and not reader.task.done()
            rig.check()
        for reader in rig.readers:
            reader.enough.set()
        async with asyncio.timeout(1):
            for reader in rig.readers:
                with suppress(asyncio.CancelledError):
                    await reader.task
        assert [lane.free for lane in rig.lanes] == counts
        assert not rig.turns.bytes_in_flight

    run(test)
