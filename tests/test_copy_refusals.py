"""What a daemon that copies refuses, and what ends a session: garbage must cost nobody else.

With a real daemon and its copy process, and peers that say what no client of ours would.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.daemon_process import DaemonProcess
from tests.page_engine import (
    BLOCK_BYTES,
    PAGE_BYTES,
    PageEngine,
    RawPeer,
    chain,
    mappings,
)
from tests.traffic import wait_until
from tierd.daemon.copying import ATTACHMENTS_MAX, COPIES_MAX, EXPORTS_MAX
from tierd.exports import ExportKind, Part, counter_handle
from tierd.wire import messages as m
from tierd.wire.session import encode

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
    """An engine that is to notice nothing of what others do."""
    with PageEngine(node.socket, name="witness", model="witness") as made:
        made.wait_attached()
        yield made


@pytest.fixture
def engine(node: DaemonProcess, witness: PageEngine) -> Iterator[PageEngine]:
    """An engine that is attached, in the same session from its first to its last copy."""
    with PageEngine(node.socket) as made:
        made.wait_attached()
        before = made.client.fileno(), made.attachment.number
        yield made
        works(made)
        assert before == (made.client.fileno(), made.attachment.number)
        works(witness)


def works(engine: PageEngine) -> None:
    """An engine's blocks are stored and loaded."""
    hashes = chain(os.urandom(8), 3)
    engine.compute(hashes, [1, 2, 3])
    assert engine.store(hashes, [1, 2, 3]) == 3
    assert engine.load(hashes, [4, 5, 6]) == 3


def copy_pid(engine: PageEngine) -> int:
    [process] = [x for x in engine.status()["copies"] if x["device"] == "host"]
    return int(process["pid"])


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def no_slot_reserved(engine: PageEngine) -> Callable[[], bool]:
    return lambda: engine.status()["host"]["writing_blocks"] == 0


# --- what ATTACH refuses ----------------------------------------------------------------


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
    (other_block, f"its runs have {BLOCK_BYTES - PAGE_BYTES} bytes, a block {BLOCK_BYTES}"),
    (huge_stride, "more than an allocation has"),
    (shifted, "its memory is not where it says"),
    (other_order, "its memory is not where it says"),
    (probe_beyond, "probe block 64"),
    (unsealed, "not sealed against shrinking"),
    (no_memfd, "has to be a memfd"),
    (wrong_size, "came as a memfd of"),
    (missing_part, "one part"),
    (surplus_part, "one part"),
    (gate_of_other_size, "gate"),
    (gate_unsealed, "gate"),
    (gate_no_file, "gate"),
    (disordered_ends, "layer groups have to end one after the other"),
    (short_ends, "the last one with the block"),
    (many_ends, "layer groups"),
    (event_outside, "counter lies outside"),
    (event_of_gpu, "not a GPU's handles"),
]


@pytest.mark.parametrize(("what", "reason"), REFUSALS, ids=[x[0].__name__ for x in REFUSALS])
def test_what_cannot_be_copied_is_refused_with_the_reason(
    engine: PageEngine,
    node: DaemonProcess,
    what: Callable[[PageEngine], dict[str, Any]],
    reason: str,
) -> None:
    """An engine would copy the wrong memory, or nobody would know why the daemon does not copy."""
    changes = what(engine)
    copier = copy_pid(engine)
    attachment = engine.attach(**changes)
    assert reason in engine.refusal(attachment)
    assert reason in node.log.read_text()
    assert copy_pid(engine) == copier
    engine.client.detach(attachment)


def test_a_process_without_a_device_does_not_stay(engine: PageEngine) -> None:
    """Every GPU that a container cannot see would leave a process behind."""
    attachment = engine.attach(**no_gpu(engine))
    assert "GPU" in engine.refusal(attachment)
    engine.wait(lambda: len(engine.status()["copies"]) == 1)


def test_a_session_has_only_so_many_attachments(engine: PageEngine) -> None:
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


def test_one_allocation_under_two_numbers_is_mapped_once(engine: PageEngine) -> None:
    """What shares memory, as layers of a pool do, would cost a device's address space twice."""
    fd = os.dup(engine.memory.export.parts[0].fd)
    again = engine.memory.export._replace(parts=(Part(0, engine.memory.export.size_bytes, fd),))
    copier = copy_pid(engine)
    second = engine.attach(exports=[again])
    engine.wait(lambda: second.ready or second.refusal)
    assert second.ready
    assert mappings(copier, engine.memory) == 1
    first, engine.attachment = engine.attachment, second
    works(engine)
    engine.attachment = first
    works(engine)
    assert engine.client.detach(second)
    os.close(fd)
    assert mappings(copier, engine.memory) == 1
    works(engine)


def test_an_allocation_is_let_go_of_with_its_last_attachment(
    node: DaemonProcess, witness: PageEngine
) -> None:
    """An engine that frees its KV would leave it in the copy process, as long as that lives."""
    with PageEngine(node.socket) as engine:
        engine.wait_attached()
        copier = copy_pid(engine)
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


# --- what ends a session ----------------------------------------------------------------


def part_of_nothing(peer: RawPeer) -> None:
    peer.say(m.Part(7, 0, 4096), peer.gate_fd)


def handle_unknown(peer: RawPeer) -> None:
    peer.export()
    peer.attach(5)


def export_unknown(peer: RawPeer) -> None:
    peer.attach(peer.register(), exports=[9])


def export_named_twice(peer: RawPeer) -> None:
    handle = peer.register()
    peer.export()
    peer.attach(handle, exports=[1, 1])


def nothing_named(peer: RawPeer) -> None:
    peer.attach(peer.register(), exports=[])


def short_digest(peer: RawPeer) -> None:
    handle = peer.register()
    peer.export()
    peer.attach(handle, probe_digest=bytes(31))


def crooked_runs(peer: RawPeer) -> None:
    handle = peer.register()
    peer.export()
    peer.attach(handle, runs=bytes(21))


def crooked_events(peer: RawPeer) -> None:
    handle = peer.register()
    peer.export()
    peer.attach(handle, events=b"\x05abc")


def exported_twice(peer: RawPeer) -> None:
    peer.export()
    peer.export()


def kind_unknown(peer: RawPeer) -> None:
    peer.say(m.Export(1, 9, bytes(16), 4096, b""))


def short_uuid(peer: RawPeer) -> None:
    peer.say(m.Export(1, 0, bytes(15), 4096, b""))


def long_handle(peer: RawPeer) -> None:
    peer.say(m.Export(1, 1, bytes(16), 4096, bytes(65)))


def too_many_exports(peer: RawPeer) -> None:
    for number in range(EXPORTS_MAX + 1):
        peer.say(m.Export(number, 0, bytes(16), 4096, b""))


def drop_unknown(peer: RawPeer) -> None:
    peer.say(m.DropExport(3))


def fewer_blocks(peer: RawPeer) -> None:
    handle, attachment = peer.attached()
    peer.store(attachment, peer.reserve(handle, chain(os.urandom(8), 3)), [1, 2])


def block_beyond(peer: RawPeer) -> None:
    handle, attachment = peer.attached()
    peer.store(attachment, peer.reserve(handle, chain(os.urandom(8), 2)), [1, 64])


def load_beyond(peer: RawPeer) -> None:
    _, attachment = peer.attached()
    peer.load(attachment, [0], [64])


def load_unequal(peer: RawPeer) -> None:
    _, attachment = peer.attached()
    peer.load(attachment, [0, 1], [1])


def load_too_much(peer: RawPeer) -> None:
    _, attachment = peer.attached()
    count = m.KEYS_PER_CALL_MAX + 1
    peer.load(attachment, [0] * count, [0] * count)


def crooked_slots(peer: RawPeer) -> None:
    _, attachment = peer.attached()
    peer.say(m.Load(1, attachment, b"abc", b"abc", 1 << 62, 0, 0, 0))


def other_namespace(peer: RawPeer) -> None:
    _, attachment = peer.attached()
    peer.store(attachment, peer.reserve(peer.register("witness"), chain(os.urandom(8), 1)), [1])


def filling(peer: RawPeer) -> tuple[int, int]:
    """An attachment, and a reservation that is being filled: its copy waits for an event."""
    handle, _ = peer.attached()
    counter = counter_handle(0, 0)
    peer.attach(handle, events=bytes([len(counter)]) + counter)
    attachment = peer.hear(m.Attached).attachment
    reservation = peer.reserve(handle, chain(os.urandom(8), 2))
    peer.say(m.Store(peer.call(), attachment, reservation, m.pack_slots([1, 2]), 0, 1))
    return attachment, reservation


def stored_twice(peer: RawPeer) -> None:
    attachment, reservation = filling(peer)
    peer.store(attachment, reservation, [1, 2])


def committed_early(peer: RawPeer) -> None:
    _, reservation = filling(peer)
    peer.say(m.Commit(peer.call(), reservation, 2))


def part_without_descriptor(peer: RawPeer) -> None:
    peer.export()
    peer.say(m.Part(1, 0, 4096))


def descriptor_unasked(peer: RawPeer) -> None:
    peer.say(m.Status(1), peer.gate_fd)


def garbage_with_descriptors(peer: RawPeer) -> None:
    socket.send_fds(peer.sock, [os.urandom(600)], [peer.gate_fd] * 60)


def half_a_frame_with_descriptors(peer: RawPeer) -> None:
    whole = encode(m.Part(1, 0, 4096), 1)
    for _ in range(70):
        socket.send_fds(peer.sock, [whole[:1]], [peer.gate_fd])


ENDINGS = [
    part_of_nothing,
    handle_unknown,
    export_unknown,
    export_named_twice,
    nothing_named,
    short_digest,
    crooked_runs,
    crooked_events,
    exported_twice,
    kind_unknown,
    short_uuid,
    long_handle,
    too_many_exports,
    drop_unknown,
    fewer_blocks,
    block_beyond,
    load_beyond,
    load_unequal,
    load_too_much,
    crooked_slots,
    other_namespace,
    stored_twice,
    committed_early,
    part_without_descriptor,
    descriptor_unasked,
    garbage_with_descriptors,
    half_a_frame_with_descriptors,
]


@pytest.mark.parametrize("say", ENDINGS, ids=[x.__name__ for x in ENDINGS])
def test_a_wrong_message_ends_its_session_alone(
    node: DaemonProcess, witness: PageEngine, say: Callable[[RawPeer], None]
) -> None:
    """One broken client would take the others' copies, or the daemon's descriptors."""
    works(witness)
    daemon, copier = node.pid, copy_pid(witness)
    before = descriptors(daemon), descriptors(copier)
    with RawPeer(node.socket) as peer:
        say(peer)
        assert peer.ended()
    wait_until(
        lambda: (descriptors(daemon), descriptors(copier)) == before,
        10,
        f"descriptors stay open: {before} before",
    )
    assert copy_pid(witness) == copier
    wait_until(no_slot_reserved(witness), 10, "slots stay reserved")
    status = witness.status()
    assert "internal_errors_total" not in status["counters"]
    works(witness)


# --- what is answered, with nothing copied ----------------------------------------------


def test_what_is_not_there_is_not_copied(node: DaemonProcess, witness: PageEngine) -> None:
    """A late or wrong LOAD or STORE would read freed slots, or write another engine's."""
    hashes = chain(os.urandom(8), 2)
    witness.compute(hashes, [1, 2])
    with RawPeer(node.socket) as peer, RawPeer(node.socket) as other:
        handle, attachment = peer.attached()
        mine = peer.reserve(handle, chain(os.urandom(8), 2))
        theirs, _ = other.attached()
        foreign = other.reserve(theirs, chain(os.urandom(8), 2))

        def copied() -> tuple[int, str]:
            answer = peer.hear(m.Copied)
            return answer.blocks, answer.reason

        peer.store(attachment, foreign, [1, 2])
        assert copied() == (0, "nothing is reserved or attached")
        peer.store(attachment + 99, mine, [1, 2])
        assert copied() == (0, "nothing is reserved or attached")
        peer.store(attachment, mine, [1, 2], event=3)
        assert copied()[0] == 0
        peer.store(attachment, mine, [1, 2])
        assert copied() == (2, "")
        peer.say(m.Commit(peer.call(), mine, 2))
        assert peer.hear(m.Committed).blocks == 2
        peer.store(attachment, mine, [1, 2])
        assert copied() == (0, "nothing is reserved or attached")
        # Reserved and not committed, never reserved, not there at all.
        for slot in (*foreign_slots(other, theirs), 100, 0xFFFF_FFFF):
            peer.load(attachment, [slot], [1])
            assert copied() == (0, "a slot is not readable")
        peer.say(m.Acquire(peer.call(), [handle], b"".join(hashes), 0, 0, 0, 0))
        peer.hear(m.Acquired)
        peer.load(attachment, [0], [1], expires_ns=time.monotonic_ns())
        assert copied() == (0, "its lease is over")
        peer.load(attachment + 99, [0], [1])
        assert copied() == (0, "nothing is attached")
        peer.load(attachment, [0], [1], event=8)
        assert copied()[0] == 0
        peer.load(attachment, [], [])
        assert copied() == (0, "")
        # As far as a number goes.
        peer.load(attachment, [0], [1], job=(1 << 63) - 1)
        assert copied() == (1, "")
        peer.say(m.Detach(peer.call(), attachment + 99))
        assert peer.hear(m.Detached).attachment == attachment + 99
    wait_until(no_slot_reserved(witness), 10, "slots stay reserved")
    works(witness)


def foreign_slots(peer: RawPeer, handle: int) -> tuple[int, ...]:
    """Slots that a peer has reserved and not filled."""
    hashes = chain(os.urandom(8), 2)
    peer.say(m.Reserve(peer.call(), handle, b"".join(hashes), bytes(64)))
    return m.unpack_slots(peer.hear(m.Reserved).slots)


def test_a_session_has_only_so_many_copies_under_way(
    node: DaemonProcess, witness: PageEngine
) -> None:
    """A client that asks without end would bury all others' copies under its own."""
    count = COPIES_MAX + 44
    with RawPeer(node.socket) as peer:
        handle, _ = peer.attached()
        hashes = chain(os.urandom(8), 1)
        counter = counter_handle(0, 0)
        peer.attach(handle, events=bytes([len(counter)]) + counter)
        attachment = peer.hear(m.Attached).attachment
        reservation = peer.reserve(handle, hashes)
        peer.store(attachment, reservation, [1])
        assert peer.hear(m.Copied).blocks == 1
        peer.say(m.Commit(peer.call(), reservation, 1))
        peer.hear(m.Committed)
        peer.say(m.Acquire(peer.call(), [handle], hashes[0], 0, 0, 0, 0))
        [slot] = m.unpack_slots(peer.hear(m.Acquired).slots)
        # Behind an event that does not happen before all are under way.
        blocks = m.pack_slots([2])
        for job in range(count):
            load = m.Load(peer.call(), attachment, m.pack_slots([slot]), blocks, 1 << 62, job, 0, 1)
            peer.say(load)
        refused = [peer.hear(m.Copied) for _ in range(count - COPIES_MAX)]
        assert {(x.blocks, x.reason) for x in refused} == {(0, "too many copies at once")}
        peer.memory.view[:8] = (1).to_bytes(8, "little")
        done = [peer.hear(m.Copied) for _ in range(COPIES_MAX)]
        assert {(x.blocks, x.reason) for x in done} == {(1, "")}
    works(witness)
