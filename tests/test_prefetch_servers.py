"""Deadlines of prefetch policies on real servers that are slow, hang and die, by a real daemon."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.blocks import chain, namespace, payload
from tests.daemon_process import DaemonProcess
from tests.proxy import BLACK_HOLE, Flow, Proxy
from tests.redis_servers import RedisServer
from tests.s3_servers import S3Server, SeaweedFS
from tests.tier_scene import table
from tierd.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LATE_MS = 10
"""An answer may come so much after its deadline, beside what the machine itself adds."""

TRIES = 10
"""A scene is played again if the machine, by its own measure, was too busy to tell."""

NOISE_MS_MAX = 10
NOISE_S = 0.002

BLOCK_BYTES = 64 << 10
CHAIN_BLOCKS = 128
SPACE = namespace(BLOCK_BYTES)
TOKENS = CHAIN_BLOCKS * SPACE.block_tokens

BASE_MS, PER_KI_MS, MAX_MS, READY_MS = 120, 40, 350, 100
ALLOWED_MS = {
    "timeout": BASE_MS + PER_KI_MS * TOKENS // 1024,
    "wait_complete": MAX_MS,
    "best_effort": READY_MS,
}
WAITED_MS = 30
"""Each request has waited so long at its engine."""

TIER_MS = {"deadline_ms": 2000, "slow_ms": 1500, "probe_ms": 50}
"""More than any request waits: it is not the tier's own deadline that ends the wait."""


class Noise:
    """How late this process is woken, every few ms, while the context lasts."""

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
        """The longest delay since then; waits for the one that is being measured."""
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
    """What an ACQUIRE got, in blocks, how long it took, and what the machine added."""

    blocks: int
    took_ms: float
    noise_ms: float


class Scene:
    """A server behind a proxy, and a daemon with a policy whose only tier it is."""

    def __init__(
        self, directory: Path, server: RedisServer | S3Server, proxy: Proxy, policy: str
    ) -> None:
        self.server, self.proxy, self.policy = server, proxy, policy
        if isinstance(server, S3Server):
            where = f"http://127.0.0.1:{proxy.port}"
            options = server.options(server.make_bucket(), endpoint=where)
            storage = table("s3", {**options, **TIER_MS})
        else:
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
        """Have more chains in the tier than there is room for in host memory."""
        self.handle = handle = client.register(SPACE)
        for tag in range(4):
            hashes, parents = chain(CHAIN_BLOCKS, tag)
            rows = [(h, p, payload(SPACE, h)) for h, p in zip(hashes, parents, strict=True)]
            for first in range(0, CHAIN_BLOCKS, 32):
                client.put(handle, rows[first : first + 32])
            self.daemon.wait_backed_up()

    def ask(self, client: Client, tag: int, noise: Noise) -> Answer:
        """An ACQUIRE as an engine does it, which is ready for it after READY_MS."""
        handle = self.handle
        assert handle.ready
        hashes, _ = chain(CHAIN_BLOCKS, tag)
        began = time.monotonic()
        pending = client.begin_acquire([handle], hashes, 10_000, waited_ms=WAITED_MS)
        told = self.policy != "best_effort"
        while not pending.done:
            if not told and time.monotonic() - began >= READY_MS / 1000:
                client.ready(pending)
                told = True
            client.poll()
            time.sleep(0.0005)
        took_ms = 1000 * (time.monotonic() - began)
        blocks = 0 if pending.lease is None else pending.lease.blocks
        if pending.lease is not None:
            views = client.lease_views(handle, pending.lease.epoch, pending.lease.slots[0]) or []
            for block_hash, view in zip(hashes, views, strict=False):
                assert view[:BLOCK_BYTES] == payload(SPACE, block_hash)
            client.release(pending.lease)
        return Answer(blocks, took_ms, noise.ms(began))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with SeaweedFS(tmp_path_factory.mktemp("weed")) as server:
        yield server


@contextmanager
def fast(scene: Scene) -> Iterator[None]:
    yield


@contextmanager
def slow(scene: Scene) -> Iterator[None]:
    """8 MiB would take 0.8 s and more."""
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
    """Its connections end while it answers, and no new ones are accepted."""
    scene.proxy.spoil(down=Flow(delay_s=0.03, bytes_per_s=2.5e6))

    def die() -> None:
        scene.proxy.refuse()
        scene.proxy.cut()

    timer = threading.Timer(0.06, die)
    timer.start()
    yield
    timer.join()
    scene.proxy.heal()


STATES: list[Callable[[Scene], AbstractContextManager[None]]] = [fast, slow, silent, hanging, dying]


@pytest.mark.parametrize("kind", ["redis", "s3"])
@pytest.mark.parametrize("policy", ALLOWED_MS)
def test_no_server_makes_an_answer_late(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, policy: str
) -> None:
    """A request would wait for a server longer than the operator allows."""
    server: RedisServer | S3Server = request.getfixturevalue(kind)
    allowed_ms = ALLOWED_MS[policy] - (WAITED_MS if policy != "best_effort" else 0)
    with Proxy(("127.0.0.1", server.port)) as proxy, Noise() as noise:
        scene = Scene(tmp_path, server, proxy, policy)
        with scene.daemon as daemon:
            client = daemon.client()
            try:
                scene.fill(client)
                tags = itertools.cycle(range(4))
                for state in STATES:
                    _judge(scene, client, noise, state, allowed_ms, tags)
            finally:
                client.close()


def _judge(
    scene: Scene,
    client: Client,
    noise: Noise,
    state: Callable[[Scene], AbstractContextManager[None]],
    allowed_ms: float,
    tags: Iterator[int],
) -> None:
    what = f"{scene.policy}, {state.__name__}"
    answers = []
    for _ in range(TRIES):
        _wait_well(scene)
        with state(scene):
            answer = scene.ask(client, next(tags), noise)
        answers.append(answer)
        assert answer.took_ms <= allowed_ms + LATE_MS + answer.noise_ms, (what, answers)
        if answer.noise_ms <= NOISE_MS_MAX:
            break
    else:
        pytest.fail(f"{what}: the machine is too busy to tell: {answers}")
    if state is silent:
        # Some blocks may be in host memory, and do not count.
        least_ms = min(allowed_ms, BASE_MS - WAITED_MS)
        assert answer.took_ms >= least_ms - 1, f"{what}: the wait was not the policy's: {answers}"


def _wait_well(scene: Scene) -> None:
    end = time.monotonic() + 20
    while True:
        (tier,) = scene.daemon.tiers().values()
        circuits = tier["circuits"].values()
        if tier["state"] == "ready" and all(c["state"] == "closed" for c in circuits):
            return
        assert time.monotonic() < end, tier
        time.sleep(0.02)
