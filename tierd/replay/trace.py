"""Reads traces in Mooncake's format: JSON lines with a request's block ids and lengths.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, ...]}`,
in order of time. Ids are any integers; equal ids mean the same block with the same prefix.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Final, cast

from tierd.errors import ConfigError
from tierd.eviction.policy import PrefixRequest

_GZIP_MAGIC: Final = b"\x1f\x8b"
LINE_BYTES_MAX: Final = 64 << 20
"""Maximum length of a line; 64 MiB hold millions of ids, so a longer line is not a trace."""

TIMESTAMP_MS_MAX: Final = 1 << 53
"""Largest integer that every JSON implementation represents exactly; 285,000 years."""

_SPREAD: Final = 0x9E3779B97F4A7C15F39CC0605CEDC8341082276BF3A27251F86C6A11D0C18E95
"""An odd constant that spreads small numbers over all of a hash's bits."""


@dataclass(slots=True)
class Trace:
    """The requests of a trace and their totals."""

    requests: list[PrefixRequest] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    block_refs: int = 0
    unique_blocks: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].now_s - self.requests[0].now_s if self.requests else 0.0


@contextmanager
def open_trace(path: str) -> Iterator[IO[bytes]]:
    """Open a trace file, plain or gzip. Raises ConfigError if it cannot be opened."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (an error of the body is not this one's)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with file:
        if file.peek(2)[:2] == _GZIP_MAGIC:
            with gzip.open(file) as unpacked:
                yield cast(IO[bytes], unpacked)
        else:
            yield file


def _lines(source: IO[bytes], name: str) -> Iterator[bytes]:
    number = 0
    try:
        while line := source.readline(LINE_BYTES_MAX):
            number += 1
            if len(line) == LINE_BYTES_MAX:
                raise ConfigError(f"{name}, line {number}: longer than {LINE_BYTES_MAX} bytes")
            yield line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{name}, after line {number}: {error}") from error


def read_trace(source: IO[bytes], name: str, block_tokens: int) -> Trace:
    """Read a trace. Raises ConfigError that names the file and the first wrong line."""
    return parse_trace(_lines(source, name), name, block_tokens)


def parse_trace(lines: Iterable[bytes], name: str, block_tokens: int) -> Trace:
    """Parse a trace from lines. Raises ConfigError like `read_trace`."""
    trace = Trace()
    hashes: dict[int, bytes] = {}
    before_ms = 0
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            time_ms, tokens, output, ids = _fields(line)
            if time_ms < before_ms:
                raise ValueError(f"timestamp {time_ms} is before the previous one, {before_ms}")
            _check_length(tokens, len(ids), block_tokens)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}, line {number}: {error}") from error
        before_ms = time_ms
        for block_id in ids:
            if block_id not in hashes:
                hashes[block_id] = (len(hashes) * _SPREAD + 1 & (1 << 256) - 1).to_bytes(32, "big")
        # A block that occurs twice in one request counts as one use, at its first position.
        chain = list(dict.fromkeys(map(hashes.__getitem__, ids)))
        trace.requests.append(
            PrefixRequest(chain, time_ms / 1000, tokens < len(ids) * block_tokens, output)
        )
        trace.input_tokens.append(tokens)
        trace.block_refs += len(chain)
    if not trace.requests:
        raise ConfigError(f"{name}: the trace has no requests")
    trace.unique_blocks = len(hashes)
    return trace


def _fields(line: bytes) -> tuple[int, int, int | None, list[int]]:
    try:
        record: object = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not an object: {record!s:.40}")
    time_ms = _integer(record, "timestamp", TIMESTAMP_MS_MAX)
    tokens = _integer(record, "input_length", TIMESTAMP_MS_MAX)
    output = None
    if "output_length" in record:
        output = _integer(record, "output_length", TIMESTAMP_MS_MAX)
    ids = record.get("hash_ids")
    if not isinstance(ids, list):
        raise ValueError("hash_ids must be a list of integers")
    # type() and not isinstance: True is an int, and 1.0 would equal 1.
    if not all(type(block_id) is int for block_id in ids):
        raise ValueError("hash_ids must have only integers")
    return time_ms, tokens, output, ids


def _integer(record: dict[str, object], key: str, most: int) -> int:
    value = record.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{key} must be an integer from 0 to {most}, got {value!s:.40}")
    return value


def _check_length(tokens: int, blocks: int, block_tokens: int) -> None:
    """Raise ValueError if the trace's blocks have another size: its token counts would be wrong."""
    if blocks and not (blocks - 1) * block_tokens < tokens <= blocks * block_tokens:
        raise ValueError(
            f"{blocks} blocks of {block_tokens} tokens cannot be the blocks of {tokens} tokens; "
            "pass the trace's block size as --block-tokens"
        )
