"""How namespaces share host memory and end: after resets, with their engines, in large numbers."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.engines.jobs_rig import Rig
from tests.support.page_engine import chain, content, namespace, parents_of
from tierd.client import Client, Handle
from tierd_connectors.common.guard import Boundary
from tierd_connectors.common.namespaces import of_generation
from tierd_connectors.vllm.scheduler import SchedulerSide
from tierd_connectors.vllm.worker.mover import Mover
from tierd_connectors.vllm.worker.queues import HostOrder

pytestmark = pytest.mark.slow

SOON_S = 60.0
PATIENT_MS = 60_000
MIB = 1 << 20


def patient(daemon: DaemonProcess, name: str = "test") -> Client:
    """A client with a timeout long enough for a busy machine."""
    return Client(daemon.socket, name=name, call_timeout_ms=PATIENT_MS)


def eventually(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, f"not within {SOON_S} s: {what}"
        time.sleep(0.02)


def put(client: Client, handle: Handle, hashes: list[bytes]) -> int:
    """Store blocks; returns how many of them the daemon holds afterwards."""
    size = handle.namespace.block_bytes
    parts = zip(hashes, parents_of(hashes), strict=True)
    return sum(client.put(handle, [(h, p, content(h, size)) for h, p in parts]))


def count_served(client: Client, handle: Handle, hashes: list[bytes]) -> int:
    """Return how many of the blocks are served; compares all their bytes."""
    got = client.get(handle, hashes, 0)
    size = handle.namespace.block_bytes
    assert all(view == content(h, size) for view, h in zip(got, hashes, strict=False))
    return len(got)


def status(client: Client) -> tuple[dict, dict, list]:
    """Return host memory, counters and namespaces from the status."""
    body = client.status()
    host, counters, spaces = body["host"], body["counters"], body["namespaces"]
    assert isinstance(host, dict)
    assert isinstance(counters, dict)
    assert isinstance(spaces, list)
    return host, counters, spaces


@contextmanager
def started(directory: Path, **how: object) -> Iterator[tuple[DaemonProcess, Client]]:
    """Start a daemon without tiers, and a client that only reads its status."""
    with DaemonProcess(directory / "d", storage="", **how) as daemon:  # type: ignore[arg-type]
        client = Client(daemon.socket, name="looks", map_segments=False, call_timeout_ms=PATIENT_MS)
        try:
            yield daemon, client
        finally:
            client.close()


def count_warnings(daemon: DaemonProcess, text: str) -> int:
    return sum(text in line for line in daemon.log.read_text().splitlines())


def test_engine_resets_leave_no_namespaces_or_descriptors(tmp_path: Path) -> None:
    """A training loop resets after each step: its node would soon store nothing for any engine, and
    run out of descriptors and namespaces."""
    rig = Rig()
    with started(tmp_path, capacity="64MiB") as (daemon, observer):
        worker = Client(daemon.socket, name="vllm-worker-0", call_timeout_ms=PATIENT_MS)
        mover = Mover(worker, rig.namespace, rig.pages, 0, Boundary(), HostOrder())
        scheduler = Client(daemon.socket, name="vllm-scheduler", map_segments=False)
        side = SchedulerSide(scheduler, [rig.namespace], deadline_ms=100, boundary=Boundary())
        mover.attach([rig.way()])
        assert mover.attached
        mover.start()
        copies = observer.status()["copies"]
        assert isinstance(copies, list)
        copier = int(copies[0]["pid"])

        def held() -> tuple[int, int]:
            """Number of descriptors of the daemon, and of segments mapped by the copy process."""
            maps = Path(f"/proc/{copier}/maps").read_text().splitlines()
            return len(os.listdir(f"/proc/{daemon.pid}/fd")), sum(
                "/memfd:tierd-" in m for m in maps
            )

        bounds = [0, 0]
        for step in range(70):
            mover.submit_stores([rig.item(1), rig.item(2)])
            eventually(lambda: mover.settled, "the engine's stores")
            if step == 35:
                bounds = [2 * number for number in held()]
            side.reset()
            scheduler.poll()
            mover.use(of_generation(rig.namespace, side.generation))
        assert mover.tally.drain()["store_blocks"] == 140
        eventually(lambda: len(status(observer)[2]) <= 2, "the end of what the resets left")
        eventually(
            lambda: all(map(int.__le__, held(), bounds)), "descriptors and mappings given back"
        )
        # Blocks stored before the first reset belong to engines that have not reset.
        fresh = patient(daemon, "fresh")
        handle = fresh.register(rig.namespace)
        assert len(fresh.get(handle, [rig.item(1).block_hash], 0)) == 1
        last = of_generation(rig.namespace, side.generation).digest.hex()
        eventually(
            lambda: any(n["digest"] == last and n["sessions"] == 2 for n in status(observer)[2]),
            "the worker's and the scheduler's registrations",
        )
        mover.stop(0.0)
        side.close()
        fresh.close()
        eventually(lambda: len(status(observer)[2]) == 1, "the end of the last generation")


def test_more_namespaces_than_segments_can_all_store(tmp_path: Path) -> None:
    """With 33 adapters on 8 ranks (264 namespaces) the last ones stored nothing while most of the
    memory was idle."""
    with started(tmp_path, capacity="64MiB") as (daemon, observer):
        client = patient(daemon)
        handles = [client.register(namespace(f"m{number}")) for number in range(200)]
        blocks = {handle: chain(handle.namespace.model, 6) for handle in handles}
        for _ in range(2):
            assert {put(client, handle, blocks[handle]) for handle in handles} == {6}
        assert min(count_served(client, handle, blocks[handle]) for handle in handles) > 0
        host, counters, _ = status(observer)
        assert host["used_bytes"] > 0.5 * host["capacity_bytes"]
        refused = {
            name: n for name, n in counters.items() if name.startswith("store_refused") and n
        }
        assert not refused
        client.close()


def test_refused_stores_are_logged_once_per_namespace(tmp_path: Path) -> None:
    """Blocks would go unstored without an explanation, or the log would hold nothing else."""
    with started(tmp_path, capacity="8MiB", extra="") as (daemon, observer):
        client = patient(daemon)
        leases = []
        for number in range(8):
            handle = client.register(namespace(f"m{number}", MIB))
            assert put(client, handle, chain(number, 1)) == 1
            leases.append(client.acquire([handle], chain(number, 1), 0))
        assert None not in leases
        late = [client.register(namespace(f"late{number}", MIB)) for number in range(3)]
        for _ in range(4):
            assert [put(client, handle, chain("late", 2)) for handle in late] == [0, 0, 0]
        _, counters, _ = status(observer)
        assert counters["store_refused_others_blocks_total"] == 3 * 4 * 2
        assert count_warnings(daemon, "blocks are not stored: it has no memory") == 3
        client.close()


def test_ended_namespaces_do_not_block_new_ones(tmp_path: Path) -> None:
    """After a thousand namespaces each new engine was refused until the daemon was restarted."""
    with started(tmp_path, capacity="64MiB") as (daemon, observer):
        for half in range(2):
            client = patient(daemon)
            handles = [client.register(namespace(f"{half}/{number}", 100)) for number in range(520)]
            assert put(client, handles[-1], chain("x", 2)) == 2
            assert all(handle.ready for handle in handles)
            assert put(client, handles[0], chain("x", 2)) == 2
            client.close()
        eventually(
            lambda: not any(s["sessions"] for s in status(observer)[2]), "the sessions' ends"
        )


def test_leases_of_one_session_are_bounded(tmp_path: Path) -> None:
    """A scheduler that never releases its leases would fill the daemon's own memory."""
    with started(tmp_path, capacity="64MiB") as (daemon, observer):
        client = patient(daemon, "forgetful")
        handle = client.register(namespace(block_bytes=4096))
        hashes = chain("a", 1000)
        assert put(client, handle, hashes) == 1000
        leases = [client.acquire([handle] * 64, hashes, 0) for _ in range(80)]
        granted = sum(lease is not None for lease in leases)
        assert granted == (1 << 22) // 64_000
        other = patient(daemon, "other")
        assert count_served(other, other.register(handle.namespace), hashes) == 1000
        assert status(observer)[1]["leases_refused_total"] == 80 - granted
        assert count_warnings(daemon, "does not release its leases") == 1
        for lease in leases:
            if lease is not None:
                client.release(lease)
        assert client.acquire([handle] * 64, hashes, 0) is not None
        client.close()
        other.close()


LIMITS = {
    # The command that sets the limit, and whether the test raises it later.
    "RLIMIT_NOFILE": ("ulimit -n 80", False),
    "RLIMIT_FSIZE": ("ulimit -Sf 1024", True),
}


@pytest.mark.parametrize(
    "limit", ["RLIMIT_NOFILE", pytest.param("RLIMIT_FSIZE", marks=pytest.mark.long)]
)
def test_failed_segment_allocation_refuses_stores_and_is_retried(
    tmp_path: Path, limit: str
) -> None:
    """The daemon ended within a second, with all blocks of all engines."""
    command, can_be_raised = LIMITS[limit]
    launcher = ["sh", "-c", f'{command}; exec "$@"', "sh"]
    with started(tmp_path, capacity="256MiB", launcher=launcher) as (daemon, observer):
        assert count_warnings(daemon, f"{limit} is") == 1, "the start says which limit is too low"
        client = patient(daemon)
        handles = [client.register(namespace(f"m{number}")) for number in range(32)]
        stored = [put(client, handle, chain(0, 2)) for handle in handles]
        assert stored[-1] == 0
        kept = [handle for handle, blocks in zip(handles, stored, strict=True) if blocks]
        counters = status(observer)[1]
        assert counters["store_refused_segment_blocks_total"] > 0

        def tried_again() -> bool:
            assert put(client, handles[-1], chain(0, 2)) == 0
            failed = status(observer)[1]["segments_failed_total"]
            return bool(failed > counters["segments_failed_total"])

        # At least one round of housekeeping later, which is where the daemon ended.
        eventually(tried_again, "another try")
        assert all(count_served(client, handle, chain(0, 2)) == 2 for handle in kept)
        assert count_warnings(daemon, f"{limit} is") >= 3
        if can_be_raised:
            _, bounds = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (bounds, bounds))
            eventually(lambda: put(client, handles[-1], chain(0, 2)) == 2, "memory again")
            assert {put(client, handle, chain(0, 2)) for handle in handles} == {2}
            assert count_warnings(daemon, "memory segments can be made again") == 1
        client.close()
