"""The daemon's production code in simulated worlds, and mutants that the oracles must detect.

One world of a failing run: `TIERD_SIM_SEED=1234 pytest tests/testing/test_simulation.py`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.blocks import chain as make_chain
from tests.support.blocks import namespace as make_namespace
from tierd.backend import Backend, BlockHeader, unpack_header
from tierd.chain import ChainIndex
from tierd.clock import Clock
from tierd.config import PrefetchConfig
from tierd.core.host import HostTier
from tierd.core.l2.finding import Taken
from tierd.core.l2.leases import Leases, SlotLease
from tierd.core.l2.reservations import Reservations, SlotReservation
from tierd.core.l2.space import Space
from tierd.core.states import LeaseEvent
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3 import tier as tier_module
from tierd.daemon.l3.backup import Backups
from tierd.daemon.l3.lookup import Lookup
from tierd.daemon.l3.promotion import Promotion, Promotions, Waiter
from tierd.daemon.l3.tier import StorageTier
from tierd.daemon.l3.write_queue import WriteQueue
from tierd.daemon.node import Node
from tierd.daemon.session.acquires import SessionAcquires
from tierd.daemon.session.acquiring import Acquiring, Patience
from tierd.daemon.session.handles import Handles
from tierd.daemon.session.session import Session
from tierd.eviction import L2_DEFAULT
from tierd.memory.arena import Arena
from tierd.storage.breaker import BreakerBackend
from tierd.storage.circuit import Circuit
from tierd.testing import backend as backend_module
from tierd.testing.loop import SimulationError, SimulationLoop, run_simulation
from tierd.testing.simulation import run as simulation_module
from tierd.testing.simulation.engine import SimulatedSession
from tierd.testing.simulation.incarnation import DaemonIncarnation
from tierd.testing.simulation.plan import Habits, WorldPlan
from tierd.testing.simulation.run import simulate
from tierd.testing.simulation.world import Violation, World
from tierd.types import PAGE_BYTES, BlockKey
from tierd.wire import messages as m

SEEDS = 200
CHUNK = 20

ONLY = os.environ.get("TIERD_SIM_SEED")
"""Run just this one world."""

MUTANT_SEEDS = 200
"""Worlds in which a broken daemon must show; most show in the first few."""


def run(seed: int) -> Counter[str]:
    """Run one world; a failure shows how to repeat it."""
    try:
        return simulate(seed).counts
    except BaseException as error:
        error.add_note(
            f"again: TIERD_SIM_SEED={seed} pytest tests/testing/test_simulation.py -k worlds"
        )
        raise


@pytest.mark.slow
@pytest.mark.parametrize("first", [int(ONLY)] if ONLY else range(0, SEEDS, CHUNK))
def test_worlds(first: int) -> None:
    """Wrong bytes, a lost lease, a leak or a silent daemon under some order of events."""
    done: Counter[str] = Counter()
    for seed in range(first, first + (1 if ONLY else CHUNK)):
        done += run(seed)
    if not ONLY:
        # A harness that no longer gets anywhere would pass everything.
        assert done["loaded_blocks"] > 500
        assert done["stored_blocks"] > 200
        assert done["backed_up_blocks"] > 100
        assert done["promoted_blocks"] > 50
        assert done["audited_blocks"] > 50
        assert done["warmings"] > 0
        assert done["restarts"] > CHUNK
        assert done["resets"] > CHUNK
        assert done["namespaces_ended_total"] > CHUNK


@pytest.mark.slow
def test_seed_repeats() -> None:
    """A failure found in CI could not be reproduced elsewhere."""
    program = "from tierd.testing.simulation.run import simulate; print(simulate(7).digest)"
    root = Path(__file__).parents[2]
    digests = {simulate(7).digest, simulate(7).digest}
    for hash_seed in ("1", "2"):
        environment = dict(os.environ, PYTHONHASHSEED=hash_seed)
        out = subprocess.check_output([sys.executable, "-c", program], cwd=root, env=environment)
        digests.add(out.decode().strip())
    assert len(digests) == 1
    assert simulate(8).digest not in digests


@pytest.mark.slow
def test_no_file_descriptor_leaks() -> None:
    """A daemon or a client would run out of file descriptors after some days."""
    simulate(0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(1, 12):
        simulate(seed)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# --- mutants that the oracles must detect -----------------------------------------------


def caught(seeds: Sequence[int] = range(MUTANT_SEEDS)) -> str:
    """Return the first violation that a world reports; fail if no world does."""
    for seed in seeds:
        try:
            simulate(seed)
        except (Violation, SimulationError, ExceptionGroup) as error:
            return f"{seed}: {error}"
    pytest.fail(f"no world of {len(seeds)} noticed")


@pytest.mark.slow
def test_lease_that_does_not_hold_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots reused during a client's copy would go undetected."""

    def grant(self: Leases, lease: SlotLease) -> None:
        self._held[lease.lease_id] = lease

    def end(self: Leases, lease_id: int, owner: int, event: LeaseEvent) -> bool:
        lease = self._held.get(lease_id)
        if lease is None or lease.owner != owner:
            return False
        del self._held[lease_id]
        return True

    monkeypatch.setattr(Leases, "grant", grant)
    monkeypatch.setattr(Leases, "end", end)
    # The daemon's own count would tell at once; the referees and the bytes must as well.
    monkeypatch.setattr(Node, "check", lambda self: None)
    assert "leased slot" in caught()


@pytest.mark.slow
def test_reader_detects_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the referees would detect a reused slot."""
    grant, take = HostTier.grant, HostTier.take_prefix

    def too_long(
        self: HostTier,
        owner: int,
        parts: list[tuple[Space, list[int]]],
        expires_ns: int,
        sources: bytes = b"",
    ) -> SlotLease:
        return told(grant(self, owner, parts, expires_ns, sources))

    def told(lease: SlotLease) -> SlotLease:
        return replace(lease, expires_ns=lease.expires_ns + 10**12)

    def take_too_long(self: HostTier, *args: Any, more_elsewhere: bool) -> Taken:
        taken = take(self, *args, more_elsewhere=more_elsewhere)
        return taken if taken.lease is None else taken._replace(lease=told(taken.lease))

    monkeypatch.setattr(HostTier, "grant", too_long)
    monkeypatch.setattr(HostTier, "take_prefix", take_too_long)
    monkeypatch.setattr(
        "tierd.testing.simulation.incarnation.DaemonIncarnation._check_leases", lambda self: None
    )
    # Otherwise the next incarnation would wait for the end of such a lease.
    monkeypatch.setattr(
        "tierd.daemon.l2.incarnations.Incarnations.leased", lambda self, lease: None
    )
    assert "loaded wrong bytes" in caught()


@pytest.mark.slow
def test_slots_freed_before_the_client_closed_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has not yet seen the end would write into another client's block."""
    end = Session._end

    def end_and_free(self: Session, error: m.Error) -> None:
        end(self, error)
        self._node.drop_owner(self.owner)

    monkeypatch.setattr(Session, "_end", end_and_free)
    assert "may write" in caught(range(130, 190))  # About one world in 70 notices.


@pytest.mark.slow
def test_tier_without_verification_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit on a disk would reach an engine."""

    def trusting(
        raw: bytes | memoryview, key: BlockKey, payload: memoryview, length: int
    ) -> BlockHeader | None:
        header = unpack_header(raw)
        return header if header is not None and header.key == key else None

    monkeypatch.setattr(backend_module, "verify_block", trusting)
    assert "wrong bytes" in caught()


@pytest.mark.slow
def test_release_by_another_client_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine's bug would end another engine's lease in the middle of its copy."""
    release = HostTier.release

    def release_any(self: HostTier, lease_id: int, owner: int) -> bool:
        lease = self.leases.get(lease_id)
        return lease is not None and release(self, lease_id, lease.owner)

    monkeypatch.setattr(HostTier, "release", release_any)
    assert "leased slot" in caught(range(80, 80 + MUTANT_SEEDS))  # About one in 80 notices.


@pytest.mark.slow
def test_commit_by_another_client_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine's bug would publish another engine's half-written block."""
    get = Reservations.get

    def get_any(self: Reservations, owner: int, reservation_id: int) -> SlotReservation | None:
        reservation = self.open.get(reservation_id)
        return reservation and get(self, reservation.owner, reservation_id)

    monkeypatch.setattr(Reservations, "get", get_any)
    assert caught()


@pytest.mark.slow
def test_leases_that_end_early_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Housekeeping would take slots from copies that are in time."""
    expire = HostTier.expire
    monkeypatch.setattr(HostTier, "expire", lambda self, now_ns: expire(self, now_ns + 10**12))
    seen = caught()
    assert "leased slot" in seen or "loaded wrong bytes" in seen


@pytest.mark.slow
def test_leases_that_never_end_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that crash would fill L2 with blocks that cannot be evicted."""
    monkeypatch.setattr(HostTier, "expire", lambda self, now_ns: 0)
    assert "'leases'" in caught()


@pytest.mark.slow
def test_hold_released_twice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease's slot would be evicted once the request that promoted it has ended."""

    def close(self: Waiter, host: HostTier) -> None:
        for space, held in zip(self.spaces, self.held, strict=True):
            host.unhold(space, list(held.values()))
        for batch in self.batches:
            batch.waiters.discard(self)

    monkeypatch.setattr(Waiter, "close", close)
    assert caught()


@pytest.mark.slow
def test_acquire_without_an_answer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's request would wait forever for a cancelled lookup."""
    monkeypatch.setattr(SessionAcquires, "_done", lambda self, call, task: None)
    assert "no Acquired" in caught()


@pytest.mark.slow
def test_committed_block_is_backed_up_before_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks acknowledged by the daemon would be gone after an orderly restart."""
    monkeypatch.setattr(Node, "drain", lambda self, budget_s: asyncio.sleep(0, 0))
    monkeypatch.setattr(Node, "backlog", lambda self: 0)
    assert re.search("are lost|was lost by a stop", caught())


@pytest.mark.slow
def test_slot_changed_during_a_backup_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier would store another block's bytes; at best its checksum makes that a miss."""

    class Unheld:
        def __init__(self, host: HostTier) -> None:
            self._host = host

        def hold(self, *_: object) -> None:
            """Not held."""

        unhold = hold

        def __getattr__(self, name: str) -> object:
            return getattr(self._host, name)

    init = Backups.__init__

    def unheld(
        self: Backups, memory: HostMemory, tiers: Sequence[StorageTier], clock: Clock
    ) -> None:
        init(self, memory, tiers, clock)
        self._host = Unheld(memory.host)  # type: ignore[assignment]  # stands in for it

    monkeypatch.setattr(Backups, "__init__", unheld)
    monkeypatch.setattr(Node, "check", lambda self: None)
    assert caught()


@pytest.mark.slow
def test_segments_announced_late_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client would get slots that it cannot map, and count a hit as a miss."""
    monkeypatch.setattr(Handles, "_announce", lambda self, space, index, segment: None)
    assert "SEGMENT" in caught()


@pytest.mark.slow
def test_namespace_that_ends_during_writes_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine would write into memory that is not counted, and its COMMIT would fail."""
    monkeypatch.setattr(Space, "is_free", property(lambda space: not space.sessions))
    assert caught()


def test_ended_session_does_not_hide_segments_from_the_next() -> None:
    """A session that ends while a segment is announced would hide it from the next session."""
    plan = WorldPlan(
        capacity_bytes=64 * PAGE_BYTES,
        segment_bytes=4 * PAGE_BYTES,
        lease_ttl_ms=100,
        eviction=L2_DEFAULT,
        prefetch=PrefetchConfig(),
        tiers=[],
        engines=[],
        habits=Habits(),
        sessions=0,
        requests=0,
        restarts=0,
        kills=False,
        keeps=False,
    )

    async def scenario(loop: SimulationLoop) -> None:
        world = World(loop, 0, loop.random, network_s=0.001)
        incarnation = world.incarnation = DaemonIncarnation(world, plan, faulty=False)
        while not incarnation.accepting:
            await asyncio.sleep(0.001)
        links = []
        for name in ("gone", "stays"):
            connection = world.connect(name, loop.random)
            assert connection is not None
            link = SimulatedSession(connection, world, loop.random)
            link.send(m.Hello(m.PROTOCOL_VERSION, name))
            asked = link.ask(m.Register(link.next_call(), make_namespace().to_fields(), True))
            assert await link.answer(asked, m.Registered)
            links.append((connection, link))
        (gone, gone_link), (_, stays) = links
        # The client has closed, but the daemon does not know it yet.
        gone.to_daemon.pause(True)
        gone_link.close(torn=False)
        hashes, parents = make_chain(16)
        asked = stays.ask(m.Reserve(stays.next_call(), 0, b"".join(hashes), b"".join(parents)))
        reserved = await stays.answer(asked, m.Reserved)
        assert reserved is not None
        for slot in m.unpack_slots(reserved.slots):
            assert stays.view(0, slot) is not None
        assert world.violation is None
        stays.close(torn=False)
        await asyncio.sleep(1)
        await incarnation.stop(drain_s=1)

    run_simulation(0, scenario)


@pytest.mark.slow
def test_lookups_beyond_their_deadline_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine would wait for a tier that is slow to give up."""
    promote = Acquiring._promote

    async def polite(self: Acquiring, lookup: Lookup, deadline_ns: int, patience: Patience) -> None:
        await promote(self, lookup, deadline_ns, patience)
        lookups = [task for task in asyncio.all_tasks() if task.get_name() == "lookup"]
        if lookups:
            await asyncio.wait(lookups)

    monkeypatch.setattr(Acquiring, "_promote", polite)
    assert "no Acquired" in caught()


@pytest.mark.slow
def test_two_fetches_of_one_block_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct bytes would depend on single flight, which must only save I/O."""

    class Forgetful(dict):
        def get(self, *_: object) -> None:
            """Never heard of it."""

        def __delitem__(self, key: object) -> None:
            self.pop(key, None)

    run_node = Node.run

    async def forgetful(self: Node, ready: Callable[[], Awaitable[None]]) -> None:
        self.promotions.under_way = Forgetful()
        await run_node(self, ready)

    monkeypatch.setattr(Node, "run", forgetful)
    for seed in range(20):
        simulate(seed)


@pytest.mark.slow
def test_memory_that_is_not_given_back_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments lent between namespaces would add up to more than host.capacity."""
    monkeypatch.setattr(Arena, "decommit", lambda self, space, index: None)
    monkeypatch.setattr(Arena, "keep_decommitted", lambda self, space: None)
    assert "bytes of memory" in caught()


@pytest.mark.slow
def test_unevictable_rings_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lying client would fill L2 with blocks that stay until the next restart."""
    monkeypatch.setattr(ChainIndex, "_is_below", lambda self, block_hash, ancestor: False)
    assert "never be evicted" in caught()


@pytest.mark.slow
def test_hung_storage_calls_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that never answers would keep slots and the tier's concurrency forever."""
    ever_s = partial(BreakerBackend, deadline_s=1e6, slow_s=1e6)

    def patient(inner: Backend, *, name: str, probe_s: float, **_: float) -> BreakerBackend:
        return ever_s(inner, name=name, probe_s=probe_s)

    monkeypatch.setattr(tier_module, "BreakerBackend", patient)
    # Who warms would read the tier that hangs again, which is another violation, and no news.
    monkeypatch.setattr(simulation_module, "WARM_CHANCE", 0.0)
    assert "left behind" in caught()


# --- mutants of several tiers that the oracles must detect ------------------------------


@pytest.mark.slow
def test_failed_backup_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose write failed once would never be offered to that tier again."""
    monkeypatch.setattr(Backups, "_not_written", lambda self, space, slots, queue: None)
    assert "said to have" in caught()


@pytest.mark.slow
def test_unwritten_fill_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier would be believed to have a block that only a lower tier has, and never get it."""

    def claim(self: Backups, space: Space, slots: Sequence[int], source: int) -> None:
        self._host.mark(space, slots, add=self._every)

    monkeypatch.setattr(Backups, "note_promoted", claim)
    assert "said to have" in caught()


@pytest.mark.slow
def test_damaged_copy_that_hides_an_intact_one_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged copy on a disk would hide the object store's copy."""
    bring = Promotions._bring_all

    async def bring_once(self: Promotions, batch: Promotion, number: int) -> list[bytes]:
        await bring(self, batch, number)
        return []

    monkeypatch.setattr(Promotions, "_bring_all", bring_once)
    assert "stored blocks" in caught()


@pytest.mark.slow
def test_queues_beyond_their_bound_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow tier would hold L2's slots until nothing can be stored."""

    def admit(self: WriteQueue, space: Space, lacking: Sequence[int]) -> Sequence[int]:
        self.pending_bytes += len(lacking) * space.slot_bytes
        self.pending_blocks += len(lacking)
        return lacking

    monkeypatch.setattr(WriteQueue, "admit", admit)
    assert "check failed: Backups" in caught()


@pytest.mark.slow
def test_requests_that_wait_for_a_dead_tier_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request during an outage would wait for the tier's deadline."""
    monkeypatch.setattr(Circuit, "allows", lambda self, now_s: True)
    assert "known to be away" in caught()


@pytest.mark.slow
def test_tier_that_is_never_tried_again_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a server's restart its tier would stay unused until tierd is restarted."""
    probed = Circuit.probed

    def deaf(self: Circuit, now_s: float, failure: str | None) -> None:
        probed(self, now_s, "not heard" if self.is_open else failure)

    monkeypatch.setattr(Circuit, "probed", deaf)
    assert "not used" in caught()


@pytest.mark.slow
def test_tier_that_is_opened_only_once_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was down when tierd started would never be used."""

    async def open_once(self: StorageTier) -> None:
        await self._try_open()

    monkeypatch.setattr(StorageTier, "keep_opening", open_once)
    assert "not used" in caught()
