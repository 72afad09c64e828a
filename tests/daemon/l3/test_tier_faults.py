"""Real servers that hang, die, fill up, lie or refuse, under a real daemon with steady traffic.

In each fault every byte is right, every answer is in time, an outage costs one deadline and not one
per request, the tier is used again once it is back, and nothing is left behind. One daemon goes
through all faults of a kind of server, so that leaks would add up.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from tests.support.servers.fake_s3 import FakeS3, Script, says
from tests.support.servers.planting import DAMAGES, RedisStore, S3Store, plant
from tests.support.servers.proxy import BLACK_HOLE, PASS, Flow, Proxy, Then
from tests.support.servers.redis import LEAST_RIGHTS, PASSWORD, USER, RedisCluster, RedisServer
from tests.support.servers.s3 import Rclone, S3Server, SeaweedFS, SmallDisk
from tests.support.tiers.scene import QUICK_MS, Scene, again_if_stalled
from tests.support.traffic import BLOCK_BYTES, CHAINS, children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROBES = 2
"""An outage lasts for this many failed probes, or trials after probes."""

PLANTED = 200
"""At most this many blocks are damaged at once: a good part of the requested blocks."""

ROUNDS = 4
"""Rounds of the same outage; the first half warms up."""

ROUNDS_GROWTH_BYTES_MAX = 1280 << 10
"""Growth in the second half, in which hundreds of blocks of 64 KiB are in flight when they are
cancelled; measured: 0.1 MiB, and no further growth after twenty rounds."""

REDIS_MS = {"deadline_ms": 300, "slow_ms": 250, "probe_ms": 200}
"""Below an acquire's deadline, and above it in S3_MS: a different limit ends first."""

S3_MS = {"deadline_ms": 600, "slow_ms": 500, "probe_ms": 200}


class Redis(Scene):
    """A Redis tier with minimal rights, and its server behind a proxy."""

    def __init__(self, directory: Path, server: RedisServer) -> None:
        self.server = server
        self.proxy = Proxy(("127.0.0.1", server.port))
        self.proxy.__enter__()
        self.password = directory / "password"
        self.password.write_text(PASSWORD)
        options = {
            "url": f"redis://127.0.0.1:{self.proxy.port}",
            "username": USER,
            "password_file": str(self.password),
            **REDIS_MS,
        }
        super().__init__(directory, "redis", options, pools=1)

    def close(self) -> None:
        super().close()
        self.proxy.__exit__()

    def plant(self, damage: str) -> int:
        """Damage PLANTED blocks; returns their number."""
        with self.server.client() as client:
            return plant(RedisStore(client), DAMAGES[damage], PLANTED)


class S3(Scene):
    """An S3 tier, and its server behind a proxy."""

    def __init__(self, directory: Path, server: S3Server) -> None:
        self.server = server
        self.proxy = Proxy(("127.0.0.1", server.port))
        self.proxy.__enter__()
        self.bucket = server.make_bucket()
        where = f"http://127.0.0.1:{self.proxy.port}"
        options = {**server.options(self.bucket, endpoint=where), **S3_MS}
        super().__init__(directory, "s3", options, pools=2)

    def close(self) -> None:
        super().close()
        self.proxy.__exit__()

    def plant(self, damage: str) -> int:
        """Damage PLANTED blocks; returns their number."""
        return plant(S3Store(self.server, self.bucket), DAMAGES[damage], PLANTED)


FaultyScene = TypeVar("FaultyScene", Redis, S3)


class SceneKeeper(Generic[FaultyScene]):
    """Keeps a scene from test to test, and creates a new one after a failure."""

    def __init__(self, directory: Path, make: Callable[[Path], FaultyScene]) -> None:
        self._directory = directory
        self._make: Callable[[Path], FaultyScene] = make
        self._made = 0
        self._scene: FaultyScene | None = None

    @contextmanager
    def judged(self) -> Iterator[FaultyScene]:
        """Yield a scene whose tier works and is in use; the block breaks and repairs it."""
        if self._scene is None:
            self._made += 1
            directory = self._directory / str(self._made)
            directory.mkdir()
            self._scene = self._make(directory)
        try:
            with self._scene.judged():
                yield self._scene
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the scene, if there is one."""
        scene, self._scene = self._scene, None
        if scene is not None:
            scene.close()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SceneKeeper[Redis]]:
    directory = tmp_path_factory.mktemp("redis")
    with RedisServer(directory / "server", rights=f"~tierd:* {LEAST_RIGHTS}") as server:
        kept = SceneKeeper(directory, lambda path: Redis(path, server))
        try:
            yield kept
        finally:
            kept.close()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SceneKeeper[S3]]:
    directory = tmp_path_factory.mktemp("s3")
    with SeaweedFS(directory / "server") as server:
        kept = SceneKeeper(directory, lambda path: S3(path, server))
        try:
            yield kept
        finally:
            kept.close()


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> SceneKeeper[Redis] | SceneKeeper[S3]:
    """The scene keeper for the kind of server that the test is parametrized with."""
    found: SceneKeeper[Redis] | SceneKeeper[S3] = request.getfixturevalue(request.param)
    return found


both_kinds = pytest.mark.parametrize("kept", ["redis", "s3"], indirect=True)


# --- outages ------------------------------------------------------------------------

Outage = Callable[[Redis | S3], AbstractContextManager[None]]


@contextmanager
def hangs(scene: Redis | S3) -> Iterator[None]:
    """SIGSTOP: connections stay, but no request is answered."""
    scene.server.pause()
    try:
        yield
    finally:
        scene.server.resume()


@contextmanager
def dies(scene: Redis | S3) -> Iterator[None]:
    """SIGKILL; restarted with its data on disk, which is empty for Redis."""
    scene.server.kill()
    try:
        yield
    finally:
        scene.server.start()


@contextmanager
def refuses(scene: Redis | S3) -> Iterator[None]:
    """Connections end, and no new ones are accepted."""
    scene.proxy.refuse()
    scene.proxy.cut()
    yield
    scene.proxy.accept()


def break_connections(*, up: Flow = PASS, down: Flow = PASS) -> Outage:
    """All connections break, and recover."""

    @contextmanager
    def break_now(scene: Redis | S3) -> Iterator[None]:
        scene.proxy.spoil(up=up, down=down)
        yield
        scene.proxy.heal()

    return break_now


HALF = BLOCK_BYTES // 2

OUTAGES: dict[str, Outage] = {
    "hangs": hangs,
    "dies": dies,
    "refuses": refuses,
    "black-hole": break_connections(up=BLACK_HOLE),
    "stalls-in-a-body": break_connections(down=Flow(good_bytes=HALF)),
    "resets-in-a-body": break_connections(down=Flow(good_bytes=HALF, then=Then.RESET)),
    "ends-in-a-body": break_connections(down=Flow(good_bytes=HALF, then=Then.CLOSE)),
    "trickles": break_connections(down=Flow(good_bytes=HALF, then=Then.TRICKLE, trickle_s=0.02)),
}


def check_outage(scene: Scene, outage: AbstractContextManager[None]) -> None:
    """Assert that an outage stops reads, then costs one wait per trial, and is noticed when it
    ends."""
    with outage:
        scene.wait(lambda: scene.stopped("reads"), "reads go on although the tier is dead")
        stopped, trials = time.monotonic(), scene.opened("reads")
        failed = scene.counter("breaker_probes_failed_total")
        scene.wait(
            lambda: (
                scene.counter("breaker_probes_failed_total") >= failed + PROBES
                or scene.opened("reads") >= trials + PROBES
            ),
            "no probe looks whether the tier is back",
        )
        asked = scene.traffic.since(stopped, time.monotonic())
        # One more trial may be under way.
        scene.at_most(scene.opened("reads") - trials + 1, QUICK_MS, asked)
    before = scene.used()
    scene.wait(lambda: scene.used() > before, "the tier is not used again", scene.back_s)


@both_kinds
@pytest.mark.parametrize("outage", OUTAGES)
@again_if_stalled
def test_outage_costs_one_deadline_and_no_wrong_byte(
    kept: SceneKeeper[Redis] | SceneKeeper[S3], outage: str
) -> None:
    """A tier that dies or hangs would delay requests, return wrong bytes, or stay unused."""
    with kept.judged() as scene:
        check_outage(scene, OUTAGES[outage](scene))


@both_kinds
@again_if_stalled
def test_repeated_outages_do_not_leak_memory(kept: SceneKeeper[Redis] | SceneKeeper[S3]) -> None:
    """A server that comes and goes would have the daemon grow until the node is out of memory."""
    with kept.judged() as scene:
        held = []
        for _ in range(ROUNDS):
            check_outage(scene, OUTAGES["stalls-in-a-body"](scene))
            held.append(scene.settle())
        assert {each.files for each in held} == {held[0].files}
        grown = held[-1].anonymous_bytes - held[ROUNDS // 2].anonymous_bytes
        assert grown < ROUNDS_GROWTH_BYTES_MAX, held


@both_kinds
@again_if_stalled
def test_stalled_puts_do_not_block_reads_or_fill_memory(
    kept: SceneKeeper[Redis] | SceneKeeper[S3],
) -> None:
    """Blocks that cannot be written would pile up in host memory, or hold up readers."""
    with kept.judged() as scene:
        scene.proxy.spoil(up=Flow(good_bytes=HALF))
        scene.wait(lambda: scene.stopped("writes"), "writes go on although none ends")
        scene.proxy.heal()
        scene.wait_in_use()


@both_kinds
@again_if_stalled
def test_killed_storage_worker_is_replaced(kept: SceneKeeper[Redis] | SceneKeeper[S3]) -> None:
    """A client that crashes would end the daemon, or lose its tier permanently."""
    with kept.judged() as scene:
        for _ in range(2):
            (worker,) = children(scene.pid())
            restarts = scene.counter("worker_restarts_total")
            os.kill(worker, signal.SIGKILL)
            scene.wait(
                lambda then=restarts: scene.counter("worker_restarts_total") > then,  # type: ignore[misc]  # a default binds it
                "the worker is not started again",
            )
            scene.wait_in_use()


@both_kinds
@again_if_stalled
def test_damaged_stored_blocks_are_not_served(kept: SceneKeeper[Redis] | SceneKeeper[S3]) -> None:
    """Another tenant's bytes, or bytes from a damaged disk, would reach an engine."""
    with kept.judged() as scene:
        for damage in DAMAGES:
            assert scene.plant(damage) > CHAINS
            scene.wait_more(f"the damage is not noticed: {damage}", "get_corrupt_total", count=5)
            scene.wait_in_use()


# --- refusals by a server -----------------------------------------------------------


@again_if_stalled
def test_rotated_redis_password_is_picked_up(redis: SceneKeeper[Redis]) -> None:
    """A new password would need a restart, or old connections would continue indefinitely."""
    with redis.judged() as scene:

        def rotate(password: str) -> None:
            with scene.server.client() as admin:
                admin.acl_setuser(
                    USER, enabled=True, reset_passwords=True, passwords=[f"+{password}"]
                )
            scene.proxy.cut()

        @contextmanager
        def rotated() -> Iterator[None]:
            rotate("another")
            yield
            assert "password" in scene.tier()["circuits"]["reads"]["why"]
            scene.password.write_text("another")

        check_outage(scene, rotated())
        # The server's file of users must have it too, for the next start of the server.
        scene.password.write_text(PASSWORD)
        rotate(PASSWORD)
        scene.wait_in_use()


@again_if_stalled
def test_full_redis_still_serves_reads(redis: SceneKeeper[Redis]) -> None:
    """A full server would lose its readers too, or be written to without end."""
    with redis.judged() as scene, scene.server.client() as admin:
        admin.config_set("maxmemory", "1mb")
        scene.wait_more("no put is refused", "put_refused_total", "put_error_total")
        scene.wait_more("reads stop because writes do", "get_hit_total", count=20)
        admin.config_set("maxmemory", "0")
        scene.wait_more("writes do not go on", "put_stored_total")


@again_if_stalled
def test_deleted_bucket_is_reported_and_used_again_once_recreated(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A recreated bucket would not be used, or its absence not be reported."""
    # SeaweedFS creates a missing bucket; this server does not.
    server = Rclone(tmp_path_factory.mktemp("server"))
    with server:
        scene = S3(tmp_path_factory.mktemp("scene"), server)
        try:
            with scene.judged():
                scene.traffic.pause()
                S3Store(server, scene.bucket).delete()
                scene.traffic.resume()
                scene.wait(lambda: scene.stopped("writes"), "writes go on without a bucket")
                assert "bucket" in scene.tier()["circuits"]["writes"]["why"]
                server.make_bucket(scene.bucket)
                scene.wait_in_use()
        finally:
            scene.close()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        pytest.param(says(503, "SlowDown", "HEAD", "GET", "PUT"), "503", id="503-storm"),
        pytest.param(says(403, "AccessDenied", "GET"), "denied", id="may-not-read"),
    ],
)
@again_if_stalled
def test_s3_error_responses_are_handled(
    tmp_path_factory: pytest.TempPathFactory, script: Script, told: str
) -> None:
    """Retries would add to a storm, or a lost permission would look like an empty tier."""
    with FakeS3() as server:
        scene = Scene(tmp_path_factory.mktemp("scene"), "s3", server.options(**S3_MS), pools=2)
        try:
            with scene.judged():

                @contextmanager
                def storm() -> Iterator[None]:
                    server.script = script
                    yield
                    server.script = None
                    assert told in scene.daemon.log.read_text()

                check_outage(scene, storm())
        finally:
            scene.close()


@again_if_stalled
def test_full_s3_disk_still_serves_reads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A full server would lose its readers too, or be written to without end."""
    if not SmallDisk.can_run():
        pytest.skip("no mount namespaces for this user")
    server = SmallDisk(tmp_path_factory.mktemp("server"))
    with server:
        scene = S3(tmp_path_factory.mktemp("scene"), server)
        try:
            with scene.judged():
                server.fill_disk()
                scene.wait_more("no put is refused", "put_refused_total", "put_error_total")
                scene.wait_more("reads stop because writes do", "get_hit_total", count=20)
                server.free_disk()
                scene.wait_more("writes do not go on", "put_stored_total")
        finally:
            scene.close()


@again_if_stalled
def test_redis_cluster_that_loses_a_node_serves_the_rest(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A dead node would delay all requests, or cost the blocks of the other nodes."""
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        scene = Scene(
            tmp_path_factory.mktemp("scene"), "redis", {**cluster.options(), **REDIS_MS}, pools=3
        )
        try:
            with scene.judged():
                cluster.nodes[2].kill()
                began = time.monotonic()
                scene.wait_more("the living nodes are not read", "get_hit_total", count=100)
                asked = scene.traffic.since(began, time.monotonic())
                scene.at_most(len(asked) // 4, QUICK_MS, asked)
                cluster.nodes[2].start()
                scene.wait_in_use()
        finally:
            scene.close()
