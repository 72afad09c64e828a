"""Tiers that open late, never, or after failures; and a real daemon with two file tiers."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.tiers.bench import PROBE_S, Bench, Tier, run
from tierd.config import TIERS_MAX
from tierd.daemon.l3.tier import OPEN_S_MAX
from tierd.errors import BackendError, ConfigError
from tierd.wire import messages as m
from tierd.wire.frames import FRAME_BYTES_MAX
from tierd.wire.session import encode


def test_tier_that_cannot_be_opened_is_skipped_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that is down at boot would keep the node's cache down, or be lost permanently."""
    caplog.set_level(logging.INFO, "tierd")
    away = Tier()
    away.open_errors = [BackendError("connection refused")] * 5

    async def test(bench: Bench) -> None:
        assert bench.loop.time() - 1000 < 0.1
        status = bench.tiers[1].status()
        assert (status["state"], status["why"]) == ("unavailable", "connection refused")
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes) == 6
        assert bench.tiers[1].counters["backup_skipped_total"] == 6
        assert away.log == []
        await asyncio.sleep(5 * PROBE_S)
        assert bench.tiers[1].status()["state"] == "ready"
        bench.store(3, "later")
        await bench.backed_up()
        assert len(away.blocks) == 3

    run(test, raw=[Tier(), away])
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "tier1: unavailable: connection refused" in line]) == 1
    assert "storage tier tier1: open" in lines


def test_slow_opening_of_a_tier_does_not_delay_the_start() -> None:
    """A server that does not answer would keep the node's engines without L2."""
    slow = Tier()
    slow.open_takes_s = 20.0

    async def test(bench: Bench) -> None:
        assert bench.loop.time() - 1000 == pytest.approx(OPEN_S_MAX)
        assert bench.tiers[1].status()["state"] == "opening"
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes) == 6
        await asyncio.sleep(20)
        assert bench.tiers[1].status()["state"] == "ready"

    run(test, raw=[Tier(), slow])


def test_stop_cancels_the_opening_of_a_tier() -> None:
    """A daemon whose server hangs could only be killed."""
    hung = Tier()
    hung.open_takes_s = 1e6

    async def test(bench: Bench) -> None:
        bench.store(3)

    run(test, raw=[Tier(), hung])


def test_hanging_opening_of_a_tier_is_retried() -> None:
    """A server that accepted the connection and died would never be asked again."""
    hung = Tier()
    hung.open_takes_s = 1e6

    async def test(bench: Bench) -> None:
        hung.open_takes_s = 0.0
        await asyncio.sleep(60)
        assert bench.tiers[0].status()["state"] == "ready"

    run(test, raw=[hung])


def test_wrong_tier_configuration_aborts_the_start() -> None:
    """tierd would run without the storage that the operator asked for."""
    wrong, other = Tier(), Tier()
    wrong.open_errors = [ConfigError("bucket 'kv' does not exist")]

    async def test(bench: Bench) -> None:
        raise AssertionError("it has started")

    with pytest.raises(ConfigError, match="storage tier tier1: bucket 'kv' does not exist"):
        run(test, raw=[other, wrong])
    assert not other._opened


def test_tier_configuration_error_found_late_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The operator would not learn why a tier stays away."""
    wrong = Tier()
    wrong.open_takes_s = 3.0
    wrong.open_errors = [ConfigError("no such bucket")]

    async def test(bench: Bench) -> None:
        await asyncio.sleep(10)
        status = bench.tiers[0].status()
        assert status["state"] == "unavailable"
        assert "no such bucket" in str(status["why"])

    run(test, raw=[wrong])
    assert "storage tier tier0: no such bucket" in caplog.text


class ChattyTier(Tier):
    """A third party's tier with a very long status."""

    def __init__(self) -> None:
        super().__init__()
        self.counters |= {f"{number}{'x' * 100}_total": number for number in range(10_000)}
        self.open_errors = [BackendError("y" * 100_000)] * 100


def test_status_of_many_verbose_tiers_is_bounded() -> None:
    """One backend with a long error would end every `tierd status`."""

    async def test(bench: Bench) -> None:
        frame = encode(m.StatusReply(1, bench.node.status()))
        assert len(frame) < FRAME_BYTES_MAX // 8

    run(test, raw=[ChattyTier() for _ in range(TIERS_MAX)])


def two_files(directory: Path, **more: str) -> str:
    """Return TOML of two file tiers below `directory`; `more` replaces a tier's path by name."""
    tables = []
    for name in ("near", "far"):
        path = more.get(name, str(directory / name))
        tables.append(
            f'[[storage]]\ntype = "file"\nname = "{name}"\npath = "{path}"\n'
            'capacity = "64MiB"\nreserve_free = "0"\nprobe_ms = 100\n'
            "deadline_ms = 20000\nslow_ms = 20000\n"
        )
    return "".join(tables)


def store_and_stop(process: DaemonProcess, count: int) -> list[bytes]:
    """Store blocks in all tiers, which a tier that is still opening would not get."""
    for name in process.tiers():
        process.wait_tier(name, "ready")
    client = process.client()
    handle = client.register(blocks.namespace(20_000))
    hashes, parents = blocks.chain(count)
    done = client.put(
        handle,
        [(h, p, blocks.payload(handle.namespace, h)) for h, p in zip(hashes, parents, strict=True)],
    )
    assert done == [True] * count
    client.close()
    assert process.stop() == 0
    return hashes


def count_served(process: DaemonProcess, hashes: list[bytes]) -> int:
    """Return the length of the prefix served once the daemon has indexed its tiers."""
    for name in process.tiers():
        process.wait_tier(name, "ready")
    client = process.client()
    handle = client.register(blocks.namespace(20_000))
    got = client.get(handle, hashes, 20_000)
    for view, block_hash in zip(got, hashes, strict=False):
        assert bytes(view) == blocks.payload(handle.namespace, block_hash)
    client.close()
    return len(got)


def status_text(process: DaemonProcess) -> str:
    return subprocess.run(
        [sys.executable, "-m", "tierd.cli.main", "status", "--socket", process.socket],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["damaged", "emptied"])
def test_second_file_tier_serves_blocks_lost_by_the_first(tmp_path: Path, how: str) -> None:
    """A replaced or dying disk would cost blocks that a second tier still has."""
    process = DaemonProcess(
        tmp_path / "tierd",
        capacity="64MiB",
        storage=two_files(tmp_path),
        prefetch={"policy": "wait_complete"},
    )
    with process:
        hashes = store_and_stop(process, 40)
        for path in (tmp_path / "near").rglob("*.slab"):
            if how == "emptied":
                path.unlink()
                continue
            # Every 20 kB, so that each record is hit.
            raw = bytearray(path.read_bytes())
            for place in range(5_000, len(raw), 16_384):
                raw[place] ^= 0xFF
            path.write_bytes(raw)
        process.start()
        assert count_served(process, hashes) == 40
        process.wait_backed_up()
        tiers = process.tiers()
        assert tiers["far"]["counters"]["get_hit_total"] == 40
        assert tiers["near"]["counters"]["put_stored_total"] == 40
        assert tiers["near"]["blocks"] == 40
        if how == "damaged":
            assert tiers["near"]["counters"]["get_corrupt_total"] == 40
        # The first tier was refilled with sound blocks.
        process.stop()
        process.start()
        assert count_served(process, hashes) == 40
        assert process.tiers()["near"]["counters"]["get_hit_total"] == 40


@pytest.mark.slow
def test_missing_directory_costs_only_its_tier(tmp_path: Path) -> None:
    """A node with a missing mount would serve no engine."""
    mount = tmp_path / "mount"
    mount.symlink_to(mount)  # Every access there gets an I/O error (ELOOP).
    storage = two_files(tmp_path, near=str(mount / "near"))
    with DaemonProcess(tmp_path / "tierd", capacity="64MiB", storage=storage) as process:
        process.wait_tier("near", "unavailable")
        log = process.log.read_text()
        near = process.tiers()["near"]
        assert "symbolic links" in near["why"]
        assert "near     unavailable: " in status_text(process)
        assert "storage tier near: unavailable" in log
        assert "probe_ms" in log
        mount.unlink()
        mount.mkdir()
        process.wait_tier("near", "ready")
        hashes = store_and_stop(process, 10)
        process.start()
        assert count_served(process, hashes) == 10
        assert process.tiers()["near"]["counters"]["get_hit_total"] == 10
