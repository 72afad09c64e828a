"""Copies cancelled at random moments: aborts, preemptions, new attachments and kills.

After each round no slot has leaked, served blocks match their hashes, and pages given back have not
been written. A real daemon and copy process run, with different timing each time; TIERD_RACE_ROUNDS
sets the number of rounds.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import LAYERS, PageEngine, chain, content, namespace
from tests.support.traffic import wait_until
from tierd.client import Lease, PendingCopy
from tierd.types import Namespace

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROUNDS = int(os.environ.get("TIERD_RACE_ROUNDS", "1000"))
KILLS, ATTACHMENTS = ROUNDS // 4, ROUNDS // 2
"""Fewer rounds, because each needs a process and an attachment, or an attachment."""

PAGE_BYTES = 2048
BLOCK_BYTES = LAYERS * PAGE_BYTES
BLOCKS = 128
CHAIN_BLOCKS = 24
CANARY = 0xCA


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon without tiers, whose leases expire soon after their engine's death."""
    folder = tmp_path_factory.mktemp("node") / "tierd"
    with DaemonProcess(folder, storage="lease_ttl_ms = 5000\n") as process:
        yield process


@pytest.fixture
def racer(node: DaemonProcess) -> Iterator[Racer]:
    with Racer(node.socket) as made:
        made.wait_attached()
        yield made
        made.check_nothing_leaked()


class Racer(PageEngine):
    """An engine that cancels its own copies."""

    def __init__(self, socket: str, name: str = "racer") -> None:
        super().__init__(socket, blocks=BLOCKS, page_bytes=PAGE_BYTES, name=name)
        memory = np.frombuffer(self.memory.view, np.uint8, LAYERS * BLOCKS * PAGE_BYTES)
        self.pages = memory.reshape(LAYERS, BLOCKS, PAGE_BYTES)
        self.random = random.Random(7)
        self.outcomes: Counter[str] = Counter()
        self.name = os.urandom(8).hex()
        self.fresh = 0

    def some_pages(self, count: int, half: int) -> list[int]:
        """Choose pages from one half per round, so that the other half can be watched. Block 0 is
        the probe's."""
        first, last = (1, BLOCKS // 2) if half else (BLOCKS // 2, BLOCKS)
        return self.random.sample(range(first, last), count)

    def new_chain(self, count: int) -> list[bytes]:
        self.fresh += 1
        return chain(f"{self.name}/{self.fresh}", count)

    def fill(self, blocks: list[int]) -> None:
        self.pages[:, blocks] = CANARY

    def check_untouched(self, blocks: list[int]) -> None:
        wrong = (self.pages[:, blocks] != CANARY).any(axis=(0, 2))
        assert not wrong.any(), f"{wrong.sum()} blocks were written after they were given back"

    def check_loaded(self, hashes: list[bytes], blocks: list[int]) -> None:
        for block_hash, block in zip(hashes, blocks, strict=False):
            assert self.read(block) == content(block_hash, BLOCK_BYTES), "a wrong byte was loaded"

    def check_served(self, hashes: list[bytes], count: int) -> None:
        """Assert that exactly `count` blocks are served, with the right bytes."""
        got = self.client.get(self.handle, hashes, 2000)
        assert len(got) == count
        for block_hash, view in zip(hashes, got, strict=False):
            assert view == content(block_hash, BLOCK_BYTES), "a wrong byte is served"

    def pause(self, span_s: float) -> None:
        """Pause for a random time, exact to microseconds."""
        end = time.perf_counter() + self.random.random() * span_s
        while time.perf_counter() < end:
            pass

    def load_of(self, hashes: list[bytes], blocks: list[int]) -> tuple[Lease, PendingCopy, int]:
        begun = self.begin_load(hashes, blocks)
        assert begun is not None
        assert begun[0].blocks == len(hashes)
        return begun

    def copy_s(self, hashes: list[bytes]) -> float:
        """Return a load's duration, from its call to its answer."""
        times = []
        for _ in range(20):
            began = time.perf_counter()
            lease, pending, _ = self.load_of(hashes, self.some_pages(len(hashes), 0))
            while not pending.done:
                self.client.wait(1.0)
            times.append(time.perf_counter() - began)
            self.client.release(lease)
        return sorted(times)[len(times) // 2]

    def end(self, pending: PendingCopy) -> None:
        deadline = time.monotonic() + 20
        while not pending.done:
            self.client.wait(1.0)
            assert time.monotonic() < deadline, "a copy does not end"

    def note(self, pending: PendingCopy, count: int) -> None:
        kind = "all" if pending.blocks == count else "some" if pending.blocks else "none"
        self.outcomes[kind] += 1

    def check_nothing_leaked(self) -> None:
        def idle() -> bool:
            status = self.status()
            host, copies = status["host"], status["copies"]
            return not (
                host["writing_blocks"] or host["leases"] or any(x["under_way"] for x in copies)
            )

        wait_until(idle, 20, "slots, leases or copies have leaked")
        counters = self.status()["counters"]
        assert "internal_errors_total" not in counters
        assert "protocol_errors_total" not in counters


def test_cancelled_loads_do_not_write_afterwards(racer: Racer) -> None:
    """An aborted request's pages would be written after another request has got them."""
    hashes = racer.new_chain(CHAIN_BLOCKS)
    racer.compute(hashes, range(1, CHAIN_BLOCKS + 1))
    assert racer.store(hashes, range(1, CHAIN_BLOCKS + 1)) == CHAIN_BLOCKS
    span_s = 1.2 * racer.copy_s(hashes)
    watched: list[int] = []
    for number in range(ROUNDS):
        blocks = racer.some_pages(CHAIN_BLOCKS, number % 2)
        lease, pending, job = racer.load_of(hashes, blocks)
        racer.pause(span_s)
        racer.settle(job)
        racer.fill(blocks)
        racer.end(pending)
        racer.check_untouched(blocks + watched)
        watched = blocks
        racer.note(pending, CHAIN_BLOCKS)
        racer.client.release(lease)
        if number % 50 == 0:
            assert racer.load(hashes, blocks) == CHAIN_BLOCKS
            watched = []
    assert racer.outcomes["all"] > ROUNDS // 100
    assert racer.outcomes["none"] > ROUNDS // 100


def test_stores_of_preempted_pages_are_cut_at_the_fence(racer: Racer) -> None:
    """A preempted request's blocks would be served with the bytes of the next request."""
    hashes = racer.new_chain(CHAIN_BLOCKS)
    racer.compute(hashes, range(1, CHAIN_BLOCKS + 1))
    assert racer.store(hashes, range(1, CHAIN_BLOCKS + 1)) == CHAIN_BLOCKS
    span_s = 1.2 * racer.copy_s(hashes)
    for number in range(ROUNDS):
        count = racer.random.randrange(4, 13)
        hashes = racer.new_chain(count)
        blocks = racer.some_pages(count, number % 2)
        racer.compute(hashes, blocks)
        reservation, pending = racer.begin_store(hashes, blocks)
        racer.pause(span_s)
        racer.client.poll()
        good = count
        if not pending.done:
            # Like a fence: from this block on the pages belong to other requests.
            good = racer.random.randrange(count)
            racer.fill(blocks[good:])
            racer.outcomes["cut"] += 1
        racer.end(pending)
        good = min(good, pending.blocks)
        assert sum(racer.client.commit(reservation, good)) == good
        racer.check_served(hashes, good)
    assert racer.outcomes["cut"] > ROUNDS // 20


def test_detach_while_copies_run(racer: Racer) -> None:
    """Changed weights would mix two models' blocks, or freed pages would be written."""
    handles = [racer.handle, *(racer.client.register(x) for x in more_namespaces())]
    kept: dict[int, list[bytes]] = {}
    span_s = 0.0
    watched: list[int] = []
    for number in range(ATTACHMENTS):
        hashes = kept.get(number % len(handles))
        if hashes is None:
            hashes = kept[number % len(handles)] = racer.new_chain(CHAIN_BLOCKS)
            racer.compute(hashes, range(1, CHAIN_BLOCKS + 1))
            assert racer.store(hashes, range(1, CHAIN_BLOCKS + 1)) == CHAIN_BLOCKS
            span_s = 1.2 * racer.copy_s(hashes)
            watched = []
        blocks = racer.some_pages(CHAIN_BLOCKS + 8, number % 2)
        new, sources = racer.new_chain(8), blocks[CHAIN_BLOCKS:]
        racer.compute(new, sources)
        reservation, store = racer.begin_store(new, sources)
        lease, load, job = racer.load_of(hashes, blocks[:CHAIN_BLOCKS])
        racer.pause(span_s)
        old = racer.attachment
        following = handles[(number + 1) % len(handles)]
        if number % 2:
            racer.attachment = racer.attach(following)
        assert racer.client.detach(old), "no answer to a detach"
        assert load.done
        assert store.done
        racer.check_loaded(hashes[: load.blocks], blocks)
        assert racer.gate.call_off(job)
        racer.fill(blocks)
        assert sum(racer.client.commit(reservation, store.blocks)) == store.blocks
        racer.check_served(new, store.blocks)
        if not number % 2:
            racer.attachment = racer.attach(following)
        racer.handle = following
        racer.wait_attached()
        racer.check_untouched(blocks + watched)
        watched = blocks
        racer.note(load, CHAIN_BLOCKS)
        racer.client.release(lease)
    assert racer.outcomes["all"]
    assert racer.outcomes["none"] + racer.outcomes["some"]
    [process] = racer.status()["copies"]
    assert process["attachments"] == 1


def more_namespaces() -> list[Namespace]:
    return [namespace(f"m{number}", BLOCK_BYTES) for number in range(2)]


def test_killed_engines_leak_nothing(node: DaemonProcess, racer: Racer) -> None:
    """A crashed engine would leave slots reserved, half a block served, or memory open."""
    with Zygote(node.socket) as zygote:
        for number in range(KILLS):
            tag, pid = zygote.start()
            racer.pause(0.02)
            os.kill(pid, signal.SIGKILL)
            for at in range(1000):
                hashes = chain(f"{tag}/{at}", 8)
                got = racer.client.get(racer.handle, hashes, 2000)
                for block_hash, view in zip(hashes, got, strict=False):
                    assert view == content(block_hash, BLOCK_BYTES), "a wrong byte is served"
                racer.outcomes["served"] += len(got)
                if not got:
                    break
            if number % 20 == 0:
                hashes = racer.new_chain(8)
                racer.compute(hashes, range(1, 9))
                assert racer.store(hashes, range(1, 9)) == 8
                assert racer.load(hashes, range(9, 17)) == 8
    assert racer.outcomes["served"] > 8 * KILLS, "all were killed before they stored more"
    # Leases of dead engines expire.
    status = racer.status()
    [process] = status["copies"]
    wait_until(lambda: own_mappings(process["pid"]) == 1, 20, "memory of the dead stays open")
    assert "copy_process_kills_total" not in status["counters"]
    assert status["counters"]["copy_process_starts_total"] == 1


def own_mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:tierd-pages")


class Zygote:
    """A context manager of a process that forks engines, which is faster than starting them."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.copies.test_copy_races", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._next = 0

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self) -> tuple[str, int]:
        """Return tag and process id of an engine that has stored its first chain, and continues."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._next += 1
        self._process.stdin.write(b"%d\n" % self._next)
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], 30)
        assert ready, "an engine was not attached"
        tag, pid = self._process.stdout.readline().split()
        return tag.decode(), int(pid)


def fork_engines(path: str) -> None:
    """Fork one engine per line of the input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                run_until_killed(path, f"victim-{line.strip()}")
            os._exit(1)


def run_until_killed(path: str, tag: str) -> None:
    """Store and load until killed."""
    engine = Racer(path, tag)
    engine.wait_attached()
    at = 0
    while True:
        hashes = chain(f"{tag}/{at}", 8)
        engine.compute(hashes, range(1, 9))
        engine.store(hashes, range(1, 9))
        if at == 0:
            print(tag, os.getpid(), flush=True)
        begun = engine.begin_load(hashes, range(9, 17))
        if begun is not None:
            engine.done(begun[1])
            engine.client.release(begun[0])
        at += 1


if __name__ == "__main__":
    fork_engines(sys.argv[1])
