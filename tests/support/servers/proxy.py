"""A proxy that disturbs connections on purpose, for tests of network clients.

It runs an event loop in a separate thread. A `Flow` says what happens to the bytes of a direction;
it can be changed at any time and applies to every connection, old and new.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

CHUNK_BYTES = 64 << 10
CHUNKS_MAX = 32
"""Chunks of one direction that are delayed: at most 2 MiB are held back."""

CALL_S_MAX = 10.0

Address = tuple[str, int] | Path
"""Host and port, or the path of a unix socket."""

_T = TypeVar("_T")


class Then(enum.Enum):
    """What happens in a direction once its good bytes have passed."""

    STALL = "silence until the flow is changed"
    RESET = "both ends of the connection see it reset"
    CLOSE = "both ends of the connection see its end"
    TRICKLE = "a single byte each `trickle_s`"


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What happens to the bytes of one direction; by default they pass."""

    delay_s: float = 0.0
    """Delay of each byte; the throughput does not change."""
    bytes_per_s: float | None = None
    good_bytes: int | None = None
    """Bytes of each connection that pass, counted from when the flow was set; None: all."""
    then: Then = Then.STALL
    trickle_s: float = 0.05
    change: Callable[[bytes], bytes] | None = None
    """Called with incoming bytes, in the proxy's thread; its result passes instead."""


PASS = Flow()
BLACK_HOLE = Flow(good_bytes=0)
"""As `up`: connections are accepted and never answered."""


class Proxy:
    """Passes connections on to `target`, disturbed as set. `accepted` counts all connections.

    It listens on a free port of 127.0.0.1, or on the unix socket `listen`. Methods are called from
    the test's threads; a change has taken effect when the method returns.
    """

    def __init__(self, target: Address, listen: Path | None = None) -> None:
        self.target = target
        self.accepted = 0
        self._listen: Address = listen if listen is not None else ("127.0.0.1", 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._listener: socket.socket | None = None
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._flows = (PASS, PASS)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.refuse()
            self.cut()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if isinstance(self._listen, Path):
                self._listen.unlink(missing_ok=True)

    @property
    def address(self) -> Address:
        """The address that clients connect to."""
        return self._listen

    @property
    def port(self) -> int:
        """The TCP port that clients connect to."""
        assert not isinstance(self._listen, Path)
        return self._listen[1]

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._links)

    def spoil(self, *, up: Flow = PASS, down: Flow = PASS) -> None:
        """Set what happens to bytes towards the target (`up`) and back from it (`down`)."""
        self._run(self._spoil(up, down))

    def heal(self) -> None:
        """Let everything pass and accept connections; delayed bytes are sent."""
        self.spoil()
        self.accept()

    def cut(self) -> None:
        """Reset all connections that are open now."""
        self._run(self._cut())

    def refuse(self) -> None:
        """Refuse new connections; open ones stay."""
        self._run(self._close_door())

    def accept(self) -> None:
        """Accept connections again."""
        self._run(self._open_door())

    # --- in the loop ----------------------------------------------------------------

    def _run(self, work: Coroutine[object, object, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S_MAX)

    async def _spoil(self, up: Flow, down: Flow) -> None:
        self._flows = (up, down)
        for link in self._links:
            link.spoil(up, down)

    async def _cut(self) -> None:
        links = dict(self._links)
        for link, task in links.items():
            link.reset = True
            task.cancel()
        await asyncio.gather(*links.values(), return_exceptions=True)

    async def _open_door(self) -> None:
        if self._listener is not None:
            return
        self._listener = _listen(self._listen)
        if not isinstance(self._listen, Path):
            self._listen = self._listener.getsockname()[:2]
        self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _close_door(self) -> None:
        if self._listener is None:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        # Not a task that waits in accept: cancelled at the wrong moment it would lose a connection.
        while True:
            try:
                near, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            self.accepted += 1
            link = _Link(near, self.target, self._flows)
            task = self._loop.create_task(link.run())
            self._links[link] = task
            task.add_done_callback(partial(self._forget, link))

    def _forget(self, link: _Link, task: asyncio.Task[None]) -> None:
        link.close()
        del self._links[link]
        if not task.cancelled():
            task.result()


class _Link:
    """One connection: the client's end (`near`), the target's (`far`), one pump per direction."""

    def __init__(self, near: socket.socket, target: Address, flows: tuple[Flow, Flow]) -> None:
        self.reset = False
        self._near = near
        self._target = target
        family = socket.AF_UNIX if isinstance(target, Path) else socket.AF_INET
        self._far = socket.socket(family, socket.SOCK_STREAM)
        self._pumps = (
            _Pump(self._near, self._far, flows[0]),
            _Pump(self._far, self._near, flows[1]),
        )

    def spoil(self, up: Flow, down: Flow) -> None:
        for pump, flow in zip(self._pumps, (up, down), strict=True):
            pump.set(flow)

    async def run(self) -> None:
        """Run until both directions have ended, or one has been cut."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for end in (self._near, self._far):
                end.setblocking(False)
            target = self._target
            where = os.fspath(target) if isinstance(target, Path) else target
            await asyncio.get_running_loop().sock_connect(self._far, where)
            for pump in self._pumps:
                tasks += [asyncio.create_task(pump.take()), asyncio.create_task(pump.give())]
            await asyncio.gather(*tasks)
        except _CutError as cut:
            self.reset = cut.reset
        except OSError:
            # Whichever end broke: the other end must not be left with half a connection.
            self.reset = True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Close both ends, once nothing uses them; with `reset` a TCP peer sees a reset."""
        for end in (self._near, self._far):
            if self.reset and end.family == socket.AF_INET:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()


class _CutError(Exception):
    """The flow ends the connection here."""

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset


class _Pump:
    """Moves the bytes of one direction from `source` to `sink` as its flow says."""

    def __init__(self, source: socket.socket, sink: socket.socket, flow: Flow) -> None:
        self._source = source
        self._sink = sink
        self._waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_MAX)
        self._changed = asyncio.Event()
        self._flow = flow
        self._passed = 0

    def set(self, flow: Flow) -> None:
        self._flow = flow
        self._passed = 0
        self._changed.set()

    async def take(self) -> None:
        """Read until the source's end; each chunk is passed on at its time."""
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            data = await loop.sock_recv(self._source, CHUNK_BYTES)
            await self._waiting.put((loop.time() + self._flow.delay_s, data))

    async def give(self) -> None:
        """Write the chunks, and then the end."""
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self._waiting.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if data and self._flow.change is not None:
                data = self._flow.change(data)
                if not data:
                    continue
            if not data:
                await self._until_good()
                with contextlib.suppress(OSError):
                    self._sink.shutdown(socket.SHUT_WR)
                return
            while data:
                await self._until_good()
                data = await self._give_some(data)

    async def _give_some(self, data: bytes) -> bytes:
        """Write as much as the flow lets pass now; returns the rest."""
        loop = asyncio.get_running_loop()
        flow, count = self._flow, len(data)
        if flow.good_bytes is not None:
            good = flow.good_bytes - self._passed
            if good <= 0:
                await asyncio.sleep(flow.trickle_s)
                good = 1
            count = min(count, good)
        started = loop.time()
        await loop.sock_sendall(self._sink, data[:count])
        self._passed += count
        if flow.bytes_per_s is not None:
            await asyncio.sleep(max(0.0, started + count / flow.bytes_per_s - loop.time()))
        return data[count:]

    async def _until_good(self) -> None:
        """Wait until the flow lets anything pass; raises _CutError where it ends."""
        while self._flow.good_bytes is not None and self._passed >= self._flow.good_bytes:
            match self._flow.then:
                case Then.TRICKLE:
                    return
                case Then.RESET | Then.CLOSE:
                    raise _CutError(reset=self._flow.then is Then.RESET)
                case Then.STALL:
                    self._changed.clear()
                    await self._changed.wait()


def _listen(address: Address) -> socket.socket:
    if isinstance(address, Path):
        address.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.fspath(address))
    else:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    listener.listen(64)
    listener.setblocking(False)
    return listener
