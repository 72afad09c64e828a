"""An engine's worker without an engine: pages in exported host memory, and a client.

Block b's bytes are runs in a memfd, in a layout with layers outermost unless told otherwise, as
vLLM has them; a block's content names its hash, so that any mix-up shows.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from tests.traffic import wait_until
from tierd.client import Client, Handle, PendingCopy
from tierd.device.engine_host import HostEvent, HostExport
from tierd.exports import NO_EVENT, PageLayout, Run
from tierd.gate import Gate, make_gate
from tierd.types import FORMAT_VERSION, Namespace

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
    """What a block's KV would be: bytes that name its hash."""
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
        self.attachment = self.attach()

    def attach(self, handle: Handle | None = None):
        """Show the pages to the daemon."""
        return self.client.attach(
            handle or self.handle,
            [self.memory.export],
            self.layout,
            events=[self.event.handle],
            gate_fd=self.gate_fd,
            layer_ends=self.layer_ends,
            probe=self.probe,
        )

    def probe(self, first: bool) -> tuple[int, bytes]:
        self.probes.append(first)
        block = 0
        self.write(block, os.urandom(self.block_bytes))
        return block, hashlib.sha256(self.read(block)).digest()

    def __enter__(self) -> PageEngine:
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
        """Until the daemon copies for this engine."""
        self.wait(lambda: self.attachment.ready or self.attachment.refusal)
        assert self.attachment.ready, self.attachment.refusal

    def wait(self, condition, timeout_s: float = 20.0) -> None:
        """Until a condition holds that the daemon brings about."""

        def polled() -> object:
            self.client.wait(0.002)
            return condition()

        wait_until(polled, timeout_s, "the daemon did not bring it about")

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
        """The blocks of a copy once it has ended."""
        self.wait(lambda: pending.done)
        return pending.blocks

    def compute(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Have the KV of blocks in pages."""
        for block_hash, block in zip(hashes, blocks, strict=True):
            self.write(block, content(block_hash, self.block_bytes))

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int], **event: int) -> int:
        """Store blocks that lie in pages; how many the daemon has then."""
        reservation = self.client.reserve(self.handle, hashes, parents_of(hashes))
        if reservation is None:
            return 0
        wanted = [b for b, slot in zip(blocks, reservation.slots, strict=True) if slot is not None]
        pending = self.client.begin_store(self.attachment, reservation, wanted, **event)
        return sum(self.client.commit(reservation, self.done(pending)))

    def begin_load(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        job: int = 0,
        event: int = NO_EVENT,
        value: int = 0,
    ):
        """A lease and the copy of what it has, None if there is nothing."""
        lease = self.client.acquire([self.handle], hashes, 2000)
        if lease is None:
            return None
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
        return lease, pending

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Load blocks into pages; how many are right there, all bytes compared."""
        begun = self.begin_load(hashes, blocks)
        if begun is None:
            return 0
        lease, pending = begun
        count = self.done(pending)
        self.client.release(lease)
        for block_hash, block in zip(hashes[:count], blocks, strict=False):
            assert self.read(block) == content(block_hash, self.block_bytes)
        return count

    def settle(self, job: int, timeout_s: float = 20.0) -> None:
        """Call a load off; returns when nobody can write its pages any more."""
        end = time.monotonic() + timeout_s
        while not self.gate.call_off(job):
            assert time.monotonic() < end, "a load writes for ever"
            time.sleep(0.0005)
