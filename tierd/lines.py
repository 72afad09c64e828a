"""JSON lines that detect damage: each ends with its CRC-32.

    {"any": "field", "crc32": "89abcdef"}

The checksum covers the line up to the comma before its key. It detects damage that leaves valid
JSON, such as a changed digit.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Final

KEY: Final = "crc32"
_TAIL: Final = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\n?', re.ASCII)
_TAIL_BYTES: Final = len(', "crc32": "01234567"}')


def sealed(value: Mapping[str, object]) -> bytes:
    """Return the line for `value`, which must not be empty or have the key KEY."""
    body = json.dumps(value, separators=(", ", ": ")).encode()[:-1]
    return body + b', "%s": "%08x"}\n' % (KEY.encode(), zlib.crc32(body))


def is_sealed(line: bytes) -> bool:
    """Whether `sealed` produced this line; the newline may be missing."""
    at = len(line.removesuffix(b"\n")) - _TAIL_BYTES
    tail = _TAIL.fullmatch(line, at) if at > 0 else None
    return tail is not None and int(tail[1], 16) == zlib.crc32(line[:at])
