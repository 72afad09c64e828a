"""What counts as a use, and how uses reach L2's order and the tiers of a live node."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from tests.support.tiers.bench import SPACE, Bench, config, run
from tierd.config import WritePolicy
from tierd.core.l3.writes import DEMAND_EARLY, WriteMoment, Writes
from tierd.core.uses import Uses
from tierd.daemon.l3.learning import PAUSE_S
from tierd.eviction.policy import PrefixRequest
from tierd.eviction.reuse import SLICE, Reuse


def chain(count: int, tag: object = 0) -> list[bytes]:
    return [hashlib.sha256(f"{tag}/{i}".encode()).digest() for i in range(count)]


def use(uses: Uses, book: Reuse, hashes: Sequence[bytes], request: int, now_s: float = 0) -> None:
    book.use(PrefixRequest(uses.new(book, hashes, request), now_s))


def counts(book: Reuse, hashes: Sequence[bytes]) -> list[int]:
    return [book.uses(block_hash) for block_hash in hashes]


def test_request_in_chunks_counts_once() -> None:
    """Chunked prefill would make every block of a long prompt look popular, as HiCache's
    selective policy did where one request reached its threshold of two by itself."""
    uses, hashes = Uses(), chain(8)
    book = uses.book(SPACE, 100)
    for end in (2, 4, 8, 8):
        use(uses, book, hashes[:end], 7, end)
    assert counts(book, hashes) == [1] * 8


def test_request_that_returns_between_others_counts_once() -> None:
    """A preempted or retried request would count again, and have its blocks written."""
    uses, hashes = Uses(), chain(3)
    book = uses.book(SPACE, 100)
    for request in (1, 2, 1, 2, 1):
        use(uses, book, hashes, request)
    assert counts(book, hashes) == [2] * 3


def test_request_that_returns_shorter_counts_once() -> None:
    """A request that comes back shorter would forget what has been counted of it."""
    uses, hashes = Uses(), chain(8)
    book = uses.book(SPACE, 100)
    for end in (8, 2, 8):
        use(uses, book, hashes[:end], 7)
    assert counts(book, hashes) == [1] * 8


def test_requests_without_a_number_all_count() -> None:
    """Blocks of a client that names no requests would never be written by the second use."""
    uses, hashes = Uses(), chain(1)
    book = uses.book(SPACE, 100)
    for _ in range(3):
        use(uses, book, hashes, 0)
    assert counts(book, hashes) == [3]


def test_ranks_share_uses_and_models_do_not() -> None:
    """Another model's traffic on the same tokens would have this one's blocks written; and the
    ranks of an engine would evict different blocks, of which no prefix is whole."""
    uses = Uses()
    book = uses.book(SPACE, 100)
    assert uses.book(replace(SPACE, model="another"), 100) is not book
    assert uses.book(replace(SPACE, hash_root=b"salt" * 8), 100) is not book
    ranks = [replace(SPACE, tp_size=2, tp_rank=rank) for rank in range(2)]
    assert uses.book(ranks[0], 100) is uses.book(ranks[1], 100) is not book


def test_remembered_requests_are_bounded() -> None:
    """The daemon's memory would grow with every request that it has ever served."""
    uses = Uses(counted_max=64)
    hashes = chain(1)
    book = uses.book(SPACE, 100)
    for request in range(1, 1000):
        uses.new(book, hashes, request)
        uses.new(book, hashes, 1)
        assert len(uses._counted) <= 64
    assert list(uses._counted)[-1] == (book, 1), "a request that continues is remembered"


def test_use_of_an_evicted_block_counts() -> None:
    """A block that L2 drops between its uses would be new each time: HiCache's hit count of a
    node goes with the node, and does not grow while it is evicted."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        for request in (1, 2):
            bench.node.learning.note([bench.space], hashes, request)
            await bench.learned()
            bench.forget()
        assert counts(bench.space.reuse, hashes) == [2] * 4

    run(test)


def test_counting_a_long_prompt_yields_to_the_loop() -> None:
    """A request of 16,000 blocks would hold up everybody else's for 20 ms."""

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


def test_request_of_all_ranks_counts_once() -> None:
    """Each rank's question would count, and a prompt look popular that came once."""

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


def test_flood_of_requests_is_counted_in_part() -> None:
    """What waits to be counted would take the daemon's memory."""

    async def test(bench: Bench) -> None:
        hashes = chain(1)
        for _ in range(2000):
            bench.node.learning.note([bench.space], hashes, 0)
        await bench.learned()
        left = bench.node.counters["uses_not_counted_total"]
        assert left > 0
        assert counts(bench.space.reuse, hashes) == [min(20, 2000 - left)]

    run(test)


def test_bug_in_counting_does_not_end_the_daemon() -> None:
    """A bug in what only serves to keep better blocks would end the daemon."""

    async def test(bench: Bench) -> None:
        note, hashes = bench.node.learning.note, chain(1)
        note([bench.space], [[]], 1)  # type: ignore[list-item]
        note([bench.space], hashes, 2)
        await bench.learned()
        assert bench.node.counters["internal_errors_total"] == 1
        assert counts(bench.space.reuse, hashes) == [1]

    run(test)


def test_selective_tier_wants_blocks_used_twice() -> None:
    """What two requests have used would not be written before it leaves L2."""
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
