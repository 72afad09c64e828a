"""A session with a daemon, message by message, for messages that no client would send."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Sequence
from typing import Any, TypeVar

from tests.support.page_engine import BLOCK_BYTES, LAYERS, PAGE_BYTES, namespace, parents_of
from tierd.device.engine_host import HostExport
from tierd.shared_memory.exports import NO_EVENT, Run, pack_runs
from tierd.shared_memory.gate import make_gate
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode

T = TypeVar("T")

BLOCKS = 64


class RawPeer:
    """Pages of BLOCKS blocks, all zeros at first, and the socket. Use as a context manager."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(path)
        self._heard: list[m.Message] = []
        self._wire = WireSession(Role.CLIENT, lambda message, _: self._heard.append(message))
        self._calls = 0
        self._mine = [make_gate()]
        self.memory = HostExport(LAYERS * BLOCKS * PAGE_BYTES)
        self.say(m.Hello(m.PROTOCOL_VERSION, "raw"))
        self.hear(m.Welcome)

    def close(self) -> None:
        self.sock.close()
        self.memory.close()
        for fd in self._mine:
            os.close(fd)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def gate_fd(self) -> int:
        return self._mine[0]

    def call(self) -> int:
        """A number for a call."""
        self._calls += 1
        return self._calls

    def say(self, message: m.Message, fd: int | None = None) -> None:
        data = encode(message, 0 if fd is None else 1)
        if fd is None:
            self.sock.sendall(data)
        else:
            assert socket.send_fds(self.sock, [data], [fd]) == len(data)

    def hear(self, kind: type[T]) -> T:
        """The next message of a kind; earlier messages of other kinds are dropped."""
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, kind):
                    return message
            data = self.sock.recv(1 << 20)
            assert data, f"the daemon has ended the session before a {kind.__name__}"
            self._wire.receive(data)

    def ended(self) -> str:
        """The daemon's reason for ending the session, once it has done so."""
        while True:
            error = self.hear(m.Error)
            if error.call == 0:
                break
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(1 << 20):
                pass
        return error.reason

    # The usual first messages of a client

    def register(self, model: str = "m") -> int:
        call = self.call()
        self.say(m.Register(call, namespace(model).to_fields(), False))
        return self.hear(m.Registered).handle

    def export(self, number: int = 1) -> None:
        export = self.memory.export
        self.say(m.Export(number, export.kind, export.device, export.size_bytes, b""))
        self.say(m.Part(number, 0, export.size_bytes), export.parts[0].fd)

    def attach(self, handle: int, **changes: Any) -> None:
        """Send ATTACH, with some of its fields changed."""
        stride = BLOCKS * PAGE_BYTES
        runs = [Run(0, layer * stride, PAGE_BYTES) for layer in range(LAYERS)]
        digest = hashlib.sha256(bytes(BLOCK_BYTES)).digest()
        message = m.Attach(
            self.call(), handle, [1], pack_runs(runs), PAGE_BYTES, BLOCKS, b"", 0, digest, []
        )
        self.say(message._replace(**changes), self.gate_fd)

    def attached(self) -> tuple[int, int]:
        """A handle and an attachment."""
        handle = self.register()
        self.export()
        self.attach(handle)
        return handle, self.hear(m.Attached).attachment

    def reserve(self, handle: int, hashes: Sequence[bytes]) -> int:
        self.say(m.Reserve(self.call(), handle, b"".join(hashes), b"".join(parents_of(hashes))))
        reserved = self.hear(m.Reserved)
        assert max(m.unpack_slots(reserved.slots)) < m.SLOT_PRESENT
        return reserved.reservation

    def store(
        self, attachment: int, reservation: int, blocks: Sequence[int], event: int = NO_EVENT
    ) -> None:
        self.say(m.Store(self.call(), attachment, reservation, m.pack_slots(blocks), event, 0))

    def load(
        self,
        attachment: int,
        slots: Sequence[int],
        blocks: Sequence[int],
        *,
        expires_ns: int = 1 << 62,
        job: int = 0,
        event: int = NO_EVENT,
    ) -> None:
        packed = m.pack_slots(slots), m.pack_slots(blocks)
        self.say(m.Load(self.call(), attachment, *packed, expires_ns, job, event, 0))
