"""Threads that run batches: who may touch a caller's memory, and who waits for whom."""

import asyncio
import contextlib
import socket
import threading

import pytest

from tierd_backends.common.calls import CallThreads


@contextlib.asynccontextmanager
async def threads(count):
    """Threads that end with the test."""
    made = CallThreads("test", count)
    try:
        yield made
    finally:
        await made.close()


async def begun(pool, work, event, jobs=range(5)):
    """Begin a call and wait until `work` has set `event`; return the call's task."""
    task = asyncio.create_task(pool.run(work, jobs))
    while not event.is_set():
        await asyncio.sleep(0.001)
    return task


async def cancelled(pool, work, event):
    """Begin a call, cancel it once `work` has set `event`, and wait until it has ended."""
    task = await begun(pool, work, event)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


async def test_every_job_is_done_once():
    """A block would be left out, or written twice."""
    done = []

    def work(turn):
        while (job := turn.take()) is not None:
            done.append(job)

    async with threads(4) as pool:
        await asyncio.gather(*(pool.run(work, range(n, n + 50)) for n in range(0, 500, 50)))
        await pool.run(work, [])
    assert sorted(done) == list(range(500))


async def test_error_ends_the_call():
    """A bug in a backend would leave the daemon waiting forever, or end a thread."""

    def work(turn):
        while (job := turn.take()) is not None:
            if job == 3:
                raise ZeroDivisionError

    async with threads(2) as pool:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                await pool.run(work, range(10))
        await pool.run(work, range(3))


async def test_calls_take_turns():
    """A lookup would wait for all of a large batch."""
    order = []
    first = threading.Event()
    go = threading.Event()

    def work(turn):
        while (job := turn.take()) is not None:
            first.set()
            go.wait(10)
            order.append(job)

    async with threads(1) as pool:
        large = await begun(pool, work, first, ["large"] * 100)
        small = asyncio.create_task(pool.run(work, ["small"]))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(large, small)
    assert order.index("small") <= 2


async def test_cancel_wakes_blocked_threads():
    """A cancelled call would wait for a silent peer."""
    near, far = socket.socketpair()
    inside = threading.Event()
    ended = []

    def work(turn):
        while turn.take() is not None:
            with turn.using(near):
                inside.set()
                near.recv(1)
                ended.append(turn.cancelled)

    with near, far:
        async with threads(2) as pool:
            await cancelled(pool, work, inside)
            assert ended
            assert all(ended)


async def test_no_thread_enters_after_a_cancel():
    """A thread that was still connecting would write to memory that has another owner by then."""
    near, far = socket.socketpair()
    release, trying = threading.Event(), threading.Event()
    touched = []

    def work(turn):
        while turn.take() is not None:
            trying.set()
            release.wait(10)
            with turn.using(near):
                touched.append(True)

    with near, far:
        async with threads(2) as pool:
            await cancelled(pool, work, trying)
            release.set()
        assert not touched


async def test_interrupt_ends_calls():
    """A tier could not be closed while a peer is silent."""
    near, far = socket.socketpair()
    inside = threading.Event()

    def work(turn):
        while turn.take() is not None:
            with turn.using(near):
                inside.set()
                near.recv(1)

    with near, far:
        async with threads(1) as pool:
            task = await begun(pool, work, inside)
            pool.interrupt()
            async with asyncio.timeout(5):
                await task
