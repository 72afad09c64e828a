"""The hot set of a daemon: in its state directory, over HTTP, and its effect on eviction."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.blocks import namespace
from tests.support.hotset_incarnation import NOW_S, SPACE, HotsetIncarnation
from tests.support.prometheus import read
from tierd.clock import SystemClock
from tierd.daemon.http.admin import HOTSET, Admin, Phase
from tierd.daemon.http.metrics import scrape
from tierd.daemon.jobs import hotset
from tierd.daemon.jobs.hotset import AGE_S_MAX, FILE, state_directory
from tierd.hotset import Hot, HotSet, worth


@pytest.fixture
def begin_incarnation(tmp_path: Path) -> Iterator[Callable[..., HotsetIncarnation]]:
    """A function that starts the next incarnation on the same directory, after ending the last."""
    incarnations: list[HotsetIncarnation] = []

    def begin(**keys: object) -> HotsetIncarnation:
        if incarnations:
            incarnations.pop().close()
        incarnations.append(HotsetIncarnation(tmp_path / "state", **keys))  # type: ignore[arg-type]
        return incarnations[0]

    yield begin
    incarnations.pop().close()


def kept(tmp_path: Path) -> list[Hot]:
    path = tmp_path / "state" / FILE
    with path.open("rb") as file:
        return list(HotSet(file, "snapshot"))


def hashes_of(hots: Sequence[Hot]) -> list[bytes]:
    return [block_hash for hot in hots for block_hash in hot.run.hashes]


def test_snapshot_holds_l2_blocks_with_their_uses(
    begin_incarnation: Callable[..., HotsetIncarnation], tmp_path: Path
) -> None:
    """A warm would load blocks that are not requested, or those of only one rank of an engine."""
    incarnation = begin_incarnation()
    ranks = [namespace(tp_size=2, tp_rank=rank) for rank in range(2)]
    cold = incarnation.store(3, "cold", 1, 4000)
    hot = incarnation.store(5, "hot", 7, 10)
    for rank in reversed(ranks):
        both = incarnation.store(2, "both", 3, 10, rank)
    incarnation.write()
    found = kept(tmp_path)
    assert hashes_of(found) == [*hot, *both, *cold]
    assert found[1].namespaces == tuple(ranks)
    assert [(each.run.uses, each.run.age_s) for each in found] == [(7, 10), (3, 10), (1, 4000)]
    assert os.stat(tmp_path / "state" / FILE).st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "state").st_mode & 0o777 == 0o700
    assert incarnation.counters == {"hotset_written_total": 1}
    assert os.listdir(tmp_path / "state") == [FILE]


def test_uses_and_their_order_survive_a_restart(
    begin_incarnation: Callable[..., HotsetIncarnation],
) -> None:
    """After each restart all blocks would count as new: the next scan evicts the hot ones."""
    incarnation = begin_incarnation()
    cold = incarnation.store(30, "cold", 1, 4000)
    hot = incarnation.store(30, "hot", 7, 10)
    incarnation.write()

    incarnation = begin_incarnation()
    incarnation.wall_s = NOW_S + 100
    asyncio.run(incarnation.snapshots.load())
    assert not incarnation.node.host.spaces
    space = incarnation.node.register(SPACE)
    book = space.reuse
    assert [book.uses(hot[0]), book.uses(cold[29]), book.uses(bytes(32))] == [7, 1, 0]
    last = [book.last_use(block_hash) for block_hash in (hot[0], cold[0])]
    assert last[0] is not None
    assert last[1] is not None
    assert 109_000 <= SystemClock().monotonic_ns() // 10**6 - last[0][1] <= 112_000
    assert last[0][1] - last[1][1] in range(3_980_000, 4_000_001)
    # The book forgets its least valuable records first.
    assert list(book._records)[:30] == cold


def test_boot_or_crash_loop_does_not_overwrite_the_hot_set(
    begin_incarnation: Callable[..., HotsetIncarnation], tmp_path: Path
) -> None:
    """The warm after a boot would find the empty hot set that the boot itself wrote."""
    incarnation = begin_incarnation()
    hot = incarnation.store(20, "hot", 7, 10)
    incarnation.write()
    for number in range(1, 4):
        incarnation = begin_incarnation()
        incarnation.wall_s = NOW_S + 1000 * number
        incarnation.write()
        incarnation.write()
        (run,) = kept(tmp_path)
        assert run.run.hashes == hot
        assert (run.run.uses, run.run.age_s) == (7, 10 + 1000 * number)

    new = incarnation.store(5, "new", 1, 0)
    incarnation.write()
    assert hashes_of(kept(tmp_path)) == [*hot, *new]
    incarnation.wall_s = NOW_S + AGE_S_MAX + 5000
    incarnation.write()
    assert hashes_of(kept(tmp_path)) == new  # Used repeatedly, but a week ago.


def test_hotter_blocks_replace_evicted_ones_in_the_hot_set(
    begin_incarnation: Callable[..., HotsetIncarnation], tmp_path: Path
) -> None:
    """The hot set would fill with blocks evicted long ago, and a warm with it."""
    incarnation = begin_incarnation(size=20 * 4096)
    old = incarnation.store(20, "old", 2, 5000)
    incarnation.write()
    assert hashes_of(kept(tmp_path)) == old
    incarnation = begin_incarnation(size=20 * 4096)
    new = incarnation.store(15, "new", 2, 10)
    incarnation.write()
    assert hashes_of(kept(tmp_path)) == new + old[:5]


def test_hot_set_is_bounded_by_host_capacity(
    begin_incarnation: Callable[..., HotsetIncarnation], tmp_path: Path
) -> None:
    """A warm would load more than fits, and evict what it loaded first."""
    incarnation = begin_incarnation()
    incarnation.store(120, "a", 1, 10)
    incarnation.write()
    incarnation = begin_incarnation()
    incarnation.store(120, "b", 1, 10)
    incarnation.write()
    incarnation = begin_incarnation()
    incarnation.store(120, "c", 1, 10)
    incarnation.write()
    assert sum(hot.size_bytes for hot in kept(tmp_path)) == 1 << 20


@pytest.mark.parametrize("raw", [b"not a hot set\n", b'{"tierd_hotset": 99}\n'])
def test_unreadable_hot_set_is_kept_aside(
    begin_incarnation: Callable[..., HotsetIncarnation],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    raw: bytes,
) -> None:
    """A snapshot of another version would be lost to the tierd that can read it."""
    state = tmp_path / "state"
    state.mkdir()
    (state / FILE).write_bytes(raw)
    incarnation = begin_incarnation()
    asyncio.run(incarnation.snapshots.load())
    assert (state / f"{FILE}.bad").read_bytes() == raw
    assert f"it is kept as {state / FILE}.bad" in caplog.text
    assert incarnation.counters["hotset_failed_total"] == 1
    incarnation.store(1, "new", 1, 0)
    incarnation.write()
    assert len(kept(tmp_path)) == 1
    (state / FILE).write_bytes(raw)  # While it runs.
    incarnation.write()
    incarnation.write()
    assert (state / f"{FILE}.bad").read_bytes() == raw
    assert len(kept(tmp_path)) == 1


def test_directory_errors_are_logged_once_and_keep_the_old_hot_set(
    begin_incarnation: Callable[..., HotsetIncarnation],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk would end the daemon, fill the journal, or leave half a hot set behind."""
    incarnation = begin_incarnation()
    incarnation.node.snapshots = incarnation.snapshots
    assert not read(scrape(incarnation.node.status()))["tierd_hotset_age_seconds"].samples
    hot = incarnation.store(3, "hot", 1, 0)
    incarnation.write()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    incarnation.store(3, "more", 1, 0)
    incarnation.write()
    incarnation.write()
    assert hashes_of(kept(tmp_path)) == hot
    assert os.listdir(tmp_path / "state") == [FILE]
    assert incarnation.counters == {"hotset_written_total": 1, "hotset_failed_total": 2}
    told = [line for line in caplog.messages if "No space left" in line]
    assert len(told) == 1
    assert "No space left" in str(incarnation.snapshots.status()["why"])
    monkeypatch.undo()
    incarnation.write()
    assert len(hashes_of(kept(tmp_path))) == 6
    assert incarnation.snapshots.status()["why"] == ""


def test_second_daemon_on_a_state_directory_serves_without_a_hot_set(
    begin_incarnation: Callable[..., HotsetIncarnation],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two daemons would overwrite each other's hot sets, or one would refuse to serve."""
    incarnation = begin_incarnation()
    incarnation.store(3, "hot", 1, 0)
    incarnation.write()
    second = HotsetIncarnation(tmp_path / "state")
    asyncio.run(second.snapshots.run())
    asyncio.run(second.snapshots.finish())
    assert "another tierd uses this state directory" in caplog.text
    assert second.counters == {"hotset_failed_total": 1}
    second.close()
    incarnation.write()
    assert incarnation.counters["hotset_written_total"] == 2
    (tmp_path / "file").touch()
    nowhere = HotsetIncarnation(tmp_path / "file")
    asyncio.run(nowhere.snapshots.run())
    assert nowhere.counters == {"hotset_failed_total": 1}
    nowhere.close()


@pytest.mark.slow
def test_hot_set_is_written_periodically_and_at_a_stop(
    begin_incarnation: Callable[..., HotsetIncarnation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A crash would cost all uses recorded since the start."""
    monkeypatch.setattr(hotset, "TICK_S", 0.01)
    incarnation = begin_incarnation(interval_s=1)
    incarnation.store(3, "hot", 1, 0)

    async def run() -> None:
        running = asyncio.create_task(incarnation.snapshots.run())
        while not incarnation.counters["hotset_written_total"]:
            await asyncio.sleep(0.01)
        incarnation.store(3, "more", 1, 0)
        await incarnation.snapshots.finish()
        await running

    asyncio.run(run())
    assert len(hashes_of(kept(tmp_path))) == 6
    assert incarnation.counters["hotset_failed_total"] == 0
    incarnation.node.snapshots = incarnation.snapshots
    families = read(scrape(incarnation.node.status()))
    assert 0 <= families["tierd_hotset_age_seconds"].value() < 60


@pytest.mark.slow
def test_stop_writes_a_hot_set_of_very_many_blocks_whole(
    begin_incarnation: Callable[..., HotsetIncarnation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The larger L2 is, the older its last hot set would be."""
    monkeypatch.setattr(hotset, "STOP_S", math.inf)  # On a machine of any speed.
    small = namespace(64)
    incarnation = begin_incarnation(capacity_bytes=300_000 * small.slot_bytes)
    chains = [incarnation.store(1000, tag, 1 + tag % 9, 60 * tag, small) for tag in range(200)]
    incarnation.write()
    late = incarnation.store(1000, "late", 20, 0, small)
    asyncio.run(incarnation.snapshots.finish())
    found = kept(tmp_path)
    assert set(hashes_of(found[:2])) == set(late)
    assert len(hashes_of(found)) == 201_000
    assert {*hashes_of(found)} == {*late, *itertools.chain(*chains)}
    values = [worth(hot.run.uses, hot.run.age_s) for hot in found]
    assert values == sorted(values, reverse=True)


def test_stop_does_not_wait_for_a_slow_disk(
    begin_incarnation: Callable[..., HotsetIncarnation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stop would take as long as the state directory's disk, or an abandoned write would replace
    what the next daemon has written since."""
    incarnation = begin_incarnation()
    hot = incarnation.store(3, "hot", 1, 0)
    incarnation.write()
    incarnation.store(100, "more", 1, 0)
    monkeypatch.setattr(hotset, "STOP_S", 0.05)
    sync, late = os.fsync, 0

    def slow(fd: int) -> None:
        nonlocal late
        while not incarnation.counters["hotset_failed_total"]:
            time.sleep(0.001)
        sync(fd)
        late += 1

    monkeypatch.setattr(os, "fsync", slow)
    asyncio.run(incarnation.snapshots.finish())
    assert late == 1
    assert hashes_of(kept(tmp_path)) == hot
    assert os.listdir(tmp_path / "state") == [FILE]
    (told,) = caplog.messages
    assert re.search(r"a stop waits at most 0.05 s .*; the one written \d+ s ago stays", told)
    assert str(incarnation.snapshots.status()["why"]) in told


def test_stop_without_a_state_directory_asks_for_no_extra_time(
    begin_incarnation: Callable[..., HotsetIncarnation], tmp_path: Path
) -> None:
    """A stop would ask its service manager for time that it does not need."""
    assert begin_incarnation().snapshots.stop_s == hotset.STOP_S
    assert begin_incarnation(interval_s=0).snapshots.stop_s == 0
    first, second = begin_incarnation(), HotsetIncarnation(tmp_path / "state")
    assert first.snapshots.stop_s == hotset.STOP_S
    assert second.snapshots.stop_s == 0
    second.close()


def test_stop_cancels_a_snapshot_in_progress(
    begin_incarnation: Callable[..., HotsetIncarnation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two writers would write the same file, or the stop wait for the slow background one."""
    incarnation = begin_incarnation()
    incarnation.store(100, "hot", 1, 0)
    monkeypatch.setattr(hotset, "WORK_S", 0.0)
    sleep = time.sleep

    def until_over(_: float) -> None:
        while not incarnation.snapshots._pace.over:
            sleep(0.001)

    monkeypatch.setattr("time.sleep", until_over)

    async def run() -> None:
        first = asyncio.create_task(incarnation.snapshots.write(hotset.PAUSE_S))
        while not (tmp_path / "state" / f"{FILE}.new").exists():
            await asyncio.sleep(0.001)
        await incarnation.snapshots.finish()
        await first

    asyncio.run(run())
    assert incarnation.counters == {"hotset_written_total": 1}
    assert len(hashes_of(kept(tmp_path))) == 100
    assert os.listdir(tmp_path / "state") == [FILE]


def test_interval_zero_disables_the_hot_set(
    begin_incarnation: Callable[..., HotsetIncarnation], tmp_path: Path
) -> None:
    """An operator who disables the hot set would get one."""
    incarnation = begin_incarnation(interval_s=0)
    incarnation.store(3, "hot", 1, 0)
    asyncio.run(incarnation.snapshots.run())
    asyncio.run(incarnation.snapshots.finish())
    assert os.listdir(tmp_path / "state") == []


def test_state_directory_defaults() -> None:
    """systemd's directory would not be used, or a list of directories be taken for one."""
    assert state_directory("", {}) is None
    assert state_directory("", {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a")
    assert state_directory("/own", {"STATE_DIRECTORY": "/var/lib/a"}) == Path("/own")


# --- over HTTP ------------------------------------------------------------------------


def test_hot_set_is_served_to_one_http_client_at_a_time(
    begin_incarnation: Callable[..., HotsetIncarnation],
) -> None:
    """Clients that disconnect, or read nothing, would each hold a list of all blocks."""
    incarnation = begin_incarnation()
    hot = incarnation.store(50, "hot", 3, 10)
    admin = Admin(incarnation.node)
    head = f"GET {HOTSET} HTTP/1.1\r\nHost: x".encode()

    def refused() -> bytes:
        assert admin.stream(head) is None
        answer = admin.answer(head)
        assert answer.startswith(b"HTTP/1.1 503 ")
        return answer.rpartition(b"\r\n")[2]

    async def ask() -> None:
        assert refused() == b"starting\n"
        admin.phase = Phase.SERVING
        for whole in (False, True, True):
            stream = admin.stream(head)
            assert stream is not None
            raw = await anext(stream)
            assert raw.endswith(b"\r\n\r\n")
            assert refused() == b"another client reads it\n"
            if whole:
                body = b"".join([piece async for piece in stream])
                assert hashes_of(list(HotSet(io.BytesIO(body), "it"))) == hot
            await stream.aclose()

    asyncio.run(ask())


def test_serving_the_hot_set_takes_a_small_share_of_the_loop(
    begin_incarnation: Callable[..., HotsetIncarnation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines would wait while another node reads the hot set."""
    slept: list[float] = []
    now_s = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        slept.append(seconds)
        now_s += seconds

    def monotonic() -> float:
        nonlocal now_s
        now_s += 0.0004
        return now_s

    incarnation = begin_incarnation()
    for tag in range(40):
        incarnation.store(3, tag, tag, 10)
    admin = Admin(incarnation.node)
    admin.phase = Phase.SERVING

    async def ask() -> None:
        stream = admin.stream(f"GET {HOTSET} HTTP/1.1\r\n".encode())
        assert stream is not None
        monkeypatch.setattr("asyncio.sleep", sleep)
        monkeypatch.setattr("time.monotonic", monotonic)
        assert sum([1 async for _ in stream]) > 40
        monkeypatch.undo()

    asyncio.run(ask())
    assert sum(slept) >= 0.9 * now_s
