"""Deadlines of prefetch policies in a real daemon, on real servers that are slow, hang or die."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.blocks import chain, namespace, payload
from tests.support.daemon_process import DaemonProcess
from tests.support.servers.proxy import BLACK_HOLE, Flow, Proxy
from tests.support.servers.redis import RedisServer
from tests.support.servers.s3 import S3Server
from tests.support.tiers.scene import table
from tests.support.traffic import children, wait_until
from tierd.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LATE_MS = 10
"""Tolerance in ms after the deadline by the daemon's clock, excluding time in which its loop was
ready but the machine ran something else."""

TRIES = 3
"""Maximum number of runs of a scene while the machine delays the daemon by more than that."""

NOISE_S = 0.002

BLOCK_BYTES = 64 << 10
CHAINS, CHAIN_BLOCKS = 4, 128
PART_BLOCKS = 32
"""A quarter of host memory may be queued for backup."""

SPACE = namespace(BLOCK_BYTES)
TOKENS = CHAIN_BLOCKS * SPACE.block_tokens

BASE_MS, PER_KI_MS, MAX_MS, READY_MS = 120, 40, 350, 100
ALLOWED_MS = {
    "timeout": BASE_MS + PER_KI_MS * TOKENS // 1024,
    "wait_complete": MAX_MS,
    "best_effort": MAX_MS,
}
WAITED_MS = 30
"""Time in ms that each request has already waited at its engine."""

TIER_MS = {"deadline_ms": 2000, "slow_ms": 1500, "probe_ms": 50}
"""Longer than any request waits, so that the tier's own deadline never ends the wait."""


class Noise:
    """A context that measures how late this process is woken, every few ms."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Noise:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def ms(self, began: float) -> float:
        """Return the longest delay since `began`; waits for the measurement in progress."""
        time.sleep(2 * NOISE_S)
        return 1000 * max((late for ended, late in list(self._late) if ended >= began), default=0)

    def _watch(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(NOISE_S)
            ended = time.monotonic()
            self._late.append((ended, ended - began - NOISE_S))


@dataclass
class Answer:
    """Blocks and times in ms of one ACQUIRE."""

    blocks: int
    allowed_ms: float
    waited_ms: float
    """From its arrival to its lease, by the daemon's clock."""
    starved_ms: float
    """Of that, the time for which the machine kept the daemon's loop from running."""
    took_ms: float
    """As measured by the client."""
    noise_ms: float
    """Possible extra delay by the machine at the client."""


WRITES_MAX = 5
"""Maximum number of times that a block is offered to a tier until it is written."""


class Scene:
    """A server behind a proxy, and a daemon whose only tier it is."""

    def __init__(
        self, directory: Path, server: RedisServer | S3Server, proxy: Proxy, policy: str
    ) -> None:
        self.server, self.proxy, self.policy = server, proxy, policy
        if isinstance(server, S3Server):
            where = f"http://127.0.0.1:{proxy.port}"
            options = server.options(server.make_bucket(), endpoint=where)
            self.kind = "s3"
            storage = table("s3", {**options, **TIER_MS})
        else:
            self.kind = "redis"
            storage = table("redis", {**server.options(port=proxy.port), **TIER_MS})
        self.daemon = DaemonProcess(
            directory,
            capacity="9MiB",
            storage=storage,
            prefetch={
                "policy": policy,
                "timeout_base_ms": BASE_MS,
                "timeout_per_ki_ms": PER_KI_MS,
                "timeout_max_ms": MAX_MS,
            },
        )

    def fill(self, client: Client) -> None:
        """Fill the tier with more chains than host memory has room for."""
        self.daemon.wait_tier(self.kind, "ready")
        self.handle = handle = client.register(SPACE)
        written = 0
        for tag in range(CHAINS):
            hashes, parents = chain(CHAIN_BLOCKS, tag)
            rows = [(h, p, payload(SPACE, h)) for h, p in zip(hashes, parents, strict=True)]
            for first in range(0, CHAIN_BLOCKS, PART_BLOCKS):
                written += PART_BLOCKS
                # A write that times out on a busy machine is tried again.
                for _ in range(WRITES_MAX):
                    client.put(handle, rows[first : first + PART_BLOCKS])
                    self.daemon.wait_backed_up()
                    has = self.counter("put_stored_total") + self.counter("put_present_total")
                    if has >= written:
                        break
                assert has == written, self.daemon.tiers()

    def counter(self, name: str) -> int:
        """Return a counter of the tier."""
        return int(self.daemon.tiers()[self.kind]["counters"][name])

    def waited_ms(self, client: Client) -> float:
        """Return the total time that all ACQUIREs so far have waited."""
        counters = client.status()["counters"]
        assert isinstance(counters, dict)
        return int(counters.get("waited_us_total", 0)) / 1000

    def starved_ms(self) -> float:
        """Return the time for which the daemon's loop was ready while the machine ran others."""
        assert self.daemon.process is not None
        pid = self.daemon.process.pid
        stat = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
        return int(stat.split()[1]) / 1e6

    def ask(self, client: Client, tag: int, noise: Noise) -> Answer:
        """Send an ACQUIRE as an engine does that is ready after READY_MS."""
        handle = self.handle
        assert handle.ready
        hashes, _ = chain(CHAIN_BLOCKS, tag)
        waited_ms, starved_ms = -self.waited_ms(client), -self.starved_ms()
        allowed_ms: float = ALLOWED_MS[self.policy] - WAITED_MS
        ready_sent = self.policy != "best_effort"
        began = time.monotonic()
        pending = client.begin_acquire([handle], hashes, 10_000, waited_ms=WAITED_MS)
        while not pending.done:
            if not ready_sent and time.monotonic() - began >= READY_MS / 1000:
                client.ready(pending)
                ready_sent = True
                allowed_ms = 1000 * (time.monotonic() - began)
            client.poll()
            time.sleep(0.0005)
        took_ms = 1000 * (time.monotonic() - began)
        starved_ms += self.starved_ms()
        waited_ms += self.waited_ms(client)
        blocks = 0 if pending.lease is None else pending.lease.blocks
        if pending.lease is not None:
            views = client.lease_views(handle, pending.lease.epoch, pending.lease.slots[0]) or []
            for block_hash, view in zip(hashes, views, strict=False):
                assert view[:BLOCK_BYTES] == payload(SPACE, block_hash)
            client.release(pending.lease)
        return Answer(blocks, allowed_ms, waited_ms, starved_ms, took_ms, noise.ms(began))


@contextmanager
def fast(scene: Scene) -> Iterator[None]:
    yield


@contextmanager
def slow(scene: Scene) -> Iterator[None]:
    """8 MiB would take at least 0.8 s."""
    scene.proxy.spoil(down=Flow(delay_s=0.01, bytes_per_s=2.5e6))
    yield
    scene.proxy.heal()


@contextmanager
def silent(scene: Scene) -> Iterator[None]:
    scene.proxy.spoil(up=BLACK_HOLE)
    yield
    scene.proxy.heal()


@contextmanager
def hanging(scene: Scene) -> Iterator[None]:
    """SIGSTOP, in the middle of an answer."""
    scene.proxy.spoil(down=Flow(good_bytes=BLOCK_BYTES // 2))
    scene.server.pause()
    try:
        yield
    finally:
        scene.server.resume()
        scene.proxy.heal()


@contextmanager
def dying(scene: Scene) -> Iterator[None]:
    """Its connections end while it answers, and it accepts no new ones."""
    scene.proxy.spoil(down=Flow(delay_s=0.03, bytes_per_s=2.5e6))

    def die() -> None:
        scene.proxy.refuse()
        scene.proxy.cut()

    timer = threading.Timer(0.06, die)
    timer.start()
    yield
    timer.join()
    scene.proxy.heal()


@contextmanager
def verifying(scene: Scene) -> Iterator[None]:
    """The process that reads and verifies blocks is stopped midway."""
    assert scene.daemon.process is not None
    (worker,) = children(scene.daemon.process.pid)
    scene.proxy.spoil(down=Flow(bytes_per_s=8e6))
    timer = threading.Timer(0.06, os.kill, (worker, signal.SIGSTOP))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        with suppress(ProcessLookupError):  # It was killed for hanging.
            os.kill(worker, signal.SIGCONT)
        scene.proxy.heal()


STATES: list[Callable[[Scene], AbstractContextManager[None]]] = [
    fast,
    slow,
    silent,
    hanging,
    dying,
    verifying,
]


@pytest.mark.parametrize("kind", ["redis", "s3"])
@pytest.mark.parametrize("policy", ALLOWED_MS)
def test_misbehaving_server_does_not_delay_an_acquire_beyond_its_deadline(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, policy: str
) -> None:
    """A request would wait for a server longer than the operator allows."""
    server: RedisServer | S3Server = request.getfixturevalue(
        {"redis": "redis_server", "s3": "weed"}[kind]
    )
    with Proxy(("127.0.0.1", server.port)) as proxy, Noise() as noise:
        scene = Scene(tmp_path, server, proxy, policy)
        with scene.daemon as daemon:
            client = daemon.client()
            try:
                scene.fill(client)
                tags = itertools.cycle(range(CHAINS))
                for state in STATES:
                    _assert_in_time(scene, client, noise, state, tags)
            finally:
                client.close()


def _assert_in_time(
    scene: Scene,
    client: Client,
    noise: Noise,
    state: Callable[[Scene], AbstractContextManager[None]],
    tags: Iterator[int],
) -> None:
    what = f"{scene.policy}, {state.__name__}"
    answers: list[Answer] = []
    while not answers or (answers[-1].starved_ms > LATE_MS and len(answers) < TRIES):
        _wait_until_recovered(scene, client, noise, next(tags))
        asked = scene.counter("lookup_calls_total")
        with state(scene):
            answer = scene.ask(client, next(tags), noise)
        assert scene.counter("lookup_calls_total") > asked, f"{what}: the tier was not asked"
        answers.append(answer)
        latest_ms = answer.allowed_ms + LATE_MS + answer.starved_ms
        assert answer.waited_ms <= latest_ms, (what, answers)
        assert answer.took_ms <= latest_ms + answer.noise_ms, (what, answers)
    if state is silent:
        # Some blocks may be in host memory, and do not count for the timeout.
        least_ms = BASE_MS - WAITED_MS if scene.policy == "timeout" else answer.allowed_ms
        assert answer.waited_ms >= least_ms - LATE_MS, f"{what}: not the policy's wait: {answers}"


def _wait_until_recovered(scene: Scene, client: Client, noise: Noise, tag: int) -> None:
    """Acquire until a whole chain arrives, so that almost none of the others is in memory."""

    def whole() -> bool:
        return scene.ask(client, tag, noise).blocks == CHAIN_BLOCKS

    wait_until(whole, 20.0, "the tier does not recover")


def test_timeout_counts_only_tokens_missing_in_host_memory(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """A conversation that lacks one turn would wait as long as one that lacks all."""
    # The tier's own deadline ends no wait.
    patient = dict.fromkeys(("deadline_ms", "slow_ms", "timeout_ms"), 20_000)
    storage = table("redis", {**redis_server.options(), **patient})
    waits = {"timeout_base_ms": 0, "timeout_per_ki_ms": 4000}
    with DaemonProcess(tmp_path / "node", storage=storage, prefetch=waits) as daemon:
        daemon.wait_tier("redis", "ready")
        client = daemon.client()
        try:
            handle = client.register(SPACE)
            hashes, parents = chain(CHAIN_BLOCKS, "turns")
            here = CHAIN_BLOCKS - 8
            for first in range(0, here, PART_BLOCKS):
                some = slice(first, min(first + PART_BLOCKS, here))
                rows = zip(hashes[some], parents[some], strict=True)
                client.put(handle, [(h, p, payload(SPACE, h)) for h, p in rows])
            daemon.wait_backed_up()
            redis_server.pause()
            began = time.monotonic()
            lease = client.acquire([handle], hashes, 60_000)
            took_s = time.monotonic() - began
            assert lease is not None
            assert lease.blocks == here
            client.release(lease)
        finally:
            redis_server.resume()
            client.close()
    # 0.5 s for the 128 missing tokens, 8 s for all.
    assert 0.4 < took_s < 4
