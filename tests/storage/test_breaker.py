"""The breaker: an outage costs one deadline, and affects only the tier that has it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.support.tiers.breaker_rig import (
    BLOCKS,
    CALL_S,
    DEADLINE_S,
    DOWN,
    ERROR,
    HASHES,
    HIT,
    HUNG,
    MISS,
    OK,
    PROBE_S,
    SLOW,
    SLOW_S,
    Act,
    Rig,
    simulated,
)
from tierd.backend import BackendStats, Outcome, PutRequest
from tierd.errors import BackendError
from tierd.testing.suite import NAMESPACE, scanned

# --- deadlines --------------------------------------------------------------------------


@simulated
async def test_missed_deadline_opens_the_circuit_at_once(rig: Rig) -> None:
    """Every request would wait for a dead server until the breaker notices the outage."""
    rig.tier.reads = HUNG
    with pytest.raises(BackendError, match="no answer within 2 s"):
        await rig.get()
    assert rig.time == DEADLINE_S
    assert rig.reads() == "open"
    assert await rig.get(3) == [MISS] * 3
    assert await rig.lookup(2) == [False] * 2
    assert rig.time == DEADLINE_S
    assert rig.tier.count("get") == 1
    assert rig.tier.count("lookup") == 0
    assert rig.breaker.counters["breaker_refused_reads_total"] == 5
    assert rig.breaker.counters["breaker_read_deadlines_total"] == 1


@simulated
async def test_lingering_call_opens_the_circuit_at_its_deadline(rig: Rig) -> None:
    """A slot would be reused while a read still writes to it, or the breaker would wait for a
    client that is slow to let go."""
    rig.tier.reads = replace(HUNG, lingers_s=20.0)
    rig.tier.probes = DOWN
    call = await rig.start(rig.get())
    await asyncio.sleep(DEADLINE_S + 1e-6)
    assert rig.reads() == "open"
    assert not call.done()
    assert rig.tier.in_flight == 1
    with pytest.raises(BackendError, match="no answer"):
        await call
    assert rig.time == DEADLINE_S + 20


@simulated
async def test_no_trial_begins_beside_a_lingering_call(rig: Rig) -> None:
    """A client stuck in the kernel would take one more thread with each trial."""
    rig.tier.reads = replace(HUNG, lingers_s=50.0)
    call = await rig.start(rig.get())
    await asyncio.sleep(DEADLINE_S + PROBE_S + 1)
    assert rig.reads() == "stalled"
    assert await rig.get() == [MISS]
    rig.tier.reads = OK
    await rig.fail(lambda: call)
    assert rig.reads() == "half_open"
    assert await rig.get() == [HIT]
    assert rig.reads() == "closed"


@simulated
async def test_answer_after_the_deadline_is_returned(rig: Rig) -> None:
    """Stored blocks would be reported as failed, and their outcome would be lost."""

    async def stubborn(namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(100)
        return [Outcome.STORED]

    rig.tier.put_many = stubborn  # type: ignore[method-assign]
    assert await rig.put() == [Outcome.STORED]
    assert rig.writes() == "open"


@simulated
async def test_an_outage_costs_one_deadline(rig: Rig) -> None:
    """Queued requests would each wait for the deadline, one after the other."""
    rig.tier.reads = rig.tier.probes = HUNG
    waited_s = 0.0
    for _ in range(100):
        began_s = rig.time
        with suppress(BackendError):
            await rig.lookup()
        waited_s += rig.time - began_s
        await asyncio.sleep(0.5)
    assert waited_s == pytest.approx(DEADLINE_S)
    assert rig.tier.count("lookup") == 1


@simulated
async def test_uses_raise_while_reads_are_refused(rig: Rig) -> None:
    """During an outage all blocks of the tier would be taken for lost, and be written again
    afterwards."""
    rig.tier.reads = HUNG
    await rig.fail(rig.get)
    with pytest.raises(BackendError, match="reads are stopped"):
        await rig.breaker.use_many(NAMESPACE, HASHES)
    assert await rig.breaker.use_many(NAMESPACE, []) == []


@simulated
async def test_deletes_are_bounded_and_never_refused(rig: Rig) -> None:
    """A flush would hang, or be reported as done although it was not even tried."""
    rig.tier.writes = rig.tier.reads = HUNG
    await rig.fail(rig.put)
    await rig.fail(rig.get)
    assert (rig.reads(), rig.writes()) == ("open", "open")
    began_s = rig.time
    with pytest.raises(BackendError, match="no answer within 2 s"):
        await rig.breaker.delete_many(NAMESPACE, HASHES)
    assert rig.time == began_s + DEADLINE_S
    rig.tier.writes = OK
    assert await rig.breaker.delete_many(NAMESPACE, HASHES) == len(HASHES)


@simulated
async def test_each_step_of_a_scan_is_bounded(rig: Rig) -> None:
    """A scan of millions of blocks would be cut off, or the scan of a dead server would never
    end."""
    rig.tier.reads = Act(takes_s=DEADLINE_S * 0.9)
    assert await scanned(rig.breaker) == [block.header for block in BLOCKS]
    assert rig.reads() == "closed"
    rig.tier.reads = HUNG
    with pytest.raises(BackendError, match="no answer within 2 s"):
        await anext(rig.breaker.scan())
    steps = rig.breaker.scan()
    rig.tier.reads = OK
    async for _ in steps:
        break
    await steps.aclose()  # type: ignore[attr-defined]
    assert rig.reads() == "closed"


# --- failures ---------------------------------------------------------------------------


@simulated
async def test_three_failures_in_a_row_open_the_circuit(rig: Rig) -> None:
    """Each request would try a refused connection, or a single failure would already open the
    circuit."""
    for _ in range(5):
        rig.tier.reads = DOWN
        await rig.fail(rig.get, 2)
        rig.tier.reads = OK
        for _ in range(4):
            assert await rig.get() == [HIT]
        assert rig.reads() == "closed"
    rig.tier.reads = DOWN
    with pytest.raises(BackendError, match="connection refused"):
        await rig.get()
    await rig.fail(rig.get, 2)
    assert rig.reads() == "open"
    assert rig.breaker.status()["reads"]["why"] == "connection refused"


@simulated
async def test_successful_lookups_do_not_cover_failing_reads(rig: Rig) -> None:
    """The breaker would never give up a server that answers lookups but delivers nothing."""
    for _ in range(3):
        rig.tier.reads = OK
        for _ in range(10):
            assert await rig.lookup() == [True]
        rig.tier.reads = DOWN
        await rig.fail(rig.get)
    assert rig.reads() == "open"


@simulated
async def test_failing_lookups_open_the_circuit(rig: Rig) -> None:
    """A server that is down would be asked for as long as nothing is read."""
    rig.tier.reads = DOWN
    await rig.fail(rig.lookup, 3)
    assert rig.reads() == "open"


@simulated
async def test_lookup_does_not_count_as_a_trial(rig: Rig) -> None:
    """After each probe all requests would go to a server that stalls in the bodies of its
    replies."""
    await rig.half_open_reads()
    for _ in range(3):
        assert await rig.lookup() == [True]
        assert rig.reads() == "half_open"
    rig.tier.reads = DOWN
    await rig.fail(rig.lookup)
    assert rig.reads() == "open"


@simulated
async def test_half_of_the_recent_calls_failing_opens_the_circuit(rig: Rig) -> None:
    """The breaker would never give up a tier that loses every other call."""
    for number in range(10):
        rig.tier.reads = OK if number % 2 else DOWN
        with suppress(BackendError):
            await rig.get()
        assert rig.reads() == "closed"
    rig.tier.reads = DOWN
    await rig.fail(rig.get)
    assert rig.reads() == "open"


@simulated
async def test_a_third_of_the_recent_calls_failing_does_not_open_the_circuit(rig: Rig) -> None:
    """A tier behind a flaky network would be unusable."""
    for number in range(90):
        rig.tier.reads = OK if number % 3 else DOWN
        with suppress(BackendError):
            await rig.get()
        assert rig.reads() == "closed"


@simulated
async def test_only_the_last_twenty_calls_count(rig: Rig) -> None:
    """A tier that worked for a day could then fail half of its calls for a day."""
    for _ in range(500):
        await rig.get()
    failed = 0
    while rig.reads() == "closed":
        rig.tier.reads = DOWN if failed % 2 == 0 else OK
        with suppress(BackendError):
            await rig.get()
        failed += 1
    assert failed == 19  # 10 failures among 20


@simulated
async def test_slow_calls_are_failures(rig: Rig) -> None:
    """A disk that takes seconds would keep every request waiting without ever failing."""
    rig.tier.reads = SLOW
    for _ in range(3):
        assert rig.reads() == "closed"
        assert await rig.get() == [HIT]
    assert rig.reads() == "open"
    assert "took 1.5" in str(rig.breaker.status()["reads"]["why"])


@pytest.mark.parametrize(
    ("outcomes", "opens"),
    [
        ([ERROR], True),
        ([ERROR, HIT], True),
        ([ERROR, ERROR, HIT], True),
        ([ERROR, HIT, HIT], False),
        ([MISS, MISS, MISS], False),
        ([Outcome.CORRUPT] * 3, False),
    ],
)
def test_a_call_whose_blocks_all_fail_is_a_failure(outcomes: list[Outcome], opens: bool) -> None:
    """A disk that fails every block without raising an error would be asked forever."""

    @simulated
    async def scenario(rig: Rig) -> None:
        rig.tier.reads = replace(OK, outcomes=outcomes)
        rig.tier.writes = replace(OK, outcomes=[o if o is ERROR else MISS for o in outcomes])
        for _ in range(3):
            assert await rig.get(len(outcomes)) == outcomes
            await rig.put(len(outcomes))
        assert rig.reads() == rig.writes() == ("open" if opens else "closed")

    scenario()


@simulated
async def test_full_tier_is_not_failing(rig: Rig) -> None:
    """A tier without room for some blocks would stop storing blocks that it has room for."""
    rig.tier.writes = replace(OK, outcomes=[Outcome.REFUSED] * 4)
    for _ in range(30):
        assert await rig.put(4) == [Outcome.REFUSED] * 4
    assert rig.writes() == "closed"


@simulated
async def test_bugs_pass_unchanged_and_count_as_failures(rig: Rig) -> None:
    """A backend's bug would be hidden, or every request would run into it again."""
    rig.tier.reads = Act(raises=TypeError("not a view"))
    for _ in range(3):
        with pytest.raises(TypeError, match="not a view"):
            await rig.get()
    assert rig.reads() == "open"
    assert rig.breaker.status()["reads"]["why"] == "TypeError: not a view"


@simulated
async def test_timeout_raised_by_the_client_passes_unchanged(rig: Rig) -> None:
    """The operator would be told of a deadline that had not passed."""
    rig.tier.reads = Act(raises=TimeoutError("socket"))
    with pytest.raises(TimeoutError, match="socket"):
        await rig.get()
    assert rig.reads() == "closed"


@simulated
async def test_reads_and_writes_have_separate_circuits(rig: Rig) -> None:
    """A full or read-only disk would make all blocks that it holds unreadable."""
    rig.tier.writes = DOWN
    await rig.fail(rig.put, 3)
    assert (rig.reads(), rig.writes()) == ("closed", "open")
    assert (rig.breaker.reads_allowed, rig.breaker.writes_allowed) == (True, False)
    assert await rig.put(3) == [Outcome.REFUSED] * 3
    assert rig.breaker.counters["breaker_refused_writes_total"] == 3
    assert await rig.get() == [HIT]
    rig.tier.writes, rig.tier.reads = OK, HUNG
    await rig.fail(rig.get)
    assert rig.reads() == "open"
    await asyncio.sleep(PROBE_S)
    assert await rig.put() == [Outcome.STORED]
    assert rig.writes() == "closed"
    assert await rig.put() == [Outcome.STORED]


@simulated
async def test_empty_batches_do_not_reach_the_tier(rig: Rig) -> None:
    """A call that asks for nothing would count as the recovery of the tier."""
    await rig.half_open_reads()
    asked = len(rig.tier.asked)
    assert await rig.get(0) == []
    assert await rig.lookup(0) == []
    assert await rig.put(0) == []
    assert len(rig.tier.asked) == asked
    assert rig.reads() == "half_open"


# --- cancelled calls --------------------------------------------------------------------


@simulated
async def test_cancelled_call_is_not_a_failure(rig: Rig) -> None:
    """An engine that cancels its requests would take the tier away from all other engines."""
    rig.tier.reads = Act(takes_s=0.5)
    for _ in range(50):
        call = await rig.start(rig.get())
        await asyncio.sleep(0.4)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
    assert rig.reads() == "closed"


@simulated
async def test_cancelled_slow_call_is_a_failure(rig: Rig) -> None:
    """Requests with short deadlines would never notice a hung tier."""
    rig.tier.reads = HUNG
    calls = [await rig.start(rig.get()) for _ in range(3)]
    await asyncio.sleep(SLOW_S + 0.1)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    assert rig.reads() == "open"


@simulated
async def test_no_call_begins_during_a_stall(rig: Rig) -> None:
    """All of a tier's concurrency would be spent on calls to a server that has gone silent."""
    rig.tier.reads = SLOW
    call = await rig.start(rig.get())
    await asyncio.sleep(SLOW_S - 0.01)
    assert rig.reads() == "closed"
    rig.tier.reads = OK
    assert await rig.lookup() == [True]
    await asyncio.sleep(0.02)
    assert rig.reads() == "stalled"
    assert not rig.breaker.reads_allowed
    assert rig.breaker.writes_allowed
    assert await rig.get(2) == [MISS] * 2
    assert "in flight for over 1 s" in str(rig.breaker.status()["reads"]["why"])
    assert await call == [HIT]
    assert rig.reads() == "closed"
    assert await rig.get() == [HIT]


@simulated
async def test_blamed_reads_hold_up_others_until_one_succeeds(rig: Rig) -> None:
    """Each request of an outage would wait for its own deadline before slow_s has passed."""
    rig.breaker.blame_reads()
    assert rig.breaker.reads_allowed
    rig.tier.reads = Act(takes_s=0.6)
    first = await rig.start(rig.get())
    rig.tier.reads = replace(DOWN, takes_s=0.3)
    second = await rig.start(rig.get())
    await asyncio.sleep(0.1)
    rig.breaker.blame_reads()
    rig.breaker.blame_reads()
    assert rig.reads() == "stalled"
    assert rig.breaker.writes_allowed
    assert await rig.get() == [MISS]
    await rig.fail(lambda: second)
    assert rig.reads() == "stalled"
    await first
    assert rig.reads() == "closed"
    assert rig.tier.count("probe") == 0


@simulated
async def test_blamed_lookup_does_not_clear_a_blamed_read(rig: Rig) -> None:
    """Requests with short deadlines would each wait for a body that never arrives."""
    rig.tier.reads = HUNG
    get = await rig.start(rig.get())
    rig.tier.reads = Act(takes_s=0.2)
    lookup = await rig.start(rig.lookup())
    await asyncio.sleep(0.1)
    rig.breaker.blame_reads()
    assert await lookup == [True]
    assert rig.reads() == "stalled"
    await rig.fail(lambda: get)
    assert rig.reads() == "open"


@simulated
async def test_probe_clears_blamed_reads_that_were_cancelled(rig: Rig) -> None:
    """A request with a tiny deadline would close a sound tier to all others permanently."""
    rig.tier.reads = HUNG
    call = await rig.start(rig.lookup())
    await asyncio.sleep(0.05)
    rig.breaker.blame_reads()
    call.cancel()
    await asyncio.wait([call])
    assert rig.reads() == "stalled"
    assert rig.breaker.status()["reads"]["why"] == "not answered before a request's deadline"
    await asyncio.sleep(2 * CALL_S)
    assert rig.tier.asked[-1] == ("probe", 0.05)
    assert rig.reads() == "closed"
    assert rig.breaker.status()["reads"]["opened_total"] == 0


@simulated
async def test_blamed_reads_of_a_dead_tier_open_the_circuit(rig: Rig) -> None:
    """Requests with deadlines below slow_s would each discover the outage themselves."""
    rig.tier.reads = rig.tier.probes = HUNG
    missed = 0
    for _ in range(200):
        call = await rig.start(rig.lookup())
        await asyncio.wait([call], timeout=0.05)
        if not call.done():
            missed += 1
            rig.breaker.blame_reads()
            call.cancel()
            await asyncio.wait([call])
        await asyncio.sleep(0.1)
    assert missed == 1
    assert rig.reads() == "open"


@simulated
async def test_reason_of_failing_blocks_is_shown_while_they_fail(rig: Rig) -> None:
    """For a tier whose writes all fail the operator would see a number of failures and have to
    guess the reason."""
    rig.tier.writes = replace(OK, outcomes=[ERROR] * 4)
    rig.tier.stats = lambda: BackendStats(trouble="/store: gone")  # type: ignore[method-assign]
    shown = [rig.breaker.why]
    for _ in range(3):
        await rig.put(4)
    assert rig.breaker.failing
    shown.append(rig.breaker.why)
    await asyncio.sleep(PROBE_S + 1)
    await rig.put(4)
    shown.append(rig.breaker.why)
    rig.tier.writes = OK
    await asyncio.sleep(PROBE_S + 1)
    await rig.put(4)
    assert not rig.breaker.failing
    why = "4 of 4 blocks failed: /store: gone"
    assert [*shown, rig.breaker.why] == ["", why, why, ""]
