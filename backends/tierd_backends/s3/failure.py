"""What an S3 server says when it does not do what it was asked, and what to do about it."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Final

ERROR_BYTES_MAX: Final = 16 << 10
"""What is read of an error's body: they have a few hundred bytes."""

MESSAGE_CHARS_MAX: Final = 600
"""Of a failure's text, of which a server may choose most."""

ARCHIVED: Final = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes from which an object cannot be read at once."""

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
    "SignatureDoesNotMatch": "the secret key is not that of the access key",
    "ExpiredToken": "the credentials have expired",
}


class FailureKind(enum.Enum):
    """Whose fault it is, as far as what to do about it differs."""

    DENIED = "denied"
    """Credentials or permissions."""
    THROTTLED = "throttled"
    """The server is busy, and says so."""
    NO_BUCKET = "no bucket"
    ELSEWHERE = "elsewhere"
    """The bucket is in another region or at another endpoint."""
    UNREADABLE = "unreadable"
    """The server does not give this object: a miss of its block, and no other's trouble."""
    SERVER = "server"
    """Any other refusal."""
    PEER = "peer"
    """No answer at all, or not an S3 server's."""


class S3Error(Exception):
    """A request came to nothing. The text is one line that says what, and a remedy if known."""

    def __init__(self, kind: FailureKind, message: str, *, status: int = 0, code: str = "") -> None:
        # Servers put lines, and whatever they like, into what they say.
        super().__init__(" ".join(message[:MESSAGE_CHARS_MAX].split()))
        self.kind = kind
        self.status = status
        self.code = code

    @property
    def may_pass(self) -> bool:
        """Whether the same request is worth another try soon."""
        return self.kind is FailureKind.THROTTLED or self.status in (500, 502, 504)

    @property
    def keys_denied(self) -> bool:
        """Whether other keys might be let in."""
        return self.kind is FailureKind.DENIED and self.code != "RequestTimeTooSkewed"

    @property
    def lacks_condition(self) -> bool:
        """Whether the server says that it knows no conditional put."""
        return self.status == 501 or self.code == "NotImplemented"


def unreadable(status: int, body: bytes) -> S3Error | None:
    """The failure of a GET that is about its object alone, if that is what a reply means: it is in
    an archive, parts of it are gone, or it is encrypted with a key that is not at hand."""
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
    text = f"the server does not give it ({words}): a miss; it is replaced when it is stored again"
    return S3Error(FailureKind.UNREADABLE, text, status=status, code=code)


def is_archived(headers: Mapping[str, str]) -> bool:
    """Whether a HEAD says that a GET would be refused: archived, and not restored."""
    archived = headers.get("x-amz-storage-class", "") in ARCHIVED
    restored = 'ongoing-request="false"' in headers.get("x-amz-restore", "")
    return (archived or "x-amz-archive-status" in headers) and not restored


def failure(status: int, headers: Mapping[str, str], body: bytes) -> S3Error:
    """The failure that a reply of a status other than success means."""
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
    """The code in an error's body, or nothing."""
    return _found(_CODE, body)


def _found(pattern: re.Pattern[bytes], body: bytes) -> str:
    match = pattern.search(body)
    return match[1].decode("utf-8", "replace").strip() if match else ""
