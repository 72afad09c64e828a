"""Threads, clocks and sockets of an engine's process, in the simulation's virtual time.

The connector and its client are written for threads that wait. Here each such thread is a
strand: it runs only while the loop waits for it, and hands each of its waits to the loop, so
that one seed gives one order of events. `virtual_process()` replaces the clocks and sockets in
the modules of the connector and of the client with simulated ones.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

from tierd.client import connection as client_module
from tierd.testing.loop import SimulationLoop
from tierd.testing.simulation.connection import SimulatedConnection
from tierd.testing.simulation.world import World

T = TypeVar("T")

_here = threading.local()


class ProcessGoneError(BaseException):
    """The process of this strand has been killed; `except Exception` does not catch it."""


class Process:
    """State shared by the strands of one simulated process: world, random stream and sockets."""

    def __init__(self, world: World, name: str, random: Random) -> None:
        self.world = world
        self.name = name
        self.random = random
        self.sockets: list[SimulatedSocket] = []
        self.strands: list[asyncio.Task[None]] = []

    def remark(self, what: str) -> None:
        """Note a provocation, to be shown with a later violation."""
        self.world.remark(f"{self.name}: {what}")

    def spawn(self, main: Callable[[], object], name: str) -> asyncio.Task[None]:
        """Start a thread of this process."""
        strand = Strand(self, main)
        task = self.world.loop.create_task(strand.run(), name=f"{self.name} {name}")
        self.strands.append(task)
        return task

    async def kill(self) -> None:
        """SIGKILL: every thread ends where it is, then the kernel closes the sockets."""
        for task in self.strands:
            task.cancel()
        if self.strands:
            await asyncio.wait(self.strands)
        for each in self.sockets:
            each.close(torn=True)
        for task in self.strands:
            if not task.cancelled():
                task.result()


class Strand:
    """A thread whose waits all are waits on the event loop."""

    def __init__(self, process: Process, main: Callable[[], object]) -> None:
        self.process = process
        self._main = main
        # Each side waits for its lock, which the other side releases, so only one runs at a time.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._asked: Callable[[], Awaitable[Any]] | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self._gone = False

    async def run(self) -> None:
        """Let the thread run to its end; on cancellation, kill it at its current wait."""
        thread = threading.Thread(target=self._body, name="strand", daemon=True)
        thread.start()
        while (asked := self._resume()) is not None:
            try:
                self._answer = await asked()
            except asyncio.CancelledError:
                self._gone, self._error = True, ProcessGoneError()
            except Exception as error:
                self._error = error
        thread.join()
        if self._error is not None and not isinstance(self._error, ProcessGoneError):
            raise self._error
        if self._gone:
            raise asyncio.CancelledError

    def _resume(self) -> Callable[[], Awaitable[Any]] | None:
        self._asked = None
        self._go.release()
        self._back.acquire()
        return self._asked

    def _body(self) -> None:
        _here.strand = self
        self._go.acquire()
        try:
            self._main()
            self._error = None
        except BaseException as error:
            self._error = error
        self._asked = None
        self._back.release()

    def wait(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Await the result of `ask` on the loop, and return it; called on the strand's thread."""
        if self._gone:
            raise ProcessGoneError
        self._asked = ask
        self._back.release()
        self._go.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error
        answer: T = self._answer
        return answer


def here() -> Strand:
    """Return the strand that runs now."""
    strand: Strand = _here.strand
    return strand


def pause(seconds: float) -> None:
    """Sleep in virtual time."""
    here().wait(lambda: asyncio.sleep(seconds))


class VirtualTime:
    """The part of the module `time` that connectors and client use, in virtual time."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now_ns / 1e9

    def monotonic_ns(self) -> int:
        return self._loop.now_ns

    time = perf_counter = monotonic
    time_ns = perf_counter_ns = monotonic_ns

    def sleep(self, seconds: float) -> None:
        pause(seconds)


class SimulatedSocket:
    """A client's end of a simulated connection, used by `tierd.client` like a socket."""

    def __init__(self, *_: int) -> None:
        self._process = here().process
        self._connection: SimulatedConnection | None = None
        self._arrived: deque[tuple[bytes, list[int]]] = deque()
        self._over = False
        self._timeout_s: float | None = None
        self._news = asyncio.Event()

    def setblocking(self, flag: bool) -> None:
        """Do nothing: the flags of each call decide whether it blocks."""

    def connect(self, path: str) -> None:
        connection = self._process.world.connect(self._process.name, self._process.random)
        if connection is None:
            raise ConnectionRefusedError(111, "no daemon")
        connection.on_data = self._data
        connection.on_end = self._end
        self._connection = connection
        self._process.sockets.append(self)

    def _data(self, chunk: bytes, fds: list[int]) -> None:
        self._arrived.append((chunk, fds))
        self._news.set()

    def _end(self) -> None:
        self._over = True
        self._news.set()

    def fileno(self) -> int:
        return 1 << 20

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        whole, part = struct.unpack("ll", value)
        self._timeout_s = whole + part / 1e6

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        assert self._connection is not None
        if self._over or self._connection.client.closed:
            raise BrokenPipeError(32, "the daemon has gone")
        self._connection.client.send(bytes(data))
        return len(data)

    def sendmsg(self, parts: Sequence[bytes | memoryview], rights: object, flags: int) -> int:
        assert not rights, "descriptors are not sent here"
        return self.send(b"".join(map(bytes, parts)), flags)

    def recv_into(self, buffer: bytearray, size: int, flags: int) -> int:
        count, fds = self._take(buffer, flags)
        for fd in fds:
            os.close(fd)
        return count

    def recvmsg_into(
        self, buffers: Sequence[bytearray], space: int, flags: int
    ) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        count, fds = self._take(buffers[0], flags)
        packed = b"".join(struct.pack("i", fd) for fd in fds)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else []
        return count, control, 0, None

    def _take(self, buffer: bytearray, flags: int) -> tuple[int, list[int]]:
        if not self._arrived and not self._over and not flags & socket.MSG_DONTWAIT:
            here().wait(self._await_news)
        if not self._arrived:
            if self._over:
                return 0, []
            raise BlockingIOError
        chunk, fds = self._arrived.popleft()
        buffer[: len(chunk)] = chunk
        return len(chunk), fds

    async def _await_news(self) -> None:
        await self.await_news(self._timeout_s)

    async def await_news(self, timeout_s: float | None) -> None:
        """Wait until data has arrived, or until the timeout."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def close(self, *, torn: bool = False) -> None:
        """Close as the kernel does at the end of a process."""
        if self._connection is not None:
            self._connection.client.close(torn=torn)
        for _, fds in self._arrived:
            for fd in fds:
                os.close(fd)
        self._arrived.clear()


def _modules() -> list[ModuleType]:
    names = ("tierd_connectors.", "tierd.client")
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(names)]


@contextmanager
def virtual_process(loop: SimulationLoop, more: Sequence[ModuleType] = ()) -> Iterator[None]:
    """Connectors and clients on virtual clocks and simulated sockets, and chance from a seed.

    `more` are modules that `sys.modules` does not have.
    """
    chance = Random("the connector's own")
    secrets = SimpleNamespace(
        token_hex=lambda size: chance.randbytes(size).hex(),
        token_bytes=chance.randbytes,
        randbelow=chance.randrange,
    )
    virtual = VirtualTime(loop)
    simulated = SimpleNamespace(**vars(socket))
    simulated.socket = SimulatedSocket
    undo: list[tuple[ModuleType, str, object]] = []

    def put(module: ModuleType, name: str, value: object) -> None:
        undo.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    try:
        for module in [*_modules(), *more]:
            if getattr(module, "time", None) is time:
                put(module, "time", virtual)
            if hasattr(module, "secrets"):
                put(module, "secrets", secrets)
        put(client_module, "socket", simulated)
        yield
    finally:
        for module, name, value in reversed(undo):
            setattr(module, name, value)
