"""The simulation loop: repeatable, on virtual time, and clear about tasks that hang."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierd.clock import Clock, SystemClock
from tierd.testing.loop import (
    EPOCH_NS,
    SimulationDeadlock,
    SimulationError,
    SimulationLoop,
    VirtualClock,
    run_simulation,
)

SEEDS = range(40)


@contextmanager
def expect_value_error() -> Iterator[None]:
    """Expects the ValueError of a task group's member."""
    with pytest.raises(ExceptionGroup) as caught:
        yield
    assert caught.group_contains(ValueError)


async def crowd(loop: SimulationLoop, tasks: int) -> list[tuple[int, int, int]]:
    """Run tasks that sleep, yield, wait for a lock and use threads; return their event log."""
    trace: list[tuple[int, int, int]] = []
    lock = asyncio.Lock()

    async def member(number: int) -> None:
        for stage in range(3):
            trace.append((number, stage, loop.now_ns))
            if number % 7 == 0:
                await asyncio.to_thread(trace.append, (number, -stage, loop.now_ns))
            elif number % 3 == 0:
                await asyncio.sleep(loop.random.choice((0.001, 0.002, 0.5)))
            elif number % 3 == 1:
                await asyncio.sleep(0)
            else:
                async with lock:
                    await asyncio.sleep(0)

    async def failing() -> None:
        await asyncio.sleep(loop.random.random())
        raise ValueError

    with expect_value_error():
        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(member(number))
            group.create_task(failing())
    return trace


@pytest.mark.slow
def test_seed_repeats_a_run_of_5000_tasks() -> None:
    """A failure found by simulation could not be reproduced."""
    first = run_simulation(1, lambda loop: crowd(loop, 5_000))
    assert len(first) > 10_000
    assert run_simulation(1, lambda loop: crowd(loop, 5_000)) == first
    assert run_simulation(2, lambda loop: crowd(loop, 5_000)) != first


@pytest.mark.slow
def test_seed_repeats_with_other_string_hashes() -> None:
    """A seed that fails in CI would pass on the developer's machine."""
    program = (
        "import hashlib, tests.testing.test_sim_loop as t\n"
        "trace = t.run_simulation(5, lambda loop: t.crowd(loop, 300))\n"
        "print(hashlib.sha256(repr(trace).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    answers = set()
    for hash_seed in ("1", "2"):
        environment = dict(os.environ, PYTHONHASHSEED=hash_seed)
        command = [sys.executable, "-c", program]
        answers.add(subprocess.check_output(command, env=environment, cwd=root))
    assert len(answers) == 1


def test_aborting_a_task_group_repeats() -> None:
    """Sets of tasks are ordered by address: each run would cancel in another order."""

    async def scenario(loop: SimulationLoop) -> list[int]:
        ended: list[int] = []

        async def waiter(number: int) -> None:
            try:
                await loop.create_future()
            finally:
                ended.append(number)

        async def failing() -> None:
            await asyncio.sleep(1)
            raise ValueError

        with expect_value_error():
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(waiter(number))
                group.create_task(failing())
        return ended

    runs = [run_simulation(3, scenario) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert run_simulation(4, scenario) != runs[0]


async def lost_update(loop: SimulationLoop) -> int:
    """Two writers read, yield and write, four turns apart; 1 if an update was lost."""
    total = 0

    async def add(rounds: int) -> None:
        nonlocal total
        for _ in range(rounds):
            await asyncio.sleep(0)
        before = total
        await asyncio.sleep(0)
        total = before + 1

    async with asyncio.TaskGroup() as group:
        group.create_task(add(1))
        group.create_task(add(5))
    return total


def test_shuffling_finds_a_race_hidden_by_first_in_first_out() -> None:
    """All seeds would run the callbacks in the one order that happens to work."""
    assert {run_simulation(seed, lost_update, shuffle=False) for seed in SEEDS} == {2}
    assert {run_simulation(seed, lost_update) for seed in SEEDS} == {1, 2}


def test_without_shuffling_callbacks_keep_their_order() -> None:
    """A test that needs asyncio's documented order could not be written."""

    async def scenario(loop: SimulationLoop) -> list[int]:
        order: list[int] = []
        for number in range(20):
            loop.call_soon_threadsafe(order.append, number)
        await asyncio.sleep(0.001)
        return order

    assert run_simulation(0, scenario, shuffle=False) == list(range(20))
    assert run_simulation(0, scenario) != list(range(20))
    assert sorted(run_simulation(0, scenario)) == list(range(20))


def test_sets_of_futures_have_a_repeatable_order() -> None:
    """asyncio.wait returns sets: iterating over them would give another order in each run."""

    async def scenario(loop: SimulationLoop) -> list[int]:
        futures: dict[asyncio.Future[None], int]
        futures = {loop.create_future(): number for number in range(50)}
        for future in futures:
            loop.call_later(loop.random.random(), future.set_result, None)
        done, _ = await asyncio.wait(futures)
        return [futures[future] for future in done]

    runs = [run_simulation(3, scenario) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def test_cancelled_callback_is_not_run() -> None:
    """A cancelled wake-up would still run, such as a deadline after the answer."""

    async def scenario(loop: SimulationLoop) -> list[str]:
        ran: list[str] = []
        soon = loop.call_soon(ran.append, "soon")
        later = loop.call_later(1, ran.append, "later")
        loop.call_soon_threadsafe(ran.append, "safe")
        soon.cancel()
        later.cancel()
        await asyncio.sleep(2)
        return ran

    assert run_simulation(0, scenario) == ["safe"]


def test_virtual_time_jumps_and_adds_up() -> None:
    """Two simulated months of heartbeats would take two months, or drift from their deadlines."""

    async def scenario(loop: SimulationLoop) -> int:
        clock: Clock = VirtualClock(loop)
        start_ns = clock.monotonic_ns()
        assert start_ns == EPOCH_NS
        for _ in range(1_000):
            await asyncio.sleep(0.1)
        assert clock.monotonic_ns() - start_ns == 100 * 10**9
        assert loop.time() == clock.monotonic_ns() / 1e9
        await asyncio.sleep(60 * 86_400)
        return clock.monotonic_ns() - start_ns

    took_ns = run_simulation(0, scenario)
    assert took_ns == (100 + 60 * 86_400) * 10**9


def test_timeouts_fire_at_their_virtual_time() -> None:
    """Deadlines could only be tested by waiting for them."""

    async def scenario(loop: SimulationLoop) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await loop.create_future()
        assert loop.now_ns == EPOCH_NS + 30 * 10**9
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(60), 0.25)
        assert loop.now_ns == EPOCH_NS + 30_250_000_000
        assert await asyncio.wait_for(asyncio.sleep(1, "slept"), 2) == "slept"
        done, pending = await asyncio.wait(
            [asyncio.ensure_future(asyncio.sleep(seconds)) for seconds in (1, 2, 9)], timeout=5
        )
        assert (len(done), len(pending)) == (2, 1)

    for seed in SEEDS:
        run_simulation(seed, scenario)


def test_deadlock_names_pending_tasks_and_their_lines() -> None:
    """A lost wake-up would show as a test that hangs without any information."""

    async def scenario(loop: SimulationLoop) -> None:
        event = asyncio.Event()

        async def waiter() -> None:
            await event.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(waiter(), name="promoter")

    with pytest.raises(SimulationDeadlock, match=r"promoter \(Event.wait, locks.py:\d+\)"):
        run_simulation(0, scenario)


def test_endless_run_is_stopped() -> None:
    """A livelock with a timer is not a deadlock; it would spin until CI kills the job."""

    async def scenario(loop: SimulationLoop) -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(SimulationError, match="no end after 500 steps; pending: Task-1 "):
        run_simulation(0, scenario, steps_max=500)

    async def rare(loop: SimulationLoop) -> None:
        while True:
            await asyncio.sleep(86_400)

    with pytest.raises(SimulationError, match="no end after 97 virtual days"):
        run_simulation(0, rare)


def test_failure_names_its_seed() -> None:
    """The seed that failed would be unknown among ten thousand."""

    async def scenario(loop: SimulationLoop) -> None:
        await asyncio.sleep(1.5)
        assert loop.now_ns == 0, "wrong byte"

    with pytest.raises(AssertionError, match="wrong byte") as caught:
        run_simulation(987, scenario)
    (note,) = caught.value.__notes__
    assert "seed 987" in note
    assert "1.500000000 s in" in note


def test_unretrieved_exception_fails_the_run() -> None:
    """A background task of the daemon would fail silently, and its simulation pass."""

    async def scenario(loop: SimulationLoop) -> None:
        async def failing() -> None:
            raise ValueError("dead pump")

        task = loop.create_task(failing())
        await asyncio.sleep(1)
        assert task.done()
        del task
        await asyncio.sleep(1)

    with pytest.raises(SimulationError, match="never retrieved") as caught:
        run_simulation(0, scenario)
    assert isinstance(caught.value.__cause__, ValueError)


def test_failing_callback_fails_the_run() -> None:
    """asyncio only logs it: a broken timer callback would go unnoticed."""

    async def scenario(loop: SimulationLoop) -> None:
        loop.call_later(1, int, "x")
        loop.call_soon(int, "y")
        await asyncio.sleep(2)

    with pytest.raises(SimulationError, match="Exception in callback"):
        run_simulation(0, scenario)


def test_remaining_tasks_end_with_the_run() -> None:
    """Their finally clauses would run at a later garbage collection, in another test."""
    ended: list[str] = []
    kept: list[asyncio.Task[None]] = []

    async def scenario(loop: SimulationLoop) -> None:
        async def background() -> None:
            try:
                await asyncio.sleep(3_600)
            finally:
                await asyncio.sleep(1)
                ended.append("background")

        kept.append(loop.create_task(background()))
        await asyncio.sleep(0.5)

    run_simulation(0, scenario)
    assert ended == ["background"]


def test_task_that_outlives_its_cancellation_is_reported() -> None:
    """A shutdown that never ends would pass, since the simulation had its result."""
    kept: list[asyncio.Task[None]] = []

    async def scenario(loop: SimulationLoop) -> None:
        async def stubborn() -> None:
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                raise ValueError("cannot stop") from None

        kept.append(loop.create_task(stubborn()))
        await asyncio.sleep(0.5)

    with pytest.raises(SimulationError, match="failed while it was cancelled"):
        run_simulation(0, scenario)


def test_thread_work_runs_later_and_delivers_later() -> None:
    """Code with file I/O on threads could not be simulated, or only in its simplest order."""

    async def scenario(loop: SimulationLoop) -> None:
        ran: list[int] = []

        def work(number: int) -> int:
            ran.append(loop.now_ns)
            assert threading.current_thread() is threading.main_thread()
            return number * 2

        before_ns = loop.now_ns
        future = loop.run_in_executor(None, work, 21)
        assert ran == []
        assert await future == 42
        assert before_ns < ran[0] < loop.now_ns

    run_simulation(0, scenario)


def test_thread_work_may_overtake_other_work() -> None:
    """Simulated threads would finish in the order of their start, unlike real ones."""

    async def scenario(loop: SimulationLoop) -> tuple[int, ...]:
        order: list[int] = []
        await asyncio.gather(*(asyncio.to_thread(order.append, n) for n in range(3)))
        return tuple(order)

    assert len({run_simulation(seed, scenario) for seed in SEEDS}) > 3


def test_single_worker_keeps_the_order() -> None:
    """The simulation would report races that a single-threaded executor cannot have."""

    async def scenario(loop: SimulationLoop) -> list[int]:
        order: list[int] = []
        with ThreadPoolExecutor(max_workers=1) as executor:
            futures = [loop.run_in_executor(executor, order.append, n) for n in range(10)]
            await asyncio.gather(*futures)
        with pytest.raises(RuntimeError, match="after shutdown"):
            loop.run_in_executor(executor, order.append, 99)
        return order

    for seed in SEEDS:
        assert run_simulation(seed, scenario, shuffle=False) == list(range(10))


def test_cancelling_does_not_stop_running_thread_work() -> None:
    """The worst bug of thread I/O, a write into memory that was given back, would never show."""

    async def scenario(loop: SimulationLoop) -> list[str]:
        ran: list[str] = []
        with ThreadPoolExecutor(max_workers=1) as executor:
            begun = loop.run_in_executor(executor, ran.append, "begun")
            queued = loop.run_in_executor(executor, ran.append, "queued")
            begun.cancel()
            queued.cancel()
            await asyncio.sleep(1)
        assert begun.cancelled()
        return ran

    assert run_simulation(0, scenario) == ["begun"]


def test_thread_work_carries_errors_and_context() -> None:
    """An I/O error on a thread would end the simulation instead of reaching the caller."""
    request = contextvars.ContextVar("request", default="none")

    async def scenario(loop: SimulationLoop) -> None:
        request.set("r1")
        assert await asyncio.to_thread(request.get) == "r1"
        assert await loop.run_in_executor(None, request.get) == "none"
        with pytest.raises(FileNotFoundError):
            await asyncio.to_thread(os.stat, "/nonexistent")

    run_simulation(0, scenario)


def test_call_from_a_real_thread_is_refused() -> None:
    """A run would depend on the operating system's scheduler, and its seed would not repeat."""
    caught: list[SimulationError] = []

    async def scenario(loop: SimulationLoop) -> None:
        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except SimulationError as error:
                caught.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    run_simulation(0, scenario)
    assert len(caught) == 1


def test_sockets_are_refused() -> None:
    """A simulation would wait for real sockets while its own clock stands still."""

    async def scenario(loop: SimulationLoop) -> None:
        with pytest.raises(NotImplementedError):
            loop.add_reader(0, print)

    run_simulation(0, scenario)


def test_system_clock_is_clock_monotonic() -> None:
    """A lease's expiry is compared in another process: both must read the same clock."""
    clock: Clock = SystemClock()
    before_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert before_ns <= clock.monotonic_ns() <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)
