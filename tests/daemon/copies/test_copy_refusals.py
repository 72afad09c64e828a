"""Attachments that a daemon refuses, and the reasons it gives.

With a real daemon and its copy process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import (
    BLOCK_BYTES,
    PAGE_BYTES,
    PageEngine,
    descriptors,
    mappings,
    namespace,
)
from tests.support.traffic import wait_until
from tierd.daemon.copies.copying import ATTACHMENTS_MAX
from tierd.device.engine_host import HostExport
from tierd.shared_memory.exports import RUNS_MAX, ExportKind, PageLayout, Part, Run, counter_handle

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon without tiers, for all tests of this file."""
    with DaemonProcess(tmp_path_factory.mktemp("node") / "tierd", storage="") as process:
        yield process
        status = process.status()
        assert "internal_errors_total" not in status["counters"], process.log.read_text()[-4000:]
        assert status["host"]["writing_blocks"] == 0
        assert status["counters"].get("copy_process_kills_total", 0) == 0


@pytest.fixture(scope="module")
def witness(node: DaemonProcess) -> Iterator[PageEngine]:
    """An engine that other sessions' errors must not affect."""
    with PageEngine(node.socket, name="witness", model="witness") as made:
        made.wait_attached()
        yield made


@pytest.fixture
def engine(node: DaemonProcess, witness: PageEngine) -> Iterator[PageEngine]:
    """An attached engine, in the same session from its first to its last copy."""
    with PageEngine(node.socket) as made:
        made.wait_attached()
        before = made.client.fileno(), made.attachment.number
        yield made
        made.check_works()
        assert before == (made.client.fileno(), made.attachment.number)
        witness.check_works()


def no_gpu(engine: PageEngine) -> dict[str, Any]:
    gpu = engine.memory.export._replace(
        kind=ExportKind.CUDA_IPC, device=b"\x5a" * 16, handle=bytes(64), parts=()
    )
    return {"exports": [gpu], "events": []}


def two_devices(engine: PageEngine) -> dict[str, Any]:
    gpu = engine.memory.export._replace(device=b"\x5b" * 16)
    return {"exports": [engine.memory.export, gpu]}


def too_far(engine: PageEngine) -> dict[str, Any]:
    return {"layout": engine.layout._replace(block_count=engine.blocks + 1)}


def other_block(engine: PageEngine) -> dict[str, Any]:
    return {"layout": engine.layout._replace(runs=engine.layout.runs[:-1])}


def huge_stride(engine: PageEngine) -> dict[str, Any]:
    return {"layout": engine.layout._replace(block_stride=1 << 62, block_count=1)}


def shifted(engine: PageEngine) -> dict[str, Any]:
    runs = [run._replace(offset=run.offset + 4096) for run in engine.layout.runs]
    return {"layout": engine.layout._replace(runs=tuple(runs))}


def other_order(engine: PageEngine) -> dict[str, Any]:
    return {"layout": engine.layout._replace(runs=engine.layout.runs[::-1])}


def probe_beyond(engine: PageEngine) -> dict[str, Any]:
    return {"probe": lambda _: (engine.blocks, bytes(32))}


def a_part(engine: PageEngine, part: Part) -> dict[str, Any]:
    return {"exports": [engine.memory.export._replace(parts=(part,))]}


def unsealed(engine: PageEngine) -> dict[str, Any]:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    size_bytes = engine.memory.export.size_bytes
    os.ftruncate(fd, size_bytes)
    return a_part(engine, Part(0, size_bytes, fd))


def no_memfd(engine: PageEngine) -> dict[str, Any]:
    fd = os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)
    return a_part(engine, Part(0, engine.memory.export.size_bytes, fd))


def wrong_size(engine: PageEngine) -> dict[str, Any]:
    size_bytes = engine.memory.export.size_bytes + 4096
    part = Part(0, size_bytes, engine.memory.export.parts[0].fd)
    return {"exports": [engine.memory.export._replace(size_bytes=size_bytes, parts=(part,))]}


def missing_part(engine: PageEngine) -> dict[str, Any]:
    return {"exports": [engine.memory.export._replace(parts=())]}


def surplus_part(engine: PageEngine) -> dict[str, Any]:
    return {"exports": [engine.memory.export._replace(parts=engine.memory.export.parts * 2)]}


def gate_of_other_size(engine: PageEngine) -> dict[str, Any]:
    return {"gate_fd": engine.memory.export.parts[0].fd}


def gate_unsealed(engine: PageEngine) -> dict[str, Any]:
    fd = os.memfd_create("gate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, os.fstat(engine.gate_fd).st_size)
    return {"gate_fd": fd}


def gate_no_file(engine: PageEngine) -> dict[str, Any]:
    return {"gate_fd": os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)}


def disordered_ends(engine: PageEngine) -> dict[str, Any]:
    return {"layer_ends": [2 * PAGE_BYTES, PAGE_BYTES, BLOCK_BYTES]}


def short_ends(engine: PageEngine) -> dict[str, Any]:
    return {"layer_ends": [PAGE_BYTES]}


def many_ends(engine: PageEngine) -> dict[str, Any]:
    return {"layer_ends": range(1, BLOCK_BYTES + 1)}


def event_outside(engine: PageEngine) -> dict[str, Any]:
    return {"events": [counter_handle(0, engine.memory.export.size_bytes - 4)]}


def event_of_gpu(engine: PageEngine) -> dict[str, Any]:
    return {"events": [b"\0" + bytes(64)]}


REFUSALS = [
    (no_gpu, "GPU"),
    (two_devices, "several devices"),
    (too_far, "block 64 ends beyond its allocation"),
    (other_block, f"its runs have {BLOCK_BYTES - PAGE_BYTES} bytes, but a block has {BLOCK_BYTES}"),
    (huge_stride, "more than any allocation has"),
    (shifted, "pages are not where it says"),
    (other_order, "pages are not where it says"),
    (probe_beyond, "probe block 64"),
    (unsealed, "not sealed against shrinking"),
    (no_memfd, "has to be a memfd"),
    (wrong_size, "bytes as a memfd of"),
    (missing_part, "one part"),
    (surplus_part, "one part"),
    (gate_of_other_size, "gate"),
    (gate_unsealed, "gate"),
    (gate_no_file, "gate"),
    (disordered_ends, "the ends must ascend"),
    (short_ends, "the end of the block"),
    (many_ends, "layer groups"),
    (event_outside, "outside of the exported memory"),
    (event_of_gpu, "not a GPU's handles"),
]


@pytest.mark.parametrize(("what", "reason"), REFUSALS, ids=[x[0].__name__ for x in REFUSALS])
def test_unsupported_attachment_is_refused_with_the_reason(
    engine: PageEngine,
    node: DaemonProcess,
    what: Callable[[PageEngine], dict[str, Any]],
    reason: str,
) -> None:
    """An engine would copy the wrong memory, or not be told why the daemon does not copy."""
    changes = what(engine)
    copier = engine.copy_pid()
    attachment = engine.attach(**changes)
    assert reason in engine.refusal(attachment)
    assert reason in node.log.read_text()
    assert engine.copy_pid() == copier
    engine.client.detach(attachment)


def test_copy_process_without_a_usable_device_ends(engine: PageEngine) -> None:
    """Every GPU that a container cannot see would leave a process behind."""
    attachment = engine.attach(**no_gpu(engine))
    assert "GPU" in engine.refusal(attachment)
    engine.wait(lambda: len(engine.status()["copies"]) == 1)


def test_attachments_are_bounded_per_session(engine: PageEngine) -> None:
    """An engine that forgets to detach would fill the copy process."""
    probe = engine.probe(True)
    more = [engine.attach(probe=lambda _: probe) for _ in range(ATTACHMENTS_MAX)]
    engine.wait(lambda: all(x.ready or x.refusal for x in more), 60)
    assert [x.refusal for x in more if not x.ready] == [
        f"a session attaches at most {ATTACHMENTS_MAX} times"
    ]
    assert [x for x in more if x.refusal] == more[-1:]
    numbers = {x.number for x in more[:-1]}
    assert len(numbers) == ATTACHMENTS_MAX - 1
    assert engine.attachment.number not in numbers
    for attachment in more:
        assert engine.client.detach(attachment)


def test_allocation_exported_under_two_numbers_is_mapped_once(engine: PageEngine) -> None:
    """Layers of a pool share memory, which would take a device's address space twice."""
    fd = os.dup(engine.memory.export.parts[0].fd)
    again = engine.memory.export._replace(parts=(Part(0, engine.memory.export.size_bytes, fd),))
    copier = engine.copy_pid()
    second = engine.attach(exports=[again])
    engine.wait(lambda: second.ready or second.refusal)
    assert second.ready
    assert mappings(copier, engine.memory) == 1
    first, engine.attachment = engine.attachment, second
    engine.check_works()
    engine.attachment = first
    engine.check_works()
    assert engine.client.detach(second)
    os.close(fd)
    assert mappings(copier, engine.memory) == 1
    engine.check_works()


def test_allocation_is_unmapped_with_its_last_attachment(
    node: DaemonProcess, witness: PageEngine
) -> None:
    """An engine's freed KV memory would stay in the copy process until that ends."""
    with PageEngine(node.socket) as engine:
        engine.wait_attached()
        copier = engine.copy_pid()
        held = descriptors(copier), descriptors(node.pid)
        other = engine.attach()
        engine.wait(lambda: other.ready)
        assert engine.client.detach(engine.attachment)
        assert mappings(copier, engine.memory) == 1
        assert engine.client.detach(other)
        assert mappings(copier, engine.memory) == 0
        # Gate and events, and the export's own descriptor.
        assert descriptors(copier) < held[0]
        wait_until(lambda: descriptors(node.pid) < held[1], 10, "an export stays open")


def test_layout_of_many_tiny_pieces_is_accepted(engine: PageEngine) -> None:
    """One engine's odd layout would look like a hanging device, and end everyone's copies."""
    copier = engine.copy_pid()
    handle = engine.client.register(namespace("tiny", RUNS_MAX))
    runs = tuple(Run(0, 2 * at, 1) for at in range(RUNS_MAX))
    digest = hashlib.sha256(bytes(RUNS_MAX)).digest()
    with contextlib.closing(HostExport(256 * RUNS_MAX)) as memory:
        tiny = engine.attach(
            handle,
            exports=[memory.export],
            layout=PageLayout(runs, 2 * RUNS_MAX, 128),
            events=[],
            probe=lambda _: (0, digest),
        )
        engine.wait(lambda: tiny.ready or tiny.refusal)
        assert tiny.ready
        assert engine.client.detach(tiny)
    assert engine.copy_pid() == copier
