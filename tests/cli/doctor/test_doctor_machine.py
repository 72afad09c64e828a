"""`tierd doctor`: its findings about the machine and about each tier."""

from __future__ import annotations

import json
import os
import socket
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.support.doctor_scene import ROOT, Examine, codes, namespace
from tests.support.fake_node import FakeDaemon
from tests.support.servers.fake_s3 import BUCKET, FakeS3, reply, says
from tierd import __version__
from tierd.cli.doctor.checks import machine, node, storage
from tierd.cli.doctor.checks.finding import Level
from tierd.config import Config, HostConfig, Size

CAPACITY = 64 << 20
HOST = {"capacity_bytes": CAPACITY, "limit_bytes": CAPACITY, "allocated_bytes": 0}
HOST |= {"huge_pages": True}


def scene(root: Path, **files: str) -> node.Scene:
    """A simulated machine: the content of files, by their paths with dots."""
    defaults = {
        "proc.meminfo": "MemAvailable: 1000000 kB\n",
        "sys.kernel.mm.transparent_hugepage.shmem_enabled": "always [advise] never\n",
        "sys.devices.system.clocksource.clocksource0.current_clocksource": "tsc\n",
    }
    for name, text in {**defaults, **files}.items():
        path = root / name.replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    config = Config(host=HostConfig(capacity=Size(CAPACITY)))
    return node.Scene(root / "tierd.toml", "", config=config, root=root)


def looked(scene: node.Scene) -> dict[str, Level]:
    found = codes(list(machine.look_at_machine(scene)))
    found.pop("dev_shm", None)  # A temporary directory's file system may be of any size.
    return found


def test_healthy_machine(tmp_path: Path) -> None:
    """There would always be something."""
    assert looked(scene(tmp_path)) == {"capacity": Level.OK}


@pytest.mark.parametrize(
    ("name", "text", "code", "level"),
    [
        ("proc.meminfo", "MemAvailable: 100 kB\n", "free_memory", Level.WARNING),
        (
            "sys.kernel.mm.transparent_hugepage.shmem_enabled",
            "always [never]\n",
            "huge_pages",
            Level.NOTE,
        ),
        (
            "sys.devices.system.clocksource.clocksource0.current_clocksource",
            "hpet\n",
            "slow_clock",
            Level.WARNING,
        ),
        ("proc.driver.nvidia.version", "x", "gpu", Level.NOTE),
    ],
)
def test_findings_of_a_poor_machine(
    tmp_path: Path, name: str, text: str, code: str, level: Level
) -> None:
    """A machine that slows tierd down would look healthy."""
    assert looked(scene(tmp_path, **{name: text}))[code] is level


def test_capacity_beyond_the_container(tmp_path: Path) -> None:
    """tierd would be killed for memory that its container does not have."""
    place = scene(tmp_path, **{"proc.self.cgroup": "0::/box\n"})
    limit = tmp_path / "sys/fs/cgroup/box/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text(str(CAPACITY))
    assert looked(place) == {"capacity": Level.FAULT}
    limit.write_text(str(2 * CAPACITY))
    assert looked(place) == {"capacity": Level.OK}


def test_locked_memory_limit_matters_with_a_gpu(tmp_path: Path) -> None:
    """Pinning would fail without a hint; or everybody without a GPU be bothered by it."""
    limits = {"proc.77.limits": "Max locked memory         65536     65536     bytes\n"}
    assert "memlock" not in looked(scene(tmp_path, **limits))
    place = scene(tmp_path, **limits, **{"proc.driver.nvidia.version": "x"})
    place.pid = 77
    assert looked(place)["memlock"] is Level.WARNING
    (tmp_path / "proc/77/limits").write_text("Max locked memory unlimited unlimited bytes\n")
    assert "memlock" not in looked(place)


def test_memory_pressure(tmp_path: Path) -> None:
    """Host memory that had to shrink would look complete."""
    place = scene(tmp_path)
    place.status = {"host": {**HOST, "limit_bytes": CAPACITY // 2}}
    assert looked(place)["pressure"] is Level.WARNING


# --- tiers ----------------------------------------------------------------------------


def tier(kind: str, **options: object) -> str:
    """A `[[storage]]` table."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join(["[[storage]]", f'type = "{kind}"', *lines, ""])


def test_a_path_that_is_a_file(examine: Examine, tmp_path: Path) -> None:
    """The tier would be away, and the reason only in the log."""
    (tmp_path / "file").write_text("mine")
    path = str(tmp_path / "file" / "store")
    found = examine(tiers=tier("file", path=path, capacity="1MiB", reserve_free=0))
    assert found["tier_path"]["level"] == "fault"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_is_missing(examine: Examine, tmp_path: Path) -> None:
    """An unmounted disk would be the root disk, which is reported as a success."""
    path = tmp_path / "not" / "there"
    found = examine(tiers=tier("file", path=str(path), capacity="1MiB", reserve_free=0))
    assert found["tier_missing"]["level"] == "note"
    assert "tier_speed" in found
    assert not path.parent.exists()


def test_a_disk_that_is_too_small(examine: Examine, tmp_path: Path) -> None:
    """A tier would silently hold less than configured."""
    found = examine(tiers=tier("file", path=str(tmp_path / "s"), capacity="900PiB"))
    assert found["tier_space"]["level"] == "warning"


def test_a_directory_that_cannot_be_written(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier would take no blocks, and the reason be in the log only."""
    (tmp_path / "mine").mkdir(mode=0o500)
    # Root may write everywhere; for other users the kernel refuses the write.
    may = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: p != tmp_path / "mine" and may(p, mode))
    found = examine(tiers=tier("file", path=str(tmp_path / "mine"), capacity="1MiB"))
    assert found["tier_denied"]["level"] == "fault"


def test_full_disk(examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only or full disk would cause a traceback."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    found = examine(tiers=tier("file", path=str(tmp_path), capacity="1MiB", reserve_free=0))
    assert found["tier_io"]["level"] == "fault"
    assert [path.name for path in tmp_path.iterdir()] == ["tierd.toml"]


def test_a_disk_slower_than_the_engine(examine: Examine, tmp_path: Path) -> None:
    """A tier that the daemon leaves aside would look as if it paid."""
    digest = namespace().digest.hex()
    fields = {**namespace().to_fields(), "hash_root": ROOT.hex(), "block_bytes": 1 << 30}
    space = {"digest": digest, **fields, "blocks": 0, "sessions": 1}
    seat = {"namespace": digest, "prefill_tokens_per_s": 10**6}
    tiers = tier("file", path=str(tmp_path / "s"), capacity="1MiB", reserve_free=0)
    status: dict[str, object] = {"version": __version__, "counters": {}, "storage": []}
    status |= {"host": HOST, "namespaces": [space], "demand": [seat]}
    with FakeDaemon(tmp_path / "d.sock", status):
        found = examine(socket=str(tmp_path / "d.sock"), tiers=tiers)
    assert found["tier_slow"]["level"] == "warning"
    seat["prefill_tokens_per_s"] = 1
    space["block_bytes"] = 4096
    with FakeDaemon(tmp_path / "e.sock", status):
        found = examine(socket=str(tmp_path / "e.sock"), tiers=tiers)
    assert found["tier_speed"]["level"] == "ok"


def test_a_backend_that_is_not_installed(examine: Examine) -> None:
    """A typing error in a type would be a traceback."""
    found = examine(tiers=tier("flie", path="/x", capacity="1MiB"))
    assert found["tier_config"]["level"] == "fault"
    assert "installed: " in found["tier_config"]["what"]


def test_a_redis_that_is_down(examine: Examine) -> None:
    """It would only be said that the tier is away."""
    found = examine(tiers=tier("redis", url="redis://127.0.0.1:9/0"))
    assert found["tier_unreachable"]["level"] == "fault"
    assert "is it running" in found["tier_unreachable"]["what"]


def test_a_redis_that_is_silent(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server behind a firewall would hang the command."""
    monkeypatch.setattr(storage, "CALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        found = examine(tiers=tier("redis", url=url, timeout_ms=2000))
    assert found["tier_hangs"]["level"] == "fault"


def test_an_s3_round_trip_leaves_nothing(examine: Examine) -> None:
    """The probe would stay in the bucket, for ever and every time."""
    with FakeS3() as fake:
        found = examine(tiers=tier("s3", **fake.options()))
        assert found["tier_round_trip"]["level"] == "ok"
        assert fake.count("PUT") == 1
        assert fake.objects == {}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("NoSuchBucket", "create it, or correct its name"),
        ("InvalidAccessKeyId", "does not know this access key"),
        ("SignatureDoesNotMatch", "secret key does not belong to the access key"),
    ],
)
def test_bucket_faults_are_reported(examine: Examine, code: str, words: str) -> None:
    """The operator would have to guess which option to change."""
    with FakeS3() as fake:
        fake.script = says(404 if code == "NoSuchBucket" else 403, code, "GET")
        found = examine(tiers=tier("s3", **fake.options()))
    assert found["tier_unreachable"]["level"] == "fault"
    assert words in found["tier_unreachable"]["what"]


def test_a_clock_that_is_off(examine: Examine) -> None:
    """S3 would refuse every request for its time, soon or already."""
    with FakeS3() as fake:
        fake.script = lambda request: (
            [reply(200, Date=formatdate(time.time() - 1000, usegmt=True))]
            if request.method == "HEAD" and not request.name
            else None
        )
        found = examine(tiers=tier("s3", **fake.options()))
    assert found["clock_skew"]["level"] == "fault"
    assert "ahead of" in found["clock_skew"]["what"]
    assert BUCKET not in found["clock_skew"]["what"]
