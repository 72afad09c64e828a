"""The vLLM connector's decisions and copies, without vLLM and without a daemon."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines.connector_bench import (
    BLOCK_TOKENS,
    ROOT,
    SIZES,
    Bench,
    FakeRequest,
    block_hash,
    namespace,
)
from tests.support.engines.fake_client import FakeClient, FakeDaemon
from tierd.errors import ConfigError
from tierd_connectors.common import guard
from tierd_connectors.common.guard import Boundary, guarded
from tierd_connectors.common.namespaces import of_generation
from tierd_connectors.common.speed import PrefillSpeed
from tierd_connectors.common.work import Load, StoreItem
from tierd_connectors.vllm.hints import LOGGED_MAX, NOTHING, SECONDS_MAX, HintReader, RequestHints
from tierd_connectors.vllm.options import Transfer, parse
from tierd_connectors.vllm.steps import Scheduled, scheduled_requests
from tierd_connectors.vllm.worker.layout import LayoutError, PageMap, TensorView, blocks_of
from tierd_connectors.vllm.worker.mover import Mover
from tierd_connectors.vllm.worker.queues import HostOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput

    from tierd.client import Client


# The scheduler's side


def looked_up(blocks: int, *, tokens: int) -> tuple[Bench, FakeRequest]:
    """A bench whose daemon has `blocks` blocks, and a request "a" that has just arrived."""
    bench = Bench()
    bench.put(blocks)
    request = FakeRequest("a", tokens)
    bench.side.add(request)
    return bench, request


def test_prompt_is_loaded_up_to_the_last_token() -> None:
    """A whole-prompt hit would leave the engine nothing to compute, and it would assert."""
    bench, _ = looked_up(3, tokens=12)
    assert bench.side.matched_tokens("a", 0) == 8


def test_own_hit_is_not_loaded_again() -> None:
    """The engine would be promised tokens that it has, or a negative number of them."""
    bench = Bench()
    bench.put(3)
    for computed, expected in ((0, 12), (4, 8), (12, 0)):
        request = FakeRequest(f"r{computed}", 14)
        bench.side.add(request)
        assert bench.side.matched_tokens(request.request_id, computed) == expected
    assert bench.side.leases_held == 2
    assert len(bench.daemon.leases) == 2


def test_lookup_without_answer_is_a_miss_at_its_deadline() -> None:
    """A daemon that hangs would park every request for ever."""
    bench = Bench(daemon=FakeDaemon(answering=False), deadline_ms=0)
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    assert bench.side.matched_tokens("a", 0) is None
    end = time.monotonic() + 5
    while bench.side.matched_tokens("a", 0) is None:
        assert time.monotonic() < end
    assert bench.side.matched_tokens("a", 0) == 0
    bench.daemon.answering = True
    bench.step(idle=True)
    assert not bench.daemon.leases


def test_hung_daemon_delays_only_one_request() -> None:
    """Every request would wait for a daemon that does not answer any."""
    bench = Bench(daemon=FakeDaemon(answering=False), deadline_ms=0)
    bench.put(3)
    for name in "ab":
        bench.side.add(FakeRequest(name, 14))
    end = time.monotonic() + 5
    while None in (bench.side.matched_tokens("a", 0), bench.side.matched_tokens("b", 0)):
        assert time.monotonic() < end
    bench.side.add(FakeRequest("c", 14))
    assert bench.side.matched_tokens("c", 0) == 0
    assert bench.daemon.lookups == 2
    assert bench.side.tally.drain()["lookup_timeouts"] == 2
    assert bench.side._lookups._silence_ms == 1000, "one silence, noticed twice"


def test_asking_again_changes_nothing() -> None:
    """The engine asks a blocked request every step: it would look up, or lease, each time."""
    bench = Bench()
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    answers = {bench.side.matched_tokens("a", 0) for _ in range(50)}
    assert answers == {12}
    assert bench.daemon.lookups == 1
    assert len(bench.daemon.leases) == 1


def test_request_number_is_stable() -> None:
    """A preempted request would count as two uses, and blocks used once would be kept."""
    bench = Bench()
    for name in ("a", "b"):
        request = FakeRequest(name, 14)
        bench.side.add(request)
        bench.side.matched_tokens(name, 0)
        bench.run(request, 0, 14, [1, 2, 3, 4], new=True)
        bench.step([], [name], idle=True)
        bench.side.matched_tokens(name, 0)
    numbers = [about["request"] for about in bench.daemon.about]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert all(0 < number < 1 << 63 for number in numbers)


def test_hints_are_sent_when_the_request_ends() -> None:
    """A pin would miss generated blocks, or be sent for one rank, twice, or for an old daemon."""
    bench = Bench(ranks=2)
    request = FakeRequest("a", 14)
    hints = RequestHints(pin_s=1.5, next_use_s=30, priority=-1, session_end=True)
    bench.side.add(request, hints)
    bench.side.add(FakeRequest("b", 14))
    bench.side.matched_tokens("a", 0)
    bench.run(request, 0, 14, [1, 2, 3, 4], new=True)
    request.num_tokens = 22
    assert not bench.daemon.hints
    for name in ("a", "a", "b"):
        bench.side.finish(name)
    [(handles, hashes, said)] = bench.daemon.hints
    assert [handle.namespace for handle in handles] == bench.namespaces
    assert hashes == request.block_hashes
    assert len(hashes) == 5
    assert said == {
        "pin_ms": 1500,
        "next_use_ms": 30_000,
        "priority": -1,
        "session_ended": True,
    }
    assert not bench.daemon.leases


def test_hints_end_with_their_generation() -> None:
    """A pin sent before the weights changed would keep KV that no engine may use."""
    bench = Bench()
    bench.side.add(FakeRequest("a", 14), RequestHints(pin_s=60))
    bench.side.reset()
    bench.side.finish("a")
    assert not bench.daemon.hints


@pytest.mark.parametrize(
    ("params", "expected", "mistakes"),
    [
        (None, NOTHING, 0),
        ({"do_remote_decode": True}, NOTHING, 0),
        ({"tierd": {}}, NOTHING, 0),
        ({"tierd": {"pin_s": 60, "priority": 1}}, RequestHints(pin_s=60, priority=1), 0),
        (
            {"tierd": {"session_end": True, "next_use_s": 0.5}},
            RequestHints(session_end=True, next_use_s=0.5),
            0,
        ),
        ("tierd", NOTHING, 0),
        ({"tierd": [1]}, NOTHING, 1),
        ({"tierd": {"pin": 60, "pin_s": 5}}, RequestHints(pin_s=5), 1),
        ({"tierd": {"pin_s": "60", "priority": 1}}, RequestHints(priority=1), 1),
        ({"tierd": {"pin_s": True}}, NOTHING, 1),
        ({"tierd": {"pin_s": -1}}, NOTHING, 1),
        ({"tierd": {"pin_s": float("nan")}}, NOTHING, 1),
        ({"tierd": {"pin_s": float("inf")}}, RequestHints(pin_s=SECONDS_MAX), 0),
        ({"tierd": {"pin_s": 10**400}}, RequestHints(pin_s=SECONDS_MAX), 0),
        ({"tierd": {"pin_s": None}}, NOTHING, 1),
        ({"tierd": {"priority": 2, "session_end": 1}}, NOTHING, 2),
        ({"tierd": {"priority": True}}, NOTHING, 1),
        ({"tierd": {"priority": 1.0}}, NOTHING, 1),
        ({"tierd": {"priority": [[]]}}, NOTHING, 1),
        ({"tierd": {7: 8, (): []}}, NOTHING, 1),
    ],
)
def test_wrong_hints_are_ignored_and_logged_once(
    params: object, expected: RequestHints, mistakes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's typo would fail the request, or fill the engine's log."""
    reader = HintReader()
    with caplog.at_level("WARNING", logger="vllm.tierd"):
        for _ in range(3):
            assert reader.read(params) == expected
    assert len(caplog.records) == mistakes <= LOGGED_MAX


def test_waiting_time_starts_at_arrival_and_again_at_preemption() -> None:
    """A request that was tokenised slowly would wait a whole deadline on top, or a preempted
    one would have no time at all to get its blocks back."""
    bench = Bench()
    request = FakeRequest("a", 14, arrival_time=time.time() - 60)
    bench.side.add(request)
    assert 60_000 <= bench.daemon.about[0]["waited_ms"] < 70_000
    bench.run(request, 0, 14, [1, 2, 3, 4], new=True)
    bench.step([], ["a"], idle=True)
    bench.side.matched_tokens("a", 0)
    assert bench.daemon.about[1]["waited_ms"] < 10_000


def test_ready_is_sent_once() -> None:
    """best_effort would wait for a whole prefix while the engine idles."""
    bench = Bench(daemon=FakeDaemon(answering=False))
    bench.side.add(FakeRequest("a", 14))
    assert bench.daemon.ready == 0
    for _ in range(3):
        assert bench.side.matched_tokens("a", 0) is None
    assert bench.daemon.ready == 1


def test_prefill_speed_is_measured_from_prompt_steps() -> None:
    """Loads would be refused, or waited for, by the speed of decoding or of an idle engine."""
    speed = PrefillSpeed()
    now_ns = 10**9
    for tokens, took_ms in ((2048, 100), (1, 5), (1, 60_000), (2048, 100), (64, 90), (2048, 100)):
        speed.step(now_ns, tokens)
        now_ns += took_ms * 10**6
    assert speed.tokens_per_s == 20_480
    speed.step(now_ns + 10**11, 0)
    assert speed.tokens_per_s == 20_480, "a long pause is none of the engine's work"
    assert PrefillSpeed().tokens_per_s == 0


def test_all_ranks_must_have_a_block() -> None:
    """One rank would load a block that the other never stored."""
    bench = Bench(ranks=2)
    bench.put(3, ranks=range(1))
    bench.put(1, ranks=range(1, 2))
    request = FakeRequest("a", 14)
    bench.side.add(request)
    (load,) = bench.load(request, 0)
    assert [len(slots) for slots in load.slots] == [1, 1]
    assert load.slots[0] != load.slots[1]


def test_load_starts_past_the_engines_own_hit() -> None:
    """Leased bytes would land in blocks that other requests are reading."""
    bench, request = looked_up(3, tokens=14)
    (load,) = bench.load(request, 4, first_block=10)
    assert load.blocks == [11, 12]
    expected = [bench.daemon.blocks[bench.namespaces[0].digest, block_hash(i)] for i in (1, 2)]
    assert load.slots == [expected]


@pytest.mark.parametrize("where", ["pending", "offered", "loading", "loaded"])
def test_lease_is_released_wherever_a_request_ends(where: str) -> None:
    """Every abort would pin memory of the daemon until its lease ran out."""
    bench = Bench()
    bench.put(3)
    bench.daemon.answering = where != "pending"
    request = FakeRequest("a", 14)
    bench.side.add(request)
    if where == "offered":
        bench.side.matched_tokens("a", 0)
    if where in ("loading", "loaded"):
        bench.load(request, 0)
    if where == "loaded":
        bench.side.finished_loads({"a"}, ())
    bench.side.finish("a")
    bench.daemon.answering = True
    bench.step(idle=True)
    if where == "loading":
        assert len(bench.daemon.leases) == 1, "the copy is still under way"
        bench.side.finished_loads({"a"}, ())
    assert not bench.daemon.leases
    assert bench.side.leases_held == 0
    assert bench.daemon.double_releases == 0


def test_failed_load_is_never_offered_again() -> None:
    """The engine asks again after a failure: the request would go round for ever."""
    bench, request = looked_up(3, tokens=14)
    (load,) = bench.load(request, 0)
    bench.side.finished_loads({"a"}, load.blocks[:1])
    assert bench.side.matched_tokens("a", 0) == 0
    assert not bench.daemon.leases
    stores = bench.run(request, 0, 14, [1, 2, 3, 4], new=True)
    assert [item[2] for item in stores] == [1, 2, 3], "recomputed blocks are stored again"


def test_failure_on_one_rank_fails_the_load() -> None:
    """A rank that failed early would be forgotten by the time that the last one is done."""
    bench = Bench(ranks=2)
    bench.put(3)
    request = FakeRequest("a", 14)
    bench.side.add(request)
    (load,) = bench.load(request, 0)
    bench.side.finished_loads((), load.blocks)
    bench.side.finished_loads({"a"}, ())
    assert bench.side.matched_tokens("a", 0) == 0


def test_old_lease_is_renewed_before_it_is_used() -> None:
    """A request that waited long would be promised slots that are about to be reused."""
    bench = Bench(daemon=FakeDaemon(lease_ms=40))
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    assert bench.side.matched_tokens("a", 0) == 12
    end = time.monotonic() + 5
    while bench.side.matched_tokens("a", 0) == 12:
        assert time.monotonic() < end
    assert bench.daemon.lookups == 2
    assert bench.side.matched_tokens("a", 0) == 12
    assert len(bench.daemon.leases) == 1


def test_lease_of_an_earlier_daemon_is_not_used() -> None:
    """After a daemon's restart the slots may hold anything."""
    bench = Bench()
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    assert bench.side.matched_tokens("a", 0) == 12
    bench.daemon.restart()
    assert bench.side.matched_tokens("a", 0) is None
    assert bench.side.matched_tokens("a", 0) == 0


def test_dead_daemon_is_a_miss_at_once() -> None:
    """Requests would wait for a daemon that is not there."""
    bench = Bench(daemon=FakeDaemon(up=False))
    bench.side.add(FakeRequest("a", 14))
    assert bench.side.matched_tokens("a", 0) == 0
    bench = Bench(daemon=FakeDaemon(answering=False))
    bench.side.add(FakeRequest("b", 14))
    assert bench.side.matched_tokens("b", 0) is None
    bench.daemon.up = False
    assert bench.side.matched_tokens("b", 0) == 0


def test_blocks_are_stored_once_as_they_fill() -> None:
    """Chunks and generated tokens would be stored twice, too early, or never."""
    bench = Bench()
    request = FakeRequest("a", 14)
    bench.side.add(request)
    first = bench.run(request, 0, 6, [1, 2], new=True)
    assert first == [StoreItem(block_hash(0), ROOT, 1)]
    second = bench.run(request, 6, 8, [3, 4], new=False)
    assert second == [StoreItem(block_hash(i), block_hash(i - 1), i + 1) for i in (1, 2)]
    for step in range(1, 6):
        # One token was sampled since; its KV is computed in the next step.
        request.num_tokens = 14 + step
        stores = bench.run(request, 13 + step, 1, [], new=False)
        assert [item[2] for item in stores] == ([4] if 14 + step == 16 else [])


def test_placeholders_and_drafts_are_not_stored() -> None:
    """Asynchronous scheduling and drafts count tokens that do not exist: wrong KV under a hash."""
    bench = Bench()
    request = FakeRequest("a", 15)
    bench.side.add(request)
    stores = bench.run(request, 0, 15, [1, 2, 3, 4, 5], new=True)
    assert len(stores) == 3
    # The engine is two steps and four drafts ahead; the request knows 15 tokens still.
    assert bench.run(request, 15, 5, [], new=False) == []
    request.num_tokens = 17
    assert [item[2] for item in bench.run(request, 20, 5, [6, 7], new=False)] == [4]


def test_loaded_blocks_are_not_stored_back_but_own_hits_are() -> None:
    """Each load would be copied back; and a daemon that lost its memory would stay empty."""
    bench = Bench()
    bench.put(3)
    before = FakeRequest("b", 5)
    bench.side.add(before)
    assert [item[2] for item in bench.run(before, 0, 5, [10, 20], new=True)] == [10]
    request = FakeRequest("a", 18)
    bench.side.add(request)
    bench.load(request, 4, first_block=10)
    bench.side.finished_loads({"a"}, ())
    stores = bench.run(request, 12, 6, [10, 11, 12, 13, 14], new=True)
    assert [item[2] for item in stores] == [10, 13]
    bench.side.finish("a")
    again = FakeRequest("c", 18)
    bench.side.add(again)
    bench.side.matched_tokens("c", 16)
    stores = bench.run(again, 16, 2, [10, 11, 12, 13, 21], new=True)
    assert [item[2] for item in stores] == [10, 11, 12, 13], "what tierd has loaded, too"


def test_blocks_loaded_by_another_connector_and_later_blocks_are_not_stored() -> None:
    """Another connector's word would become a fact for every engine of the fleet."""
    bench = Bench()
    request = FakeRequest("a", 30)
    bench.side.add(request)
    assert bench.side.matched_tokens("a", 4) == 0
    table = list(range(1, 9))
    bench.side.allocated("a", table, 0)
    work = bench.step(idle=True)
    assert work.reused == table[1:], "it may be loading into all but the engine's own hit"
    # It has loaded 14 tokens, so that a block is half its own.
    assert bench.run(request, 14, 16, table, new=True) == []
    bench.side.finish("a")
    later = FakeRequest("b", 30)
    bench.side.add(later)
    bench.side.matched_tokens("b", 28)
    assert bench.run(later, 28, 2, table, new=True) == [], "hits on its blocks"


def test_blocks_after_a_partly_failed_load_are_stored() -> None:
    """Blocks that were recomputed would be taken for loaded ones, and be missed for ever."""
    bench, request = looked_up(3, tokens=14)
    (load,) = bench.load(request, 0)
    bench.side.finished_loads({"a"}, load.blocks[1:2])
    stores = bench.run(request, 4, 10, [*load.blocks, 7], new=True)
    assert [item[2] for item in stores] == load.blocks[1:]


def test_blocks_are_fenced_when_the_connector_is_off() -> None:
    """Blocks with new owners would no longer be reported, and stale stores published."""
    bench = Bench()
    request = FakeRequest("a", 14)
    bench.side.add(request)
    bench.side.matched_tokens("a", 12)
    bench.boundary.switch_off("a test")
    bench.side.allocated("a", [1, 2, 3, 4], 0)
    assert bench.step(idle=True).reused == [1, 2, 3, 4]


def test_error_in_the_cleanup_switches_off() -> None:
    """State that an error has left half done would be used all the same."""
    bench = Bench()
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    assert bench.side.matched_tokens("a", 0) == 12

    def fail(lease: object) -> None:
        raise OSError("no")

    cast("FakeClient", bench.side._client).release = fail  # type: ignore[method-assign]  # a fault
    bench.boundary.start_over = bench.side.start_over
    bench.boundary.caught("a test", ValueError("first"))
    assert "no" in bench.boundary.off
    assert bench.side.leases_held == 0
    assert bench.step(idle=True).reused_unknown


def test_preempted_request_starts_again() -> None:
    """It would store from a freed block table, and not load its stored blocks."""
    bench = Bench()
    request = FakeRequest("a", 14)
    bench.side.add(request)
    bench.run(request, 0, 14, [1, 2, 3, 4], new=True)
    bench.put(3)
    bench.step([], ["a"])
    bench.load(request, 0, first_block=50)
    assert bench.daemon.lookups == 2
    bench.side.finished_loads({"a"}, ())
    assert bench.run(request, 12, 2, [50, 51, 52, 53], new=True) == []


def test_every_block_with_a_new_owner_is_fenced() -> None:
    """A waiting store would read the next request's KV and store it under the old hash."""
    bench = Bench()
    bench.put(2, salt=1)
    other = FakeRequest("b", 10, salt=1)
    bench.side.add(other)
    request = FakeRequest("a", 14)
    bench.side.add(request)
    assert bench.side.matched_tokens("b", 0) == 8
    bench.side.allocated("b", [20, 21], 8)
    assert bench.side.matched_tokens("a", 4) == 0
    step = bench.scheduled("a", 4, 10, [1, 2, 3, 4], new=True)
    work = bench.step([step])
    assert sorted(work.reused) == [2, 3, 4, 20, 21], "block 1 is a hit and keeps its content"
    work = bench.step([bench.scheduled("a", 14, 3, [5], new=False)])
    assert work.reused == [5]
    work = bench.step([bench.scheduled("unknown", 0, 5, [8, 9], new=True)])
    assert work.reused == [8, 9], "also of requests that tierd does not serve"


def test_load_that_cannot_be_planned_is_reported_as_failed() -> None:
    """The engine would wait forever for a load that no worker knows."""
    bench, _ = looked_up(3, tokens=14)
    assert bench.side.matched_tokens("a", 0) == 12
    bench.side.allocated("a", [1], 12)
    (load,) = bench.step(idle=True).loads
    assert load.slots == []
    bench.side.finished_loads({"a"}, {1})
    assert bench.side.matched_tokens("a", 0) == 0
    assert not bench.daemon.leases


def test_loads_survive_an_error_in_the_step() -> None:
    """An error of ours would leave requests waiting and stale blocks readable."""
    bench = Bench()
    bench.put(3)
    bench.side.add(FakeRequest("a", 14))
    tokens = bench.side.matched_tokens("a", 0)
    assert tokens
    bench.side.allocated("a", [1, 2, 3], tokens)
    with pytest.raises(AttributeError):
        bench.side.build([cast("Scheduled", None)], [], idle=True)
    bench.side.start_over()
    work = bench.side.hand_over(None, idle=True)
    assert [(load.request_id, load.blocks, load.slots) for load in work.loads] == [
        ("a", [1, 2, 3], [])
    ]
    assert work.reused_unknown
    assert not bench.daemon.leases
    assert not bench.step(idle=True).reused_unknown


def test_incomplete_table_after_an_error_stores_nothing() -> None:
    """From the error on each block would be stored under the hash of the one before it."""
    bench = Bench()
    bench.boundary.start_over = bench.side.start_over
    request = FakeRequest("a", 9)
    bench.side.add(request)
    bench.side.matched_tokens("a", 0)
    assert len(bench.run(request, 0, 9, [10, 11, 12], new=True)) == 2
    # The error is in another request's part of the step, or before the connector has seen it.
    bench.tables["a"].append(13)
    bench.boundary.caught("a step", ValueError("any"))
    assert bench.side.hand_over(None, idle=False).reused_unknown
    request.num_tokens = 20
    assert bench.run(request, 13, 4, [14], new=False) == []
    again = FakeRequest("b", 20)
    bench.side.add(again)
    bench.side.matched_tokens("b", 16)
    table = [10, 11, 12, 13, 20]
    assert bench.run(again, 16, 4, table, new=True) == [], "the content of hits is unknown"
    fresh = FakeRequest("c", 9, salt=1)
    bench.side.add(fresh)
    bench.side.matched_tokens("c", 0)
    assert len(bench.run(fresh, 0, 9, [30, 31, 32], new=True)) == 2, "later requests are stored"


def test_short_block_table_stores_nothing() -> None:
    """Blocks would be stored for tokens that lie in other ones."""
    bench = Bench()
    request = FakeRequest("a", 9)
    bench.side.add(request)
    bench.side.matched_tokens("a", 0)
    with pytest.raises(AssertionError):
        bench.run(request, 0, 9, [10, 11], new=True)


@pytest.mark.parametrize("version", ["0.29", "0.30"])
def test_block_tables_come_from_the_engine(version: str) -> None:
    """If a version reports tables in another way, nothing or wrong blocks would be stored."""
    tables = {"new": ([1, 2],), "again": ([3, 4, 5],), "grows": ([6, 7],)}
    state = {"block_ids": tables} if version == "0.29" else {"get_block_ids": tables.get}
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=4)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["grows", "stays", "again"],
            resumed_req_ids={"again"},
            new_block_ids=[([7],), None, ([3, 4, 5],)],
            num_computed_tokens=[5, 9, 8],
        ),
        num_scheduled_tokens={"new": 3, "grows": 1, "stays": 1, "again": 2},
        kv_connector_block_state=SimpleNamespace(**state),
    )
    steps = scheduled_requests(cast("SchedulerOutput", output))
    assert [(step.request_id, step.restarted, step.blocks, step.table()) for step in steps] == [
        ("new", True, (), [1, 2]),
        ("grows", False, [7], [6, 7]),
        ("stays", False, (), None),
        ("again", True, [3, 4, 5], [3, 4, 5]),
    ]
    assert [(step.computed, step.tokens) for step in steps] == [(4, 3), (5, 1), (9, 1), (8, 2)]


def test_reset_neither_finds_nor_stores_old_blocks() -> None:
    """An engine with replaced weights would load KV of the old ones, or mix its KV with it."""
    bench, _ = looked_up(3, tokens=14)
    assert bench.side.matched_tokens("a", 0) == 12
    bench.side.reset()
    assert bench.side.matched_tokens("a", 0) == 0
    assert not bench.daemon.leases
    bench.side.add(FakeRequest("b", 14))
    assert bench.side.matched_tokens("b", 0) == 0
    seen = {namespace().digest}
    for _ in range(2):
        generation = bench.step(idle=True).generation
        workers = of_generation(namespace(), generation).digest
        assert workers not in seen
        seen.add(workers)
        bench.side.add(FakeRequest(f"r{len(seen)}", 14))
        client = cast("FakeClient", bench.side._client)
        assert client.handles[-1].namespace.digest == workers, "both sides move alike"
        bench.side.reset()


def namespaces_of(bench: Bench) -> set[str]:
    return {handle.namespace.weights for handle in cast("FakeClient", bench.side._client).handles}


def test_untouched_engine_finds_its_blocks_after_a_reset() -> None:
    """Each pause would cost all that is stored, though the weights stay."""
    bench = Bench()
    bench.put(3)
    bench.side.untouched = True
    before = namespaces_of(bench)
    request = FakeRequest("a", 14)
    bench.side.add(request)
    assert bench.side.matched_tokens("a", 0) == 12
    bench.side.reset()
    assert bench.side.matched_tokens("a", 0) == 0, "it was computed before the reset"
    assert not bench.daemon.leases
    bench.side.add(FakeRequest("b", 14))
    assert bench.side.matched_tokens("b", 0) == 12
    assert bench.step(idle=True).generation == ""
    assert (namespaces_of(bench), bench.daemon.left) == (before, [])


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("computes", [False, True])
def test_touched_engine_stores_nothing_in_its_old_namespace(resets: bool, computes: bool) -> None:
    """Engines with the old weights would serve what this one computes with others, whether a reset
    was before the call, or comes after it, or never."""
    bench = Bench()
    bench.put(3)
    bench.side.untouched = True
    before = namespaces_of(bench)
    under_way = FakeRequest("a", 14)
    bench.side.add(under_way)
    if resets:
        bench.side.reset()
    bench.step(idle=not computes)
    bench.side.touched("a function sent by a caller")
    assert namespaces_of(bench).isdisjoint(before)
    assert [worthless for _, worthless in bench.daemon.left] == [False] * len(before)
    assert not bench.daemon.leases
    assert bench.step(idle=True).generation
    assert bench.side.matched_tokens("a", 0) == 0
    bench.side.add(FakeRequest("b", 14))
    assert bench.side.matched_tokens("b", 0) == 0
    # From now on each reset counts.
    again = namespaces_of(bench)
    bench.side.reset()
    assert namespaces_of(bench).isdisjoint(before | again)
    assert [worthless for _, worthless in bench.daemon.left[len(before) :]] == [True] * len(again)


def test_only_calls_after_a_step_change_the_namespace() -> None:
    """The second update of weights would find the KV of the first; a hundred calls that make one
    update would register as many namespaces."""
    bench = Bench()
    bench.side.touched("update_weights")
    first = namespaces_of(bench)
    for _ in range(100):
        bench.step(idle=True)
        bench.side.touched("update_weights")
    assert namespaces_of(bench) == first
    bench.step()
    bench.side.touched("update_weights")
    assert namespaces_of(bench).isdisjoint(first)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_requests_leave_no_lease(data: st.DataObject) -> None:
    """Some order of offers, loads, failures, preemptions and aborts would leak or free twice."""
    bench = Bench(daemon=FakeDaemon(answering=data.draw(st.booleans())))
    bench.put(3)
    live: dict[str, FakeRequest] = {}
    loading: set[str] = set()
    for step in range(data.draw(st.integers(1, 25))):
        action = data.draw(
            st.sampled_from(["add", "ask", "finish", "done", "fail", "run", "preempt", "restart"])
        )
        name = data.draw(st.sampled_from(sorted(live))) if live else None
        if action == "add":
            request = FakeRequest(f"r{step}", data.draw(st.integers(1, 20)))
            live[request.request_id] = request
            bench.side.add(request)
        elif action == "restart":
            bench.daemon.restart()
            bench.put(2)
        elif name is None:
            continue
        elif action == "ask" and name not in loading:
            tokens = bench.side.matched_tokens(name, 0)
            if tokens and data.draw(st.booleans()):
                bench.side.allocated(name, list(range(tokens // BLOCK_TOKENS)), tokens)
                bench.step(idle=True)
                loading.add(name)
        elif action == "run" and name not in loading:
            table = list(range(live[name].num_tokens // BLOCK_TOKENS + 1))
            bench.run(live[name], 0, live[name].num_tokens, table, new=True)
        elif action == "preempt" and name not in loading:
            bench.step([], [name])
        elif action in ("done", "fail") and name in loading:
            bench.side.finished_loads({name}, {0} if action == "fail" else ())
            loading.discard(name)
        elif action == "finish":
            bench.side.finish(name)
            if name not in loading:
                del live[name]
    for name in live:
        bench.side.finish(name)
    bench.side.finished_loads(loading, ())
    bench.daemon.answering = True
    bench.step(idle=True)
    assert bench.side.leases_held == 0
    assert not [x for x in bench.daemon.leases.values() if x.epoch == bench.daemon.epoch]


# Copies

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def tensors(layout: str) -> tuple[np.ndarray, list[TensorView]]:
    """Random KV of a layout: the [L, B, H, N, C] view, and each layer as the engine shows it."""
    shape = [SIZES[axis] for axis in layout]
    memory = np.random.default_rng(3).random(shape, dtype=np.float32)
    logical = memory.transpose([layout.index(axis) for axis in "LBHNC"])
    views = [
        TensorView(
            logical[i].ctypes.data,
            memory.ctypes.data,
            logical[i].shape,
            logical[i].strides,
            4,
            memory,
        )
        for i in range(SIZES["L"])
    ]
    return logical, views


@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_survives_the_way_through_a_slot(layout: str) -> None:
    """A layout's strides would be misread: KV of the wrong layer, head or block."""
    logical, views = tensors(layout)
    pages = PageMap(blocks_of(views, SIZES["B"]), views)
    block_bytes = pages.blocks.block_bytes
    assert block_bytes == 3 * 2 * 4 * 8 * 4
    before = logical.copy()
    slot = memoryview(bytearray(4096))
    pages.gather(2, slot)
    assert (logical == before).all()
    logical[:, 4] = 0
    pages.scatter(slot, 4)
    assert (logical[:, 4] == before[:, 2]).all()
    untouched = [0, 1, 2, 3, 5]
    assert (logical[:, untouched] == before[:, untouched]).all()
    assert bytes(slot[block_bytes:]) == bytes(4096 - block_bytes)


def test_block_outermost_layout_is_one_copy() -> None:
    """Loads would be many small copies where one large one does."""
    _, views = tensors("BLNHC")
    assert len(blocks_of(views, SIZES["B"]).runs) == 1


def test_shared_and_split_tensors() -> None:
    """Layers that share KV would be copied twice; kernels' smaller blocks would be misread."""
    logical, views = tensors("LBHNC")
    pages = PageMap(blocks_of([*views, views[0]], SIZES["B"] // 2), views)
    assert pages.blocks.block_bytes == 2 * 3 * 2 * 4 * 8 * 4
    before = logical.copy()
    slot = memoryview(bytearray(4096))
    pages.gather(1, slot)
    logical[:, 4:6] = 0
    pages.scatter(slot, 2)
    assert (logical[:, 4:6] == before[:, 2:4]).all()


def test_slots_do_not_depend_on_where_layers_were_allocated() -> None:
    """An engine's next process would read a slot's layers in another order."""
    memory = np.random.default_rng(4).random((2, 6, 16), dtype=np.float32)
    slots = []
    for order in ((0, 1), (1, 0)):
        pages = [
            TensorView(memory[i].ctypes.data, memory[i].ctypes.data, (6, 16), (64, 4), 4, memory)
            for i in order
        ]
        slots.append(memoryview(bytearray(128)))
        PageMap(blocks_of(pages, 6), pages).gather(2, slots[-1])
        memory = memory[::-1].copy()
    assert slots[0] == slots[1]


def test_tensors_that_are_not_blocks_are_refused() -> None:
    """A layout that this code does not know would be copied as nonsense."""
    _, views = tensors("LBHNC")
    with pytest.raises(LayoutError, match="must count the"):
        blocks_of(views, 4)
    with pytest.raises(LayoutError, match="overlap"):
        blocks_of([views[0], replace(views[1], address=views[0].address + 4)], SIZES["B"])
    with pytest.raises(LayoutError, match="no KV tensor"):
        blocks_of([], 4)


# The mover


@dataclass
class MoverRig:
    """A mover over a fake daemon and one layout's tensors."""

    daemon: FakeDaemon = field(default_factory=FakeDaemon)

    def __post_init__(self) -> None:
        self.logical, views = tensors("LBHNC")
        self.pages = PageMap(blocks_of(views, SIZES["B"]), views)
        self.block_bytes = self.pages.blocks.block_bytes
        self.namespace = namespace(block_bytes=self.block_bytes)
        self.boundary = Boundary()
        self.client = FakeClient(self.daemon)
        client = cast("Client", self.client)
        self.mover = Mover(client, self.namespace, self.pages, 0, self.boundary, HostOrder())
        self.mover.start()

    def item(self, block: int) -> StoreItem:
        return StoreItem(block_hash(block), block_hash(block - 1) if block else ROOT, block)

    def stored(self, block: int) -> bytes | None:
        slot = self.daemon.blocks.get((self.namespace.digest, block_hash(block)))
        return None if slot is None else bytes(self.daemon.slots[slot][: self.block_bytes])

    def content(self, block: int) -> bytes:
        return self.content_by(self.pages.gather, block)

    def content_by(self, gather: Callable[[int, memoryview], None], block: int) -> bytes:
        slot = memoryview(bytearray(self.block_bytes))
        gather(block, slot)
        return bytes(slot)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.001)

    def settle(self) -> None:
        """Wait until all stores have ended."""
        self.wait_for(lambda: self.mover.settled)

    def lease(self, blocks: list[int], into: list[int], lease_ms: int = 60_000) -> Load:
        slots = [self.daemon.blocks[self.namespace.digest, block_hash(b)] for b in blocks]
        expires_ns = time.monotonic_ns() + lease_ms * 1_000_000
        return Load("r", self.daemon.epoch, expires_ns, into, [slots])

    def outcome(self, load: Load) -> list[int]:
        self.mover.submit_load(load)
        end = time.monotonic() + 5
        while True:
            self.mover.wait_finished(0.1)
            finished = self.mover.take_finished()
            if finished:
                ((request_id, failed),) = finished
                assert request_id == load.request_id
                assert self.mover.take_finished() == [], "reported twice"
                return failed
            assert time.monotonic() < end


@pytest.fixture
def rig():
    made = MoverRig()
    yield made
    if made.daemon.reserve_gate is not None:
        made.daemon.reserve_gate.set()
    made.mover.stop(0.2)
    assert made.client.closed
    assert made.boundary.errors == 0


def test_store_then_load(rig: MoverRig) -> None:
    """A load would not return the stored bytes."""
    rig.mover.submit_stores([rig.item(1), rig.item(2)])
    rig.settle()
    before = [rig.content(1), rig.content(2)]
    assert [rig.stored(1), rig.stored(2)] == before
    assert rig.daemon.parents[rig.namespace.digest, block_hash(2)] == block_hash(1)
    assert rig.outcome(rig.lease([1, 2], [4, 5])) == []
    assert [rig.content(4), rig.content(5)] == before


def test_expired_lease_fails_the_load(rig: MoverRig) -> None:
    """A slot that the daemon reused during the copy would be served as the prefix."""
    rig.mover.submit_stores([rig.item(1)])
    rig.settle()
    assert rig.outcome(rig.lease([1], [4], lease_ms=0)) == [4]


@pytest.mark.slow
def test_slots_of_another_incarnation_fail_the_load(rig: MoverRig) -> None:
    """A restarted daemon's slots would be read by numbers of the old one."""
    rig.mover.submit_stores([rig.item(1)])
    rig.settle()
    load = rig.lease([1], [4])
    rig.daemon.restart()
    started = time.monotonic()
    assert rig.outcome(load) == [4]
    assert time.monotonic() - started < 1


def test_unplannable_load_is_reported_as_failed(rig: MoverRig) -> None:
    """The engine would wait for ever for a load that could not be planned."""
    assert rig.outcome(Load("r", b"", 0, [1, 2], [])) == [1, 2]


@pytest.mark.parametrize("where", ["queued", "reserved"])
def test_fenced_block_is_never_read(rig: MoverRig, where: str) -> None:
    """Another request's KV would be published under the old hash."""
    rig.daemon.reserve_gate = threading.Event()
    before = [rig.content(b) for b in range(6)]
    rig.mover.submit_stores([rig.item(5 if where == "queued" else 1)])
    rig.wait_for(lambda: bool(rig.mover._chunks))
    if where == "queued":
        rig.mover.submit_stores([rig.item(1)])
    rig.mover.fence({1})
    rig.logical[:, 1] = 9
    rig.daemon.reserve_gate.set()
    rig.settle()
    assert rig.stored(1) is None
    assert rig.stored(5) == (before[5] if where == "queued" else None)


def test_fence_during_a_copy_does_not_wait(rig: MoverRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's step would wait for a copy, or a new owner's KV would be published."""
    copying, go_on = threading.Event(), threading.Event()
    gather_many = rig.pages.gather_many

    def slowly(blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        copying.set()
        assert go_on.wait(5)
        gather_many(blocks, slots)

    monkeypatch.setattr(rig.pages, "gather_many", slowly)
    before = rig.content(1)
    rig.mover.submit_stores([rig.item(1), rig.item(2), rig.item(3)])
    assert copying.wait(5)
    rig.mover.fence({2})
    rig.logical[:, 2] = 9
    go_on.set()
    rig.settle()
    assert rig.stored(1) == before
    assert [rig.stored(2), rig.stored(3)] == [None, None], "3 would have no parent"
    assert rig.mover.tally.drain()["store_blocks_dropped"] == 2


def test_reuse_during_stores_publishes_nothing_wrong(rig: MoverRig) -> None:
    """Under memory pressure blocks change owner while stores are queued and copied."""
    rng = np.random.default_rng(5)
    truth: dict[bytes, bytes] = {}
    for turn in range(300):
        block = int(rng.integers(0, SIZES["B"]))
        rig.mover.fence({block})
        rig.logical[:, block] = rng.random(rig.logical[:, block].shape, dtype=np.float32)
        name = block_hash(turn, salt=9)
        truth[name] = rig.content(block)
        rig.mover.submit_stores([StoreItem(name, ROOT, block)])
    rig.settle()
    held = {
        name: bytes(rig.daemon.slots[slot][: rig.block_bytes])
        for (_, name), slot in rig.daemon.blocks.items()
    }
    assert held
    assert all(truth[name] == payload for name, payload in held.items())


def test_dead_daemon_ends_every_job(rig: MoverRig) -> None:
    """Jobs would pile up, and loads never be reported, once the daemon has died."""
    rig.mover.submit_stores([rig.item(1)])
    rig.settle()
    load = rig.lease([1], [4])
    rig.daemon.up = False
    rig.mover.submit_stores([rig.item(2), rig.item(3)])
    rig.settle()
    assert rig.stored(2) is None
    assert rig.mover.tally.drain()["store_blocks_dropped"] == 2
    assert rig.outcome(load) == [], "a live lease outlives its daemon"


def test_load_goes_before_stores(rig: MoverRig) -> None:
    """A user's load would wait for other requests' stores."""
    rig.mover.submit_stores([rig.item(1)])
    rig.settle()
    rig.daemon.reserve_gate = threading.Event()
    rig.mover.submit_stores([rig.item(b) for b in (0, 2, 3)])
    load = rig.lease([1], [4])
    rig.mover.submit_load(load)
    rig.mover.submit_stores([rig.item(5)])
    rig.daemon.reserve_gate.set()
    rig.mover.wait_finished(5)
    assert rig.mover.take_finished() == [("r", [])]


def test_new_namespace_fails_queued_loads(rig: MoverRig) -> None:
    """After a reset, slots of the old namespace would be looked up in the new one."""
    rig.mover.submit_stores([rig.item(1)])
    rig.settle()
    rig.mover.use(of_generation(rig.namespace, "x"))
    rig.mover.submit_stores([rig.item(2)])
    rig.settle()
    assert rig.stored(2) is None
    digests = {digest for digest, _ in rig.daemon.blocks}
    assert digests == {rig.namespace.digest, of_generation(rig.namespace, "x").digest}


def test_stop_is_quick(rig: MoverRig) -> None:
    """An engine's shutdown would hang on its cache."""
    rig.mover.submit_stores([rig.item(b) for b in (1, 2, 3)])
    started = time.monotonic()
    rig.mover.stop(0.5)
    assert time.monotonic() - started < 1
    assert rig.stored(3) is not None, "what was queued had its time"


# The boundary, the settings, the weights


@pytest.mark.parametrize(("apart_s", "off"), [(1, True), (299, True), (301, False)])
def test_repeated_errors_switch_off(
    monkeypatch: pytest.MonkeyPatch, apart_s: int, off: bool
) -> None:
    """A bug of ours would end the engine, or three in months end all reuse."""
    times = itertools.count(1000, apart_s)
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: next(times)))

    class Owner:
        def __init__(self) -> None:
            self.boundary = Boundary()

        @guarded(lambda: 7)
        def work(self) -> int:
            raise KeyError("x")

    owner = Owner()
    assert [owner.work() for _ in range(4)] == [7] * 4
    assert owner.boundary.errors == 4
    assert ("3 errors within 10 minutes" in owner.boundary.off) == off
    assert ("KeyError" in owner.boundary.off) == off


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped key would silently keep its default."""
    monkeypatch.setenv("TIERD_SOCKET", "/tmp/env.sock")
    assert parse({}).socket == "/tmp/env.sock"
    assert parse({"socket": "/tmp/x.sock"}).socket == "/tmp/x.sock"
    assert parse({}).transfer is Transfer.AUTO
    assert parse({"transfer": "host_ipc"}).transfer is Transfer.HOST_IPC
    assert not parse({}).layerwise
    assert parse({"layerwise": True}).layerwise
    assert parse({"loras": {"sql": "a=b"}}).loras == {"sql": "a=b"}
    assert parse({}).loras == {}
    with pytest.raises(ConfigError, match="did you mean 'prefetch_deadline_ms'"):
        parse({"prefetch_deadlin_ms": 3})
    for wrong in (
        {"socket": ""},
        {"prefetch_deadline_ms": True},
        {"prefetch_deadline_ms": -1},
        {"weights": ""},
        {"transfer": "gpu"},
        {"transfer": ["shm"]},
        {"layerwise": 1},
        {"loras": ["sql"]},
        {"loras": {"sql": 1}},
        {"loras": {"sql": ""}},
        {"loras": {"": "1"}},
        {"loras": {"a=b": "1"}},
        {"loras": {"a" * 257: "1"}},
        {"loras": {f"a{i}": "1" for i in range(33)}},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            parse(wrong)
