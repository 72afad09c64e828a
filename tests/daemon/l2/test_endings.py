"""How a namespace ends, for each order in which its sessions come and go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import PAGE, Bench, Tier, config, run
from tierd.core.l2.space import Space
from tierd.daemon.lifecycle.housekeeping import HOUSEKEEPING_S
from tierd.daemon.session.session import Session
from tierd.testing.simulation.keeper import Keeper
from tierd.types import Namespace
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode

RESET = blocks.namespace(PAGE, model="after a reset")
A_WHILE_S = 3 * HOUSEKEEPING_S


class Client:
    """A session and its client, which dies when it receives a message of type `dies_at`."""

    def __init__(self, bench: Bench, owner: int, dies_at: type[m.Message] | None = None) -> None:
        self.gone = False
        self._dreads = dies_at
        self._wire = WireSession(Role.CLIENT, self._receive)
        self._session = Session(owner, bench.node, "test")
        self._session.transport = self
        self.say(m.Hello(m.PROTOCOL_VERSION, "test"))

    def say(self, message: m.Message) -> None:
        self._session.data(memoryview(encode(message)))

    def register(self, namespace: Namespace) -> None:
        """Register a namespace; the first one of a session gets handle 0."""
        self.say(m.Register(1, namespace.to_fields(), True))

    def die(self) -> None:
        """Close the session, as when the daemon finds the socket closed."""
        self.gone = True
        self._session.closed()

    def send(self, data: bytes, fd: int | None = None) -> None:
        if not self.gone:
            self._wire.receive(memoryview(data), () if fd is None else (os.dup(fd),))

    def finish(self) -> None:
        """The daemon ends the session."""

    def close(self) -> None:
        """The daemon knows that the client is gone."""

    def _receive(self, message: m.Message, fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)
        if type(message) is self._dreads:
            self.die()


def space_of(bench: Bench, namespace: Namespace) -> Space | None:
    return bench.node.host.spaces.get(namespace.digest)


@pytest.mark.parametrize("dies_at", [m.Guard, m.Registered, m.Segment])
def test_client_that_dies_during_register_leaves_no_registration(
    dies_at: type[m.Message],
) -> None:
    """A failed send ends the session in the middle of a REGISTER: the namespace would keep a
    session, and its memory, permanently."""
    keeper = Keeper()

    async def test(bench: Bench) -> None:
        client = Client(bench, 7, dies_at)
        client.register(RESET)
        assert client.gone
        space = space_of(bench, RESET)
        assert space is not None
        assert space.sessions == 0
        await asyncio.sleep(60)
        assert space.ended

    try:
        run(test, config("tier"), raw=[Tier()], manager=keeper)
    finally:
        keeper.close()


@pytest.mark.parametrize("late_s", [0.0, A_WHILE_S])
@pytest.mark.parametrize("ending", ["dies", "says so", "says nothing of worth"])
def test_worthless_namespace_ends_after_its_last_worker_leaves(late_s: float, ending: str) -> None:
    """A worker may learn of a reset only after the next one, and be killed: its blocks would keep
    memory, though no client can ask for them."""

    async def test(bench: Bench) -> None:
        scheduler, worker = Client(bench, 7), Client(bench, 8)
        scheduler.register(RESET)
        scheduler.say(m.Unregister(0, True))
        await asyncio.sleep(late_s)
        assert (space_of(bench, RESET) is None) == bool(late_s)
        worker.register(RESET)
        space = space_of(bench, RESET)
        assert space is not None
        assert len(bench.store(4, space=space)) == len(space.items) == 4
        await asyncio.sleep(A_WHILE_S)
        assert len(space.items) == 4, "its worker still uses it"
        if ending != "dies":
            worker.say(m.Unregister(0, ending == "says so"))
        worker.die()
        await asyncio.sleep(A_WHILE_S)
        assert not space.items
        assert not space.memory_bytes
        await asyncio.sleep(60)
        assert space.ended

    run(test, config("tier"), raw=[Tier()])


def test_record_of_worthless_namespaces_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training loop that resets after each step would fill the daemon's own memory."""
    monkeypatch.setattr("tierd.daemon.l2.ending.WORTHLESS_MAX", 4)

    async def test(bench: Bench) -> None:
        client = Client(bench, 7)
        for number in range(10):
            client.register(blocks.namespace(PAGE, model=f"after reset {number}"))
            client.say(m.Unregister(number, True))
            await asyncio.sleep(A_WHILE_S)
        last = [blocks.namespace(PAGE, model=f"after reset {n}").digest for n in range(6, 10)]
        assert list(bench.node.endings.worthless) == last
        assert len(bench.node.host.spaces) == 1

    run(test, config("tier"), raw=[Tier()])
