"""Copies by the daemon on the host device, against the same copies by the engine's own thread.

An engine's pages lie in exported memory, layers outermost. The limit is a strided copy of the same
blocks between pages and mapped slots in this process, done as a connector in `shm` mode does it.
All cases take turns in one run. A store is reserve, copy, commit; a load is acquire, copy, release;
two chunks are in flight at a time, as in the connector. The point of the mode is the CPU time per
block in the engine's process, so that is measured as well.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.common import interleaved, write_result
from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import LAYERS, PageEngine, chain, parents_of
from tierd.client import PendingCopy, Reservation

ROUND_BYTES = 64 << 20
CHUNK_BYTES = 16 << 20
PAGES = (16 << 10, 64 << 10, 512 << 10)
FLYING = 2


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as scratch:
        results: dict[str, object] = {}
        for page_bytes in PAGES:
            with DaemonProcess(
                Path(scratch) / str(page_bytes), capacity="1GiB", storage=""
            ) as daemon:
                results |= _case(daemon, page_bytes)
    write_result("copies", results)  # type: ignore[arg-type]


def _case(daemon: DaemonProcess, page_bytes: int) -> dict[str, object]:
    count = ROUND_BYTES // (LAYERS * page_bytes)
    tag = itertools.count()
    with PageEngine(daemon.socket, blocks=count, page_bytes=page_bytes) as engine:
        engine.wait_attached()
        for block in range(count):
            engine.write(block, bytes([block % 251]) * engine.block_bytes)
        resident = chain("resident", count)
        _store(engine, resident)
        rows = _rows(engine)
        cases: dict[str, Callable[[], object]] = {
            "strided copy, store": lambda: _copy(engine, rows, store=True),
            "strided copy, load": lambda: _copy(engine, rows, store=False),
            "store": lambda: _store(engine, chain(next(tag), count)),
            "load": lambda: _load(engine, resident),
        }
        seconds = interleaved(cases)
        used = {name: _cpu_s(cases[name]) for name in cases}
        how = engine.attachment.how
    label = f"{LAYERS} pages of {page_bytes >> 10} KiB"
    found: dict[str, object] = {}
    for way in ("store", "load"):
        limit = seconds[f"strided copy, {way}"]
        found[f"{way}, {label}"] = {
            "gb_per_s": round(ROUND_BYTES / seconds[way] / 1e9, 2),
            "ratio_to_strided_copy": round(limit / seconds[way], 2),
            "engine_cpu_ratio_to_strided_copy": round(
                used[way] / max(used[f"strided copy, {way}"], 1e-9), 2
            ),
            "how": how,
        }
        print(way, label, found[f"{way}, {label}"])
    return found


def _cpu_s(case: Callable[[], object]) -> float:
    """CPU time of this process for one round."""
    before = time.process_time()
    case()
    return time.process_time() - before


def _rows(engine: PageEngine) -> np.ndarray:
    """(layers, blocks) of pages as opaque items, the element type that copies fastest."""
    raw = np.frombuffer(engine.memory.view, np.uint8, LAYERS * engine.blocks * engine.page_bytes)
    return raw.view(np.dtype((np.void, engine.page_bytes))).reshape(LAYERS, engine.blocks)


def _copy(engine: PageEngine, rows: np.ndarray, *, store: bool) -> None:
    views = _slots(engine)
    for block in range(engine.blocks):
        slot = views[block]
        if store:
            slot[:] = rows[:, block]
        else:
            rows[:, block] = slot


def _slots(engine: PageEngine) -> list[np.ndarray]:
    """Mapped slots of resident blocks, as rows of pages."""
    lease = engine.client.acquire([engine.handle], chain("resident", engine.blocks), 2000)
    assert lease is not None
    views = engine.client.lease_views(engine.handle, lease.epoch, lease.slots[0])
    engine.client.release(lease)
    assert views is not None
    kind = np.dtype((np.void, engine.page_bytes))
    return [np.frombuffer(view, np.uint8, engine.block_bytes).view(kind) for view in views]


def _chunks(engine: PageEngine) -> list[range]:
    size = max(1, CHUNK_BYTES // engine.block_bytes)
    return [range(at, min(at + size, engine.blocks)) for at in range(0, engine.blocks, size)]


def _store(engine: PageEngine, hashes: list[bytes]) -> None:
    parents = parents_of(hashes)
    flying: deque[tuple[Reservation, PendingCopy]] = deque()

    def end() -> None:
        reservation, pending = flying.popleft()
        while not pending.done:
            engine.client.wait(0.01)
        assert all(engine.client.commit(reservation, pending.blocks))

    for chunk in _chunks(engine):
        part = slice(chunk.start, chunk.stop)
        reservation = engine.client.reserve(engine.handle, hashes[part], parents[part])
        assert reservation is not None
        pending = engine.client.begin_store(engine.attachment, reservation, list(chunk))
        flying.append((reservation, pending))
        if len(flying) == FLYING:
            end()
    while flying:
        end()


def _load(engine: PageEngine, hashes: list[bytes]) -> None:
    client, job = engine.client, 0
    lease = client.acquire([engine.handle], hashes, 2000)
    assert lease is not None
    engine.gate.prepare(job)
    blocks = list(range(engine.blocks))
    pending = client.begin_load(
        engine.attachment, lease.epoch, lease.slots[0], blocks, lease.expires_ns, job=job
    )
    while not pending.done:
        client.wait(0.01)
    assert pending.blocks == engine.blocks, pending.reason
    client.release(lease)


if __name__ == "__main__":
    main()
