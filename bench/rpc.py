"""Round trips: the smallest call, and acquire of 1,000 resident blocks.

The limit is a 60-byte ping-pong over a socketpair between two Python processes, in turns with the
calls.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import raw_ping_pong, write_result
from tests.support.blocks import chain, namespace
from tests.support.daemon_process import DaemonProcess

ROUNDS = 20
CALLS = 300
"""Calls per round; the cases take turns, so a slow moment affects all of them."""


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="tierd-bench-") as scratch,
        DaemonProcess(Path(scratch), capacity="256MiB", storage="") as daemon,
    ):
        client = daemon.client("bench")
        handle = client.register(namespace(4096))
        hashes, parents = chain(1000)
        blocks = [(h, p, bytes(4096)) for h, p in zip(hashes, parents, strict=True)]
        assert all(client.put(handle, blocks))
        daemon.wait_backed_up()
        unknown = [bytes(32)]

        def small() -> None:
            assert client.acquire([handle], unknown, 10) is None

        def acquire() -> None:
            lease = client.acquire([handle], hashes, 10)
            assert lease is not None
            assert lease.blocks == 1000
            leases.append(lease)

        def release_all() -> None:
            while leases:
                client.release(leases.pop())

        leases: list = []
        raw = raw_ping_pong()
        times: dict[str, list[float]] = {"raw": [], "small": [], "acquire 1000": []}
        cases = [("raw", raw, CALLS), ("small", small, CALLS), ("acquire 1000", acquire, 50)]
        for _ in range(ROUNDS):
            for name, case, calls in cases:
                times[name] += [timed(case) for _ in range(calls)]
                release_all()
        client.close()
    results: dict = {}
    for name, values in times.items():
        values.sort()
        p50, p99 = values[len(values) // 2], values[int(len(values) * 0.99)]
        results[name] = {"p50_us": round(p50 * 1e6, 1), "p99_us": round(p99 * 1e6, 1)}
    ratio = results["small"]["p50_us"] / results["raw"]["p50_us"]
    results["small"] |= {"p50_ratio_to_raw": round(ratio, 2), "target": 1.5}
    results["acquire 1000"]["target_p99_us"] = 600
    for name, row in results.items():
        print(f"{name:<14}", row)
    write_result("rpc", results)


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
