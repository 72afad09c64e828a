"""Reload: live keys take effect, other changes are named, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.servers.redis import RedisServer
from tests.support.tiers.bench import PAGE, Bench, Tier, run
from tests.support.tiers.scene import table
from tests.support.traffic import wait_until
from tierd.backend import GetRequest
from tierd.client import Client
from tierd.config import NOT_SCALARS, Config, StorageConfig, parse
from tierd.core.hints import PrefixHint
from tierd.core.l3.writes import WriteMoment
from tierd.daemon.lifecycle.reload import (
    LIVE,
    RESTART,
    Reloader,
    differences,
    take_effect,
    take_over,
)
from tierd.daemon.session.server import Server
from tierd.errors import BackendError, ConfigError
from tierd.types import HASH_BYTES

WAIT_S = 20.0
BLOCKS = 256

RAW: dict[str, Any] = {
    "host": {"capacity": BLOCKS * PAGE},
    "prefetch": {"min_tokens": 0, "break_even": False},
    "storage": [
        {"type": "memory", "name": name, "deadline_ms": 2000, "slow_ms": 2000, "probe_ms": 5000}
        for name in ("upper", "lower")
    ],
}


def configured(**keys: object) -> Config:
    """Build a configuration from key paths with __ for dots; tier keys apply to every tier."""
    raw = copy.deepcopy(RAW)
    for path, value in keys.items():
        table, _, key = path.rpartition("__")
        if table == "storage":
            places = raw["storage"]
        else:
            places = [raw.setdefault(table, {}) if table else raw]
        for place in places:
            place[key] = value
    return parse(raw, {})


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """Restore the log level."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


# --- each live key -----------------------------------------------------------------------


class Scene:
    """A node on virtual time with a configuration applied."""

    def __init__(self, bench: Bench, config: Config) -> None:
        self.bench, self.config = bench, config
        self.node, self.raw = bench.node, bench.raw
        self.server = Server(bench.node, frozenset())
        self.queue = bench.node.backups.queues[0]

    def deadline_ns(self) -> int:
        now_ns = self.bench.loop.now_ns
        asked = self.node.acquire_deadline_ns(self.bench.space, 8, waited_ms=0, client_ms=1_000_000)
        return asked - now_ns

    async def in_tiers_only(self, count: int, tag: object = 0) -> list[bytes]:
        hashes = self.bench.store(count, tag)
        await self.bench.backed_up()
        self.bench.forget()
        return hashes

    async def get(self, hashes: list[bytes]) -> float:
        """Read from the first tier; returns the time it took."""
        began_s = self.bench.loop.time()
        views = [memoryview(bytearray(PAGE)) for _ in hashes]
        requests = [GetRequest(h, v, 1) for h, v in zip(hashes, views, strict=True)]
        await self.bench.tiers[0].get(self.bench.space.digest, requests)
        return round(self.bench.loop.time() - began_s, 6)


class Known:
    """A Reuse that is certain of every block, each used twice."""

    def uses(self, block_hash: bytes) -> int:
        return 2

    def chances(self, hashes: list[bytes], horizon_s: float) -> list[float]:
        return [1.0] * len(hashes)


async def leased_for(scene: Scene) -> object:
    hashes = scene.bench.store(1)
    lease = scene.node.acquire_now(1, [scene.bench.space], hashes).lease
    assert lease is not None
    return lease.expires_ns - scene.bench.loop.now_ns


async def kept(scene: Scene) -> object:
    hashes = scene.bench.store(100)
    scene.node.hint([scene.bench.space], hashes, PrefixHint(pin_ms=100_000_000))
    return scene.node.host.hints.kept_bytes


async def kept_until(scene: Scene) -> object:
    scene.node.hint([scene.bench.space], scene.bench.store(1), PrefixHint(pin_ms=100_000_000))
    return [*scene.node.host.hints.kept(scene.bench.space.digest).values()]


async def brought(scene: Scene) -> object:
    return await scene.bench.acquire(await scene.in_tiers_only(8))


async def brought_if_worth_it(scene: Scene) -> object:
    scene.raw[0].takes_s = 0.5
    await scene.bench.acquire(await scene.in_tiers_only(8, "so that the speed is known"))
    hashes = await scene.in_tiers_only(8)
    now_ns = scene.bench.loop.now_ns
    ask = scene.node.acquire(
        1, [scene.bench.space], hashes, now_ns + 10**10, prefill_tokens_per_s=1_000_000
    )
    return (await ask) is None


async def brought_within(scene: Scene) -> object:
    chains = [await scene.in_tiers_only(8, tag) for tag in range(2)]
    scene.raw[0].takes_s = 0.1
    began_s = scene.bench.loop.time()
    assert await asyncio.gather(*map(scene.bench.acquire, chains)) == [8, 8]
    return round(scene.bench.loop.time() - began_s, 1)


async def hung_for(scene: Scene) -> object:
    scene.raw[0].hangs = {"get"}
    return await scene.get([bytes(HASH_BYTES)])


async def slow_calls_open(scene: Scene) -> object:
    scene.raw[0].takes_s = 0.5
    for _ in range(3):
        await scene.get([bytes(HASH_BYTES)])
    return scene.bench.tiers[0].reads_allowed


async def shut_for(scene: Scene) -> object:
    scene.raw[0].hangs = {"get"}
    await scene.get([bytes(HASH_BYTES)])
    scene.raw[0].hangs = set()
    began_s = scene.bench.loop.time()
    while not scene.bench.tiers[0].reads_allowed:
        await asyncio.sleep(0.1)
    return round(scene.bench.loop.time() - began_s, 1)


async def waits_for_the_tier(scene: Scene) -> object:
    scene.raw[0].hangs = {"put"}
    scene.bench.store(8)
    return scene.queue.pending_blocks


async def spent(scene: Scene) -> object:
    budget = scene.queue.writes.budget
    budget.pass_time(0)
    return budget.spend_on(10_000, PAGE)


async def demanded(scene: Scene) -> object:
    budget = scene.queue.writes.budget
    for _ in range(60):
        budget.offer(PAGE)
        budget.spend_on(1, PAGE)
    return budget.demand


async def written_when_used(scene: Scene) -> object:
    writes = scene.queue.writes
    writes.budget.demand = 0.5
    known: Any = Known()
    return writes.choose(WriteMoment.USED, bytes(16), [bytes(HASH_BYTES)], known, PAGE, 0)


async def filled(scene: Scene) -> object:
    hashes = await scene.in_tiers_only(4)
    scene.raw[0].blocks.clear()
    await scene.bench.acquire(hashes)
    await scene.bench.backed_up()
    return len(scene.raw[0].blocks)


def now(read: Callable[[Scene], object]) -> Callable[[Scene], Awaitable[object]]:
    async def observed(scene: Scene) -> object:
        return read(scene)

    return observed


OBSERVED: dict[str, tuple[object, Callable[[Scene], Awaitable[object]]]] = {
    "allow_uids": ([7], now(lambda scene: scene.server.allow_uids)),
    "drain_timeout_ms": (1, now(lambda scene: scene.config.drain_timeout_ms)),
    "host.capacity": (128 * PAGE, now(lambda scene: scene.node.host.limit_bytes)),
    "host.lease_ttl_ms": (2000, leased_for),
    "host.min": (PAGE, now(lambda scene: scene.node.watch.pressure.min_bytes)),
    "host.pin_max_s": (60, kept_until),
    "host.pin_share": (0.125, kept),
    "log.level": ("error", now(lambda scene: logging.getLogger().level)),
    "prefetch.break_even": (True, brought_if_worth_it),
    "prefetch.bytes_in_flight": (8 * PAGE, brought_within),
    "prefetch.min_tokens": (10_000, brought),
    "prefetch.policy": ("wait_complete", now(Scene.deadline_ns)),
    "prefetch.timeout_base_ms": (5, now(Scene.deadline_ns)),
    "prefetch.timeout_max_ms": (7, now(Scene.deadline_ns)),
    "prefetch.timeout_per_ki_ms": (60_000, now(Scene.deadline_ns)),
    "storage.deadline_ms": (100, hung_for),
    "storage.drive_writes_per_day": (1.0, spent),
    "storage.fill_from_lower": (False, filled),
    "storage.probe_ms": (1000, shut_for),
    "storage.slow_ms": (100, slow_calls_open),
    "storage.write_bytes_per_s": (PAGE, spent),
    "storage.write_queue": (3 * PAGE, waits_for_the_tier),
    "storage.write_share": (0.05, demanded),
    "storage.write_uses": (3, written_when_used),
}
"""Another value of each live key, and the function that observes it."""


def observe(key: str, running: Config, new: Config | None) -> object:
    """Observe a key's effect in a node that starts with one configuration and gets another."""
    seen: list[object] = []

    async def test(bench: Bench) -> None:
        scene = Scene(bench, running)
        scene.queue.writes.budget.resize(86_400 * PAGE)
        take_effect(running, bench.node, scene.server)
        if new is not None:
            take_over(running, new)
            take_effect(running, bench.node, scene.server)
        seen.append(await OBSERVED[key][1](scene))

    run(test, *running.storage, blocks_in_l2=BLOCKS, raw=[Tier(), Tier()])
    return seen[0]


@pytest.mark.parametrize("key", sorted(LIVE))
def test_live_key_takes_effect_on_reload(key: str) -> None:
    """The log would report a changed key while the daemon goes on as before."""
    path, value = key.replace(".", "__"), OBSERVED[key][0]
    reloaded = observe(key, configured(), configured(**{path: value}))
    assert reloaded == observe(key, configured(**{path: value}), None)
    assert reloaded != observe(key, configured(), None)


def test_every_key_is_either_live_or_needs_a_restart() -> None:
    """A new key would be taken as live without being so, or never be reported as needing a
    restart."""
    keys = set()
    tables: list[tuple[str, type[msgspec.Struct]]] = [("", Config), ("storage.", StorageConfig)]
    for field in msgspec.structs.fields(Config):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            tables.append((f"{field.name}.", field.type))
    for prefix, cls in tables:
        names = {field.name for field in msgspec.structs.fields(cls)} - set(NOT_SCALARS)
        keys |= {prefix + name for name in names}
    assert keys == LIVE | RESTART
    assert not LIVE & RESTART
    assert OBSERVED.keys() == LIVE


# --- what is logged -----------------------------------------------------------------------


def reload(
    running: Config, load: Callable[[], Config], caplog: pytest.LogCaptureFixture
) -> tuple[str, list[tuple[str, str]]]:
    """Return the reason of a refusal, and the lines of the log."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    refused: list[str] = []

    async def test(bench: Bench) -> None:
        server = Server(bench.node, frozenset())
        reloader = Reloader(running, load, bench.node, server)
        refused.append(await reloader.reload())

    run(test, *running.storage, raw=[Tier() for _ in running.storage])
    return refused[0], [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "tierd"]


def test_reload_logs_what_changed_and_what_needs_a_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An operator could not see whether the change took effect, nor that it needs a restart."""
    running = configured()
    new = configured(
        host__pin_max_s=60,
        host__capacity=512 * PAGE,
        storage__write_policy="write_back",
        storage__slow_ms=50,
        socket="/elsewhere",
    )
    refused, lines = reload(running, lambda: new, caplog)
    assert not refused
    assert ("INFO", "configuration: host.pin_max_s: 3600 -> 60") in lines
    assert ("INFO", 'configuration: host.capacity: "1MiB" -> "2MiB"') in lines
    assert ("INFO", "configuration: storage (lower).slow_ms: 2000 -> 50") in lines
    policy = 'storage (upper).write_policy: "write_through_selective" -> "write_back"'
    assert ("INFO", f"configuration: {policy}") in lines
    assert lines[-1] == (
        "WARNING",
        "reloaded; these keys need a restart of tierd: socket, storage (upper).write_policy, "
        "storage (lower).write_policy",
    )
    # Changes that need a restart are logged at each reload, applied ones only once.
    refused, lines = reload(running, lambda: new, caplog)
    assert "storage (lower).write_policy" in lines[-1][1]
    assert not any("pin_max_s" in text for _, text in lines)


def test_reload_of_a_bad_file_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A typo would take a serving daemon down, or half of it."""
    running = configured()

    def load() -> Config:
        raise ConfigError("/etc/tierd/tierd.toml: host.capacty is not a key")

    refused, lines = reload(running, load, caplog)
    assert refused == "/etc/tierd/tierd.toml: host.capacty is not a key"
    ((kind, text),) = lines
    assert kind == "ERROR"
    assert refused in text
    assert running == configured()


def test_added_and_removed_tiers_need_a_restart() -> None:
    """An added tier would be missing without a message."""
    old, new = configured(), configured()
    new.storage[1].name = "new"
    (change,) = differences(old, new)
    assert change == ("storage", False, "upper, lower", "upper, new")
    old.storage.reverse()
    new.storage[1].name = "lower"
    (change,) = differences(old, new)
    assert change == ("storage", False, "lower, upper", "upper, lower")


class Keyed(Tier):
    """A tier with credentials outside the configuration, whose first reload fails."""

    def __init__(self) -> None:
        super().__init__()
        self.reloads = 0

    async def reload(self) -> None:
        self.reloads += 1
        if self.reloads == 1:
            raise BackendError("no such file")


def test_reload_makes_tiers_read_their_credentials_again(caplog: pytest.LogCaptureFixture) -> None:
    """Rotated keys would be used only once the old ones are denied, or after a restart."""
    running, raw = configured(), Keyed()

    async def test(bench: Bench) -> None:
        reloader = Reloader(running, configured, bench.node, Server(bench.node, frozenset()))
        assert [await reloader.reload() for _ in range(2)] == ["", ""]

    run(test, *running.storage, raw=[raw, *(Tier() for _ in running.storage[1:])])
    assert raw.reloads == 2
    assert [
        r.getMessage() for r in caplog.records if "reload failed: no such file" in r.getMessage()
    ]


def test_reload_logs_no_secret() -> None:
    """Anyone who can read the log could use the store."""
    old, new = configured(), configured()
    new.storage[0].options.update(password="hunter2", url="redis://u:hunter3@h", path="/x")
    new.storage[0].overrides.update(secret_key="hunter4")
    changes = {change.key: change for change in differences(old, new)}
    assert "hunter" not in repr(changes)
    assert changes["storage (upper).path"].new == '"/x"'
    assert changes["storage (upper).url"].new == '"redis://***@h"'
    assert {"password", "secret_key"} <= {key.rpartition(".")[2] for key in changes}


# --- a daemon -----------------------------------------------------------------------------


@pytest.mark.slow
def test_daemon_reloads_on_sighup(tmp_path: Path) -> None:
    """`systemctl reload` would do nothing, or end tierd; with or without systemd."""
    with RedisServer(tmp_path / "redis") as redis:
        patient = {"deadline_ms": 60_000, "slow_ms": 60_000, "timeout_ms": 60_000}
        storage = table("redis", {**redis.options(), **patient, "write_policy": "write_back"})
        daemon = DaemonProcess(
            tmp_path / "tierd", storage=storage, extra="drain_timeout_ms = 600000"
        )

        def reload(old: str, new: str, said: str) -> None:
            text = daemon.config.read_text()
            assert old in text
            daemon.config.write_text(text.replace(old, new))
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: said in daemon.log.read_text(), WAIT_S, said)

        with daemon:
            daemon.wait_tier("redis", "ready")
            client = daemon.client()
            handle = client.register(blocks.namespace(4096))
            hashes, parents = blocks.chain(4)
            payloads = [blocks.payload(handle.namespace, h) for h in hashes]
            assert all(client.put(handle, [*zip(hashes, parents, payloads, strict=True)]))
            reload("600000", "600000\nbogus = 1", "bogus is not a key")
            reload("bogus = 1", f"allow_uids = [{os.getuid() + 1}]", "allow_uids: [] -> ")
            stranger = Client(daemon.socket, name="stranger", map_segments=False)
            with pytest.raises(Exception, match="may not connect"):
                stranger.status()
            stranger.close()
            reload("600000", "100", "drain_timeout_ms: 600000 -> 100")
            assert client.get(handle, hashes, 5000), "an existing session goes on"
            client.close()
            redis.pause()
            try:
                began_s = time.monotonic()
                daemon.stop()
                assert time.monotonic() - began_s < WAIT_S
            finally:
                redis.resume()
