"""Lines of JSON that tell whether they are as they were written: each ends with its CRC-32.

    {"what": "ever", "crc32": "89abcdef"}

The sum is over all that precedes its key in the line. Damage that leaves good JSON, say a digit
that is another, would else be taken for what was written.
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
    """The line of an object that is not empty and has no key KEY."""
    body = json.dumps(value, separators=(", ", ": ")).encode()[:-1]
    return body + b', "%s": "%08x"}\n' % (KEY.encode(), zlib.crc32(body))


def is_sealed(line: bytes) -> bool:
    """Whether a line is one that `sealed` gave, whole or without its newline."""
    at = len(line.removesuffix(b"\n")) - _TAIL_BYTES
    tail = _TAIL.fullmatch(line, at) if at > 0 else None
    return tail is not None and int(tail[1], 16) == zlib.crc32(line[:at])
