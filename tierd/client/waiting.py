"""Calls that wait for their reply, up to a timeout. At the timeout the session ends."""

from __future__ import annotations

import time

from tierd.client.connection import DaemonConnection
from tierd.wire import messages as m


class WaitingCalls:
    """Matches replies to the calls that wait for them. Used under the client's lock."""

    def __init__(self, connection: DaemonConnection, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """Bounds every call that waits for the daemon."""
        self._connection = connection
        self._replies: dict[int, m.Message | None] = {}

    def call(self, call: int, message: m.FromClient) -> m.Message | None:
        """Send a call and return its reply; None: the session has ended, at the latest now."""
        connection = self._connection
        self._replies[call] = None
        try:
            connection.send(message)
            end = time.monotonic() + self.timeout_s
            while connection.sock is not None:
                reply = self._replies[call]
                if reply is not None:
                    return reply
                left = end - time.monotonic()
                if left <= 0:
                    connection.disconnect("the daemon does not answer")
                    return None
                connection.receive(wait_s=left)
            return None
        finally:
            del self._replies[call]

    def replied(self, call: int, message: m.Message) -> None:
        """Take the reply to a call. A reply that no call waits for is dropped."""
        if call in self._replies:
            self._replies[call] = message

    def lost(self) -> None:
        """End every call without a reply: the session is over."""
        self._replies = dict.fromkeys(self._replies)
