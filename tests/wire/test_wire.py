"""The wire: golden bytes, and any split, merge or damage of the stream."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import RemoteProtocolError
from tierd.shared_memory.exports import NO_EVENT, Run, pack_runs
from tierd.wire import messages as m
from tierd.wire.frames import FRAME_BYTES_MAX, HEAD_BYTES, FrameDecoder, encode_frame
from tierd.wire.session import Role, WireSession, encode

GOLDEN = Path(__file__).parents[1] / "data" / "golden_frames.json"

SAMPLES: list[m.Message] = [
    m.Hello(m.PROTOCOL_VERSION, "engine"),
    m.Register(1, {"model": "m", "tp_rank": 0, "hash_root": bytes(32)}, True),
    m.Acquire(2, [0, 1], b"h" * 64, 2000, 1 << 62, 15, 20_000, 1),
    m.Release(7),
    m.Cancel(2),
    m.Reserve(3, 0, b"h" * 32, b"p" * 32),
    m.Commit(4, 9, 1),
    m.Abort(9),
    m.Status(5),
    m.Welcome(m.PROTOCOL_VERSION, b"epoch123", "0.1.0", 30_000),
    m.Registered(1, 0, 4096, 256),
    m.Segment(0, 3),
    m.Guard(),
    m.Acquired(2, 7, 1, m.pack_slots([5, 6]), 123_456_789, b"\x02"),
    m.Reserved(3, 9, m.pack_slots([1, m.SLOT_PRESENT, m.SLOT_REFUSED])),
    m.Committed(4, 1),
    m.StatusReply(5, {"version": "0.1.0", "host": {"blocks": 1}}),
    m.Error(0, "why"),
    m.Ready(2),
    m.Hint([0, 1], b"h" * 64, 600_000, 30_000, 2, True),
    m.Export(1, 1, b"u" * 16, 1 << 30, b"c" * 64),
    m.Part(1, 2 << 20, 4 << 20),
    m.Attach(
        6,
        0,
        [1],
        pack_runs([Run(0, 4096, 65_536)]),
        1 << 17,
        8192,
        m.pack_handles([bytes(65), b"\x01" + bytes(12)]),
        77,
        b"d" * 32,
        [65_536],
    ),
    m.Store(7, 3, 9, m.pack_slots([12]), NO_EVENT, 0),
    m.Load(8, 3, m.pack_slots([5]), m.pack_slots([13]), 123_456_789, 4, 1, 99),
    m.Detach(9, 3),
    m.DropExport(1),
    m.Attached(6, 3, "pitched, 21 GB/s in, 20 GB/s out"),
    m.Copied(7, 1, ""),
    m.Detached(9, 3, ""),
    m.Flush(10, "0a1b", True, [0, 1]),
    m.Scrub(11, [], 100_000_000),
    m.StopScrub(12),
    m.Describe(13, b"n" * 16),
    m.Progress(10, {"complete": False}),
    m.Done(10, {"complete": True}),
    m.Described(13, {"model": "m"}),
    m.Warm(14, 0, b"h" * 64, 1, 60_000, 1 << 30, 3_600_000, True),
    m.Teach(0, b"h" * 32, m.pack_slots([7]), m.pack_slots([60])),
    m.Explain(15, b"n" * 16, b"h" * 32),
    m.Inventory(16, b"n" * 16, 0),
    m.Unregister(3, True),
    m.Loaded([0, 1], 5, [1, 0, 2], 750_000),
    m.Warmed(14, bytes([m.Warmth.HERE, m.Warmth.NOWHERE]), {"bytes": 0}),
    m.Explained(15, {"blocks": []}),
    m.Listed(16, False, b"h" * 32, b"p" * 32, m.pack_slots([7]), m.pack_slots([m.NEVER])),
]


def fd_count(message: m.Message) -> int:
    return int(type(message) in m.WITH_DESCRIPTOR)


def frame(message: m.Message) -> bytes:
    return encode(message, fd_count(message))


def test_golden_bytes() -> None:
    """An engine with last month's client would stop understanding this daemon."""
    golden = json.loads(GOLDEN.read_text())
    assert {type(s).__name__: frame(s).hex() for s in SAMPLES} == golden


def test_every_message_has_a_sample() -> None:
    """A message without golden bytes could change unseen."""
    numbers = m.FROM_CLIENT | m.FROM_DAEMON
    assert len({type(s) for s in SAMPLES}) == len(SAMPLES) == len(numbers)


class Reader:
    """A session of one end, and the messages that it has received."""

    def __init__(self, role: Role) -> None:
        self.got: list[tuple[m.Message, tuple[int, ...]]] = []
        self.wire = WireSession(role, lambda message, fds: self.got.append((message, fds)))

    def receive(self, data: bytes, fds: list[int] | None = None) -> None:
        self.wire.receive(data, fds or [])


def session_samples(role: Role) -> list[m.Message]:
    mine = m.FROM_CLIENT if role is Role.DAEMON else m.FROM_DAEMON
    return [sample for sample in SAMPLES if number_of(sample) in mine]


def number_of(message: m.Message) -> int:
    return m.encode(message)[1]


@given(st.lists(st.integers(0, 2000), max_size=40), st.sampled_from(list(Role)))
def test_frames_may_be_split_anywhere(cuts: list[int], role: Role) -> None:
    """A stream cut at unlucky places would lose or change messages."""
    sent = session_samples(role)
    stream = b"".join(frame(s) for s in sent)
    fds = [100 + i for i in range(sum(map(fd_count, sent)))]
    reader = Reader(role)
    edges = sorted({min(c, len(stream)) for c in cuts} | {0, len(stream)})
    for start, end in itertools.pairwise(edges):
        # Descriptors come merged with the first bytes, long before their frame.
        reader.receive(stream[start:end], fds if start == 0 else [])
    assert [message for message, _ in reader.got] == sent
    assert [fd for _, frame_fds in reader.got for fd in frame_fds] == fds
    assert reader.wire.take_fds() == []


def test_merged_descriptors_stay_with_their_frames() -> None:
    """A segment would be mapped under another one's number."""
    reader = Reader(Role.CLIENT)
    stream = frame(SAMPLES[9]) + b"".join(encode(m.Segment(0, i), 1) for i in range(3))
    reader.receive(stream, [50, 51, 52])
    assert [(g.segment, fds) for g, fds in reader.got if isinstance(g, m.Segment)] == [
        (0, (50,)),
        (1, (51,)),
        (2, (52,)),
    ]


@given(st.binary(max_size=400))
def test_garbage_is_refused_or_incomplete(garbage: bytes) -> None:
    """Garbage on the socket would crash the daemon instead of one session."""
    reader = Reader(Role.DAEMON)
    with contextlib.suppress(RemoteProtocolError):
        reader.receive(garbage)
    assert all(isinstance(message, m.Hello) for message, _ in reader.got)


@given(st.data())
def test_damaged_frames_raise_only_protocol_errors(data: st.DataObject) -> None:
    """A flipped byte in a frame would raise an error that no code catches."""
    sample = data.draw(st.sampled_from(SAMPLES))
    raw = bytearray(frame(sample))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(HEAD_BYTES, len(raw) - 1))] = data.draw(st.integers(0, 255))
    role = Role.DAEMON if number_of(sample) in m.FROM_CLIENT else Role.CLIENT
    reader = Reader(role)
    reader.receive(frame(SAMPLES[0] if role is Role.DAEMON else SAMPLES[9]))
    with contextlib.suppress(RemoteProtocolError):
        reader.receive(bytes(raw), [9] * raw[2])


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"XX\0\0\0\0\0\0", "not a frame"),
        (b"TK\0\1\0\0\0\0", "not a frame"),
        (b"TK\0\0\xff\xff\xff\xff", "exceeds the limit"),
        (b"TK\xff\0\0\0\0\0", "descriptors"),
        (encode_frame(b"\xc1"), "not MessagePack"),
        (encode_frame(b"\x91" * 5000), "not MessagePack"),
        (encode_frame(b"\xdd\xff\xff\xff\xff"), "not MessagePack"),
        (encode_frame(b"\x90"), "starts with its number"),
        (encode_frame(b"\x91\x63"), "unknown, or out of order"),
        (encode_frame(m.encode(m.Status(1))), "unknown, or out of order"),
        (encode_frame(b"\x92\x01\x01"), "2 fields"),
        (encode_frame(b"\x93\x01\xc3\xa1x"), "Hello.version is bool"),
        (encode_frame(b"\x93\x01\xff\xa1x"), "must be 0 to"),
        (encode_frame(m.encode(m.Hello(1, "x")), 1), "and came with 0"),
    ],
)
def test_hostile_frames(raw: bytes, why: str) -> None:
    """A hostile frame must end its session with a reason that an operator understands."""
    with pytest.raises(RemoteProtocolError, match=why):
        Reader(Role.DAEMON).receive(raw)


def test_declared_length_allocates_nothing() -> None:
    """A head that claims 4 GiB would take the daemon's memory."""
    decoder = FrameDecoder()
    frames: list[bytes] = []
    head = b"TK\0\0" + FRAME_BYTES_MAX.to_bytes(4, "little")
    decoder.feed(head, [], lambda payload, fds: frames.append(bytes(payload)))
    assert frames == []
    assert len(decoder._buffer) == HEAD_BYTES


def test_descriptors_without_frames_are_returned() -> None:
    """A peer could make this process run out of descriptors."""
    reader = Reader(Role.CLIENT)
    reader.receive(b"", [70, 71])
    assert reader.wire.take_fds() == [70, 71]
    with pytest.raises(RemoteProtocolError, match="descriptors came before their frames"):
        reader.receive(b"", list(range(100, 200)))


def test_unexpected_descriptor_is_refused_and_returned() -> None:
    """A descriptor that came with the wrong message would leak."""
    reader = Reader(Role.DAEMON)
    reader.receive(frame(SAMPLES[0]))
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        reader.receive(encode(m.Status(1), 1), [77])
    assert reader.wire.take_fds() == [77]


def test_key_limit() -> None:
    """A call with too many keys must be refused, and one at the limit must work."""
    assert len(m.split_hashes(bytes(32 * m.KEYS_PER_CALL_MAX))) == m.KEYS_PER_CALL_MAX
    with pytest.raises(RemoteProtocolError, match="at most"):
        m.split_hashes(bytes(32 * (m.KEYS_PER_CALL_MAX + 1)))
    with pytest.raises(RemoteProtocolError, match="must be 32 each"):
        m.split_hashes(bytes(31))
    with pytest.raises(RemoteProtocolError, match="multiple of 4"):
        m.unpack_slots(bytes(3))
