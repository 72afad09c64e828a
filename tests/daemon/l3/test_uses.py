"""Uses: how they are counted, and how they reach L2's eviction order and a node's tiers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from tests.support.tiers.bench import SPACE, Bench, config, run
from tierd.config import WritePolicy
from tierd.core.uses import Uses
from tierd.core.writes import DEMAND_EARLY, WriteMoment, Writes
from tierd.daemon.l3.learning import PAUSE_S
from tierd.eviction.policy import PrefixRequest
from tierd.eviction.reuse import SLICE, Reuse


def chain(count: int, tag: object = 0) -> list[bytes]:
    return [hashlib.sha256(f"{tag}/{i}".encode()).digest() for i in range(count)]


def use(uses: Uses, book: Reuse, hashes: Sequence[bytes], request: int, now_s: float = 0) -> None:
    book.use(PrefixRequest(uses.new(book, hashes, request), now_s))


def counts(book: Reuse, hashes: Sequence[bytes]) -> list[int]:
    return [book.uses(block_hash) for block_hash in hashes]


def test_request_in_chunks_counts_as_one_use() -> None:
    """Chunked prefill would make every block of a long prompt look popular, as in HiCache's
    selective policy, where one request reached the threshold of two by itself."""
    uses, hashes = Uses(), chain(8)
    book = uses.book(SPACE, 100)
    for end in (2, 4, 8, 8):
        use(uses, book, hashes[:end], 7, end)
    assert counts(book, hashes) == [1] * 8


def test_request_that_returns_between_others_counts_as_one_use() -> None:
    """A preempted or retried request would count again, and have its blocks written."""
    uses, hashes = Uses(), chain(3)
    book = uses.book(SPACE, 100)
    for request in (1, 2, 1, 2, 1):
        use(uses, book, hashes, request)
    assert counts(book, hashes) == [2] * 3


def test_aborted_request_that_returns_shorter_counts_as_one_use() -> None:
    """A request that returns shorter would lose its record of counted blocks."""
    uses, hashes = Uses(), chain(8)
    book = uses.book(SPACE, 100)
    for end in (8, 2, 8):
        use(uses, book, hashes[:end], 7)
    assert counts(book, hashes) == [1] * 8


def test_requests_without_a_number_count_separately() -> None:
    """A client that numbers no requests would never reach the second use."""
    uses, hashes = Uses(), chain(1)
    book = uses.book(SPACE, 100)
    for _ in range(3):
        use(uses, book, hashes, 0)
    assert counts(book, hashes) == [3]


def test_uses_are_shared_by_ranks_but_not_by_models() -> None:
    """Another model's traffic on the same tokens would have this model's blocks written; and an
    engine's ranks would evict different blocks, so that no prefix is whole."""
    uses = Uses()
    book = uses.book(SPACE, 100)
    assert uses.book(replace(SPACE, model="another"), 100) is not book
    assert uses.book(replace(SPACE, hash_root=b"salt" * 8), 100) is not book
    ranks = [replace(SPACE, tp_size=2, tp_rank=rank) for rank in range(2)]
    assert uses.book(ranks[0], 100) is uses.book(ranks[1], 100) is not book


def test_number_of_remembered_requests_is_bounded() -> None:
    """The daemon's memory would grow with every request that it has ever served."""
    uses = Uses(counted_max=64)
    hashes = chain(1)
    book = uses.book(SPACE, 100)
    for request in range(1, 1000):
        uses.new(book, hashes, request)
        uses.new(book, hashes, 1)
        assert len(uses._counted) <= 64
    assert list(uses._counted)[-1] == (book, 1), "an active request is not forgotten"


def test_use_of_an_evicted_block_counts() -> None:
    """A block that L2 evicts between its uses would be new each time: HiCache's hit count of a node
    is deleted with the node, and does not grow while it is evicted."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        for request in (1, 2):
            bench.node.learning.note([bench.space], hashes, request)
            await bench.learned()
            bench.forget()
        assert counts(bench.space.reuse, hashes) == [2] * 4

    run(test)


def test_counting_a_long_prompt_yields_to_other_tasks() -> None:
    """A request of 16,000 blocks would hold up all others for 20 ms."""

    async def test(bench: Bench) -> None:
        hashes = chain(8 * SLICE)
        bench.node.learning.note([bench.space], hashes, 1)
        pauses = 0
        while bench.node.learning.busy:
            await asyncio.sleep(PAUSE_S / 2)
            pauses += 1
        assert pauses > 16
        assert counts(bench.space.reuse, hashes[:: SLICE // 2]) == [1] * 16

    run(test)


def test_acquire_for_all_ranks_counts_as_one_use() -> None:
    """Each rank's lookup would count, and a prompt that came once would look popular."""

    async def test(bench: Bench) -> None:
        node = bench.node
        spaces = [node.register(replace(SPACE, tp_size=4, tp_rank=rank)) for rank in range(4)]
        hashes = chain(3)
        node.learning.note(spaces, hashes, 1)
        for space in spaces:
            node.learning.note([space], hashes, 1)
        await bench.learned()
        assert counts(spaces[3].reuse, hashes) == [1] * 3

    run(test)


def test_flood_of_requests_is_counted_in_part_and_reported() -> None:
    """Requests queued for counting would take the daemon's memory."""

    async def test(bench: Bench) -> None:
        hashes = chain(1)
        for _ in range(2000):
            bench.node.learning.note([bench.space], hashes, 0)
        await bench.learned()
        left = bench.node.counters["uses_not_counted_total"]
        assert left > 0
        assert counts(bench.space.reuse, hashes) == [min(20, 2000 - left)]

    run(test)


def test_exception_in_counting_does_not_end_the_daemon() -> None:
    """A bug in code that only improves eviction would end the daemon."""

    async def test(bench: Bench) -> None:
        note, hashes = bench.node.learning.note, chain(1)
        note([bench.space], [[]], 1)  # type: ignore[list-item]
        note([bench.space], hashes, 2)
        await bench.learned()
        assert bench.node.counters["internal_errors_total"] == 1
        assert counts(bench.space.reuse, hashes) == [1]

    run(test)


def test_used_block_is_written_to_a_selective_tier() -> None:
    """Blocks that two requests have used would not be written before L2 evicts them."""
    uses, hashes = Uses(), chain(4)
    book = uses.book(SPACE, 100)
    for request in (1, 2):
        use(uses, book, hashes, request, request)
    tier = config("tier", write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    writes = Writes(tier, 1 << 20)
    writes.budget.demand, writes.budget._first_steps = 2 * DEMAND_EARLY, 0
    assert writes.choose(WriteMoment.EVICTING, b"n" * 16, hashes, book, 4096, 2 * 10**9) == [
        0,
        1,
        2,
        3,
    ]
