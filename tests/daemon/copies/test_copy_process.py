"""A single copy process under the daemon's requests: its open and pinned memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.support import blocks
from tierd.daemon.copies.copy_process import CopyProcess
from tierd.daemon.copies.copying import SessionCopies
from tierd.daemon.copies.processes import AttachedLayout
from tierd.device import frames
from tierd.device.engine_host import HostExport
from tierd.device.frames import Reply
from tierd.device.process import Process
from tierd.memory.arena import Segment
from tierd.shared_memory.exports import HOST_UUID, ExportKind, Run, pack_runs
from tierd.shared_memory.gate import make_gate
from tierd.wire import messages as m

if TYPE_CHECKING:
    from tierd.core.l2.space import Space
    from tierd.daemon.copies.processes import CopyProcesses

pytestmark = [pytest.mark.slow]

BLOCK_BYTES = 4096
SEGMENT_BYTES = 1 << 20


class Rig:
    """A copy process for the host device, and memory to attach."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.process = CopyProcess(
            HOST_UUID, bandwidth_max=0, job_limit_ms=1000, on_end=lambda _: self.ended.set()
        )
        self.memory = HostExport(8 * BLOCK_BYTES)
        self.gate_fd = make_gate()

    async def attach(self, number: int) -> Reply:
        """Attach the memory; returns the answer."""
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        export = self.memory.export
        part = export.parts[0]
        ask = frames.Attach(
            number,
            [
                frames.Export(
                    ExportKind.MEMFD, HOST_UUID, export.size_bytes, b"", [(0, part.size_bytes)]
                )
            ],
            pack_runs([Run(0, 0, BLOCK_BYTES)]),
            BLOCK_BYTES,
            8,
            BLOCK_BYTES,
            [],
            0,
            hashlib.sha256(bytes(BLOCK_BYTES)).digest(),
            [],
        )
        self.process.call(ask, answer.set_result, (self.gate_fd, part.fd))
        return await answer

    def opened(self, name: str) -> int:
        """Return how many descriptors of the named memfd the process has open."""
        count = 0
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(path).startswith(f"/memfd:tierd-{name}")
        return count

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for an effect of the process."""
        while not condition():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.process.kill("the test is over")
        await self.ended.wait()
        self.memory.close()
        os.close(self.gate_fd)


def run(test: Callable[[Rig], Coroutine[object, object, None]]) -> None:
    """Run a test with its own rig."""

    async def main() -> None:
        rig = Rig()
        try:
            async with asyncio.timeout(30):
                await test(rig)
        finally:
            await rig.close()

    asyncio.run(main())


def test_descriptors_of_a_failed_attach_are_not_taken_for_the_next() -> None:
    """When descriptors run out, the next engine's gate would be taken for its pages."""

    async def test(rig: Rig) -> None:
        assert (await rig.attach(1)).ok
        # As much as the failed attach has sent.
        for _ in range(3):
            rig.process._say(0, frames.Bring(), rig.gate_fd)
        answer = await rig.attach(2)
        assert answer.ok, answer.text
        # Each attachment has its own gate, opened and mapped; the memory is opened once.
        await rig.until(lambda: (rig.opened("gate"), rig.opened("pages")) == (4, 1))

    run(test)


def test_decommitted_memory_is_not_pinned_when_the_device_opens() -> None:
    """A device would keep pages that no longer belong to the arena, and copy to and from them."""

    async def test(rig: Rig) -> None:
        space = blocks.namespace(SEGMENT_BYTES // 16)
        decommitted, committed = (Segment.create(space, index, 16) for index in range(2))
        for segment in (decommitted, committed):
            rig.process.share(segment)
        rig.process.unpin(decommitted)
        await rig.until(lambda: not decommitted.pins)
        assert (await rig.attach(1)).ok
        await rig.until(lambda: rig.process.pinning.pinned_bytes == SEGMENT_BYTES)
        # Answered only after all pinning is done.
        rig.process.unpin(committed)
        await rig.until(lambda: not committed.pins)
        assert rig.process.pinning.pinned_bytes == 0
        # Filled again, it is pinned again.
        rig.process.share(decommitted)
        await rig.until(lambda: rig.process.pinning.pinned_bytes == SEGMENT_BYTES)
        rig.process.kill("the test is over")
        await rig.ended.wait()
        assert not decommitted.pins
        for segment in (decommitted, committed):
            os.close(segment.fd)
            os.close(segment.ledger.fd)

    run(test)


def test_session_that_ends_during_detach_notification() -> None:
    """Other engines would request copies from a dead process until they are restarted."""
    copies = SimpleNamespace(sessions=[], counters=Counter())
    process = SimpleNamespace(dying="it has ended", call=lambda *_: None)
    told = []

    def send(message: m.FromDaemon) -> None:
        told.append(message)
        # The client has gone: the session learns of it by this call.
        session.close(lambda: None)

    session = SessionCopies(1, cast("CopyProcesses", copies), send)
    for number in (1, 2):
        session.attachments[number] = AttachedLayout(
            number, cast("Space", None), 8, cast("CopyProcess", process)
        )
    session.process_ended(cast("CopyProcess", process))
    assert told == [m.Detached(0, 1, "it has ended")]
    assert not session.attachments


async def test_exception_in_a_copy_thread_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of the failed thread would wait indefinitely."""
    near, far = socket.socketpair()
    process = Process(far, HOST_UUID, 0, 1.0)
    reasons: list[str] = []
    monkeypatch.setattr(process, "_leave", reasons.append)
    process._run(process._pinning, process._pin, 12345)
    process._pinning.shutdown()
    assert reasons == ["a bug in the copy process"]
    process._stream.close()
    near.close()
