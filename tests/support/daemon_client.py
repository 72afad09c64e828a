"""Clients of a real daemon: connect, store blocks, and compare the bytes that are served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tierd.client import Client, Handle

SOON_S = 10.0


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, f"not within {SOON_S} s: {what}"
        time.sleep(0.005)


def wait_until_registered(client: Client, handle: Handle) -> None:
    """Wait until the client has found the daemon again."""
    end = time.monotonic() + SOON_S
    client.poll()
    while not handle.ready:
        assert time.monotonic() < end, client.last_error
        client.wait(0.05)
        time.sleep(0.005)


@contextmanager
def connected(daemon: DaemonProcess, *, timeout_ms: int = 5000) -> Iterator[Client]:
    with Client(daemon.socket, name="test", call_timeout_ms=timeout_ms) as client:
        yield client


def store(client: Client, handle: Handle, count: int, tag: object = 0) -> list[bytes]:
    """Store a chain of blocks whose bytes follow from their hashes; returns the hashes."""
    hashes, parents = blocks.chain(count, tag)
    done = client.put(
        handle,
        [
            (h, parent, blocks.payload(handle.namespace, h))
            for h, parent in zip(hashes, parents, strict=True)
        ],
    )
    assert done == [True] * count
    return hashes


def count_served(
    client: Client, handle: Handle, hashes: list[bytes], deadline_ms: int = 5000
) -> int:
    """Return the length of the prefix that the daemon serves; compares every byte."""
    got = client.get(handle, hashes, deadline_ms)
    for view, block_hash in zip(got, hashes, strict=False):
        assert bytes(view) == blocks.payload(handle.namespace, block_hash)
    return len(got)


def host_status(client: Client) -> dict[str, int]:
    host = client.status()["host"]
    assert isinstance(host, dict)
    return host


def counter(client: Client, name: str) -> int:
    counters = client.status()["counters"]
    assert isinstance(counters, dict)
    return int(counters.get(name, 0))


def wait_until_indexed(client: Client) -> None:
    """Wait until every storage tier has indexed its content."""

    def ready() -> bool:
        tiers = client.status()["storage"]
        assert isinstance(tiers, list)
        return all(tier["state"] == "ready" for tier in tiers)

    eventually(ready, "storage tiers indexed")
