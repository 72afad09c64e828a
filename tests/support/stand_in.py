"""A stand-in for an engine on an operator's machine, for tests of the pages."""

from __future__ import annotations

import json

from tests.support import blocks
from tests.support.fake_node import FakeEngine
from tests.support.systemd_machine import Machine
from tests.support.traffic import wait_until
from tierd.client import Client
from tierd.hashing import KeyStyle, hash_blocks, root_hash

SEED = root_hash()


OLD = blocks.namespace(64 << 10, hash_scheme=KeyStyle.TAGGED.value, hash_root=SEED)


class StandIn(FakeEngine):
    """An engine whose tokens are letters; it stores computed blocks with a node's daemon."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(self._store)
        self.space, self.seed = OLD, SEED
        self._machine = machine
        self._client: Client | None = None

    def attach(self) -> None:
        """Connect to the running daemon."""
        self.detach()
        self._client = self._machine.client("vllm-scheduler")
        self._handle = self._client.register(self.space)
        wait_until(self._accepted, 20, "the engine is not accepted")

    def detach(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def ask(self, text: str) -> None:
        """Compute a prompt."""
        self.compute([ord(letter) for letter in text])

    def _accepted(self) -> bool:
        assert self._client is not None
        self._client.wait(0.01)
        return self._handle.ready

    def _store(self, tokens: list[int]) -> None:
        assert self._client is not None
        hashes = hash_blocks(tokens, self.space.block_tokens, parent=self.seed)
        contents = [blocks.payload(self.space, each) for each in hashes]
        rows = list(zip(hashes, [self.seed, *hashes], contents, strict=False))
        assert all(self._client.put(self._handle, rows))

    def _answer(self, path: str, body: dict[str, object]) -> bytes:
        if path != "/tokenize":
            return super()._answer(path, body)
        return json.dumps({"tokens": [ord(letter) for letter in str(body["prompt"])]}).encode()
