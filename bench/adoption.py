"""Time to recover host memory: a daemon with 4 GiB of it is killed and started again.

The service manager is the test suite's fake, which keeps descriptors as systemd does. Three times
are measured from the start of the process: until the arena has been taken over (the daemon's own
measurement), until the daemon answers, and until every block has been verified. For comparison:
a start with nothing to take over, and one thread that computes all checksums in one go, which is
the lower limit of verification.
"""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

from bench.common import write_result
from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import chain, content, namespace, parents_of
from tests.support.service_manager import ServiceManager
from tests.support.traffic import wait_until
from tierd.backend import checksum
from tierd.client import Client

ARENA_BYTES = 4 << 30
BLOCK_BYTES = (128 << 10, 2 << 20)
PER_CALL = 256
ROUNDS = 5
_TOOK = re.compile(r"taken over in ([0-9.]+) s")


def main() -> None:
    results: dict[str, object] = {}
    for block_bytes in BLOCK_BYTES:
        with tempfile.TemporaryDirectory(prefix="tierd-bench-") as scratch:
            results[f"blocks of {block_bytes >> 10} KiB"] = _case(Path(scratch), block_bytes)
    write_result("adoption", results)  # type: ignore[arg-type]


def _case(scratch: Path, block_bytes: int) -> dict[str, object]:
    with ServiceManager(scratch / "manager") as manager:
        daemon = DaemonProcess(scratch / "d", capacity="4GiB", storage="", manager=manager)
        began = time.perf_counter()
        daemon.start()
        empty_s = time.perf_counter() - began
        try:
            blocks = _fill(daemon, block_bytes)
            rounds = [_round(daemon) for _ in range(ROUNDS)]
        finally:
            daemon.stop()
    best = {key: sorted(r[key] for r in rounds)[ROUNDS // 2] for key in rounds[0]}
    size = blocks * block_bytes
    sample = memoryview(bytearray(256 << 20))
    began = time.perf_counter()
    for at in range(0, len(sample), block_bytes):
        checksum(sample[at : at + block_bytes])
    sums_s = (time.perf_counter() - began) * size / len(sample)
    report: dict[str, object] = {
        "blocks": blocks,
        "adopted share": round(best.pop("adopted") / blocks, 4),
        "start with nothing to take over, s": round(empty_s, 3),
        **{f"{key}, s": round(value, 3) for key, value in best.items()},
        "all checksums by one thread, s": round(sums_s, 3),
        "taken over per 100 GB, s": round(best["taken over"] * 100e9 / size, 2),
        "verified per 100 GB, s": round(best["verified"] * 100e9 / size, 1),
    }
    print(report)
    return report


def _fill(daemon: DaemonProcess, block_bytes: int) -> int:
    """Store blocks until the arena is nearly full; returns the number of blocks."""
    count = ARENA_BYTES * 15 // 16 // block_bytes
    client = daemon.client()
    handle = client.register(namespace(block_bytes=block_bytes))
    hashes = chain("bench", count)
    links = list(zip(hashes, parents_of(hashes), strict=True))
    payload = content(hashes[0], block_bytes)
    for at in range(0, count, PER_CALL):
        stored = client.put(handle, [(h, p, payload) for h, p in links[at : at + PER_CALL]])
        assert all(stored)
    wait_until(lambda: _host(client)["verified_blocks"] == count, 60, "checksums are missing")
    client.close()
    return count


def _round(daemon: DaemonProcess) -> dict[str, float]:
    daemon.kill()
    seen = daemon.log.stat().st_size
    began = time.perf_counter()
    daemon.start()
    answers = time.perf_counter() - began
    client = daemon.client()
    wait_until(lambda: not _host(client)["unverified_blocks"], 120, "blocks stay unverified")
    verified = time.perf_counter() - began
    adopted = float(_host(client)["blocks"])
    client.close()
    found = _TOOK.search(daemon.log.read_bytes()[seen:].decode())
    assert found, daemon.log
    return {
        "adopted": adopted,
        "taken over": float(found[1]),
        "answers": answers,
        "verified": verified,
    }


def _host(client: Client) -> dict[str, int]:
    host = client.status()["host"]
    assert isinstance(host, dict)
    return host


if __name__ == "__main__":
    main()
