"""Both sides of the vLLM connector, without vLLM and without a daemon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from tests.support.engines.fake_client import FakeClient, FakeDaemon
from tierd.client import Client
from tierd.types import FORMAT_VERSION, Namespace
from tierd_connectors.common.guard import Boundary
from tierd_connectors.common.work import Load, StepWork, StoreItem
from tierd_connectors.vllm.scheduler import SchedulerSide
from tierd_connectors.vllm.steps import Scheduled

BLOCK_TOKENS = 4


ROOT = b"\x07" * 32


def namespace(tp_rank: int = 0, tp_size: int = 1, block_bytes: int = 64) -> Namespace:
    return Namespace(
        model="m",
        weights="w",
        kv_dtype="float32",
        block_tokens=BLOCK_TOKENS,
        block_bytes=block_bytes,
        layout="l",
        groups=("g",),
        platform="p",
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        cp_rank=0,
        cp_size=1,
        hash_scheme="vllm-sha256-cbor-tagged",
        hash_root=ROOT,
        format_version=FORMAT_VERSION,
    )


def block_hash(index: int, salt: int = 0) -> bytes:
    return bytes([salt, index // 256, index % 256]) + b"\x01" * 29


@dataclass
class FakeRequest:
    request_id: str
    num_tokens: int
    salt: int = 0
    arrival_time: float = field(default_factory=time.time)

    @property
    def block_hashes(self) -> list[bytes]:
        return [block_hash(i, self.salt) for i in range(self.num_tokens // BLOCK_TOKENS)]


@dataclass
class Bench:
    """A scheduler side with a fake daemon, and the few steps of an engine around it."""

    daemon: FakeDaemon = field(default_factory=FakeDaemon)
    ranks: int = 1
    deadline_ms: int = 2000
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.namespaces = [namespace(rank, self.ranks) for rank in range(self.ranks)]
        self.boundary = Boundary()
        self.side = SchedulerSide(
            cast("Client", FakeClient(self.daemon)),
            self.namespaces,
            deadline_ms=self.deadline_ms,
            boundary=self.boundary,
        )

    def put(self, count: int, salt: int = 0, ranks: range | None = None) -> None:
        """Store the first blocks of a salt's chain in the daemon."""
        for rank in ranks if ranks is not None else range(self.ranks):
            for index in range(count):
                slot = next(self.daemon.ids)
                self.daemon.slots[slot] = bytearray(64)
                digest = self.namespaces[rank].digest
                self.daemon.blocks[digest, block_hash(index, salt)] = slot

    def load(self, request: FakeRequest, computed: int, first_block: int = 100) -> list[Load]:
        """Let the engine accept the offer, up to the step that sends it to the workers."""
        tokens = self.side.matched_tokens(request.request_id, computed)
        assert tokens
        count = (computed + tokens) // BLOCK_TOKENS
        table = list(range(first_block, first_block + count))
        self.side.allocated(request.request_id, table, tokens)
        return self.step([], idle=True).loads

    def step(
        self, steps: Sequence[Scheduled] = (), preempted: Sequence[str] = (), *, idle: bool = False
    ) -> StepWork:
        """The metadata that workers get for a step."""
        work = self.side.build(steps, preempted, idle=idle)
        return self.side.hand_over(work, idle=idle)

    def scheduled(
        self, request_id: str, computed: int, tokens: int, blocks: list[int], *, new: bool
    ) -> Scheduled:
        """A request in a step, its new blocks, and its table as the engine has it."""
        table = self.tables.setdefault(request_id, [])
        if new:
            table.clear()
        table.extend(blocks)
        if new:
            self.side.allocated(request_id, table, 0)
        given = [] if new else blocks
        return Scheduled(request_id, new, given, computed, tokens, lambda: list(table))

    def run(
        self, request: FakeRequest, computed: int, tokens: int, blocks: list[int], *, new: bool
    ) -> list[StoreItem]:
        """A step that computes; returns its stores."""
        step = self.scheduled(request.request_id, computed, tokens, blocks, new=new)
        return self.step([step]).stores


SIZES = {"L": 3, "B": 6, "H": 2, "N": 4, "C": 8}
