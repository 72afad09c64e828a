"""An engine's worker without an engine: pages in exported host memory, and a client.

Block b's bytes are runs in a memfd, by default in a layout with layers outermost, as in vLLM. A
block's content depends on its hash, so any mix-up shows.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from tests.support.traffic import wait_until
from tierd.client import Attachment, Client, Handle, Lease, PendingCopy
from tierd.device.engine_host import HostEvent, HostExport
from tierd.shared_memory.exports import NO_EVENT, PageLayout, Run
from tierd.shared_memory.gate import Gate, make_gate
from tierd.types import FORMAT_VERSION, Namespace

T = TypeVar("T")

LAYERS = 4
PAGE_BYTES = 8 << 10
BLOCK_BYTES = LAYERS * PAGE_BYTES
ROOT = b"\x07" * 32


def namespace(model: str = "m", block_bytes: int = BLOCK_BYTES) -> Namespace:
    return Namespace(
        model=model,
        weights="w",
        kv_dtype="float32",
        block_tokens=16,
        block_bytes=block_bytes,
        layout="l",
        groups=("g",),
        platform="p",
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        cp_rank=0,
        cp_size=1,
        hash_scheme="vllm-sha256-cbor-tagged",
        hash_root=ROOT,
        format_version=FORMAT_VERSION,
    )


def chain(tag: object, count: int) -> list[bytes]:
    """Hashes of a chain of blocks."""
    return [hashlib.sha256(f"{tag}/{i}".encode()).digest() for i in range(count)]


def parents_of(hashes: Sequence[bytes]) -> list[bytes]:
    return [ROOT, *hashes[:-1]]


def content(block_hash: bytes, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The KV of a block: bytes that depend on its hash."""
    seed = int.from_bytes(block_hash[:8], "little")
    return np.random.default_rng(seed).bytes(block_bytes)


class PageEngine:
    """Pages of `blocks` blocks that a daemon copies to and from. Use as a context manager."""

    def __init__(
        self,
        socket: str,
        *,
        blocks: int = 64,
        name: str = "pages",
        model: str = "m",
        page_bytes: int = PAGE_BYTES,
        layer_ends: Sequence[int] = (),
    ) -> None:
        self.blocks = blocks
        self.page_bytes = page_bytes
        self.block_bytes = LAYERS * page_bytes
        self.memory = HostExport(LAYERS * blocks * page_bytes + 4096)
        self.event = HostEvent(self.memory, 0, LAYERS * blocks * page_bytes)
        stride = blocks * page_bytes
        runs = tuple(Run(0, layer * stride, page_bytes) for layer in range(LAYERS))
        self.layout = PageLayout(runs, page_bytes, blocks)
        self.gate_fd = make_gate()
        self.gate = Gate(self.gate_fd)
        self.client = Client(socket, name=name, call_timeout_ms=5000)
        self.handle: Handle = self.client.register(namespace(model, self.block_bytes))
        self.layer_ends = layer_ends
        self.probes: list[bool] = []
        self.jobs = 0
        self.attachment = self.attach()

    def attach(self, handle: Handle | None = None, **changes: Any) -> Attachment:
        """Attach the pages to the daemon; `changes` are arguments of Client.attach."""
        shown: dict[str, Any] = {
            "exports": [self.memory.export],
            "layout": self.layout,
            "events": [self.event.handle],
            "gate_fd": self.gate_fd,
            "layer_ends": self.layer_ends,
            "probe": self.probe,
            **changes,
        }
        return self.client.attach(handle or self.handle, **shown)

    def probe(self, first: bool) -> tuple[int, bytes]:
        self.probes.append(first)
        block = 0
        self.write(block, os.urandom(self.block_bytes))
        return block, hashlib.sha256(self.read(block)).digest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self.gate.close()
        os.close(self.gate_fd)

    def wait_attached(self) -> None:
        """Wait until the daemon copies for this engine."""
        self.wait(lambda: self.attachment.ready or self.attachment.refusal)
        assert self.attachment.ready, self.attachment.refusal

    def wait(self, condition, timeout_s: float = 20.0) -> None:
        """Wait until the daemon has made a condition true."""

        def polled() -> object:
            self.client.wait(0.002)
            return condition()

        wait_until(polled, timeout_s, "the daemon did not make the condition true")

    def status(self) -> dict[str, Any]:
        """The daemon's status."""
        return self.client.status()

    def refusal(self, attachment: Attachment) -> str:
        """The daemon's reason for refusing an attachment."""
        self.wait(lambda: attachment.ready or attachment.refusal)
        assert not attachment.ready, "the attachment was accepted"
        return attachment.refusal or ""

    def copy_pid(self) -> int:
        """The process that copies for this engine."""
        [process] = [x for x in self.status()["copies"] if x["device"] == "host"]
        return int(process["pid"])

    def wait_no_slot_reserved(self) -> None:
        wait_until(lambda: not self.status()["host"]["writing_blocks"], 10, "slots stay reserved")

    def check_works(self) -> None:
        """Check that new blocks can be stored and loaded."""
        hashes = chain(os.urandom(8), 3)
        self.compute(hashes, [1, 2, 3])
        assert self.store(hashes, [1, 2, 3]) == 3
        assert self.load(hashes, [4, 5, 6]) == 3

    # Pages

    def view(self, block: int, layer: int) -> memoryview:
        at = (layer * self.blocks + block) * self.page_bytes
        return self.memory.view[at : at + self.page_bytes]

    def write(self, block: int, data: bytes) -> None:
        for layer in range(LAYERS):
            part = data[layer * self.page_bytes : (layer + 1) * self.page_bytes]
            self.view(block, layer)[:] = part

    def read(self, block: int) -> bytes:
        return b"".join(bytes(self.view(block, layer)) for layer in range(LAYERS))

    # Copies

    def done(self, pending: PendingCopy) -> int:
        """The number of blocks of a copy, once it has ended."""
        self.wait(lambda: pending.done)
        return pending.blocks

    def compute(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Write the KV of blocks to pages."""
        for block_hash, block in zip(hashes, blocks, strict=True):
            self.write(block, content(block_hash, self.block_bytes))

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int], **event: int) -> int:
        """Store blocks from pages; returns how many the daemon has afterwards."""
        reservation = self.client.reserve(self.handle, hashes, parents_of(hashes))
        if reservation is None:
            return 0
        wanted = [b for b, slot in zip(blocks, reservation.slots, strict=True) if slot is not None]
        pending = self.client.begin_store(self.attachment, reservation, wanted, **event)
        return sum(self.client.commit(reservation, self.done(pending)))

    def begin_store(
        self, hashes: Sequence[bytes], blocks: Sequence[int], event: int = NO_EVENT, value: int = 0
    ):
        """A reservation of new blocks, and the copy into it."""
        reservation = self.client.reserve(self.handle, hashes, parents_of(hashes))
        assert reservation is not None
        assert None not in reservation.slots
        return reservation, self.client.begin_store(
            self.attachment, reservation, blocks, event=event, value=value
        )

    def begin_load(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        event: int = NO_EVENT,
        value: int = 0,
    ) -> tuple[Lease, PendingCopy, int] | None:
        """A lease, the copy of its blocks, and the job; None if there is nothing to load."""
        lease = self.client.acquire([self.handle], hashes, 2000)
        if lease is None:
            return None
        self.jobs = job = self.jobs + 1
        self.gate.prepare(job)
        pending = self.client.begin_load(
            self.attachment,
            lease.epoch,
            lease.slots[0],
            blocks[: lease.blocks],
            lease.expires_ns,
            job=job,
            event=event,
            value=value,
        )
        return lease, pending, job

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Load blocks into pages; compares all bytes and returns how many blocks were loaded."""
        begun = self.begin_load(hashes, blocks)
        if begun is None:
            return 0
        lease, pending, _ = begun
        count = self.done(pending)
        self.client.release(lease)
        for block_hash, block in zip(hashes[:count], blocks, strict=False):
            assert self.read(block) == content(block_hash, self.block_bytes)
        return count

    def settle(self, job: int, timeout_s: float = 20.0) -> None:
        """Cancel a load; returns once no process can write its pages."""
        end = time.monotonic() + timeout_s
        while not self.gate.call_off(job):
            assert time.monotonic() < end, "a cancelled load keeps writing"
            time.sleep(0.0005)


def mappings(pid: int, memory: HostExport | int) -> int:
    """How often a process has mapped an export, given as such or as its inode."""
    inode = memory if isinstance(memory, int) else inode_of(memory)
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


def descriptors(pid: int) -> int:
    """The number of open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def inode_of(memory: HostExport) -> int:
    return os.fstat(memory.export.parts[0].fd).st_ino


def main() -> None:
    """An engine that stores without end, and whose child process holds its socket."""
    with PageEngine(sys.argv[1], name="child") as engine:
        engine.wait_attached()
        child = os.fork()
        if child == 0:
            time.sleep(3600)
            os._exit(0)
        print(inode_of(engine.memory), child, flush=True)
        while True:
            hashes = chain(os.urandom(8), 20)
            engine.compute(hashes, range(1, 21))
            engine.store(hashes, range(1, 21))


if __name__ == "__main__":
    main()
