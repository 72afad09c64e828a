"""Failures that an S3 server reports, their meaning, and the operator's remedy."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Final

ERROR_BYTES_MAX: Final = 16 << 10
"""Longest part of an error's body that is read: bodies have a few hundred bytes."""

MESSAGE_CHARS_MAX: Final = 600
"""Longest text of a failure; the server chooses most of it."""

ARCHIVED: Final = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes whose objects cannot be read at once."""

_CODE: Final = re.compile(rb"<Code>([^<]{1,100})</Code>")
_MESSAGE: Final = re.compile(rb"<Message>([^<]{1,300})")
_REGION: Final = re.compile(rb"<Region>([a-z0-9-]{1,40})</Region>")
_THROTTLED: Final = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
)
_DENIED: Final = frozenset(
    {
        "AccessDenied",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_REMEDIES: Final = {
    "RequestTimeTooSkewed": "set this machine's clock (NTP)",
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
}


class FailureKind(enum.Enum):
    """Cause of a failure, as finely as the reaction to it differs."""

    DENIED = "denied"
    """Credentials or permissions."""
    THROTTLED = "throttled"
    """The server reports that it is busy."""
    NO_BUCKET = "no bucket"
    ELSEWHERE = "elsewhere"
    """The bucket is in another region or at another endpoint."""
    UNREADABLE = "unreadable"
    """The server does not deliver this object: its block is a miss, other blocks are fine."""
    SERVER = "server"
    """Any other refusal."""
    PEER = "peer"
    """No answer, or an answer that no S3 server gives."""


class S3Error(Exception):
    """A request failed. The text is one line: the failure, and a remedy if one is known."""

    def __init__(self, kind: FailureKind, message: str, *, status: int = 0, code: str = "") -> None:
        # A server's text may contain line breaks and anything else.
        super().__init__(" ".join(message[:MESSAGE_CHARS_MAX].split()))
        self.kind = kind
        self.status = status
        self.code = code

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed soon."""
        return self.kind is FailureKind.THROTTLED or self.status in (500, 502, 504)

    @property
    def keys_denied(self) -> bool:
        """Whether other keys might be accepted."""
        return self.kind is FailureKind.DENIED and self.code != "RequestTimeTooSkewed"

    @property
    def lacks_condition(self) -> bool:
        """Whether the server reports that it does not know the condition."""
        return self.status == 501 or self.code == "NotImplemented"


def unreadable(status: int, body: bytes) -> S3Error | None:
    """Return the failure of a GET if it concerns only the object: the object is archived, has lost
    parts, or is encrypted with a key that the server cannot use. None for other replies."""
    code = _found(_CODE, body)
    about_it = (
        code == "InvalidObjectState"
        or (status == 404 and code not in ("", "NoSuchKey", "NoSuchBucket"))
        or (status == 400 and code.startswith(("KMS.", "ServerSideEncryption")))
        or (status == 400 and "ncrypt" in _found(_MESSAGE, body))
    )
    if not about_it:
        return None
    words = " ".join(f"HTTP {status} {code}: {_found(_MESSAGE, body)}".split())
    text = f"the server does not give it ({words}): a miss; storing the block again replaces it"
    return S3Error(FailureKind.UNREADABLE, text, status=status, code=code)


def is_archived(headers: Mapping[str, str]) -> bool:
    """Whether a HEAD shows that a GET would be refused: archived and not restored."""
    archived = headers.get("x-amz-storage-class", "") in ARCHIVED
    restored = 'ongoing-request="false"' in headers.get("x-amz-restore", "")
    return (archived or "x-amz-archive-status" in headers) and not restored


def failure(status: int, headers: Mapping[str, str], body: bytes) -> S3Error:
    """Return the failure that a reply with a status other than success means."""
    code = _found(_CODE, body)
    region = headers.get("x-amz-bucket-region", "") or _found(_REGION, body)
    words = " ".join(part for part in (f"HTTP {status}", code) if part)
    message = _found(_MESSAGE, body)
    if message:
        words = f"{words}: {message}"
    if 300 <= status < 400 or (status == 400 and region):
        kind = FailureKind.ELSEWHERE
        where = f"set region to {region}" if region else "set endpoint or region"
        words = f"the bucket is not served here ({words}): {where}"
    elif status == 404 and code == "NoSuchBucket":
        kind, words = (
            FailureKind.NO_BUCKET,
            "the bucket does not exist: create it, or correct its name",
        )
    elif status in (401, 403) or code in _DENIED:
        kind = FailureKind.DENIED
        remedy = _REMEDIES.get(code, "check the credentials and their permissions")
        words = f"access denied ({words}): {remedy}"
    elif status in (429, 503) or code in _THROTTLED:
        kind = FailureKind.THROTTLED
        words = f"the server is busy ({words})"
    else:
        kind = FailureKind.SERVER
        words = f"the server refuses ({words})"
    return S3Error(kind, words, status=status, code=code)


def code_of(body: bytes) -> str:
    """Return the code in an error's body, or ""."""
    return _found(_CODE, body)


def _found(pattern: re.Pattern[bytes], body: bytes) -> str:
    match = pattern.search(body)
    return match[1].decode("utf-8", "replace").strip() if match else ""
