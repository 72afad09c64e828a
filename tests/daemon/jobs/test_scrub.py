"""Scrub: rot in tiers is found before a request needs the block, and repaired if possible."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.tiers.bench import PAGE, SPACE, Bench, Tier, config, damage, key, run
from tierd.cli.common.operator import Operator
from tierd.cli.main import main
from tierd.daemon.jobs.scrub import AWAY_S_MAX, ScrubJob
from tierd.errors import RefusedError
from tierd.wire import messages as m

FAST = 1 << 40


def begin(bench: Bench, *numbers: int, rate: int = FAST) -> ScrubJob:
    scrubs = bench.node.scrubs
    work = scrubs.begin(numbers, rate)
    bench.node.spawn(lambda: scrubs.run(work), "scrub")
    return work


async def scrub(bench: Bench, *numbers: int, rate: int = FAST) -> ScrubJob:
    work = begin(bench, *numbers, rate=rate)
    await work.done.wait()
    return work


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.001)


def counted(bench: Bench) -> dict[str, int]:
    names = ("scrubbed_blocks", "scrub_corrupt", "scrub_unreadable", "scrub_repaired")
    return {name: bench.node.counters[f"{name}_total"] for name in names}


def test_scrub_of_sound_tiers_changes_nothing() -> None:
    """A scrub would report sound blocks, or take room in L2 for them."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(100)
        await bench.backed_up()
        bench.forget()
        work = await scrub(bench)
        status = work.status()
        assert status["complete"]
        assert [entry.blocks for entry in work.tiers] == [100, 100]
        assert [entry.size_bytes for entry in work.tiers] == [100 * PAGE] * 2
        assert counted(bench)["scrubbed_blocks"] == 200
        assert sum(counted(bench).values()) == 200
        assert not bench.space.items  # It loaded nothing into L2.
        bench.check_nothing_is_left()
        assert await bench.acquire(hashes) == 100

    run(test, blocks_in_l2=1024)


def test_scrub_repairs_rot_from_l2_and_from_another_tier() -> None:
    """Rot would be found by the request that needs the block, and cost its hit."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(40)
        await bench.backed_up()
        first, second = bench.raw
        damage(first, hashes[3])
        work = await scrub(bench, 0)  # L2 has it.
        assert (work.tiers[0].corrupt, work.tiers[0].repaired) == (1, 1)
        assert first.blocks == second.blocks

        bench.forget()
        damage(first, hashes[5])
        damage(first, hashes[39])
        work = await scrub(bench, 0)  # Only the second tier has them.
        assert (work.tiers[0].corrupt, work.tiers[0].repaired) == (2, 2)
        assert first.blocks == second.blocks

        damage(first, hashes[7])
        damage(second, hashes[7])
        work = await scrub(bench)
        assert [(entry.corrupt, entry.repaired) for entry in work.tiers] == [(1, 0), (0, 0)]
        assert key(hashes[7]) not in first.blocks
        assert key(hashes[7]) not in second.blocks  # Its rot was found when it was read.
        assert counted(bench)["scrub_corrupt"] == 4
        assert counted(bench)["scrub_repaired"] == 3
        assert await bench.acquire(hashes) == 7
        bench.check_nothing_is_left()

    run(test, blocks_in_l2=1024)


def test_scrub_repairs_from_an_l2_block_without_a_checksum() -> None:
    """The copy in L2 would be written with a wrong checksum, or not used."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        (raw,) = bench.raw
        damage(raw, hashes[2])
        slot = bench.space.items[hashes[2]]
        bench.space._checksums[slot] = None
        work = await scrub(bench)
        assert work.tiers[0].repaired == 1
        bench.forget()
        assert await bench.acquire(hashes) == 4

    run(test, config("tier"))


def test_rotten_block_that_cannot_be_repaired_is_forgotten() -> None:
    """L2 would keep assuming that the tier has the block, and never write it."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        (raw,) = bench.raw
        damage(raw, hashes[2])
        raw.hangs = {"put"}
        work = await scrub(bench)
        assert (work.tiers[0].corrupt, work.tiers[0].repaired) == (1, 0)
        raw.hangs = set()
        await until(lambda: bench.tiers[0].writes_allowed)
        bench.store(4)  # Like an engine that computes the prompt again.
        await bench.backed_up()
        assert set(raw.blocks) == {key(h) for h in hashes}
        bench.check_nothing_is_left()

    run(test, config("tier"))


def test_scrub_keeps_its_rate() -> None:
    """A scrub would take the disk from the requests."""

    async def test(bench: Bench) -> None:
        bench.store(100)
        await bench.backed_up()
        began_s = bench.loop.time()
        await scrub(bench, rate=10 * PAGE)
        assert 9.0 < bench.loop.time() - began_s < 11.0

    run(test, config("tier"), blocks_in_l2=1024)


def test_requests_are_read_before_a_scrub() -> None:
    """A request would wait behind a scrub."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        hashes = bench.store(200)
        await bench.backed_up()
        bench.forget()
        raw.takes_s = 0.01
        work = begin(bench)
        await until(lambda: raw.calls("get"))
        assert await bench.acquire(hashes[:128]) == 128
        # Two batches of the scrub were read before the request's lookup ended; the next one waited.
        assert work.tiers[0].blocks == 64
        await work.done.wait()
        assert work.tiers[0].blocks == 200
        bench.check_nothing_is_left()

    run(test, config("tier", read_batches=1), blocks_in_l2=1024)


def test_scrub_can_be_stopped() -> None:
    """A scrub could not be stopped before its end."""

    async def test(bench: Bench) -> None:
        bench.store(100)
        await bench.backed_up()
        work = begin(bench, rate=PAGE)
        await until(lambda: work.tiers[0].blocks)
        with pytest.raises(RefusedError, match="is in progress"):
            begin(bench)
        began_s = bench.loop.time()
        work.stop.set()
        await work.done.wait()
        assert bench.loop.time() - began_s < 0.1
        status = work.status()
        assert status["stopped"]
        assert not status["complete"]
        assert (await scrub(bench)).status()["complete"]
        bench.check_nothing_is_left()

    run(test, config("tier"), blocks_in_l2=1024)


def test_scrub_reports_a_tier_that_is_unavailable() -> None:
    """A tier that could not be read would be called sound."""

    async def test(bench: Bench) -> None:
        bench.store(10)
        await bench.backed_up()
        (raw,) = bench.raw
        raw.hangs = {"get", "contains"}
        work = begin(bench)
        await until(lambda: not bench.tiers[0].reads_allowed)
        await work.done.wait()
        assert work.tiers[0].unreadable == 10
        work = await scrub(bench)
        assert not work.status()["complete"]
        assert f"no reads for {AWAY_S_MAX:g} s" in work.tiers[0].why

    run(test, config("tier"))


def test_scrub_does_not_restore_flushed_blocks() -> None:
    """A scrub that repairs a block would put it back after a flush."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(20)
        await bench.backed_up()
        bench.forget()
        first, second = bench.raw
        damage(first, hashes[3])
        first.takes_s = second.takes_s = 0.5
        scrubbing = begin(bench, 0)
        await until(lambda: first.calls("get"))
        flushes = bench.node.flushes
        flush = flushes.begin("", host=True, numbers=[0, 1])
        bench.node.spawn(lambda: flushes.run(flush), "flush")
        await flush.done.wait()
        await scrubbing.done.wait()
        assert flush.status()["complete"]
        assert not first.blocks
        assert not second.blocks
        bench.check_nothing_is_left()

    run(test)


def test_shared_tier_is_scrubbed_only_when_named() -> None:
    """A scrub would read a whole object store, which costs money."""

    class Shared(Tier):
        @property
        def shared(self) -> bool:
            return True

    async def test(bench: Bench) -> None:
        bench.store(10)
        await bench.backed_up()
        assert [entry.tier.name for entry in (await scrub(bench)).tiers] == ["tier0"]
        assert (await scrub(bench, 1)).tiers[0].blocks == 10

    async def alone(bench: Bench) -> None:
        with pytest.raises(RefusedError, match="name the tiers"):
            begin(bench)

    run(test, raw=[Tier(), Shared()])
    run(alone, raw=[Shared()])


@pytest.mark.slow
def test_scrub_command(tmp_path, capsys, monkeypatch) -> None:
    """Rot on a real disk would stay, or the exit status would not report it."""
    storage = (
        f'[[storage]]\ntype = "file"\nname = "disk"\npath = "{tmp_path}/store"\n'
        'capacity = "64MiB"\nreserve_free = "0"\nwrite_policy = "write_through"\n'
    )
    with DaemonProcess(tmp_path, capacity="64MiB", storage=storage) as daemon:
        daemon.wait_tier("disk", "ready")
        hashes, parents = blocks.chain(40)
        client = daemon.client()
        handle = client.register(SPACE)
        contents = [blocks.payload(SPACE, h) for h in hashes]
        assert all(client.put(handle, list(zip(hashes, parents, contents, strict=True))))
        daemon.wait_backed_up()

        def command(*words: str) -> int:
            return main(["scrub", "--socket", daemon.socket, *words])

        assert command() == 0
        assert "disk: 40 blocks read" in capsys.readouterr().out
        (slab,) = daemon.store.glob(f"{SPACE.digest.hex()}*/00000001.slab")
        with slab.open("r+b") as file:
            file.seek(5 * 2 * PAGE + PAGE)
            file.write(b"rot!")
        assert command("--json") == 1
        (entry,) = json.loads(capsys.readouterr().out)["tiers"]
        assert (entry["corrupt"], entry["repaired"]) == (1, 1)
        assert command("--tier", "disk") == 0
        capsys.readouterr()

        assert command("--stop") == 1
        assert "no scrub is running" in capsys.readouterr().err
        follow = Operator._follow

        def interrupted(self, order, timeout_s):
            for entry in follow(self, order, timeout_s):
                yield entry
                if isinstance(order, m.Scrub):
                    raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Operator, "_follow", interrupted)
            assert command("--rate", "70kB/s") == 3
        assert "the scrub was stopped" in capsys.readouterr().out
        assert command("--rate", "70kB/s", "--detach") == 0
        assert command("--stop") == 0
        assert "the scrub was stopped" in capsys.readouterr().out
        for words, named in ((("--tier", "tape"), "disk"), (("--rate", "8G"), "8G")):
            assert command(*words) == 2
            assert named in capsys.readouterr().err
        client.close()
        assert daemon.status()["counters"]["scrub_repaired_total"] == 1
    assert command() == 1
    assert "no answer from" in capsys.readouterr().err
