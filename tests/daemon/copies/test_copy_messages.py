"""Invalid copy messages end only the session that sent them.

A real daemon with its copy process serves peers that send messages no real client would.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import PageEngine, chain, descriptors
from tests.support.raw_peer import RawPeer
from tests.support.traffic import wait_until
from tierd.daemon.copies.copying import COPIES_MAX
from tierd.daemon.copies.exports import EXPORTS_MAX
from tierd.shared_memory.exports import counter_handle
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
        assert status["counters"]["copy_process_starts_total"] == 1


@pytest.fixture(scope="module")
def witness(node: DaemonProcess) -> Iterator[PageEngine]:
    """An engine that other sessions' errors must not affect."""
    with PageEngine(node.socket, name="witness", model="witness") as made:
        made.wait_attached()
        # From here on the peers' namespace has its memory and descriptors.
        with PageEngine(node.socket) as first:
            first.wait_attached()
            first.check_works()
        yield made


# --- messages that end a session ---------------------------------------------------------


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
    """Return an attachment, and a reservation whose copy waits for an event."""
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
def test_invalid_copy_message_ends_only_its_session(
    node: DaemonProcess, witness: PageEngine, say: Callable[[RawPeer], None]
) -> None:
    """One broken client would take the others' copies, or the daemon's descriptors."""
    witness.check_works()
    daemon, copier = node.pid, witness.copy_pid()
    before = descriptors(daemon), descriptors(copier)
    with RawPeer(node.socket) as peer:
        say(peer)
        assert peer.ended()
    wait_until(
        lambda: (descriptors(daemon), descriptors(copier)) == before,
        10,
        f"descriptors stay open: {before} before",
    )
    assert witness.copy_pid() == copier
    witness.wait_no_slot_reserved()
    status = witness.status()
    assert "internal_errors_total" not in status["counters"]
    witness.check_works()


def test_client_that_disconnects_at_any_point_leaks_nothing(
    node: DaemonProcess, witness: PageEngine
) -> None:
    """Each engine that dies while it starts would leave its memory open permanently."""
    daemon, copier = node.pid, witness.copy_pid()
    before = descriptors(daemon), descriptors(copier)
    for number in range(60):
        with RawPeer(node.socket) as peer:
            handle = peer.register()
            peer.export()
            peer.attach(handle)
            if number % 3:
                peer.say(m.DropExport(1))
            if number % 2:
                counter = counter_handle(0, 0)
                peer.export(2)
                peer.attach(handle, exports=[2], events=bytes([len(counter)]) + counter)
                attachment = peer.hear(m.Attached).attachment
                reservation = peer.reserve(handle, chain(os.urandom(8), 2))
                peer.store(attachment, reservation, [1, 2])
                peer.say(m.Detach(peer.call(), attachment))
    witness.wait_no_slot_reserved()
    wait_until(
        lambda: (descriptors(daemon), descriptors(copier)) == before,
        10,
        f"descriptors stay open: {before} before",
    )
    [process] = witness.status()["copies"]
    assert process["attachments"] == 1
    witness.check_works()


# --- answered without a copy -------------------------------------------------------------


def test_copies_of_missing_blocks_and_slots_are_refused(
    node: DaemonProcess, witness: PageEngine
) -> None:
    """A late or wrong LOAD or STORE would read freed slots, or write another engine's."""
    hashes = chain(os.urandom(8), 2)
    with RawPeer(node.socket) as peer, RawPeer(node.socket) as other:
        handle, attachment = peer.attached()
        mine = peer.reserve(handle, hashes)
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
        # Reserved and not committed, never reserved, and nonexistent slots.
        for slot in (*foreign_slots(other, theirs), 100, 0xFFFF_FFFF):
            peer.load(attachment, [slot], [1])
            assert copied() == (0, "a slot is not readable")
        peer.say(m.Acquire(peer.call(), [handle], b"".join(hashes), 0, 0, 0, 0))
        slot, _ = m.unpack_slots(peer.hear(m.Acquired).slots)
        peer.load(attachment, [slot], [1], expires_ns=time.monotonic_ns())
        assert copied() == (0, "the lease has expired")
        peer.load(attachment + 99, [slot], [1])
        assert copied() == (0, "nothing is attached")
        peer.load(attachment, [slot], [1], event=8)
        assert copied()[0] == 0
        peer.load(attachment, [], [])
        assert copied() == (0, "")
        # The largest job number.
        peer.load(attachment, [slot], [1], job=(1 << 63) - 1)
        assert copied() == (1, "")
        peer.say(m.Detach(peer.call(), attachment + 99))
        assert peer.hear(m.Detached).attachment == attachment + 99
    witness.wait_no_slot_reserved()
    witness.check_works()


def foreign_slots(peer: RawPeer, handle: int) -> tuple[int, ...]:
    """Return slots that a peer has reserved and not filled."""
    hashes = chain(os.urandom(8), 2)
    peer.say(m.Reserve(peer.call(), handle, b"".join(hashes), bytes(64)))
    return m.unpack_slots(peer.hear(m.Reserved).slots)


def test_copies_under_way_are_bounded_per_session(node: DaemonProcess, witness: PageEngine) -> None:
    """A client that sends copies without end would delay all others' copies."""
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
        # Behind an event that does not occur before all are under way.
        blocks = m.pack_slots([2])
        for job in range(count):
            load = m.Load(peer.call(), attachment, m.pack_slots([slot]), blocks, 1 << 62, job, 0, 1)
            peer.say(load)
        refused = [peer.hear(m.Copied) for _ in range(count - COPIES_MAX)]
        assert {(x.blocks, x.reason) for x in refused} == {(0, "too many copies at once")}
        peer.memory.view[:8] = (1).to_bytes(8, "little")
        done = [peer.hear(m.Copied) for _ in range(COPIES_MAX)]
        assert {(x.blocks, x.reason) for x in done} == {(1, "")}
    witness.check_works()
