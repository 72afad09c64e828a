"""The client of a tierd daemon: synchronous, without threads and without an event loop.

It is made to run inside an engine. No call waits longer than its timeout, and while the
daemon is away every call returns a miss at once. Block bytes never cross the socket: the
caller copies them to and from slots of shared memory that both sides have mapped.

The simple API is `register`, `put` and `get`. An engine that must not wait uses
`begin_acquire`, `lease_views` and `release` to load, and `reserve`, `commit` and `abort`
to store. `attach`, `begin_load` and `begin_store` have the daemon make the copies.
"""

from tierd.client.attaching import Attachment, PendingCopy
from tierd.client.calls import HINT_MS_MAX
from tierd.client.client import Client
from tierd.client.session import DEFAULT_SOCKET
from tierd.client.values import (
    Handle,
    Lease,
    PendingAcquire,
    Reservation,
    by_source,
    copy,
    request_number,
)
from tierd.errors import NamespaceError, RefusedError
from tierd.types import FORMAT_VERSION, HASH_BYTES, Namespace

__all__ = [
    "DEFAULT_SOCKET",
    "FORMAT_VERSION",
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
