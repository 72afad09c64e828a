"""Simulated worlds that are out for the worst, and proof that they see what they are made for.

Engines with block tables of their own around the real connector, another connector that writes,
errors in the connector, readers whose leases outlive the daemon, uploads that land late, parts of
storage that come back. One world of a failing run:
`TIERD_SIM_SEED=1234 pytest tests/testing/test_hostile_worlds.py -k test_worlds`.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from tests.support.simulation.tables import run_tables, simulate_everything
from tierd.core.l3.epochs import Epochs
from tierd.daemon.l3.renewal import Renewal
from tierd.memory.past import IncarnationPage
from tierd.testing.loop import SimulationError
from tierd.testing.simulation.run import simulate
from tierd.testing.simulation.world import Violation
from tierd_connectors.common.guard import Boundary
from tierd_connectors.vllm.scheduler import SchedulerSide
from tierd_connectors.vllm.worker.queues import Queues

SEEDS = 24
"""Many more are run by `make sim-soak`."""

CHUNK = 12

MUTANT_SEEDS = 48
"""Worlds in which a fault that is brought back must show; most show in the first few."""

ONLY = os.environ.get("TIERD_SIM_SEED")
"""Run just this one world."""

FOUND_WITHOUT_TABLES = {
    14: "a slot that was leased before its checksum was known is given away after a crash",
    5: "a part of a tier that could not be read during a flush is back after the next start",
    27: "the same, and uploads land after the flush",
    29: "an upload lands between the scan of a flush and its end",
    38: "an upload lands after a flush was complete",
}
"""Worlds that showed a fault, by seed, and the fault."""

FOUND_WITH_TABLES = {
    3: "a store publishes what another connector was loading into the block",
    7: "the same",
    43: "after an error that was survived, tables lack the blocks of that step",
    1369: "a client that is gone before its first REGISTER is answered stays registered",
    1961: "a stop gives up what a flush keeps from the tiers, and says that nothing is left",
    1280: "the witness of a tier forgets a block as what an epoch before has of it is deleted",
    1966: "the same",
}
"""As above, with engines that have block tables."""

ROOT = Path(__file__).parents[2]


def run(seed: int) -> Counter[str]:
    """One world; a failure tells how to run it again."""
    try:
        done = simulate_everything(seed).counts
        # Each daemon that is killed takes some with it.
        assert done["saved_tokens_total"] <= done["table_saved_tokens"], "savings that are none"
        return done
    except BaseException as error:
        error.add_note(
            f"again: TIERD_SIM_SEED={seed} "
            "pytest tests/testing/test_hostile_worlds.py -k test_worlds"
        )
        raise


@pytest.mark.slow
@pytest.mark.parametrize("first", [int(ONLY)] if ONLY else range(0, SEEDS, CHUNK))
def test_worlds(first: int) -> None:
    """Wrong tokens: a block stored under another's hash, leased bytes that change, a flushed
    block that is back."""
    done: Counter[str] = Counter()
    for seed in range(first, first + (1 if ONLY else CHUNK)):
        done += run(seed)
    if not ONLY:
        # Worlds in which nothing of it happens any more would pass everything.
        assert done["table_tokens"] > 1000
        assert done["table_loads"] > 10
        assert done["saved_tokens_total"] > done["table_saved_tokens"] // 2 > 0
        assert done["table_preemptions"] > 10
        assert done["table_errors"] > 0
        assert done["table_resets"] > 0
        assert done["table_touches"] > 0
        assert done["other_loads"] > 5
        assert done["outliving_reads"] > 100
        assert done["restarts"] > CHUNK
        assert done["complete_flushes"] > 0
        assert done["late_calls"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND_WITHOUT_TABLES)
def test_what_was_found_among_tiers_and_leases(seed: int) -> None:
    """Flushed blocks would be served again, or leased bytes change after a crash, as they did."""
    simulate(seed, hostile=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND_WITH_TABLES)
def test_what_was_found_with_tables(seed: int) -> None:
    """A block would be stored under another one's hash, or nowhere, as it was."""
    run(seed)


@pytest.mark.slow
def test_a_long_world_ends_soon() -> None:
    """Engines that reset would ask on and on while flushes take their minute: a world of a soak
    took longer than a hundred others."""
    done = run(1142)
    assert 100 < done["resets"] < 1000


@pytest.mark.slow
def test_a_seed_repeats() -> None:
    """A failure found in a soak could not be found again on a desk."""
    program = (
        "from tests.support.simulation.tables import simulate_everything as s; print(s(7).digest)"
    )
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "connectors"))
    digests = {simulate_everything(7).digest}
    for hash_seed in ("1", "3"):
        environment = dict(os.environ, PYTHONHASHSEED=hash_seed, PYTHONPATH=path)
        out = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=environment)
        digests.add(out.decode().strip())
    assert len(digests) == 1


@pytest.mark.slow
def test_no_descriptor_is_left() -> None:
    """A soak would run out of descriptors, and blame the daemon."""
    simulate_everything(0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(1, 5):
        simulate_everything(seed)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# --- proof that the worlds see --------------------------------------------------------------


def caught(seeds: Sequence[int], *, tables: bool = True, hostile: bool = True) -> str:
    """What the first of these worlds says that notices; fails if none does."""
    for seed in seeds:
        try:
            simulate(seed, [run_tables] if tables else [], hostile=hostile)
        except (Violation, SimulationError, ExceptionGroup) as error:
            return f"{seed}: {error}"
    pytest.fail(f"no world of {len(seeds)} noticed")


@pytest.mark.slow
def test_blocks_that_another_connector_fills_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of a block's former owner would publish what another connector loads into it."""
    allocated = SchedulerSide.allocated

    def only_its_own(
        self: SchedulerSide, request_id: str, blocks: Sequence[int], external_tokens: int
    ) -> None:
        allocated(self, request_id, blocks if external_tokens else (), external_tokens)

    monkeypatch.setattr(SchedulerSide, "allocated", only_its_own)
    assert "wrong" in caught(range(MUTANT_SEEDS))


@pytest.mark.slow
def test_state_after_an_error_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that was survived would shift all that is stored from then on."""
    caught_error = Boundary.caught

    def only_counted(self: Boundary, where: str, error: Exception) -> None:
        vars(self)["start_over"] = lambda: None
        caught_error(self, where, error)

    monkeypatch.setattr(Boundary, "caught", only_counted)
    assert caught(range(9, 9 + MUTANT_SEEDS))


@pytest.mark.slow
def test_stores_that_are_not_fenced_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next owner of a block computes would be stored as its former owner's."""

    def unfenced(self: Queues, blocks: Collection[int]) -> None:
        """Publishes whatever it has read."""

    monkeypatch.setattr(Queues, "fence", unfenced)
    assert "wrong bytes were stored" in caught(range(MUTANT_SEEDS))


@pytest.mark.slow
def test_leases_that_end_with_the_daemon_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash leased slots would be given to others while their readers copy."""

    def forgotten(
        self: IncarnationPage, digest: bytes, slots: Sequence[int], expires_ns: int
    ) -> None:
        """The next life never hears of it."""

    monkeypatch.setattr(IncarnationPage, "lease", forgotten)
    assert "under a lease" in caught(range(3, 3 + MUTANT_SEEDS), tables=False)


@pytest.mark.slow
def test_flushes_that_bar_nothing_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a flush did not find, or that land after it, would be served again."""
    monkeypatch.setattr(Epochs, "of", lambda self, digest: 1)
    assert "flush" in caught(range(1, 1 + MUTANT_SEEDS), tables=False)


@pytest.mark.slow
def test_a_stop_that_asks_tiers_for_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used most would be lost by a stop if its tier has dropped it before."""
    monkeypatch.setattr(Renewal, "recheck", lambda self, stored_blocks: None)
    assert "used often" in caught(range(20, 20 + MUTANT_SEEDS), tables=False, hostile=False)
