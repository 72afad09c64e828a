"""The worker process: one backend on one event loop, driven over a socket.

It ends when the daemon closes its end of the socket.
Run as `python -m tierd.storage.worker.process DESCRIPTOR MODULE:CLASS`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Final, assert_never

import msgspec
import uvloop

from tierd.backend import Backend, Scanned
from tierd.child import Stream, be_child, leave_at_once
from tierd.config import convert
from tierd.errors import BackendError, ConfigError
from tierd.shared_memory.mapping import SharedMapping
from tierd.storage.worker.wire import (
    AddMark,
    Call,
    Cancel,
    Close,
    Contains,
    Delete,
    DropMarks,
    End,
    EndScan,
    Get,
    Map,
    Marks,
    Open,
    Put,
    Reload,
    Reply,
    Report,
    Request,
    Scan,
    Unmap,
    Use,
    pack_outcomes,
    pack_results,
    pack_scanned,
    pack_texts,
    unpack_gets,
    unpack_hashes,
    unpack_puts,
)

NICE: Final = 10
"""With both cores busy, I/O at the priority of the daemon's loop raises its p99 to 3-10 ms."""

REPORT_S: Final = 1.0
"""Interval of reports to the daemon about changes without a call."""

INDEXING_REPORT_S: Final = 0.05
"""Interval of reports while the index is incomplete: the daemon may be waiting for it."""

ERROR_CHARS_MAX: Final = 4000
"""Maximum characters of an error's text; some clients put whole replies into it."""

log = logging.getLogger("tierd.worker")
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)


class Worker:
    """The backend, the calls in flight, and the daemon's mappings."""

    def __init__(self, sock: socket.socket, target: str) -> None:
        self._target = target
        self._backend: Backend | None = None
        self._tasks: dict[int, asyncio.Task[bytes | int]] = {}
        self._scans: dict[int, AsyncIterator[Scanned]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._mappings: dict[int, memoryview] = {}
        self._reported: Report | None = None
        self._closed = asyncio.Event()
        self._stream = Stream(sock, self._take, leave_at_once)

    async def run(self) -> None:
        """Serve until the daemon has closed the backend."""
        reporting = asyncio.create_task(self._report_changes())
        await self._closed.wait()
        reporting.cancel()
        await self._stream.flush()

    def _take(self, payload: bytes | bytearray | memoryview, fds: tuple[int, ...]) -> None:
        request = _requests.decode(payload)
        match request.ask:
            case Map(serial, size_bytes):
                [fd] = fds
                # The mapping has duplicated the descriptor.
                self._mappings[serial] = SharedMapping(fd, size_bytes).view
                os.close(fd)
            case Unmap(serials):
                for serial in serials:
                    del self._mappings[serial]
            case Cancel(number):
                if number in self._tasks:
                    self._tasks[number].cancel()
            case EndScan(scan):
                self._end_scan(scan)
            case call:
                task = asyncio.create_task(self._run(call))
                self._tasks[request.call] = task
                task.add_done_callback(partial(self._answer, request.call, call))

    async def _run(self, call: Call) -> bytes | int:
        if isinstance(call, Open):
            logging.getLogger().setLevel(call.log_level)
            opening = _make(self._target, call.options)
            await opening.open()
            self._backend = opening
            return b""
        backend = self._backend
        assert backend is not None
        match call:
            case Contains(namespace, hashes):
                answers = await backend.contains_many(namespace, unpack_hashes(hashes))
                return bytes(answers)
            case Use(namespace, hashes):
                answers = await backend.use_many(namespace, unpack_hashes(hashes))
                return bytes(answers)
            case Get(namespace, blocks):
                gets = unpack_gets(blocks, self._mappings)
                return pack_results(await backend.get_into(namespace, gets))
            case Put(namespace, blocks):
                puts = unpack_puts(blocks, self._mappings)
                return pack_outcomes(await backend.put_many(namespace, puts))
            case Delete(namespace, hashes):
                return await backend.delete_many(namespace, unpack_hashes(hashes))
            case Scan(scan):
                return await self._scan(backend, scan)
            case Marks():
                return pack_texts(await backend.marks())
            case AddMark(mark):
                await backend.add_mark(mark)
                return b""
            case DropMarks(marks):
                await backend.drop_marks(marks)
                return b""
            case Reload():
                await backend.reload()
                return b""
            case Close():
                await backend.close()
                return b""
            case _:
                assert_never(call)

    async def _scan(self, backend: Backend, scan: int) -> bytes:
        if scan not in self._scans:
            self._scans[scan] = backend.scan()
        step = await anext(self._scans[scan], None)
        return pack_scanned(step) if step is not None else b""

    def _end_scan(self, scan: int) -> None:
        steps = self._scans.pop(scan, None)
        if isinstance(steps, AsyncGenerator):
            task = asyncio.create_task(_end(steps))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _answer(self, number: int, call: Call, task: asyncio.Task[bytes | int]) -> None:
        """Reply to a call that has ended and released its views."""
        del self._tasks[number]
        reply = Reply(number)
        if task.cancelled():
            reply.end = End.CANCELLED
        elif (error := task.exception()) is None:
            reply.value = task.result()
        else:
            reply.end, text = _explain(error)
            reply.text = _sendable(text)
        reply.report = self._changes()
        self._stream.send(_encoder.encode(reply))
        if isinstance(call, Close):
            self._closed.set()

    def _changes(self) -> Report | None:
        """Return stats and counters if they differ from the last report, else None."""
        if self._backend is None:
            return None
        try:
            stats = self._backend.stats()
            report = Report(
                stats.blocks,
                stats.used_bytes,
                stats.capacity_bytes,
                stats.index_complete,
                _sendable(stats.trouble),
                dict(self._backend.counters),
            )
        except Exception:  # the reply that this report goes with must still be sent
            log.exception("the backend's stats or counters cannot be read")
            return None
        if report == self._reported:
            return None
        self._reported = report
        return report

    async def _report_changes(self) -> None:
        while True:
            last = self._reported
            await asyncio.sleep(REPORT_S if last and last.index_complete else INDEXING_REPORT_S)
            report = self._changes()
            if report is not None:
                self._stream.send(_encoder.encode(Reply(0, report=report)))


def main() -> None:
    """Serve the socket and the backend class that the command line names."""
    sock = be_child("worker")
    os.nice(NICE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sock, sys.argv[2]))


async def _serve(sock: socket.socket, target: str) -> None:
    await Worker(sock, target).run()


def _make(target: str, options: dict[str, object]) -> Backend:
    module, _, name = target.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        text = f"cannot import {target}: {type(error).__name__}: {error}"
        raise ConfigError(text) from error
    assert isinstance(found, type)
    assert issubclass(found, Backend)
    return found.from_options(convert(options, found.Options, ""))


def _sendable(text: str) -> str:
    """Return a text that a frame can carry: cut, and with surrogates replaced.

    A file's name may contain surrogates, which UTF-8 cannot encode. A reply that cannot be
    encoded would never be sent, and the daemon would kill the process.
    """
    return text[:ERROR_CHARS_MAX].encode("utf-8", "replace").decode()


def _explain(error: BaseException) -> tuple[End, str]:
    if isinstance(error, ConfigError):
        return End.CONFIG_ERROR, str(error)
    if isinstance(error, BackendError):
        return End.BACKEND_ERROR, str(error)
    log.error("the backend failed unexpectedly", exc_info=error)
    return End.BUG, f"{type(error).__name__}: {error}"


async def _end(steps: AsyncGenerator[Scanned]) -> None:
    await steps.aclose()


if __name__ == "__main__":
    main()
