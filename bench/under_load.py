"""The daemon's loop under load: a small call and an acquire of 1,000 resident blocks, while blocks
are promoted without pause, four batches at a time from the file tier and four from S3.

The requested blocks are three times L2, so nearly every batch is read from its tier. The S3 server
(SeaweedFS) uses 0.8 of the two cores. It stands for a server on another machine, so it is niced;
"server in idle time" goes further and gives it only CPU time that no other process wants. The
controls run the file tier's threads, or those of both tiers, in the daemon's process. A bare
ping-pong of two processes is timed as well: on busy cores it shows the machine's share of the
times.

The cases take turns; a row has the median of the rounds, and each round's p99. `python -m
bench.under_load` runs all cases as root: another user may not be allowed to take the server out of
idle time again.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from bench.common import Json, raw_ping_pong, write_result
from tests.support.blocks import chain, namespace
from tests.support.daemon_process import DaemonProcess
from tests.support.servers.s3 import SeaweedFS
from tierd.client import Client, Handle, Lease
from tierd_backends.file import FileBackend
from tierd_backends.s3 import S3Backend

BLOCK_BYTES = 2 << 20
BATCH = 16
"""Blocks of a chain: 32 MiB, four batches of the daemon."""

CHAINS = 24
"""768 MiB in each tier."""

HOST_CAPACITY = "512MiB"
READS = 4
"""Concurrent reads of the S3 tier; the file tier has four threads."""

READERS = 4
"""Acquires in flight for each tier, one per batch that it reads concurrently."""

RESIDENT = 1000
READY_S = 60.0
ROUNDS = 4
MEASURED_S = 8.0
"""Length of each round of each case."""

PAUSE_S = 0.0005
"""Pause between two calls, as between an engine's scheduler steps."""

TARGETS_P99_US = {"small call": 2000, "acquire 1000": 4000}


class FileHere(FileBackend):
    """A control: the file tier as threads of the daemon."""

    in_worker: ClassVar[bool] = False


class S3Here(S3Backend):
    """A control: the S3 client as threads of the daemon."""

    in_worker: ClassVar[bool] = False


class QuietSeaweed(SeaweedFS):
    """An S3 server whose CPU time is kept from the daemon, as if it ran on another machine."""

    def command(self) -> list[str]:
        return ["nice", "-n", "10", *super().command()]

    def set_policy(self, policy: int) -> None:
        """Set the scheduling policy of all its threads; new threads inherit it."""
        assert self.process is not None
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))


class Case(NamedTuple):
    """The daemon's tiers, and the tiers that the load reads from."""

    tiers: str
    load: tuple[str, ...]
    server_policy: int = os.SCHED_OTHER


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as scratch:
        folder = Path(scratch)
        _register_control(folder / "site")
        with QuietSeaweed(folder / "s3") as server:
            keys = server.options(server.make_bucket())
            # Blocks of S3 stay in S3: otherwise the file tier would soon answer for both.
            store = str(folder / "store")
            file_tier = _table("file", path=store, capacity="4GiB", fill_from_lower=False)
            s3_tier = _table("s3", timeout_ms=20_000, connections=READS, **keys)
            _fill(folder / "fill-file", file_tier, "file")
            _fill(folder / "fill-s3", s3_tier, "s3")
            file_here = file_tier.replace('type = "file"', 'type = "file-here"')
            s3_here = s3_tier.replace('type = "s3"', 'type = "s3-here"')
            both, all_load = file_tier + s3_tier, ("file", "s3")
            cases = {
                "idle": Case(both, ()),
                "file reads": Case(both, ("file",)),
                "file and S3 reads": Case(both, all_load),
                "the same, server in idle time": Case(both, all_load, os.SCHED_IDLE),
                "the same, file tier in the daemon": Case(file_here + s3_tier, all_load),
                "the same, no worker process": Case(file_here + s3_here, all_load),
            }
            runs: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in cases}
            for number in range(ROUNDS):
                for name, case in cases.items():
                    server.set_policy(case.server_policy)
                    with DaemonProcess(
                        folder / f"{name} {number}".replace(" ", "-"),
                        capacity=HOST_CAPACITY,
                        storage=case.tiers,
                    ) as daemon:
                        runs[name].append(_measure(daemon, case.load))
                    print(f"{name}: {runs[name][-1]}", flush=True)
    results: dict[str, Json] = {name: _medians(rounds) for name, rounds in runs.items()}
    results["targets_p99_us"] = TARGETS_P99_US
    write_result("under_load", results)


def _measure(daemon: DaemonProcess, load: tuple[str, ...]) -> dict[str, dict[str, float]]:
    client = _ready_client(daemon)
    handle = client.register(namespace(4096, model="bench-resident"))
    hashes, parents = chain(RESIDENT)
    blocks = [(h, p, bytes(4096)) for h, p in zip(hashes, parents, strict=True)]
    assert all(client.put(handle, blocks))
    daemon.wait_backed_up()
    with contextlib.ExitStack() as stack:
        for kind in load:
            stack.enter_context(_reading(daemon.socket, kind))
        if load:
            time.sleep(3.0)  # Until L2 is full and each promotion evicts.
        before = _promoted(client)
        began = time.perf_counter()
        bare, small, large = _calls(client, handle, hashes)
        seconds = time.perf_counter() - began
        after = _promoted(client)
    client.close()
    return {
        "bare ping-pong": _row(bare),
        "small call": _row(small),
        "acquire 1000": _row(large),
        "gb_per_s": {
            name: round((after[name] - before[name]) / seconds / 1e9, 2) for name in after
        },
    }


def _medians(rounds: list[dict[str, dict[str, float]]]) -> Json:
    """Median of every number over the rounds, and the p99 of each round beside the bare one's."""
    row: dict[str, Json] = {}
    for part, numbers in rounds[0].items():
        medians = {name: statistics.median(each[part][name] for each in rounds) for name in numbers}
        row[part] = medians
        if "p99_us" not in medians:
            continue
        p99s = [each[part]["p99_us"] for each in rounds]
        bares = [each["bare ping-pong"]["p99_us"] for each in rounds]
        ratios = [p99 / bare for p99, bare in zip(p99s, bares, strict=True)]
        row[part] = {
            **medians,
            "p99_us_runs": list(p99s),
            "p99_ratio_to_bare": round(statistics.median(ratios), 2),
        }
    return row


def _calls(client: Client, handle: Handle, hashes: list[bytes]) -> list[list[float]]:
    """Seconds of each round trip with a process that only echoes, of each small call, and of each
    acquire of all resident blocks, in turns."""

    def call(wanted: list[bytes]) -> None:
        lease = client.acquire([handle], wanted, 1000)
        assert lease is not None
        assert lease.blocks == len(wanted)
        leases.append(lease)

    leases: list[Lease] = []
    cases: list[Callable[[], None]] = [
        raw_ping_pong(),
        partial(call, hashes[:1]),
        partial(call, hashes),
    ]
    seconds: list[list[float]] = [[] for _ in cases]
    end = time.perf_counter() + MEASURED_S
    while time.perf_counter() < end:
        for case, times in zip(cases, seconds, strict=True):
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            case()
            times.append(time.perf_counter() - began)
            while leases:
                client.release(leases.pop())
    return seconds


def _row(times: list[float]) -> dict[str, float]:
    times.sort()
    at = {"p50_us": 0.5, "p99_us": 0.99, "p999_us": 0.999}
    row = {name: round(times[int(len(times) * share)] * 1e6, 1) for name, share in at.items()}
    return {**row, "max_us": round(times[-1] * 1e6, 1), "calls": len(times)}


def _promoted(client: Client) -> dict[str, int]:
    """Bytes that each tier has delivered so far."""
    return {
        str(tier["type"]).removesuffix("-here"): tier["counters"]["read_bytes_total"]
        for tier in _tiers(client)
    }


@contextlib.contextmanager
def _reading(socket: str, kind: str) -> Iterator[None]:
    """Acquire blocks that only the tier `kind` has, without pause, in a separate process."""
    reader = subprocess.Popen([sys.executable, "-m", "bench.under_load", socket, kind])
    try:
        yield
        assert reader.poll() is None, "the load ended before the measurement"
    finally:
        reader.kill()
        reader.wait()


def _read(socket: str, kind: str) -> None:
    """Runs in the process of `_reading` until it is killed."""

    def run(seed: int) -> None:
        chance = random.Random(seed)
        client = Client(socket, name=f"bench-{kind}", map_segments=False, call_timeout_ms=30_000)
        handle = client.register(_space(kind))
        while True:
            hashes, _ = chain(BATCH, f"{kind} {chance.randrange(CHAINS)}")
            lease = client.acquire([handle], hashes, 20_000)
            if lease is None or lease.blocks != BATCH:
                print(f"{kind}: {lease.blocks if lease else 0} of {BATCH} blocks", file=sys.stderr)
            if lease is not None:
                client.release(lease)

    for seed in range(READERS):
        threading.Thread(target=run, args=(seed,), daemon=True).start()
    threading.Event().wait()


def _ready_client(daemon: DaemonProcess) -> Client:
    """A client, connected once all tiers are ready."""
    client = daemon.client("bench")
    end = time.monotonic() + READY_S
    while any(tier["state"] != "ready" for tier in _tiers(client)):
        assert time.monotonic() < end, _tiers(client)
        time.sleep(0.01)
    return client


def _tiers(client: Client) -> list[dict]:
    status: dict = client.status()
    tiers: list[dict] = status["storage"]
    return tiers


def _fill(folder: Path, storage: str, kind: str) -> None:
    """Put all chains of `kind` into its tier, using a daemon that has no other tier."""
    with DaemonProcess(folder, capacity=HOST_CAPACITY, storage=storage) as daemon:
        client = _ready_client(daemon)
        handle = client.register(_space(kind))
        content = os.urandom(BLOCK_BYTES)
        for number in range(CHAINS):
            hashes, parents = chain(BATCH, f"{kind} {number}")
            blocks = [(h, p, content) for h, p in zip(hashes, parents, strict=True)]
            assert all(client.put(handle, blocks))
            status = daemon.wait_backed_up(120)
        client.close()
        assert status["storage"][0]["blocks"] >= CHAINS * BATCH, status["storage"]


def _space(kind: str):
    return namespace(BLOCK_BYTES, model=f"bench-{kind}")


def _table(kind: str, **keys: object) -> str:
    """A `[[storage]]` table whose breaker does not open during the measurement."""
    values = {"type": kind, "deadline_ms": 30_000, "slow_ms": 30_000, **keys}
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(["[[storage]]", *lines, ""])


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | int) else f'"{value}"'


def _register_control(site: Path) -> None:
    """Register the controls as backend types, as a third party's package would."""
    info = site / "tierd_bench-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tierd-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[tierd.backends]\n"
        "file-here = bench.under_load:FileHere\n"
        "s3-here = bench.under_load:S3Here\n"
    )
    here = Path(__file__).parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(here), str(here / "backends")])


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _read(*sys.argv[1:])
    else:
        main()
