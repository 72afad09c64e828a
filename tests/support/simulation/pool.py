"""An engine's KV: the model that computes it, its memory, and its block table.

The KV of a token is a function of the model, the rank and all tokens up to it. A block with wrong
KV is therefore detected at once. The last state of a block is its hash.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.support.simulation.threads import pause
from tierd.testing.simulation.world import World
from tierd.types import FORMAT_VERSION, BlockKey, Namespace
from tierd_connectors.vllm.worker.layout import BlockPages, Stretch

BLOCK_TOKENS = 4
TOKEN_BYTES = 40
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
ROOT = hashlib.sha256(b"table engines").digest()
WORDS = 50

_LOSS = bytes(255 - value for value in range(256))


class Model:
    """Computes the KV of one model's engines, on one or more ranks."""

    def __init__(self, world: World, name: str, ranks: int) -> None:
        self.world = world
        self.ranks = [_namespace(name, rank, ranks) for rank in range(ranks)]
        self._blocks: dict[tuple[int, bytes], bytes] = {}
        self._told: dict[bytes, list[bytes]] = {}
        self._generations: list[list[Namespace]] = []

    def state(self, before: bytes, token: int) -> bytes:
        """Return a state that represents all tokens up to one."""
        return hashlib.sha256(before + token.to_bytes(4)).digest()

    def kv(self, rank: int, state: bytes) -> bytes:
        """Return the KV of one token."""
        return hashlib.shake_128(self.ranks[rank].digest + state).digest(TOKEN_BYTES)

    def block(self, rank: int, states: Sequence[bytes], index: int) -> bytes:
        """Return the KV of a full block."""
        first = index * BLOCK_TOKENS
        key = rank, states[first + BLOCK_TOKENS - 1]
        known = self._blocks.get(key)
        if known is None:
            its_own = states[first : first + BLOCK_TOKENS]
            known = self._blocks[key] = b"".join(self.kv(rank, state) for state in its_own)
        return known

    def tell(self, states: Sequence[bytes]) -> None:
        """Tell the world the valid payload of the block that the last of these states completes."""
        index = len(states) // BLOCK_TOKENS - 1
        block_hash = states[-1]
        if block_hash in self._told:
            return
        payloads = [self.block(rank, states, index) for rank in range(len(self.ranks))]
        self._told[block_hash] = payloads
        self.world.parents[block_hash] = states[index * BLOCK_TOKENS - 1] if index else ROOT
        for ranks in (self.ranks, *self._generations):
            self._know(ranks, block_hash, payloads)

    def use_too(self, ranks: list[Namespace]) -> None:
        """Continue in these namespaces, with the same weights."""
        self._generations.append(ranks)
        for block_hash, payloads in self._told.items():
            self._know(ranks, block_hash, payloads)

    def _know(
        self, ranks: Sequence[Namespace], block_hash: bytes, payloads: Sequence[bytes]
    ) -> None:
        for namespace, payload in zip(ranks, payloads, strict=True):
            self.world.know(BlockKey(namespace.digest, block_hash), payload)


def nearly(kv: bytes) -> bytes:
    """Return KV as a lossy cache returns it."""
    return bytes(kv[:1]) + kv[1:].translate(_LOSS)


class Request:
    """The part of vLLM's Request that the connector and the scheduler use."""

    lora_request = None
    kv_transfer_params = None
    mm_features = ()
    resumable = False
    skip_reading_prefix_cache = False

    def __init__(
        self, model: Model, request_id: str, prompt: Sequence[int], tokens_max: int, now_s: float
    ) -> None:
        self.request_id = request_id
        self.arrival_time = now_s
        self.tokens_max = tokens_max
        self.tokens: list[int] = []
        self.states: list[bytes] = []
        self.computed = 0
        self.table: list[int] = []
        self.known = False
        """Whether the workers know the request."""
        self.preempted = False
        self.awaits_load = False
        self.loading_since_s = 0.0
        self.load_failed = False
        self.aborted = False
        self.own = 0
        """Tokens that the engine already had when tierd was asked for the following ones."""
        self.by_tierd = False
        self._model = model
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token."""
        before = self.states[-1] if self.states else ROOT
        self.tokens.append(token)
        self.states.append(self._model.state(before, token))
        if len(self.tokens) % BLOCK_TOKENS == 0:
            self._model.tell(self.states)

    def generate(self) -> None:
        """Sample the next token."""
        self.append(self.states[-1][0] % WORDS)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.states[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]


class BlockPool:
    """Owners of blocks, and the prefix cache; block 0 is never allocated."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = deque(range(1, count))
        self.refs = [0] * count
        self.lossy: set[int] = set()
        """Blocks with inexact KV, which engines tolerate."""
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def get_cached_block(self, block_hash: bytes, groups: Sequence[int]) -> list[int] | None:
        """Return a cached block like vLLM's pool, which has one group of layers here."""
        block = self._by_hash.get(block_hash)
        return None if block is None else [block]

    def room_for(self, count: int, hits: Sequence[int]) -> bool:
        """Whether `count` blocks are free, not counting those that are hit."""
        return count <= len(self.free) - sum(not self.refs[block] for block in hits)

    def touch(self, blocks: Sequence[int]) -> None:
        """Add one owner to each block."""
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    def take(self, count: int) -> list[int]:
        """Allocate blocks for a new owner; their old content leaves the prefix cache."""
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            self.forget(block)
            self.lossy.discard(block)
            self.refs[block] = 1
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove one owner of each block; the last block of a prefix is reused first."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)

    def cache(self, table: Sequence[int], hashes: Sequence[bytes], full: int) -> None:
        """Add the first blocks of a table to the prefix cache."""
        for block, block_hash in zip(table[:full], hashes, strict=False):
            if block_hash not in self._by_hash and block not in self._hashes:
                self._by_hash[block_hash] = block
                self._hashes[block] = block_hash

    def forget_all(self) -> None:
        """Clear the prefix cache."""
        for block in list(self._hashes):
            self.forget(block)

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache."""
        block_hash = self._hashes.pop(block, None)
        if block_hash is not None:
            del self._by_hash[block_hash]


@dataclass
class Memory:
    """KV of one rank, like `tierd_connectors.vllm.worker.layout.Pages`; copies take time."""

    count: int
    random: Random

    def __post_init__(self) -> None:
        self.bytes = bytearray(self.random.randbytes(self.count * BLOCK_BYTES))
        self.blocks = BlockPages((Stretch(0, BLOCK_BYTES),), BLOCK_BYTES, self.count)

    def view(self, block: int) -> memoryview:
        return memoryview(self.bytes)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

    def gather_many(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            self._copy(slot[:BLOCK_BYTES], self.view(block))

    def scatter_many(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            self._copy(self.view(block), slot[:BLOCK_BYTES])

    def _copy(self, target: memoryview, source: memoryview) -> None:
        half = self.random.randrange(BLOCK_BYTES)
        target[:half] = source[:half]
        if self.random.random() < 0.3:
            pause(self.random.expovariate(1 / 0.002))
        target[half:] = source[half:]


def _namespace(name: str, rank: int, ranks: int) -> Namespace:
    return Namespace(
        model=name,
        weights="w",
        kv_dtype="float32",
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_BYTES,
        layout="tables",
        groups=("full",),
        platform="simulated",
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        cp_rank=0,
        cp_size=1,
        hash_scheme="vllm-sha256-cbor-tagged",
        hash_root=ROOT,
        format_version=FORMAT_VERSION,
    )
