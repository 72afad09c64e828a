"""The breaker: the end of an outage is noticed, and an outage and its end are reported."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.support.tiers.breaker_rig import (
    CALL_S,
    DEADLINE_S,
    DOWN,
    HASHES,
    HIT,
    HUNG,
    MISS,
    OK,
    PROBE_S,
    SLOW_S,
    Act,
    Rig,
    rigged,
    simulated,
)
from tierd.errors import BackendError
from tierd.storage.breaker import BreakerBackend
from tierd.testing.loop import SimulationDeadlock, SimulationLoop, run_simulation
from tierd.testing.suite import NAMESPACE

# --- recovery ---------------------------------------------------------------------------


@simulated
async def test_one_probe_at_a_time_every_probe_s(rig: Rig) -> None:
    """A dead server would be flooded with probes, or never be asked again."""
    await rig.open_reads()
    opened_s = rig.time
    rig.tier.probes = replace(HUNG, lingers_s=1.0)
    await asyncio.sleep(30)
    period_s = PROBE_S + DEADLINE_S + 1
    times = [time for what, time in rig.tier.asked if what == "probe"]
    assert times == pytest.approx([opened_s + PROBE_S + period_s * i for i in range(len(times))])
    assert len(times) == 4
    assert rig.breaker.counters["breaker_probes_total"] == 4
    assert rig.breaker.counters["breaker_probes_failed_total"] == 3
    assert rig.tier.in_flight == 1


@simulated
async def test_probing_survives_a_bug(rig: Rig) -> None:
    """A backend that raises an unexpected error would never be asked again."""
    await rig.open_reads()
    rig.tier.reads = OK
    rig.tier.probes = Act(raises=TypeError("bug"))
    await asyncio.sleep(2 * PROBE_S)
    assert rig.reads() == "open"
    assert rig.breaker.status()["reads"]["why"] == "TypeError: bug"
    rig.tier.probes = OK
    await asyncio.sleep(2 * PROBE_S)
    assert await rig.get() == [HIT]
    assert rig.reads() == "closed"


@simulated
async def test_half_open_admits_one_call(rig: Rig) -> None:
    """All waiting requests would fall on a server that has just come up."""
    await rig.half_open_reads()
    rig.tier.reads = Act(takes_s=0.5)
    trial = await rig.start(rig.get())
    await asyncio.sleep(0.1)
    assert not rig.breaker.reads_allowed
    assert await asyncio.gather(*(rig.get() for _ in range(5))) == [[MISS]] * 5
    assert await trial == [HIT]
    assert rig.reads() == "closed"
    assert rig.breaker.reads_allowed
    assert rig.tier.count("get") == 4


@simulated
async def test_failed_trial_opens_the_circuit_again(rig: Rig) -> None:
    """A server that answers pings and nothing else would be taken for a sound one."""
    await rig.half_open_reads()
    rig.tier.reads = DOWN
    await rig.fail(rig.get)
    assert rig.reads() == "open"
    failed_s = rig.time
    assert rig.breaker.status()["reads"]["opened_total"] == 2
    await asyncio.sleep(PROBE_S + 2 * CALL_S)
    assert rig.tier.asked[-1] == ("probe", round(failed_s + PROBE_S, 6))
    assert rig.reads() == "half_open"


@simulated
async def test_tier_that_only_answers_probes_is_failing(rig: Rig) -> None:
    """A tier whose every get raises would be shown as ready between two trials."""
    await rig.half_open_reads()
    assert not rig.breaker.failing, "an outage that has passed would be shown until the next get"
    for trial in (DOWN, HUNG, Act(raises=TypeError("bug"))):
        rig.tier.reads = trial
        with pytest.raises((BackendError, TypeError)):
            await rig.get()
        assert rig.breaker.failing
        await asyncio.sleep(PROBE_S + 2 * CALL_S)
        assert rig.reads() == "half_open"
        assert rig.breaker.failing
    rig.tier.reads = OK
    assert await rig.get() == [HIT]
    assert not rig.breaker.failing


@simulated
async def test_lookup_does_not_end_an_outage(rig: Rig) -> None:
    """A server that finds objects but stalls in their bodies would be let back in after each probe,
    and every request would wait for it again."""
    await rig.half_open_reads()
    for _ in range(3):
        assert await rig.lookup() == [True]
        assert rig.reads() == "half_open"
        assert rig.breaker.reads_allowed
    assert await rig.get() == [HIT]
    assert rig.reads() == "closed"


@simulated
async def test_hanging_trial_opens_the_circuit_at_its_deadline(rig: Rig) -> None:
    """A trial that never ends would keep the circuit half open forever."""
    await rig.half_open_reads()
    rig.tier.reads = replace(HUNG, lingers_s=1.0)
    trial = await rig.start(rig.get())
    await asyncio.sleep(DEADLINE_S + 1e-6)
    assert rig.reads() == "open"
    await rig.fail(lambda: trial)
    rig.tier.reads = OK
    await asyncio.sleep(PROBE_S)
    assert await rig.get() == [HIT]
    assert rig.reads() == "closed"


@simulated
async def test_cancelled_trial_makes_way_for_another(rig: Rig) -> None:
    """One cancelled request after an outage would keep the tier closed permanently."""
    await rig.half_open_reads()
    rig.tier.reads = Act(takes_s=0.5)
    for _ in range(10):
        trial = await rig.start(rig.get())
        await asyncio.sleep(0.2)
        trial.cancel()
        await asyncio.wait([trial])
        assert rig.reads() == "half_open"
    assert await rig.get() == [HIT]
    assert rig.reads() == "closed"


@simulated
async def test_trial_cancelled_before_it_began_makes_way_for_another(rig: Rig) -> None:
    """A call cancelled before its first step would keep the tier closed permanently."""
    await rig.half_open_reads()
    trial = rig.loop.create_task(rig.get())
    trial.cancel()
    await asyncio.wait([trial])
    assert rig.breaker.reads_allowed


@simulated
async def test_blamed_trial_that_is_cancelled_has_failed(rig: Rig) -> None:
    """After a probe that was answered, each request would wait for its own deadline."""
    await rig.half_open_reads()
    rig.tier.reads = HUNG
    trial = await rig.start(rig.get())
    await asyncio.sleep(0.2)
    rig.breaker.blame_reads()
    trial.cancel()
    await asyncio.wait([trial])
    assert rig.reads() == "open"
    await asyncio.sleep(PROBE_S + 2 * CALL_S)
    assert rig.reads() == "half_open"


@simulated
async def test_half_open_waits_for_a_real_call(rig: Rig) -> None:
    """A tier without requests would be probed forever, or its circuit would open by itself."""
    await rig.half_open_reads()
    probes = rig.tier.count("probe")
    since_s = rig.breaker.status()["reads"]["since_s"]
    await asyncio.sleep(100 * PROBE_S)
    assert rig.tier.count("probe") == probes
    assert rig.reads() == "half_open"
    assert since_s == pytest.approx(CALL_S)
    assert rig.breaker.status()["reads"]["since_s"] == pytest.approx(CALL_S + 100 * PROBE_S)
    assert await rig.get() == [HIT]


@simulated
async def test_calls_from_before_a_state_change_do_not_count(rig: Rig) -> None:
    """An answer from before the outage would pass for its end, or an error for the next outage."""
    rig.tier.reads = Act(takes_s=SLOW_S - 0.02)
    good = await rig.start(rig.get())
    rig.tier.reads = replace(DOWN, takes_s=SLOW_S - 0.01)
    bad = [await rig.start(rig.get()) for _ in range(3)]
    await asyncio.sleep(0.5)
    await rig.open_reads()
    await good
    assert rig.reads() == "open"
    await asyncio.wait(bad)
    assert rig.breaker.status()["reads"]["opened_total"] == 1
    for call in bad:
        assert isinstance(call.exception(), BackendError)


@simulated
async def test_late_answer_does_not_end_an_outage(rig: Rig) -> None:
    """The answer of a call from before the outage would send all requests to a tier that has not
    been tried yet."""
    await rig.breaker.close()
    rig.tier.reads = Act(takes_s=PROBE_S + 0.5)
    breaker = BreakerBackend(rig.tier, name="x", deadline_s=20, slow_s=20, probe_s=PROBE_S)
    await breaker.open()
    straggler = await rig.start(breaker.contains_many(NAMESPACE, HASHES))
    rig.tier.reads = DOWN
    await rig.fail(lambda: breaker.contains_many(NAMESPACE, HASHES), 3)
    await asyncio.sleep(PROBE_S + 0.1)
    assert breaker.status()["reads"]["state"] == "half_open"
    await straggler
    assert breaker.status()["reads"]["state"] == "half_open"
    await breaker.close()


@simulated
async def test_failures_before_a_recovery_are_forgotten(rig: Rig) -> None:
    """A tier that has recovered would be given up at its first hiccup."""
    await rig.half_open_reads()
    for number in range(12):
        rig.tier.reads = DOWN if number % 3 == 2 else OK
        with suppress(BackendError):
            await rig.get()
        assert rig.reads() == "closed"


@pytest.mark.parametrize("down_s", [0.5, 3.0, 6.99, 7.0, 7.01, 11.3, 60.0])
def test_recovery_takes_one_probe_and_one_call(down_s: float) -> None:
    """A tier would stay closed long after it has come back."""

    @simulated
    async def scenario(rig: Rig) -> None:
        rig.tier.reads = rig.tier.writes = rig.tier.probes = DOWN

        def mend() -> None:
            rig.tier.reads = rig.tier.writes = rig.tier.probes = OK

        rig.loop.call_later(down_s, mend)
        closed_s = None
        while closed_s is None:
            for call in (rig.get, rig.put):
                with suppress(BackendError):
                    await call()
            if rig.time > down_s and (rig.reads(), rig.writes()) == ("closed", "closed"):
                closed_s = rig.time
            await asyncio.sleep(0.1)
        assert closed_s - down_s <= PROBE_S + 0.1 + 6 * CALL_S

    scenario()


@simulated
async def test_circuits_that_open_at_different_times_are_probed_in_time(rig: Rig) -> None:
    """The second circuit to open would delay the first one's probe, or miss its own."""
    await rig.open_reads()
    opened_s = rig.time
    rig.tier.probes = OK
    await asyncio.sleep(PROBE_S - 1)
    rig.tier.writes = DOWN
    await rig.fail(rig.put, 3)
    await asyncio.sleep(1)
    assert rig.tier.asked[-1] == ("probe", round(opened_s + PROBE_S, 6))
    assert (rig.reads(), rig.writes()) == ("half_open", "half_open")


def test_sound_tier_is_not_probed() -> None:
    """An idle daemon would wake up every few seconds."""

    async def scenario(loop: SimulationLoop) -> None:
        rig = Rig(loop)
        await rig.breaker.open()
        await rig.get()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationDeadlock, match="breaker probe"):
        run_simulation(1, scenario)


# --- status, log and counters -----------------------------------------------------------


def test_outage_logs_one_line_when_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    """The log would fill during an outage, or not mention it."""
    caplog.set_level(logging.DEBUG, "tierd")

    async def run(loop: SimulationLoop) -> None:
        async with rigged(loop) as rig:
            rig.tier.reads = DOWN
            for _ in range(300):
                with suppress(BackendError):
                    await rig.get()
                await asyncio.sleep(0.5)
            assert rig.breaker.status()["reads"]["opened_total"] > 5
            rig.tier.reads = OK
            for _ in range(30):
                await rig.get()
                await asyncio.sleep(0.5)

    run_simulation(1, run)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "storage tier nvme: reads stopped: connection refused"),
        ("INFO", "storage tier nvme: reads resumed"),
    ]


@simulated
async def test_status(rig: Rig) -> None:
    """The operator would not learn whether reads or writes are stopped, why, or since when."""
    sound = {"state": "closed", "why": "", "since_s": None, "opened_total": 0}
    assert rig.breaker.status() == {"reads": sound, "writes": sound}
    rig.tier.writes = HUNG
    await rig.fail(rig.put)
    await asyncio.sleep(1.5)
    assert rig.breaker.status() == {
        "reads": sound,
        "writes": {
            "state": "open",
            "why": "no answer within 2 s",
            "since_s": 1.5,
            "opened_total": 1,
        },
    }


@simulated
async def test_status_queries_change_no_state(rig: Rig) -> None:
    """A status query would take the trial's place, or end a stall."""
    await rig.half_open_reads()
    for _ in range(10):
        assert rig.breaker.reads_allowed
        rig.breaker.status()
    assert await rig.get() == [HIT]


@simulated
async def test_counters_are_live_and_always_present(rig: Rig) -> None:
    """Metrics would stand still, or appear only with the first failure."""
    assert rig.breaker.counters["corrupt_total"] == 0
    assert rig.breaker.counters["breaker_refused_reads_total"] == 0
    rig.tier.counters["corrupt_total"] += 1
    assert rig.breaker.counters["corrupt_total"] == 1
    # A tier in a worker process does this.
    rig.tier.counters = {"corrupt_total": 5}
    assert rig.breaker.counters["corrupt_total"] == 5
    assert all(name.endswith("_total") for name in rig.breaker.counters)


# --- closing ----------------------------------------------------------------------------


@pytest.mark.parametrize("wait_s", [0.0, PROBE_S / 2, PROBE_S + 1])
def test_close_ends_the_probe(wait_s: float) -> None:
    """A closed tier would be asked again, or the daemon would wait for its probe."""

    @simulated
    async def scenario(rig: Rig) -> None:
        await rig.open_reads()
        rig.tier.probes = HUNG
        await asyncio.sleep(wait_s)
        closed_s = rig.time
        await rig.breaker.close()
        await rig.breaker.close()
        assert rig.time == closed_s
        assert not rig.tier.in_flight
        assert asyncio.all_tasks() == {asyncio.current_task()}

    scenario()


@simulated
async def test_tier_can_be_opened_again(rig: Rig) -> None:
    """A tier that once failed to open would have to wait for a restart of the daemon."""
    await rig.open_reads()
    await rig.breaker.close()
    rig.tier.reads = rig.tier.probes = OK
    await rig.breaker.open()
    await asyncio.sleep(PROBE_S + 2 * CALL_S)
    assert await rig.get() == [HIT]
