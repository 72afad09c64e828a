"""A session with a bench's node, to see the effect of its messages."""

from __future__ import annotations

import asyncio

from tests.support.tiers.bench import Bench
from tierd.daemon.session.session import Session
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode


class Line:
    """A session with a bench's node, and the daemon's answers."""

    def __init__(self, bench: Bench) -> None:
        self.got: list[m.Message] = []
        self._wire = WireSession(Role.CLIENT, lambda message, _: self.got.append(message))
        self._session = Session(7, bench.node, "test")
        self._session.transport = self
        self.say(m.Hello(m.PROTOCOL_VERSION, "test"))
        self.say(m.Register(1, bench.space.namespace.to_fields(), False))

    def say(self, message: m.Message) -> None:
        self._session.data(memoryview(encode(message)))

    async def acquired(self, hashes: list[bytes], own: int) -> m.Acquired:
        self.say(m.Acquire(2, [0], b"".join(hashes), 5000, 0, 0, 0, own))
        while not (self.got and isinstance(self.got[-1], m.Acquired)):
            await asyncio.sleep(0.01)
        return self.got[-1]

    def send(self, data: bytes, fd: int | None = None) -> None:
        self._wire.receive(memoryview(data), () if fd is None else (fd,))

    def finish(self) -> None:
        """The daemon ends the session."""

    def close(self) -> None:
        """The daemon knows that the client is gone."""

    def closed(self) -> None:
        self._session.closed()
