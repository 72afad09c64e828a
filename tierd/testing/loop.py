"""A deterministic event loop with virtual time: a seed decides every choice.

When nothing is ready, the clock jumps to the next timer, so a simulated hour costs only the time
of its callbacks. The same seed gives the same run in any process if the code under test reads no
other clock, draws no other random numbers and does not depend on the iteration order of a set of
str or bytes (sets of tasks and futures are safe). Sockets are not supported: code that opens one
fails with NotImplementedError.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from random import Random
from types import CoroutineType
from typing import Final, NamedTuple, TypeVar, TypeVarTuple, cast
from weakref import WeakKeyDictionary

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH_NS: Final = 1_000 * 10**9
"""Start of the clock: not 0, which code may take for "never"."""

HORIZON_NS: Final = 2**23 * 10**9
"""End of the clock, after 97 days: beyond it a float of seconds no longer resolves a
nanosecond, and asyncio would miss timers that are due.
"""

STEPS_MAX: Final = 1_000_000
"""Iterations after which a run counts as endless: tens of seconds of real time."""

DEFAULT_WORKERS: Final = 8
"""Threads of the default executor, and of executors whose thread count is unknown."""

WORK_MEAN_S: Final = 0.0005
"""Mean of the exponential delay before a thread's work takes effect, and again after it."""

_PENDING_SHOWN: Final = 20


class SimulationError(Exception):
    """The simulated program did something that no correct program does."""


class SimulationDeadlock(SimulationError):  # noqa: N818  # it names a state
    """Nothing is ready and no timer is set: pending tasks will never end."""


class SimulationLoop(asyncio.BaseEventLoop):
    """A single-threaded loop on virtual time.

    `random` is a random stream for the scenario. With `shuffle`, ready callbacks run in an order
    drawn from the seed instead of first in, first out: a task may lose any race that it could
    lose in production. Functions passed to an executor run on the loop thread at a drawn time,
    with the order and parallelism of that executor's workers. As on a thread, a function that a
    worker has picked up runs even if its caller is cancelled. `errors` collects the contexts
    passed to the loop's exception handler.
    """

    def __init__(self, seed: int, *, shuffle: bool = True, steps_max: int = STEPS_MAX) -> None:
        super().__init__()
        self.random = Random(f"scenario {seed}")
        self.now_ns = EPOCH_NS
        self.steps = 0
        self.steps_max = steps_max
        self.errors: list[dict[str, object]] = []
        self.serials = itertools.count(1)
        self._shuffle = shuffle
        self._thread = threading.get_ident()
        self._choices = Random(f"loop {seed}")
        self._pool: list[asyncio.Handle] = []
        self._pool_context = contextvars.Context()
        self._names = itertools.count(1)
        self._default_threads = _Threads(self, DEFAULT_WORKERS)
        self._threads: WeakKeyDictionary[Executor, _Threads] = WeakKeyDictionary()
        self._selector = _VirtualSelector(self)
        self.set_exception_handler(_collect_error)

    def time(self) -> float:
        return self.now_ns / 1e9

    @property
    def elapsed_s(self) -> float:
        """Virtual seconds since the start."""
        return (self.now_ns - EPOCH_NS) / 1e9

    def create_future(self) -> asyncio.Future[T]:
        return _Future(loop=self)

    def create_task(
        self,
        coro: Generator[asyncio.Future[object] | None, None, T] | Coroutine[object, object, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        # asyncio's default names would not repeat: their counter is shared by all loops.
        given = f"Task-{next(self._names)}" if name is None else str(name)
        return _Task(coro, loop=self, name=given, context=context)

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if not self._shuffle:
            return super().call_soon(callback, *args, context=context)
        # Each callback adds one _run_any to the loop's queue, which runs any one of the callbacks.
        super().call_soon(self._run_any, context=self._pool_context)
        handle = asyncio.Handle(callback, args, self, context)
        self._pool.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise SimulationError(
                "a real thread called into the simulation: no seed can repeat that"
            )
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        threads = self._default_threads
        if executor is not None:
            # These attributes are private, so an executor without them gets the defaults.
            if getattr(executor, "_shutdown", False):
                raise RuntimeError("cannot schedule new futures after shutdown")
            workers = getattr(executor, "_max_workers", DEFAULT_WORKERS)
            threads = self._threads.setdefault(executor, _Threads(self, workers))
        future: asyncio.Future[T] = self.create_future()
        call = partial(func, *args)
        threads.submit(_Work(future.cancelled, partial(_take_effect, future, call)))
        return future

    def work_delay_s(self) -> float:
        """Draw the duration of the next stage of a thread's work, in seconds."""
        return self._choices.expovariate(1 / WORK_MEAN_S)

    def cancel_all(self) -> None:
        """Cancel all pending tasks and run until they have ended, as asyncio.run does.

        Raises SimulationError if they do not end.
        """
        self.steps_max += self.steps
        pending = asyncio.all_tasks(self)
        for task in pending:
            task.cancel()
        if pending:
            self.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        for task in pending:
            if not task.cancelled() and (error := task.exception()) is not None:
                message = f"{task.get_name()} failed while it was cancelled"
                self.errors.append({"message": message, "exception": error})
        self.run_until_complete(self.shutdown_asyncgens())

    def close(self) -> None:
        super().close()
        self._pool.clear()

    def advance(self, timeout_s: float | None) -> None:
        """Start an iteration; if nothing is ready, jump to the next timer, `timeout_s` ahead."""
        self.steps += 1
        if timeout_s is None:
            raise SimulationDeadlock(f"nothing is ready, no timer is set; {self._pending()}")
        if self.steps > self.steps_max:
            raise SimulationError(f"no end after {self.steps_max} steps; {self._pending()}")
        if timeout_s > 0:
            # Rounded, so that sleeps add up; at least 1, so that the clock always advances.
            self.now_ns += max(1, round(timeout_s * 1e9))
            if self.now_ns > HORIZON_NS:
                raise SimulationError(f"no end after 97 virtual days; {self._pending()}")

    def _run_any(self) -> None:
        pool = self._pool
        index = int(self._choices.random() * len(pool))
        pool[index], pool[-1] = pool[-1], pool[index]
        handle = pool.pop()
        if not handle.cancelled():
            handle._run()
        # A failed task's traceback keeps this frame alive, and the frame would keep the task.
        del handle

    def _pending(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        shown = ", ".join(_place(task) for task in tasks[:_PENDING_SHOWN])
        more = f" and {len(tasks) - _PENDING_SHOWN} more" if len(tasks) > _PENDING_SHOWN else ""
        return f"pending: {shown or 'no task'}{more}"

    def _process_events(self, event_list: list[object]) -> None:
        """BaseEventLoop's hook for I/O events: there are none."""

    def _write_to_self(self) -> None:
        """BaseEventLoop's hook to wake its selector: this one never waits."""


class VirtualClock:
    """A `tierd.clock.Clock` that reads a simulation's virtual time."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop

    def monotonic_ns(self) -> int:
        """Virtual time in nanoseconds, on the scale of the loop's time()."""
        return self._loop.now_ns


def run_simulation(
    seed: int,
    scenario: Callable[[SimulationLoop], Awaitable[T]],
    *,
    shuffle: bool = True,
    steps_max: int = STEPS_MAX,
) -> T:
    """Run `scenario` on a new loop and return its result.

    Exceptions carry a note with the seed. Raises SimulationDeadlock if nothing can continue, and
    SimulationError if the run is endless, a callback failed or a task's exception was never
    retrieved. Tasks that are left at the end are cancelled and must end.
    """
    loop = SimulationLoop(seed, shuffle=shuffle, steps_max=steps_max)
    try:
        try:
            result = loop.run_until_complete(scenario(loop))
        except BaseException:
            # Tasks of a failed run may not end; the first failure counts.
            with suppress(SimulationError):
                loop.cancel_all()
            raise
        loop.cancel_all()
        for context in loop.errors:
            cause = context.get("exception")
            assert cause is None or isinstance(cause, BaseException)
            raise SimulationError(str(context.get("message"))) from cause
    except BaseException as error:
        hash_seed = os.environ.get("PYTHONHASHSEED", "random")
        error.add_note(
            f"simulation seed {seed} (PYTHONHASHSEED {hash_seed}), "
            f"step {loop.steps}, {loop.elapsed_s:.9f} s in"
        )
        raise
    finally:
        loop.close()
    return result


class _VirtualSelector:
    """The selector of a SimulationLoop: it advances the clock instead of waiting."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[object]:
        self._loop.advance(timeout_s)
        return []


# TaskGroup and asyncio.wait keep sets of tasks and futures, which are iterated by hash. The
# default hash is an address; a number in the order of first use is the same in each run.


class _Future(asyncio.Future[T]):
    _serial = 0

    def __hash__(self) -> int:
        if not self._serial:
            self._serial = next(cast(SimulationLoop, self.get_loop()).serials)
        return self._serial


class _Task(asyncio.Task[T]):
    _serial = 0

    def __hash__(self) -> int:
        if not self._serial:
            self._serial = next(cast(SimulationLoop, self.get_loop()).serials)
        return self._serial


def _collect_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    cast(SimulationLoop, loop).errors.append(context)


def _place(task: asyncio.Task[object]) -> str:
    """Return the task's name and the line at which it waits."""
    innermost: object = task.get_coro()
    while isinstance(innermost, CoroutineType) and isinstance(innermost.cr_await, CoroutineType):
        innermost = innermost.cr_await
    if not isinstance(innermost, CoroutineType) or innermost.cr_frame is None:
        return task.get_name()
    frame = innermost.cr_frame
    file = os.path.basename(frame.f_code.co_filename)
    return f"{task.get_name()} ({innermost.__qualname__}, {file}:{frame.f_lineno})"


class _Work(NamedTuple):
    """A function passed to an executor.

    `cancelled` says whether its caller gave up. `run` runs it and returns a call that delivers
    the result to the caller.
    """

    cancelled: Callable[[], bool]
    run: Callable[[], Callable[[], None]]


class _Threads:
    """The workers of one executor: they run functions in order, `workers` at a time."""

    def __init__(self, loop: SimulationLoop, workers: int) -> None:
        self._loop = loop
        self._idle = workers
        self._queue: deque[_Work] = deque()

    def submit(self, work: _Work) -> None:
        self._queue.append(work)
        self._pick_up()

    def _pick_up(self) -> None:
        while self._idle and self._queue:
            work = self._queue.popleft()
            if not work.cancelled():
                self._idle -= 1
                # A thread starts with an empty context.
                context = contextvars.Context()
                self._loop.call_later(self._loop.work_delay_s(), self._run, work, context=context)

    def _run(self, work: _Work) -> None:
        answer = work.run()
        self._loop.call_later(self._loop.work_delay_s(), _deliver, work, answer)
        self._idle += 1
        self._pick_up()


def _take_effect(future: asyncio.Future[T], func: Callable[[], T]) -> Callable[[], None]:
    try:
        result = func()
    except Exception as error:  # noqa: BLE001  # the future carries it, as an executor's does
        return partial(future.set_exception, error)
    return partial(future.set_result, result)


def _deliver(work: _Work, answer: Callable[[], None]) -> None:
    if not work.cancelled():
        answer()
