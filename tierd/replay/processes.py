"""Runs several replays of one trace in parallel, each in a separate process.

Processes are forked one by one as others end, and inherit the trace that was read; only results
are sent back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Final, TypeVar

from tierd.errors import ConfigError

PERIOD_S: Final = 0.2
"""Interval between two calls of the progress callback."""

Tell = Callable[[int], None]
"""Callback with which a run reports the number of requests done."""

Result = TypeVar("Result")


def run_all(
    runs: Sequence[Callable[[Tell], Result]], processes: int, progress: Callable[[int], None]
) -> list[Result]:
    """Return the results of all runs, in order; `progress` gets the total of requests done.

    Raises ConfigError if a process dies, for example because memory runs out. No process is left
    behind.
    """
    context = get_context("fork")
    done = context.RawArray("q", len(runs))
    results: dict[int, Result] = {}
    running: dict[Connection[Result, Result], tuple[int, ForkProcess]] = {}
    started = 0
    try:
        while len(results) < len(runs):
            while len(running) < processes and started < len(runs):
                with _uninterrupted():
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_run, args=(runs[started], started, done, theirs, os.getpid())
                    )
                    process.start()
                    # Only the process keeps this end, so that the pipe ends with the process.
                    theirs.close()
                    running[ours] = started, process
                started += 1
            for connection in wait(list(running), PERIOD_S):
                assert isinstance(connection, Connection)
                number, process = running[connection]
                try:
                    results[number] = connection.recv()
                except EOFError:
                    process.join()
                    raise ConfigError(
                        f"a process of the replay ended with status {process.exitcode}; if memory "
                        "ran out, pass a smaller --processes"
                    ) from None
                del running[connection]
                connection.close()
                process.join()
            progress(sum(done))
    finally:
        for connection, (_, process) in running.items():
            process.kill()
            process.join()
            connection.close()
    return [results[number] for number in range(len(runs))]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT while a process is started, so that the parent knows each process.

    The new process keeps it blocked: a terminal sends Ctrl-C to all processes, and the parent
    ends the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    run: Callable[[Tell], Result],
    number: int,
    done: MutableSequence[int],
    connection: Connection[Result, Result],
    parent: int,
) -> None:
    def tell(requests: int) -> None:
        done[number] = requests
        if os.getppid() != parent:
            os._exit(1)

    connection.send(run(tell))
    connection.close()
