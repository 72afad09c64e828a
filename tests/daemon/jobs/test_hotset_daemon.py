"""The hot set that a daemon keeps: in its state directory, over HTTP, and what it teaches."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.blocks import chain, namespace
from tests.support.prometheus import read
from tierd.clock import SystemClock
from tierd.config import HotsetConfig
from tierd.daemon.http.admin import HOTSET, Admin, Phase
from tierd.daemon.http.metrics import scrape
from tierd.daemon.jobs import hotset
from tierd.daemon.jobs.hotset import AGE_S_MAX, FILE, Snapshots, state_directory
from tierd.daemon.node import Node
from tierd.hotset import Hot, HotSet, worth
from tierd.types import Namespace

SPACE = namespace()
NOW_S = 1_000_000.0


class Life:
    """A node of which nothing runs but its hot set, on a wall clock of its own."""

    def __init__(self, directory: Path, capacity_bytes: int = 1 << 20, **keys: object) -> None:
        self.node = Node(
            capacity_bytes=capacity_bytes,
            segment_bytes=capacity_bytes >> 4,
            lease_ttl_ms=1000,
            tiers=[],
            clock=SystemClock(),
            epoch=bytes(8),
        )
        self.wall_s = NOW_S
        self.counters: Counter[str] = Counter()
        config = HotsetConfig(**keys)  # type: ignore[arg-type]
        self.snapshots = Snapshots(
            directory,
            config,
            self.node.host,
            SystemClock(),
            self.counters,
            lambda: self.wall_s,
        )
        self.snapshots.open()

    def close(self) -> None:
        self.snapshots.close()
        self.node.memory.arena.close()

    def store(
        self, count: int, tag: object, uses: int, age_s: int, space: Namespace = SPACE
    ) -> list[bytes]:
        """Store a chain that has been used."""
        hashes, parents = chain(count, tag)
        own = self.node.host.spaces.get(space.digest) or self.node.register(space)
        done = self.node.reserve(1, own, hashes, parents)
        assert min(done.slots) >= 0
        self.node.commit(1, done.reservation_id, count)
        self.node.teach(space, hashes, [uses] * count, [age_s] * count)
        return hashes

    def write(self, pause_s: float = 0.0) -> None:
        asyncio.run(self.snapshots.write(pause_s))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Makes the next life on the same directory, after the end of the one before."""
    lives: list[Life] = []

    def begin(**keys: object) -> Life:
        if lives:
            lives.pop().close()
        lives.append(Life(tmp_path / "state", **keys))  # type: ignore[arg-type]
        return lives[0]

    yield begin
    lives.pop().close()


def kept(tmp_path: Path) -> list[Hot]:
    path = tmp_path / "state" / FILE
    with path.open("rb") as file:
        return list(HotSet(file, "snapshot"))


def hashes_of(hots: Sequence[Hot]) -> list[bytes]:
    return [block_hash for hot in hots for block_hash in hot.run.hashes]


def test_a_snapshot_holds_l2_and_what_its_blocks_are_worth(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    """A warm would bring what nobody asks for, or one rank of an engine only."""
    life = live()
    ranks = [namespace(tp_size=2, tp_rank=rank) for rank in range(2)]
    cold = life.store(3, "cold", 1, 4000)
    hot = life.store(5, "hot", 7, 10)
    for rank in reversed(ranks):
        both = life.store(2, "both", 3, 10, rank)
    life.write()
    found = kept(tmp_path)
    assert hashes_of(found) == [*hot, *both, *cold]
    assert found[1].namespaces == tuple(ranks)
    assert [(each.run.uses, each.run.age_s) for each in found] == [(7, 10), (3, 10), (1, 4000)]
    assert os.stat(tmp_path / "state" / FILE).st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "state").st_mode & 0o777 == 0o700
    assert life.counters == {"hotset_written_total": 1}
    assert os.listdir(tmp_path / "state") == [FILE]


def test_uses_and_their_order_outlive_the_daemon(live: Callable[..., Life]) -> None:
    """After each restart all blocks would count as new: the next scan evicts what is hot."""
    life = live()
    cold = life.store(30, "cold", 1, 4000)
    hot = life.store(30, "hot", 7, 10)
    life.write()

    life = live()
    life.wall_s = NOW_S + 100
    asyncio.run(life.snapshots.load())
    assert not life.node.host.spaces
    space = life.node.register(SPACE)
    book = space.reuse
    assert [book.uses(hot[0]), book.uses(cold[29]), book.uses(bytes(32))] == [7, 1, 0]
    last = [book.last_use(block_hash) for block_hash in (hot[0], cold[0])]
    assert last[0] is not None
    assert last[1] is not None
    assert 109_000 <= SystemClock().monotonic_ns() // 10**6 - last[0][1] <= 112_000
    assert last[0][1] - last[1][1] in range(3_980_000, 4_000_001)
    # What of the book is forgotten first is what is worth least.
    assert list(book._records)[:30] == cold


def test_neither_a_boot_nor_a_crash_loop_costs_the_hot_set(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    """The warm after a boot would find the empty hot set that the boot itself wrote."""
    life = live()
    hot = life.store(20, "hot", 7, 10)
    life.write()
    for number in range(1, 4):
        life = live()
        life.wall_s = NOW_S + 1000 * number
        life.write()
        life.write()
        (run,) = kept(tmp_path)
        assert run.run.hashes == hot
        assert (run.run.uses, run.run.age_s) == (7, 10 + 1000 * number)

    new = life.store(5, "new", 1, 0)
    life.write()
    assert hashes_of(kept(tmp_path)) == [*hot, *new]
    life.wall_s = NOW_S + AGE_S_MAX + 5000
    life.write()
    assert hashes_of(kept(tmp_path)) == new  # Used again and again, but a week ago.


def test_hotter_blocks_take_the_place_of_what_was_evicted(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    """The hot set would fill with what is long gone, and a warm with it."""
    life = live(size=20 * 4096)
    old = life.store(20, "old", 2, 5000)
    life.write()
    assert hashes_of(kept(tmp_path)) == old
    life = live(size=20 * 4096)
    new = life.store(15, "new", 2, 10)
    life.write()
    assert hashes_of(kept(tmp_path)) == new + old[:5]


def test_host_capacity_bounds_it(live: Callable[..., Life], tmp_path: Path) -> None:
    """A warm would bring more than fits, and evict what it brought first."""
    life = live()
    life.store(120, "a", 1, 10)
    life.write()
    life = live()
    life.store(120, "b", 1, 10)
    life.write()
    life = live()
    life.store(120, "c", 1, 10)
    life.write()
    assert sum(hot.size_bytes for hot in kept(tmp_path)) == 1 << 20


@pytest.mark.parametrize("raw", [b"not a hot set\n", b'{"tierd_hotset": 99}\n'])
def test_what_cannot_be_read_is_kept_aside(
    live: Callable[..., Life], tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    """A snapshot of another version would be lost to the tierd that can read it."""
    state = tmp_path / "state"
    state.mkdir()
    (state / FILE).write_bytes(raw)
    life = live()
    asyncio.run(life.snapshots.load())
    assert (state / f"{FILE}.bad").read_bytes() == raw
    assert f"it is kept as {state / FILE}.bad" in caplog.text
    assert life.counters["hotset_failed_total"] == 1
    life.store(1, "new", 1, 0)
    life.write()
    assert len(kept(tmp_path)) == 1
    (state / FILE).write_bytes(raw)  # While it runs.
    life.write()
    life.write()
    assert (state / f"{FILE}.bad").read_bytes() == raw
    assert len(kept(tmp_path)) == 1


def test_trouble_with_the_directory_is_told_once_and_harms_nothing(
    live: Callable[..., Life],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk would end the daemon, fill the journal, or leave half a hot set behind."""
    life = live()
    life.node.snapshots = life.snapshots
    assert not read(scrape(life.node.status()))["tierd_hotset_age_seconds"].samples
    hot = life.store(3, "hot", 1, 0)
    life.write()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    life.store(3, "more", 1, 0)
    life.write()
    life.write()
    assert hashes_of(kept(tmp_path)) == hot
    assert os.listdir(tmp_path / "state") == [FILE]
    assert life.counters == {"hotset_written_total": 1, "hotset_failed_total": 2}
    told = [line for line in caplog.messages if "No space left" in line]
    assert len(told) == 1
    assert "No space left" in str(life.snapshots.status()["why"])
    monkeypatch.undo()
    life.write()
    assert len(hashes_of(kept(tmp_path))) == 6
    assert life.snapshots.status()["why"] == ""


def test_a_second_daemon_on_the_directory_serves_without(
    live: Callable[..., Life], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two daemons would overwrite each other's hot sets, or one would not serve for it."""
    life = live()
    life.store(3, "hot", 1, 0)
    life.write()
    second = Life(tmp_path / "state")
    asyncio.run(second.snapshots.run())
    asyncio.run(second.snapshots.finish())
    assert "another tierd uses this state directory" in caplog.text
    assert second.counters == {"hotset_failed_total": 1}
    second.close()
    life.write()
    assert life.counters["hotset_written_total"] == 2
    (tmp_path / "file").touch()
    nowhere = Life(tmp_path / "file")
    asyncio.run(nowhere.snapshots.run())
    assert nowhere.counters == {"hotset_failed_total": 1}
    nowhere.close()


@pytest.mark.slow
def test_it_is_written_now_and_then_and_at_a_stop(
    live: Callable[..., Life], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash would cost all that was learned since the start."""
    monkeypatch.setattr(hotset, "TICK_S", 0.01)
    life = live(interval_s=1)
    life.store(3, "hot", 1, 0)

    async def run() -> None:
        running = asyncio.create_task(life.snapshots.run())
        while not life.counters["hotset_written_total"]:
            await asyncio.sleep(0.01)
        life.store(3, "more", 1, 0)
        await life.snapshots.finish()
        await running

    asyncio.run(run())
    assert len(hashes_of(kept(tmp_path))) == 6
    assert life.counters["hotset_failed_total"] == 0
    life.node.snapshots = life.snapshots
    families = read(scrape(life.node.status()))
    assert 0 <= families["tierd_hotset_age_seconds"].value() < 60


@pytest.mark.slow
def test_a_stop_with_very_many_blocks_keeps_all_of_them(
    live: Callable[..., Life], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger L2 is, the older would be the hot set that is left of it."""
    monkeypatch.setattr(hotset, "STOP_S", math.inf)  # However slow the machine.
    small = namespace(64)
    life = live(capacity_bytes=300_000 * small.slot_bytes)
    chains = [life.store(1000, tag, 1 + tag % 9, 60 * tag, small) for tag in range(200)]
    life.write()
    late = life.store(1000, "late", 20, 0, small)
    asyncio.run(life.snapshots.finish())
    found = kept(tmp_path)
    assert set(hashes_of(found[:2])) == set(late)
    assert len(hashes_of(found)) == 201_000
    assert {*hashes_of(found)} == {*late, *itertools.chain(*chains)}
    values = [worth(hot.run.uses, hot.run.age_s) for hot in found]
    assert values == sorted(values, reverse=True)


def test_a_stop_does_not_wait_for_a_slow_disk(
    live: Callable[..., Life],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stop would take as long as the state directory's disk likes; or a write that was given up
    take the place of what the next daemon has written since."""
    life = live()
    hot = life.store(3, "hot", 1, 0)
    life.write()
    life.store(100, "more", 1, 0)
    monkeypatch.setattr(hotset, "STOP_S", 0.05)
    sync, late = os.fsync, 0

    def slow(fd: int) -> None:
        nonlocal late
        while not life.counters["hotset_failed_total"]:
            time.sleep(0.001)
        sync(fd)
        late += 1

    monkeypatch.setattr(os, "fsync", slow)
    asyncio.run(life.snapshots.finish())
    assert late == 1
    assert hashes_of(kept(tmp_path)) == hot
    assert os.listdir(tmp_path / "state") == [FILE]
    (told,) = caplog.messages
    assert re.search(r"a stop waits at most 0.05 s .*; the one written \d+ s ago stays", told)
    assert str(life.snapshots.status()["why"]) in told


def test_a_stop_waits_for_no_snapshot_that_is_never_written(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    """A stop would ask its service manager for time that it does not need."""
    assert live().snapshots.stop_s == hotset.STOP_S
    assert live(interval_s=0).snapshots.stop_s == 0
    first, second = live(), Life(tmp_path / "state")
    assert first.snapshots.stop_s == hotset.STOP_S
    assert second.snapshots.stop_s == 0
    second.close()


def test_a_stop_ends_the_snapshot_that_is_being_written(
    live: Callable[..., Life], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would write the same file, or the stop wait for the courteous one."""
    life = live()
    life.store(100, "hot", 1, 0)
    monkeypatch.setattr(hotset, "WORK_S", 0.0)
    sleep = time.sleep

    def until_over(_: float) -> None:
        while not life.snapshots._pace.over:
            sleep(0.001)

    monkeypatch.setattr("time.sleep", until_over)

    async def run() -> None:
        first = asyncio.create_task(life.snapshots.write(hotset.PAUSE_S))
        while not (tmp_path / "state" / f"{FILE}.new").exists():
            await asyncio.sleep(0.001)
        await life.snapshots.finish()
        await first

    asyncio.run(run())
    assert life.counters == {"hotset_written_total": 1}
    assert len(hashes_of(kept(tmp_path))) == 100
    assert os.listdir(tmp_path / "state") == [FILE]


def test_the_interval_can_be_none(live: Callable[..., Life], tmp_path: Path) -> None:
    """Who wants no hot set would get one all the same."""
    life = live(interval_s=0)
    life.store(3, "hot", 1, 0)
    asyncio.run(life.snapshots.run())
    asyncio.run(life.snapshots.finish())
    assert os.listdir(tmp_path / "state") == []


def test_where_state_is() -> None:
    """What systemd has made for it would not be used, or a list of directories taken for one."""
    assert state_directory("", {}) is None
    assert state_directory("", {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a")
    assert state_directory("/own", {"STATE_DIRECTORY": "/var/lib/a"}) == Path("/own")


# --- over HTTP ------------------------------------------------------------------------


def test_one_client_at_a_time_gets_the_hot_set(live: Callable[..., Life]) -> None:
    """Clients that ask and go, or read nothing, would each hold a list of all blocks."""
    life = live()
    hot = life.store(50, "hot", 3, 10)
    admin = Admin(life.node)
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


def test_a_hot_set_over_http_takes_a_small_part_of_the_loops_time(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
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

    life = live()
    for tag in range(40):
        life.store(3, tag, tag, 10)
    admin = Admin(life.node)
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
