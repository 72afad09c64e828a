"""Run the checks on this machine's first GPU, one line of JSON each: `make gpu-test`."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable

from tests.gpu.checks import CHECKS, Rig, Shape, Told, layouts, openings, private_shm, unshowable
from tests.gpu.engine import can_have_private_shm
from tierd.device.api import CannotOpenError
from tierd.device.cuda import CudaDevice, runtime, visible

LIMIT_S = 360
"""Timeout of all checks, far more than on fake CUDA; a traceback shows where a GPU hangs."""

REFUSALS = {
    "cuda-async": "cudaMallocAsync",
    "cuda": "managed memory",
}
"""Engines whose memory cannot be exported, and a word of the reason."""


def main() -> int:
    try:
        device = CudaDevice.find(visible()[0])
    except CannotOpenError as error:
        print(f"skipped, nothing has been checked: {error}")
        return 0
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    rig = Rig(device, "cuda", rounds=100, free_bytes=lambda: runtime.memGetInfo()[0])
    reserved = Rig(device, "cuda-vmm", Shape(channel_bytes=16_000))
    checks: dict[str, Callable[[], Told]] = {
        check.__name__: functools.partial(check, rig) for check in CHECKS
    }
    for check in (openings, layouts):
        checks[f"{check.__name__} of reserved addresses"] = functools.partial(check, reserved)
    for kind, words in REFUSALS.items():
        checks[f"{kind} is refused"] = functools.partial(unshowable, kind, words)
    if can_have_private_shm():
        checks["private /dev/shm"] = functools.partial(private_shm, rig)
    print(json.dumps({"device": device.name}), flush=True)
    failed = sum(not passes(name, check) for name, check in checks.items())
    print(json.dumps({"checks": len(checks), "failed": failed}), flush=True)
    faulthandler.cancel_dump_traceback_later()
    # Without closing the device: a stream may wait for an engine that a check has killed.
    sys.stdout.flush()
    os._exit(min(failed, 1))


def passes(name: str, check: Callable[[], Told]) -> bool:
    """Run one check; any exception is reported, so that the other checks still run."""
    begin = time.perf_counter()
    line: dict[str, object] = {"check": name}
    try:
        line |= {"passed": True, "told": check()}
    except Exception as error:
        line |= {"passed": False, "error": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    line["seconds"] = round(time.perf_counter() - begin, 2)
    print(json.dumps(line), flush=True)
    return bool(line["passed"])


if __name__ == "__main__":
    sys.exit(main())
