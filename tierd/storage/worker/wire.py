"""Messages between the daemon and a worker process, typed structs in MessagePack.

A frame carries a batch. The fields of its blocks are packed records, which cost a tenth of one
message per block. Both ends run the same version of this file. A message that does not decode is
a bug; the process that receives one ends the connection.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tierd.backend import (
    SCANNED_MAX,
    BlockHeader,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
)
from tierd.shared_memory.mapping import ViewPlace
from tierd.types import CHECKSUM_BYTES, HASH_BYTES, SCOPE_BYTES, BlockKey

HASHES_PER_CALL_MAX: Final = 128 << 10
"""Maximum hashes per frame: 4 MiB of the 5 MiB that a frame may have. Larger calls are split."""

BLOCKS_PER_CALL_MAX: Final = 32 << 10
"""Maximum blocks per frame: 3.4 MiB of a put, and as much of the answer to a get."""

TEXTS_MAX: Final = 1024
"""Maximum texts about unreadable places in one step of a scan; the rest is one text with a count.
"""

TEXT_CHARS_MAX: Final = 400

_HASH = struct.Struct(f"{HASH_BYTES}s")
_GET = struct.Struct(f"<{HASH_BYTES}sQQII")
_PUT = struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}s{CHECKSUM_BYTES}sQQII")
_HEADER = struct.Struct(f"<{SCOPE_BYTES}s{HASH_BYTES}s{HASH_BYTES}sI{CHECKSUM_BYTES}s")
_RESULT = struct.Struct(f"<B{_HEADER.format[1:]}")
_OUTCOMES: Final = tuple(Outcome)
_CODES: Final = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
_encoder = msgspec.msgpack.Encoder()
_scanned = msgspec.msgpack.Decoder(tuple[bytes, list[str]])
_texts = msgspec.msgpack.Decoder(list[str])


class Open(msgspec.Struct, array_like=True, tag=1):
    """Call: create the backend and open it. `log_level` is the daemon's."""

    options: dict[str, object]
    log_level: int


class Close(msgspec.Struct, array_like=True, tag=2):
    """Call: close the backend; the process ends after its answer."""


class Contains(msgspec.Struct, array_like=True, tag=3):
    """Call: contains_many; the reply has one byte per hash."""

    namespace: bytes
    hashes: bytes


class Get(msgspec.Struct, array_like=True, tag=4):
    """Call: get_into; the reply has the results."""

    namespace: bytes
    blocks: bytes


class Put(msgspec.Struct, array_like=True, tag=5):
    """Call: put_many; the reply has the outcomes."""

    namespace: bytes
    blocks: bytes


class Delete(msgspec.Struct, array_like=True, tag=6):
    """Call: delete_many; the reply has the count."""

    namespace: bytes
    hashes: bytes


class Scan(msgspec.Struct, array_like=True, tag=7):
    """Call: the next step of a scan; the first call starts it. An empty reply follows the last."""

    scan: int


class EndScan(msgspec.Struct, array_like=True, tag=8):
    """End a scan; no call for it follows."""

    scan: int


class Cancel(msgspec.Struct, array_like=True, tag=9):
    """Cancel a call. Its reply still comes, once it has released its views."""

    number: int


class Map(msgspec.Struct, array_like=True, tag=10):
    """A mapping for later calls; its frame carries the descriptor."""

    serial: int
    size_bytes: int


class Unmap(msgspec.Struct, array_like=True, tag=11):
    """Mappings that no later call names."""

    serials: list[int]


class Marks(msgspec.Struct, array_like=True, tag=12):
    """Call: marks; the reply has texts."""


class AddMark(msgspec.Struct, array_like=True, tag=13):
    """Call: add_mark."""

    mark: str


class DropMarks(msgspec.Struct, array_like=True, tag=14):
    """Call: drop_marks."""

    marks: list[str]


class Reload(msgspec.Struct, array_like=True, tag=15):
    """Call: reload."""


class Use(msgspec.Struct, array_like=True, tag=16):
    """Call: use_many; the reply has one byte per hash."""

    namespace: bytes
    hashes: bytes


Call = (
    Open | Close | Contains | Use | Get | Put | Delete | Scan | Marks | AddMark | DropMarks | Reload
)
Ask = Call | EndScan | Cancel | Map | Unmap


class Request(msgspec.Struct, array_like=True):
    """Daemon to worker. `call` is 0 for a message without a reply."""

    call: int
    ask: Ask


class End(enum.IntEnum):
    """How a call ended."""

    OK = 0
    CANCELLED = 1
    BACKEND_ERROR = 2
    CONFIG_ERROR = 3
    BUG = 4
    """The backend raised an exception that its contract does not allow."""
    DIED = 5
    """Never sent: the process ended before it answered."""


class Report(msgspec.Struct, array_like=True):
    """The backend's stats, and its counters since the start of the process."""

    blocks: int
    used_bytes: int
    capacity_bytes: int
    index_complete: bool
    trouble: str
    counters: dict[str, int]


class Reply(msgspec.Struct, array_like=True):
    """Worker to daemon. `report` is set if it has changed; `call` 0 carries only a report."""

    call: int
    end: End = End.OK
    value: bytes | int = b""
    text: str = ""
    report: Report | None = None


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    """Concatenate block hashes."""
    packed = b"".join(hashes)
    assert len(packed) == HASH_BYTES * len(hashes)
    return packed


def unpack_hashes(packed: bytes) -> list[bytes]:
    """Undo `pack_hashes`."""
    return [block_hash for (block_hash,) in _HASH.iter_unpack(packed)]


def pack_gets(requests: Sequence[GetRequest], places: Sequence[ViewPlace]) -> bytes:
    """Pack requests with the places of their views."""
    assert all(len(r.block_hash) == HASH_BYTES for r in requests)
    return b"".join(
        [
            _GET.pack(block_hash, place.serial, place.offset, len(view), length)
            for (block_hash, view, length), place in zip(requests, places, strict=True)
        ]
    )


def unpack_gets(packed: bytes, mappings: Mapping[int, memoryview]) -> list[GetRequest]:
    """Unpack requests with views of this process's mappings."""
    return [
        GetRequest(block_hash, _view(mappings[serial], offset, size), length)
        for block_hash, serial, offset, size, length in _GET.iter_unpack(packed)
    ]


def pack_puts(requests: Sequence[PutRequest], places: Sequence[ViewPlace]) -> bytes:
    """Pack requests with the places of their views."""
    for request in requests:
        assert len(request.block_hash) == len(request.parent) == HASH_BYTES
        assert len(request.checksum) == CHECKSUM_BYTES
    return b"".join(
        [
            _PUT.pack(block_hash, parent, digest, place.serial, place.offset, len(view), length)
            for (block_hash, parent, digest, view, length), place in zip(
                requests, places, strict=True
            )
        ]
    )


def unpack_puts(packed: bytes, mappings: Mapping[int, memoryview]) -> list[PutRequest]:
    """Unpack requests with views of this process's mappings."""
    return [
        PutRequest(block_hash, parent, digest, _view(mappings[serial], offset, size), length)
        for block_hash, parent, digest, serial, offset, size, length in _PUT.iter_unpack(packed)
    ]


def pack_results(results: Sequence[GetResult]) -> bytes:
    """Pack results of get_into. Raises ValueError for a result that breaks the contract."""
    return b"".join([_pack_result(*result) for result in results])


def unpack_results(packed: bytes) -> list[GetResult]:
    """Undo `pack_results`."""
    return [
        GetResult(_OUTCOMES[code], _header(*fields))
        if _OUTCOMES[code] is Outcome.HIT
        else GetResult(_OUTCOMES[code])
        for code, *fields in _RESULT.iter_unpack(packed)
    ]


def pack_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    """Pack outcomes of put_many, one byte each."""
    return bytes([_CODES[outcome] for outcome in outcomes])


def unpack_outcomes(packed: bytes) -> list[Outcome]:
    """Undo `pack_outcomes`."""
    return [_OUTCOMES[code] for code in packed]


def pack_scanned(step: Scanned) -> bytes:
    """Pack a step of a scan. Raises ValueError for a step that breaks the contract."""
    if len(step.headers) > SCANNED_MAX:
        raise ValueError(f"a step of a scan gave {len(step.headers)} headers")
    unread = [text[:TEXT_CHARS_MAX] for text in step.unread]
    if len(unread) > TEXTS_MAX:
        unread[TEXTS_MAX:] = [f"{len(unread) - TEXTS_MAX} more"]
    headers = b"".join([_HEADER.pack(*_fields(header)) for header in step.headers])
    return _encoder.encode((headers, _sendable(unread)))


def unpack_scanned(packed: bytes) -> Scanned | None:
    """Undo `pack_scanned`; return None for the empty reply after the last step."""
    if not packed:
        return None
    headers, unread = _scanned.decode(packed)
    return Scanned([_header(*fields) for fields in _HEADER.iter_unpack(headers)], unread)


def pack_texts(texts: Sequence[str]) -> bytes:
    """Pack marks."""
    return _encoder.encode(_sendable(texts))


def unpack_texts(packed: bytes) -> list[str]:
    """Undo `pack_texts`."""
    return _texts.decode(packed)


def _sendable(texts: Sequence[str]) -> list[str]:
    # A file's name may contain surrogates, which UTF-8 cannot encode.
    return [text.encode("utf-8", "replace").decode() for text in texts]


_NO_HEADER: Final = bytes(_HEADER.size)


def _pack_result(outcome: Outcome, header: BlockHeader | None) -> bytes:
    if (outcome is Outcome.HIT) is not (header is not None):
        raise ValueError(f"get_into gave {outcome} with header {header}")
    if header is None:
        return bytes([_CODES[outcome]]) + _NO_HEADER
    return _RESULT.pack(_CODES[outcome], *_fields(header))


def _fields(header: BlockHeader) -> tuple[bytes, bytes, bytes, int, bytes]:
    (namespace, block_hash), parent, length, digest = header
    # struct would cut or pad them, and a wrong key could become a valid one.
    if (
        len(namespace) != SCOPE_BYTES
        or len(block_hash) != HASH_BYTES
        or len(parent) != HASH_BYTES
        or len(digest) != CHECKSUM_BYTES
    ):
        raise ValueError(f"the backend gave a header of a wrong form: {header}")
    return namespace, block_hash, parent, length, digest


def _header(
    namespace: bytes, block_hash: bytes, parent: bytes, length: int, digest: bytes
) -> BlockHeader:
    return BlockHeader(BlockKey(namespace, block_hash), parent, length, digest)


def _view(mapping: memoryview, offset: int, size_bytes: int) -> memoryview:
    assert offset + size_bytes <= len(mapping)
    return mapping[offset : offset + size_bytes]
