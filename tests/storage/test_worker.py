"""Backends in worker processes: the contract through the socket, and every way to die."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.tiers.file_tier import FileSuite, options
from tests.support.tiers.worker_backends import SCRIBBLE, OddBackend, OddOptions
from tierd import child
from tierd.backend import GetRequest, Outcome, PutRequest
from tierd.errors import BackendError, ConfigError
from tierd.storage.worker import backend as worker
from tierd.storage.worker import incarnation
from tierd.storage.worker import wire as wire_module
from tierd.storage.worker.backend import BackendBugError, WorkerBackend
from tierd.testing.suite import CanarySlots, scanned
from tierd.types import PAGE_BYTES
from tierd.wire.frames import FRAME_BYTES_MAX, encode_frame
from tierd_backends.file import FileBackend

HASHES = [bytes([number]) * 32 for number in range(8)]
ANSWERS = [number % 2 == 1 for number in range(8)]
WAIT_S = 60.0

# Each test starts at least one Python process.
pytestmark = pytest.mark.slow


class TestFileInWorker(FileSuite):
    """The file tier in a worker process, damaged by the same hooks."""

    async def _open(self):
        backend = WorkerBackend(FileBackend, options(self.path, **self.more))
        await backend.open()
        return backend


@contextlib.asynccontextmanager
async def running(**given):
    backend = WorkerBackend(OddBackend, OddOptions(**given))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


async def until(condition):
    """Run the loop until the condition holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.001)


def alive(pid):
    """Whether the process exists, even as a zombie."""
    return Path(f"/proc/{pid}").exists()


def state(pid):
    """Return the state letter that ps shows; Z if there is no process."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def stopped(pid):
    return state(pid) == "T"


def proc(pid, name):
    """Read a file of /proc/PID; empty if there is no process."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def children():
    return [int(pid) for pid in proc("self", f"task/{os.getpid()}/children").split()]


async def died(backend):
    """Wait until the daemon has noticed the death of the worker."""
    await until(lambda: backend._incarnation is None)


def pid_of(backend):
    return backend._incarnation.pid


def fds():
    return sorted(os.listdir("/proc/self/fd"))


def begin(backend, namespace=b"hang"):
    """Start a call that is in the worker when this returns to the loop."""
    return asyncio.create_task(backend.contains_many(namespace, HASHES))


async def serving(backend):
    """Wait until calls are answered again."""
    await until(lambda: backend._incarnation is not None and not backend._incarnation.dying)
    assert await backend.contains_many(b"", HASHES) == ANSWERS
    assert await backend.use_many(b"", HASHES) == [not answer for answer in ANSWERS]


def gets(slots, length=PAGE_BYTES):
    return [GetRequest(HASHES[i], slots.view(i), length) for i in range(slots.count)]


# A process that dies.


async def test_killed_during_calls():
    """A crashed client would hang loads forever, or free slots that it still writes to."""
    async with running() as backend:
        pid = pid_of(backend)
        calls = [begin(backend) for _ in range(20)]
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(BackendError, match="signal 9"):
                await call
            assert not alive(pid)
        await serving(backend)
        assert pid_of(backend) != pid
        assert backend.counters["worker_deaths_total"] == 1
        assert backend.counters["worker_restarts_total"] == 1
        assert backend.counters["worker_kills_total"] == 0


async def test_calls_raise_while_no_worker_runs(tmp_path):
    """Requests would wait for a restarting worker instead of being misses."""
    plan = tmp_path / "plan"
    async with running(open_does=str(plan)) as backend:
        plan.write_text("hang")
        with pytest.raises(BackendError):
            await backend.contains_many(b"crash", HASHES)
        await until(plan.with_suffix(".tries").exists)
        with pytest.raises(BackendError, match="signal 6"):
            await backend.contains_many(b"", HASHES)


async def test_worker_is_restarted_until_its_backend_opens(tmp_path, monkeypatch):
    """A tier whose server was down when its worker crashed would be lost until a restart of the
    daemon."""
    monkeypatch.setattr(worker, "RESTART_S_MIN", 0.001)
    monkeypatch.setattr(worker, "RESTART_S_MAX", 0.01)
    plan = tmp_path / "plan"
    async with running(open_does=str(plan)) as backend:
        for how in ("backend", "config", "bug", "exit"):
            plan.with_suffix(".new").write_text(how)
            plan.with_suffix(".new").rename(plan)
            plan.with_suffix(".tries").unlink(missing_ok=True)
            if how == "backend":
                os.kill(pid_of(backend), signal.SIGKILL)
            await until(plan.with_suffix(".tries").exists)
        plan.unlink()
        await serving(backend)
        assert backend.counters["worker_deaths_total"] == 1
        assert backend.counters["worker_restarts_total"] == 1


async def test_repeated_crashes_leak_nothing(monkeypatch):
    """A backend that always crashes would leak processes, descriptors or calls."""
    monkeypatch.setattr(worker, "RESTART_S_MAX", 0.0)
    async with running() as backend:
        before, pids = fds(), set()
        for _ in range(5):
            pids.add(pid_of(backend))
            with pytest.raises(BackendError):
                await backend.contains_many(b"crash", HASHES)
            await serving(backend)
        assert len(fds()) == len(before)
        assert not any(map(alive, pids - {pid_of(backend)}))
        assert len(pids) == 5


async def test_pause_between_restarts(monkeypatch):
    """A backend that crashes at once each time would keep a core busy."""
    monkeypatch.setattr(worker, "RESTART_S_MIN", 3600.0)
    monkeypatch.setattr(worker, "RESTART_S_MAX", 3600.0)
    async with running() as backend:
        os.kill(pid_of(backend), signal.SIGKILL)
        await died(backend)
        await serving(backend)
        os.kill(pid_of(backend), signal.SIGKILL)
        await died(backend)
        await asyncio.sleep(0.05)
        assert not children()
        with pytest.raises(BackendError, match="signal 9"):
            await backend.contains_many(b"", HASHES)


async def test_counters_never_fall():
    """A restart would make the counters in graphs drop, and rates negative."""
    async with running() as backend:
        counters = backend.counters
        for _ in range(3):
            await backend.contains_many(b"", HASHES)
        assert counters["calls_total"] == 3
        os.kill(pid_of(backend), signal.SIGKILL)
        await died(backend)
        assert counters["calls_total"] == 3
        await until(lambda: backend._incarnation is not None)
        assert counters["calls_total"] == 3
        await backend.contains_many(b"", HASHES)
        assert counters["calls_total"] == 4
        assert backend.counters is counters


def test_worker_ends_when_the_daemon_is_killed():
    """Workers of a killed daemon would go on writing into an arena that another daemon has taken
    over."""
    script = """
        import asyncio, sys
        from tests.support.tiers.worker_backends import OddBackend, OddOptions
        from tierd.storage.worker.backend import WorkerBackend

        async def main():
            backends = [WorkerBackend(OddBackend, OddOptions()) for _ in range(2)]
            for backend in backends:
                await backend.open()
            blocked = asyncio.create_task(backends[0].contains_many(b"block", [bytes(32)]))
            await asyncio.sleep(0)
            print(*(backend._incarnation.pid for backend in backends), flush=True)
            await blocked

        asyncio.run(main())
    """
    daemon = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with daemon:
        assert daemon.stdout is not None
        pids = [int(word) for word in daemon.stdout.readline().split()]
        assert len(pids) == 2
        daemon.kill()
    # The process that adopts an orphan reaps it; a zombie touches nothing.
    end = time.monotonic() + WAIT_S
    while not all(state(pid) == "Z" for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.001)


async def test_worker_ends_when_its_socket_closes():
    """A worker whose daemon died before the worker asked for the death signal would stay."""
    async with running() as backend:
        pid = pid_of(backend)
        backend._incarnation._stream.close()
        await died(backend)
        assert not alive(pid)
        assert backend.counters["worker_kills_total"] == 0
        await serving(backend)


async def test_worker_ignores_signals_of_a_stop():
    """SIGTERM from systemd would end the tiers before the daemon has drained its backups."""
    async with running() as backend:
        pid = pid_of(backend)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        assert await backend.contains_many(b"", HASHES) == ANSWERS
        assert pid_of(backend) == pid


# A process that does not release its slots.


async def test_cancelled_call_ends_alone():
    """A cancelled load would end the process, and all other loads with it."""
    async with running() as backend:
        pid = pid_of(backend)
        calls = [begin(backend) for _ in range(10)]
        for turns, call in enumerate(calls):
            await asyncio.sleep(0.0001 * turns)
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        assert await backend.contains_many(b"", HASHES) == ANSWERS
        assert pid_of(backend) == pid


async def test_cancelled_call_waits_for_its_slot():
    """A slot would be given away while the worker still receives into it."""
    async with running() as backend:
        slots = CanarySlots(1, PAGE_BYTES)
        call = asyncio.create_task(backend.get_into(b"linger", gets(slots)))
        # It is sent first, so the worker has begun it when the other call is answered.
        await asyncio.sleep(0)
        await backend.contains_many(b"", HASHES)
        call.cancel()
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert slots.view(0)[0] == SCRIBBLE
        assert backend.counters["worker_kills_total"] == 0
        assert await backend.contains_many(b"", HASHES) == ANSWERS


async def test_worker_that_ignores_a_cancel_is_killed(monkeypatch):
    """A client that goes on after a deadline would write into another request's slots."""
    monkeypatch.setattr(OddBackend, "lets_go_s", 0.05)
    async with running() as backend:
        pid = pid_of(backend)
        slots = CanarySlots(2, PAGE_BYTES)
        call = asyncio.create_task(backend.get_into(b"stubborn", gets(slots)))
        await until(lambda: slots.view(0)[0] == SCRIBBLE)
        other = begin(backend)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert not alive(pid)
        slots.blank(0)
        with pytest.raises(BackendError, match="cancelled call"):
            await other
        await serving(backend)
        assert slots.is_blank(0)
        slots.check()
        assert backend.counters["worker_kills_total"] == 1


async def test_worker_with_a_blocked_loop_is_killed(monkeypatch):
    """A client that blocks its process would hold slots until a restart of the daemon."""
    monkeypatch.setattr(OddBackend, "lets_go_s", 0.05)
    async with running() as backend:
        for _ in range(2):
            pid = pid_of(backend)
            call = begin(backend, b"block")
            await until(lambda pid=pid: proc(pid, "comm") == b"blocked\n")
            call.cancel()
            await asyncio.wait([call])
            await died(backend)
            await serving(backend)
        assert backend.counters["worker_kills_total"] == 2


async def test_stopped_worker_is_killed(monkeypatch):
    """A suspended worker would hold slots until a restart of the daemon."""
    monkeypatch.setattr(OddBackend, "lets_go_s", 0.05)
    async with running() as backend:
        pid = pid_of(backend)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: stopped(pid))
        call = begin(backend, b"")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await call
        assert not alive(pid)
        await serving(backend)


async def test_requests_to_a_stopped_worker_are_bounded(monkeypatch):
    """Lookups that a slow worker does not read would fill the daemon's memory, or block it."""
    async with running() as backend:
        pid = pid_of(backend)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: stopped(pid))
        many, slots = HASHES * 12_500, CanarySlots(2, PAGE_BYTES)
        calls = [asyncio.create_task(backend.contains_many(b"", many)) for _ in range(12)]
        calls += [asyncio.create_task(backend.get_into(b"", gets(slots))) for _ in calls]
        await asyncio.sleep(0.05)
        assert backend._incarnation._stream._queued_bytes < 3 * child.OUTBOUND_BYTES_MAX
        os.kill(pid, signal.SIGCONT)
        answers = await asyncio.gather(*calls)
        assert answers[:12] == [ANSWERS * 12_500] * 12
        assert all(r.outcome is Outcome.MISS for results in answers[12:] for r in results)


async def test_worker_that_hangs_in_close_is_killed(monkeypatch):
    """A tier that does not close would keep the daemon from stopping."""
    monkeypatch.setattr(incarnation, "CLOSE_S_MAX", 0.05)
    backend = WorkerBackend(OddBackend, OddOptions(close_hangs=True))
    await backend.open()
    pid, call = pid_of(backend), begin(backend)
    await asyncio.sleep(0)
    await asyncio.gather(backend.close(), backend.close())
    assert not alive(pid)
    with pytest.raises(BackendError, match="did not close"):
        await call
    with pytest.raises(BackendError, match="closed"):
        await backend.contains_many(b"", HASHES)


async def test_cancelled_close_ends_the_process():
    """A stop that runs out of time would leave the process behind."""
    backend = WorkerBackend(OddBackend, OddOptions(close_hangs=True))
    await backend.open()
    pid = pid_of(backend)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await backend.close()
    assert not alive(pid)
    await backend.close()


async def test_close_during_restart(tmp_path):
    """A stop during a restart would leave a process that opens the tier afterwards."""
    plan = tmp_path / "plan"
    backend = WorkerBackend(OddBackend, OddOptions(open_does=str(plan)))
    await backend.open()
    plan.write_text("hang")
    os.kill(pid_of(backend), signal.SIGKILL)
    await until(plan.with_suffix(".tries").exists)
    await backend.close()
    assert not children()


# Starting.


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("config", ConfigError, "key is wrong"),
        ("backend", BackendError, "server is away"),
        ("bug", BackendError, "KeyError: 'open'"),
        ("exit", BackendError, "exit status 3"),
    ],
)
async def test_failed_open_is_reported_and_retried(tmp_path, how, error, text):
    """The operator would not learn why a tier does not start, or the daemon would never try
    again."""
    plan = tmp_path / "plan"
    backend = WorkerBackend(OddBackend, OddOptions(open_does=str(plan)))
    before = fds()
    plan.write_text(how)
    for _ in range(2):
        with pytest.raises(error, match=text):
            await backend.open()
        if how != "backend":
            assert len(fds()) == len(before)
    plan.unlink()
    await backend.open()
    await serving(backend)
    await backend.close()
    assert len(fds()) == len(before)


async def test_unreachable_server_costs_one_process(tmp_path):
    """The daemon would start a process every two seconds while a server is down."""
    plan = tmp_path / "plan"
    plan.write_text("backend")
    backend = WorkerBackend(OddBackend, OddOptions(open_does=str(plan)))
    pids = set()
    for _ in range(3):
        with pytest.raises(BackendError, match="server is away"):
            await backend.open()
        pids.update(children())
    plan.unlink()
    await backend.open()
    assert pids == {pid_of(backend)}
    await backend.close()
    assert not children()


async def test_close_while_the_server_is_down(tmp_path):
    """A stop of the daemon would leave the process that waits for the server."""
    plan = tmp_path / "plan"
    plan.write_text("backend")
    backend = WorkerBackend(OddBackend, OddOptions(open_does=str(plan)))
    with pytest.raises(BackendError, match="server is away"):
        await backend.open()
    [pid] = children()
    await backend.close()
    assert not children()
    # A process that died meanwhile is not asked again.
    with pytest.raises(BackendError, match="server is away"):
        await backend.open()
    os.kill(children()[0], signal.SIGKILL)
    plan.unlink()
    await until(lambda: backend._spare is None or backend._spare.dying)
    await backend.open()
    assert pid_of(backend) != pid
    await backend.close()


async def test_cancelled_open_ends_the_process(tmp_path):
    """A tier that does not open in time would leave its process behind."""
    plan = tmp_path / "plan"
    plan.write_text("hang")
    backend = WorkerBackend(OddBackend, OddOptions(open_does=str(plan)))
    opening = asyncio.create_task(backend.open())
    await until(plan.with_suffix(".tries").exists)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert not children()


async def test_backend_that_cannot_be_imported(monkeypatch):
    """A missing client library would look like a server that is down."""
    monkeypatch.setattr(OddBackend, "__module__", "no_such_module")
    backend = WorkerBackend(OddBackend, OddOptions())
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        await backend.open()


def test_refused_options():
    """Wrong options would be found only once a process runs, after the daemon's check."""
    with pytest.raises(ConfigError, match="secret is refused"):
        WorkerBackend(OddBackend, OddOptions(secret="refused"))


async def test_status_before_open():
    """A tier that could not be opened would break status and metrics."""
    backend = WorkerBackend(OddBackend, OddOptions())
    assert backend.stats().capacity_bytes == 7
    assert set(OddBackend(OddOptions()).counters) < set(backend.counters)
    assert set(backend.counters.values()) == {0}
    with pytest.raises(BackendError, match="not open"):
        await backend.contains_many(b"", HASHES)
    with pytest.raises(BackendError, match="not open"):
        await anext(backend.scan())
    await backend.close()


async def test_secrets_stay_secret():
    """Every user of the machine could read a tier's password in the list of processes."""
    async with running(secret="correct-horse") as backend:
        pid = pid_of(backend)
        assert b"tierd.storage.worker.process" in proc(pid, "cmdline")
        assert b"correct-horse" not in proc(pid, "cmdline") + proc(pid, "environ")


async def test_worker_is_niced():
    """A busy client would delay the answers of the daemon by many milliseconds."""
    async with running() as backend:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid_of(backend)) == min(19, own + 10)


async def test_open_and_close_leak_nothing():
    """Opening a tier again and again would use up the daemon's descriptors."""
    slots = CanarySlots(2, PAGE_BYTES)
    counts = []
    for _ in range(4):
        async with running() as backend:
            await backend.get_into(b"", gets(slots))
        counts.append(len(fds()))
    assert len(set(counts[1:])) == 1
    assert not children()


# What the socket carries.


async def test_blocks_land_in_their_slots():
    """A block would land in the slot of another one."""
    async with running() as backend:
        first, second = CanarySlots(8, 2 * PAGE_BYTES), CanarySlots(3, PAGE_BYTES)
        requests = [*gets(first, 100), *gets(second, PAGE_BYTES)]
        results = await backend.get_into(b"", requests)
        assert [result.outcome for result in results] == [Outcome.MISS] * 11
        for request in requests:
            assert request.view[: request.length] == request.block_hash[:1] * request.length
            assert set(request.view[request.length :]) <= {0xA5}
        first.check()
        second.check()


async def test_outcomes_keep_their_order():
    """A block's outcome would be reported for its neighbour, or as another outcome."""
    async with running() as backend:
        slots, outcomes = CanarySlots(7, PAGE_BYTES), list(Outcome)
        for slot in range(7):
            slots.view(slot)[0] = slot
        puts = [PutRequest(HASHES[i], HASHES[0], bytes(16), slots.view(i), 1) for i in range(7)]
        assert await backend.put_many(b"", puts) == outcomes


async def test_large_batches(monkeypatch):
    """A long prompt's lookup would exceed a frame and end the tier."""
    monkeypatch.setattr(worker, "BLOCKS_PER_CALL_MAX", 3)
    async with running() as backend:
        assert await backend.contains_many(b"", HASHES * 12_500) == ANSWERS * 12_500
        assert await backend.contains_many(b"", HASHES * 37_500) == ANSWERS * 37_500
        assert await backend.delete_many(b"", HASHES * 37_500) == 300_000
        slots = CanarySlots(8, PAGE_BYTES)
        assert len(await backend.get_into(b"", gets(slots))) == 8
        assert [slots.view(slot)[0] for slot in range(8)] == list(range(8))


def test_frames_fit():
    """The largest call that is not split would be refused by the frame's limit."""
    per_block = max(wire_module._PUT.size, wire_module._RESULT.size)
    largest = max(wire_module.HASHES_PER_CALL_MAX * 32, wire_module.BLOCKS_PER_CALL_MAX * per_block)
    assert largest + 64_000 < FRAME_BYTES_MAX


async def test_mapped_once():
    """The worker would run out of descriptors, or keep memory that the arena has dropped."""
    async with running() as backend:

        def mapped():
            return proc(pid_of(backend), "maps").count(b"memfd:tierd-suite")

        slots = CanarySlots(4, PAGE_BYTES)
        for _ in range(5):
            await backend.get_into(b"", gets(slots))
        assert mapped() == 1
        del slots
        gc.collect()
        other = CanarySlots(1, PAGE_BYTES)
        await backend.get_into(b"", gets(other))
        assert mapped() == 1


async def test_bugs_are_reported_as_bugs(caplog):
    """A bug in a client would look like a server's failure, or end the process."""
    async with running() as backend:
        pid, slots = pid_of(backend), CanarySlots(1, PAGE_BYTES)
        with pytest.raises(BackendBugError, match="KeyError: 'contains_many'"):
            await backend.contains_many(b"bug", HASHES)
        with pytest.raises(BackendBugError, match="daemon had not cancelled"):
            await backend.contains_many(b"cancel", HASHES)
        with pytest.raises(BackendBugError, match="wrong form"):
            await backend.get_into(b"odd header", gets(slots))
        with pytest.raises(BackendError, match="server says no"):
            await backend.contains_many(b"error", HASHES)
        with pytest.raises(BackendError, match=r"no such file: \?"):
            async with asyncio.timeout(WAIT_S):
                await backend.contains_many(b"no utf-8", HASHES)
        assert not issubclass(BackendBugError, BackendError)
        assert pid_of(backend) == pid


async def test_stats_are_reported_while_idle():
    """The end of a scan in the background would never be seen."""
    async with running() as backend:
        assert backend.stats().index_complete
        await backend.contains_many(b"grow", HASHES)
        await until(lambda: backend.stats().blocks == 5)
        assert backend.stats().index_complete


@pytest.mark.parametrize("count", [0, 1, 1024, 2048, 2500])
async def test_scan(count):
    """fsck and warm would overlook blocks, or never come to an end."""
    async with running(headers=count) as backend:
        found = [header.length for header in await scanned(backend)]
        assert found == list(range(count))
        await until(lambda: backend.counters["scans_ended_total"] == 1)


async def test_abandoned_scan_is_ended():
    """A scan that is no longer read would hold its cursor in the worker forever."""
    async with running(headers=5000) as backend:
        scan = backend.scan()
        assert (await anext(scan)).headers[0].length == 0
        assert backend.counters["scans_ended_total"] == 0
        await scan.aclose()
        await until(lambda: backend.counters["scans_ended_total"] == 1)
        async for step in backend.scan():
            if step.headers[-1].length > 3000:
                os.kill(pid_of(backend), signal.SIGKILL)
                break
        await died(backend)
        await serving(backend)


@pytest.mark.parametrize("garbage", [b"garbage" * 100, encode_frame(b"\xc1")])
async def test_garbage_on_the_socket(garbage):
    """A worker whose memory is damaged would make the daemon believe anything."""
    near, far = socket.socketpair()
    reasons: list[str] = []

    def take(payload, _):
        incarnation._replies.decode(payload)

    stream = child.Stream(near, take, reasons.append)
    with far:
        far.send(garbage)
        await until(lambda: reasons)
    assert "cannot be taken" in reasons[0]
    stream.close()
