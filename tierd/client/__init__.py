"""The client of a tierd daemon, for the inside of an engine: sync, light, without threads."""

from tierd.client.attaching import Attachment, PendingCopy
from tierd.client.client import (
    DEFAULT_SOCKET,
    HINT_MS_MAX,
    Client,
    Handle,
    Lease,
    PendingAcquire,
    Reservation,
    by_source,
    copy,
    request_number,
)
from tierd.errors import NamespaceError, RefusedError
from tierd.types import HASH_BYTES, Namespace

__all__ = [
    "DEFAULT_SOCKET",
    "HASH_BYTES",
    "HINT_MS_MAX",
    "Attachment",
    "Client",
    "Handle",
    "Lease",
    "Namespace",
    "NamespaceError",
    "PendingAcquire",
    "PendingCopy",
    "RefusedError",
    "Reservation",
    "by_source",
    "copy",
    "request_number",
]
