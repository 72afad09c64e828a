"""A day of a node in minutes: clients without pause, and every fault that a daemon must survive.

A real daemon with a file and a Redis tier, under a service manager that keeps its descriptors;
client processes compare every byte that they get. In each "hour" the daemon is stopped, killed or
reloaded, or a tier fails, drawn by a seed; in the last third only tiers fail, so that one
incarnation runs long enough to show a leak. At the end of each hour, with no call in progress,
every count that could grow is taken, and a line is fitted through the hours:
bench/results/soak.json has both.

    make bench-soak                               # 2 million calls
    make bench-soak ARGS='--operations 20000'     # a few seconds, nothing is written
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import Json, write_result
from tests.support.blocks import chain, namespace, payload
from tests.support.daemon_process import DaemonProcess
from tests.support.servers.redis import RedisServer
from tests.support.service_manager import ServiceManager
from tests.support.tiers.scene import table
from tests.support.traffic import children, footprint, wait_until
from tierd.client import Client, Handle

OPERATIONS = 2_000_000
HOURS = 24
STEADY_HOURS = 8
"""The last hours, in which the daemon is not restarted."""

FAULTS_PER_HOUR = 5
FAULTS_PER_HOUR_SHORT = 3
CLIENTS = 3
BLOCK_BYTES = 8 << 10
CHAIN_BLOCKS = 8
CHAINS = 400
"""25 MiB: three times L2, and more than either tier holds."""

SKEW = 6
"""How unevenly chains are requested: half of the requests are for a 64th of them. Three quarters of
the blocks are then found in L2, and a tenth in the tiers."""

RARE_CHAINS = 400
RARE_SHARE = 0.05
"""Share of requests for chains that are rarely requested again. They come from a fixed set: the
record of each block (about 800 bytes, for up to 2^18 blocks) does not reach its maximum in a day,
so an endless supply of new blocks would look like a leak."""

CAPACITIES = ("8MiB", "6MiB")
DEADLINE_MS = 100
WAIT_S = 60.0
STEPS = 20
"""Prefixes that each client requests between two checks for a pause."""


class Bound(NamedTuple):
    """How much the fitted line of a count may rise from the first hour to the last."""

    growth_max: float
    steady: bool
    """Whether only the hours of the last incarnation are fitted; counts of the clients and of the
    service manager outlive an incarnation."""


BOUNDS = {
    "daemon_anonymous_mib": Bound(8.0, True),
    "daemon_files": Bound(2.0, True),
    "daemon_memory_files": Bound(4.0, True),
    "daemon_threads": Bound(2.0, True),
    "daemon_processes": Bound(0.5, True),
    "daemon_connections": Bound(8.0, True),
    "ledger_kib": Bound(16.0, True),
    "client_anonymous_mib": Bound(12.0, False),
    # A reload changes the capacity, and segments come and go with it: 16 or 24 of these. Losing one
    # per incarnation would exceed the bound.
    "client_files": Bound(24.0, False),
    "kept_descriptors": Bound(16.0, False),
    "files_on_disk": Bound(6.0, False),
}

# Counters of each client, a row in a file that it shares with this process.
FIELDS = ("calls", "verified_blocks", "stored_blocks", "asked_blocks", "unverified_blocks", "idle")


# --- a client ---------------------------------------------------------------------------


class Engine:
    """One client process: loads, compares, stores, and sometimes leaves an operation unfinished."""

    def __init__(self, socket: str, tally: np.ndarray, pause: Path, seed: int) -> None:
        self.client = Client(socket, name=f"soak-{seed}", call_timeout_ms=2000)
        self.space = namespace(BLOCK_BYTES)
        self.handle: Handle = self.client.register(self.space)
        self.tally = tally
        self.pause = pause
        self.chance = random.Random(seed)
        self.chains = [chain(CHAIN_BLOCKS, tag) for tag in range(CHAINS)]
        self.rare = [chain(CHAIN_BLOCKS, ("rare", tag)) for tag in range(RARE_CHAINS)]
        self.right = {
            h: payload(self.space, h) for hashes, _ in self.chains + self.rare for h in hashes
        }

    def count(self, field: str, number: int = 1) -> None:
        self.tally[FIELDS.index(field)] += number

    def run(self) -> None:
        while True:
            self.count("idle", int(self.pause.exists()) - int(self.tally[FIELDS.index("idle")]))
            if self.tally[FIELDS.index("idle")]:
                time.sleep(0.01)
                continue
            for _ in range(STEPS):
                self.step()

    def step(self) -> None:
        if not self.client.connected or not self.handle.ready:
            # A call without a connection would miss at once and is not counted.
            self.client.poll()
            time.sleep(0.005)
            return
        # Some chains are requested far more often than others.
        hashes, parents = self.chains[int(CHAINS * self.chance.random() ** SKEW)]
        if self.chance.random() < RARE_SHARE:
            hashes, parents = self.rare[self.chance.randrange(RARE_CHAINS)]
        draw = self.chance.random()
        if draw < 0.02:
            self.client.hint(
                [self.handle], hashes, pin_ms=500, priority=self.chance.choice((-1, 1))
            )
            self.count("calls")
        if draw < 0.2:
            views = self.client.get(self.handle, hashes, DEADLINE_MS)
            self.check(hashes, views)
            done = self.client.put(self.handle, self.blocks(hashes, parents, len(views)))
            self.count("calls", 2)
            self.count("stored_blocks", sum(done))
            return
        blocks = self.load(hashes)
        if blocks < len(hashes):
            self.store(hashes[blocks:], parents[blocks:])

    def load(self, hashes: list[bytes]) -> int:
        lease = self.client.acquire([self.handle], hashes, DEADLINE_MS)
        self.count("calls")
        self.count("asked_blocks", len(hashes))
        if lease is None:
            return 0
        views = self.client.lease_views(self.handle, lease.epoch, lease.slots[0]) or []
        copies = [bytes(view[:BLOCK_BYTES]) for view in views]
        if time.monotonic_ns() < lease.expires_ns:
            self.check(hashes, copies)
        else:
            self.count("unverified_blocks", len(copies))
        if self.chance.random() < 0.98:  # Otherwise the lease expires.
            self.client.release(lease)
            self.count("calls")
        return lease.blocks

    def store(self, hashes: list[bytes], parents: list[bytes]) -> None:
        reservation = self.client.reserve(self.handle, hashes, parents)
        self.count("calls")
        if reservation is None:
            return
        draw = self.chance.random()
        if draw < 0.02:
            self.client.abort(reservation)
            self.count("calls")
            return
        count = len(hashes) if draw > 0.05 else self.chance.randrange(len(hashes))
        for block_hash, view in list(zip(hashes, reservation.views, strict=True))[:count]:
            if view is not None:
                view[:BLOCK_BYTES] = self.right[block_hash]
        granted = sum(view is not None for view in reservation.views[:count])
        self.count("stored_blocks", sum(self.client.commit(reservation, granted)))
        self.count("calls")

    def blocks(
        self, hashes: list[bytes], parents: list[bytes], start: int
    ) -> list[tuple[bytes, bytes, bytes]]:
        rest = zip(hashes[start:], parents[start:], strict=True)
        return [(h, parent, self.right[h]) for h, parent in rest]

    def check(self, hashes: list[bytes], found: list[Any]) -> None:
        for block_hash, data in zip(hashes, found, strict=False):
            if data != self.right[block_hash]:
                print(f"block {block_hash.hex()} has wrong bytes", file=sys.stderr, flush=True)
                os._exit(1)
        self.count("verified_blocks", len(found))


# --- the day ----------------------------------------------------------------------------


class Day:
    """The node, its clients, and the faults."""

    def __init__(self, folder: Path, stack: ExitStack, operations: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.operations = operations
        self.hours = max(4, min(HOURS, operations // 50_000))
        self.steady_from = self.hours - max(1, self.hours * STEADY_HOURS // HOURS)
        self.folder = folder
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)
        self.mounted = stack.enter_context(_small_disk(self.disk))
        self.redis = stack.enter_context(
            RedisServer(
                folder / "redis", "--maxmemory", "14mb", "--maxmemory-policy", "allkeys-lru"
            )
        )
        self.manager = stack.enter_context(ServiceManager(folder / "manager"))
        file_tier = {"path": str(self.disk / "store"), "capacity": "16MiB", "reserve_free": "0"}
        redis_tier = {"deadline_ms": 300, "slow_ms": 200, "probe_ms": 200, **self.redis.options()}
        tiers = table("file", {**file_tier, "probe_ms": 200}) + table("redis", redis_tier)
        self.daemon = DaemonProcess(
            folder / "tierd",
            capacity=CAPACITIES[0],
            storage=f"lease_ttl_ms = 2000\n{tiers}",
            manager=self.manager,
        )
        stack.enter_context(self.daemon)
        self.pause = folder / "pause"
        self.shared = folder / "tally"
        self.shared.write_bytes(bytes(8 * len(FIELDS) * CLIENTS))
        self.tally = np.memmap(self.shared, np.int64, "r+", shape=(CLIENTS, len(FIELDS)))
        self.clients = [self.start_client(number) for number in range(CLIENTS)]
        stack.callback(self.end_clients)
        self.happened: Counter[str] = Counter()
        self.series: dict[str, list[float]] = {name: [] for name in BOUNDS}
        self.incarnations = 1
        self.faults: list[Callable[[], None]] = [
            self.redis_stalls,
            self.redis_is_lost,
            self.worker_dies,
            self.store_rots,
            self.reload,
            self.bad_reload,
            self.client_dies,
        ]
        if self.mounted:
            self.faults.append(self.disk_fills)
        self.ends: list[Callable[[], None]] = [self.stop, self.kill, self.kill]

    def run(self) -> None:
        deck: list[Callable[[], None]] = []
        per_hour = FAULTS_PER_HOUR if self.hours == HOURS else FAULTS_PER_HOUR_SHORT
        for hour in range(self.hours):
            for number in range(per_hour):
                part = (hour * per_hour + number) / (self.hours * per_hour)
                self.wait_calls(int(self.operations * part))
                if not deck:
                    deck = [*self.faults, *self.ends]
                    self.chance.shuffle(deck)
                event = deck.pop()
                if hour >= self.steady_from and event in self.ends:
                    event = self.chance.choice(self.faults)
                event()
                self.happened[event.__name__] += 1
            self.wait_calls(self.operations * (hour + 1) // self.hours)
            self.look()
            print(self.line(hour), flush=True)

    def calls(self) -> int:
        return int(self.tally[:, FIELDS.index("calls")].sum())

    def total(self, field: str) -> int:
        return int(self.tally[:, FIELDS.index(field)].sum())

    def wait_calls(self, count: int) -> None:
        """Wait until the clients have made `count` calls."""
        last, since = self.calls(), time.monotonic()
        while last < count:
            time.sleep(0.005)
            for process in self.clients:
                assert process.poll() is None, "a client has ended"
            now = self.calls()
            if now > last:
                last, since = now, time.monotonic()
            assert time.monotonic() - since < WAIT_S, self.log()[-4000:]

    # --- faults -----------------------------------------------------------------------

    def stop(self) -> None:
        assert self.daemon.stop() == 0, self.log()[-4000:]
        self.daemon.start()
        self.incarnations += 1

    def kill(self) -> None:
        self.daemon.kill()
        self.daemon.start()
        self.incarnations += 1

    def redis_stalls(self) -> None:
        self.redis.pause()
        time.sleep(self.chance.uniform(0.1, 1.5))
        self.redis.resume()

    def redis_is_lost(self) -> None:
        self.redis.kill()
        time.sleep(self.chance.uniform(0.0, 0.5))
        self.redis.start()

    def worker_dies(self) -> None:
        for pid in children(self.daemon.pid):
            os.kill(pid, signal.SIGKILL)

    def store_rots(self) -> None:
        for slab in self.slabs()[:4]:
            with slab.open("r+b") as file:
                for _ in range(8):
                    file.seek(self.chance.randrange(max(1, slab.stat().st_size - 64)))
                    file.write(self.chance.randbytes(64))

    def disk_fills(self) -> None:
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(self.chance.uniform(0.1, 0.5))
        filler.unlink()

    def reload(self) -> None:
        text = self.daemon.config.read_text()
        old, new = CAPACITIES if f'capacity = "{CAPACITIES[0]}"' in text else CAPACITIES[::-1]
        self.reloaded(text.replace(f'capacity = "{old}"', f'capacity = "{new}"', 1), "reloaded")

    def bad_reload(self) -> None:
        text = self.daemon.config.read_text()
        self.reloaded(text + "[nonsense]\n", "not reloaded")
        self.daemon.config.write_text(text)

    def reloaded(self, text: str, says: str) -> None:
        before = self.log().count(says)
        self.daemon.config.write_text(text)
        os.kill(self.daemon.pid, signal.SIGHUP)
        wait_until(lambda: self.log().count(says) > before, WAIT_S, f"the log lacks: {says}")

    def client_dies(self) -> None:
        number = self.chance.randrange(CLIENTS)
        self.clients[number].kill()
        self.clients[number].wait()
        self.clients[number] = self.start_client(number)

    def start_client(self, number: int) -> subprocess.Popen[bytes]:
        seed = self.chance.randrange(1 << 30)
        words = [self.daemon.socket, str(self.shared), str(self.pause), str(number), str(seed)]
        return subprocess.Popen([sys.executable, "-m", "bench.soak", "--client", *words])

    def end_clients(self) -> None:
        for process in self.clients:
            process.kill()
            process.wait()

    def slabs(self) -> list[Path]:
        found = sorted((self.disk / "store").glob("*/*.slab"))
        self.chance.shuffle(found)
        return found

    def log(self) -> str:
        return self.daemon.log.read_text()

    # --- growth -----------------------------------------------------------------------

    def look(self) -> None:
        """Take every count while no call is in progress."""
        self.pause.touch()
        idle = FIELDS.index("idle")
        wait_until(lambda: bool(self.tally[:, idle].all()), WAIT_S, "a client does not pause")
        with contextlib.closing(self.daemon.client("look")) as client:
            wait_until(lambda: _is_idle(client), WAIT_S, f"work remains: {client.status()}")
            held = footprint(self.daemon.pid)
            files = _memory_files(self.daemon.pid)
        pids = [self.daemon.pid, *children(self.daemon.pid)]
        mine = [process.pid for process in self.clients]
        now = {
            "daemon_anonymous_mib": held.anonymous_bytes / (1 << 20),
            "daemon_files": held.files,
            "daemon_memory_files": len(files),
            "daemon_threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
            "daemon_processes": held.processes,
            "daemon_connections": held.connections,
            "ledger_kib": sum(files.values()) / 1024,
            "client_anonymous_mib": sum(footprint(pid).anonymous_bytes for pid in mine) / (1 << 20),
            "client_files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in mine),
            "kept_descriptors": len(self.manager.kept),
            "files_on_disk": sum(len(names) for _, _, names in os.walk(self.folder)),
        }
        for name, number in now.items():
            self.series[name].append(round(float(number), 3))
        self.pause.unlink()

    def line(self, hour: int) -> str:
        shown = " ".join(f"{name}={values[-1]:g}" for name, values in self.series.items())
        runs = f"{self.calls()} calls, {self.incarnations} incarnations"
        return f"hour {hour + 1}/{self.hours}: {runs}, {shown}"

    def judge(self) -> dict[str, Json]:
        """The fitted growth of each count. Raises AssertionError if one exceeds its bound in a
        whole day. A shorter run is not judged: its tiers and pools are still growing."""
        rows: dict[str, Json] = {}
        grown = []
        for name, bound in BOUNDS.items():
            values = self.series[name][self.steady_from if bound.steady else 1 :]
            growth = _growth(values)
            rows[name] = {
                "hours": list(self.series[name]),
                "median": statistics.median(values),
                "fitted_over_hours": len(values),
                "fitted_growth": round(growth, 3),
                "bound": bound.growth_max,
            }
            if growth > bound.growth_max and self.hours == HOURS:
                grown.append(f"{name} by {growth:.2f}: {values}")
        assert not grown, grown
        return rows


def _growth(values: list[float]) -> float:
    """Rise of the line fitted through the values, from first to last; 0 for fewer than three."""
    if len(values) < 3:
        return 0.0
    slope, _ = np.polyfit(np.arange(len(values)), values, 1)
    return float(slope) * (len(values) - 1)


def _is_idle(client: Client) -> bool:
    status: Any = client.status()
    host, tiers = status["host"], status["storage"]
    waits = [host["leases"], host["writing_blocks"], host["backlog_blocks"], host["leaving_blocks"]]
    return not any(waits) and all(_is_well(tier) for tier in tiers)


def _is_well(tier: Any) -> bool:
    if tier["state"] == "failing":
        # Its probe is answered. It closes at the next real call; paused clients make none.
        return all(c["state"] in {"closed", "half_open"} for c in tier["circuits"].values())
    return bool(tier["state"] == "ready")


def _memory_files(pid: int) -> dict[int, int]:
    """All memfds of a process by inode: a ledger's size, 0 for any other memfd."""
    found: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(entry)
            if name.startswith("/memfd:"):
                status = entry.stat()
                found[status.st_ino] = status.st_size if re.search("ledger", name) else 0
    return found


@contextlib.contextmanager
def _small_disk(path: Path) -> Iterator[bool]:
    """Mount a separate, small file system at `path`; yields False where mounting is not allowed."""
    words = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(path)]
    done = subprocess.run(words, capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(path)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="calls of all clients")
    parser.add_argument("--seed", type=int, default=1, help="decides which faults occur when")
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        socket, shared, pause, number, seed = arguments.client
        tally = np.memmap(shared, np.int64, "r+", shape=(CLIENTS, len(FIELDS)))
        Engine(socket, tally[int(number)], Path(pause), int(seed)).run()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierd-soak-") as scratch, ExitStack() as stack:
        day = Day(Path(scratch), stack, arguments.operations, arguments.seed)
        try:
            day.run()
        except BaseException:
            print(day.log()[-6000:], file=sys.stderr)
            raise
        seconds = time.monotonic() - began
        log = day.log()
        assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:6000]
        grown = day.judge()
        results: dict[str, Json] = {
            "calls": day.calls(),
            "seconds": round(seconds, 1),
            "seed": arguments.seed,
            "clients": CLIENTS,
            "incarnations": day.incarnations,
            "wrong_blocks": 0,
            **{name: day.total(name) for name in FIELDS if name.endswith("_blocks")},
            "happened": dict(sorted(day.happened.items())),
            "grown": grown,
        }
        assert day.daemon.stop() == 0
    print({name: value for name, value in results.items() if name != "grown"})
    if arguments.operations >= OPERATIONS:
        write_result("soak", results)


if __name__ == "__main__":
    main()
