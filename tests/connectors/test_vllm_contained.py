"""The connector in an engine whose tokens reveal a wrong byte, with a second connector and errors.

The engine (`token_engine`) has block tables and a second connector; the daemon is a fake. Stored
blocks are compared byte by byte, and loaded by another engine.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from tests.support.engines import fake_vllm
from tests.support.engines.connector_bench import BLOCK_TOKENS, namespace
from tests.support.engines.fake_client import FakeClient, FakeDaemon
from tests.support.engines.token_engine import (
    ASYNC,
    BLOCK_BYTES,
    SYNC,
    Request,
    TokenEngine,
    module,
    right_blocks,
    truth,
)
from tierd_connectors.common import guard

WAYS: dict[str, dict[str, Any]] = {
    "worker": {"transfer": "shm"},
    "daemon": {"transfer": "host_ipc"},
    "layerwise": {"transfer": "host_ipc", "layerwise": True},
}


class RandomServing:
    """A daemon, engines with random requests, and checks of all tokens and stored bytes."""

    def __init__(self, seed: int, way: str) -> None:
        self.chance = random.Random(seed)
        self.seed, self.way = seed, way
        self.daemon = FakeDaemon(copying=way == "worker")
        self.asked: list[tuple[int, Request]] = []
        self.saved_tokens = 0
        """Tokens that no engine computed because tierd had loaded them."""
        shared = self.tokens(14)
        self.prompts = [
            shared[: self.chance.randrange(15)] + self.tokens(self.chance.randrange(3, 22))
            for _ in range(8)
        ]

    def tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(1000) for _ in range(count)]

    def engine(self) -> TokenEngine:
        return TokenEngine(self.daemon, seed=self.seed, **WAYS[self.way])

    def serve(self, engine: TokenEngine, count: int, *, alone: bool = False) -> None:
        """Add requests while others run. Unless `alone`, a second connector loads for some, and
        some are aborted."""
        aborted = []
        for _ in range(count):
            prompt, tokens = self.chance.choice(self.prompts), self.chance.randrange(1, 10)
            others = "" if alone else self.chance.choice(["", "", "", SYNC, ASYNC])
            request = Request(f"r{len(self.asked)}", prompt, tokens, others)
            request.spoilt = others == SYNC and self.chance.random() < 0.5
            self.asked.append((engine.weights, request))
            engine.add(request)
            for _ in range(self.chance.randrange(3)):
                engine.step()
            if not alone and self.chance.random() < 0.1:
                engine.abort(request)
                aborted.append(request)
        engine.run()
        for request in aborted:
            request.count = len(request.output)

    def run(self, during: AbstractContextManager[object], requests: int = 14) -> TokenEngine:
        """A first engine fills the daemon, a second one runs within `during`, a third one loads."""
        first = self.engine()
        self.serve(first, 4, alone=True)
        first.close()
        self.saved_tokens += first.saved_tokens
        with during:
            second = self.engine()
            self.serve(second, requests)
            second.replace_weights()
            self.serve(second, 3)
            second.close()
        third = self.engine()
        self.serve(third, 4, alone=True)
        third.close()
        self.saved_tokens += second.saved_tokens + third.saved_tokens
        self.check()
        return second

    def check(self) -> None:
        """Check every token and every stored byte."""
        for weights, request in self.asked:
            expected = truth(request.prompt, request.count, weights)
            assert request.output == expected, f"{request.request_id} has wrong tokens"
        right = [
            right_blocks([r.tokens for w, r in self.asked if w == weights], weights)
            for weights in (0, 1)
        ]
        first = namespace(block_bytes=BLOCK_BYTES).digest
        for (digest, name), slot in self.daemon.blocks.items():
            held = bytes(self.daemon.slots[slot][:BLOCK_BYTES])
            assert held == right[digest != first][name], "the daemon holds a wrong byte"
        reported = self.daemon.loaded * BLOCK_TOKENS
        assert reported <= self.saved_tokens, "more is reported as saved than was saved"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_right_with_a_second_connector(way: str) -> None:
    """Bytes of another connector, or KV computed from them, would be stored under hashes that
    they do not match."""
    loaded = stored = preemptions = 0.0
    for seed in range(40):
        serving = RandomServing(seed, way)
        engine = serving.run(contextlib.nullcontext())
        assert engine.errors == 0, seed
        assert engine.scheduler._scheduler.leases_held == 0
        assert serving.daemon.loaded * BLOCK_TOKENS == serving.saved_tokens, seed
        assert serving.daemon.wanted >= serving.daemon.loaded
        assert engine.counted.get("loaded_tokens", 0) == engine.saved_tokens, seed
        loaded += engine.counted.get("loaded_tokens", 0)
        stored += engine.counted.get("store_blocks", 0)
        preemptions += engine.preemptions
    assert loaded > 200
    assert stored > 200
    assert preemptions > 20


@pytest.mark.parametrize("setting", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_engine_that_discards_kv_memory_is_refused(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from freed memory would end a GPU engine, or store wrong bytes."""
    made = fake_vllm.config

    def config(**extra: object) -> SimpleNamespace:
        changed = made(**extra)
        setattr(changed.model_config, setting, True)
        return changed

    monkeypatch.setattr(fake_vllm, "config", config)
    engine = TokenEngine(FakeDaemon())
    assert setting in engine.scheduler.boundary.off
    engine.close()


def test_handshake_of_another_connector_is_refused() -> None:
    """Under vLLM's MultiConnector the connector would be off without a log line."""
    engine = TokenEngine(FakeDaemon())
    engine.scheduler._scheduler = None
    engine.scheduler.set_xfer_handshake_metadata({0: object()})
    assert "another connector" in engine.scheduler.boundary.off
    assert engine.errors == 0
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_external_launcher_is_refused_with_the_reason(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would read "1 of 2 workers gave a namespace", and look for a broken worker."""
    engine = TokenEngine(FakeDaemon())
    config = engine.scheduler._vllm_config.parallel_config
    monkeypatch.setattr(config, "distributed_executor_backend", "external_launcher", raising=False)
    monkeypatch.setattr(config, "tensor_parallel_size", ranks)
    info = engine.worker.get_handshake_metadata()
    monkeypatch.setattr(module, "Client", lambda *_, **__: FakeClient(engine.daemon))
    engine.scheduler.set_xfer_handshake_metadata({0: info})
    assert ("distributed_executor_backend" in engine.scheduler.boundary.off) == (ranks > 1)
    assert "'mp'" in engine.scheduler.boundary.off or ranks == 1
    engine.close()


# Errors

PACKAGE = Path(guard.__file__).parents[1]
BOUNDARY = guard.guarded(guard.nothing)(lambda self: None).__code__

Place = tuple[str, str, int]


def silent_lines() -> set[tuple[str, int]]:
    """Lines that take and release locks. They raise nothing; an injected error there would
    leave a lock held."""
    return {
        (path.name, node.lineno)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.With)
    }


SILENT = silent_lines()


class InjectedError(Exception):
    """An error that no code expects."""


class Injector(AbstractContextManager["Injector"]):
    """Raises at one place of the connector, under one of its guarded methods, once.

    A place is the guarded method, a file and a line; it raises when the place is reached for the
    `turn`-th time. Without a place it only counts how often each place is reached.
    """

    def __init__(self, place: Place | None = None, turn: int = 0) -> None:
        self.place, self.turn = place, turn
        self.reached: dict[Place, int] = {}
        self.raised = False
        self._under: list[str] = []

    def __enter__(self) -> Injector:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        if self.raised:
            return None
        code = frame.f_code
        if code is BOUNDARY:
            self._under.append(frame.f_locals["method"].__name__)
            return self._boundary
        if self._under and code.co_filename.startswith(str(PACKAGE)):
            return self._line
        return None

    def _boundary(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "return":
            self._under.pop()
        frame.f_trace_lines = False
        return self._boundary

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        elsewhere = self.place is not None and frame.f_lineno != self.place[2]
        if event == "line" and not self.raised and not elsewhere:
            line = os.path.basename(frame.f_code.co_filename), frame.f_lineno
            if line in SILENT:
                return self._line
            place = self._under[-1], *line
            count = self.reached[place] = self.reached.get(place, 0) + 1
            if place == self.place and count > self.turn:
                self.raised = True
                raise InjectedError(str(place))
        return self._line


REQUESTS = 9
"""Requests of the engine with errors: enough for preemptions and all kinds of foreign loads."""


def places(way: str) -> dict[Place, int]:
    injector = Injector()
    RandomServing(1, way).run(injector, REQUESTS)
    return injector.reached


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_an_error_at_any_line_causes_no_wrong_token(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one contained error, blocks would be stored under wrong hashes, or a load would be
    written under a computing request, reported twice or never: wrong tokens, or a request that
    hangs."""
    monkeypatch.setattr(guard.logger, "error", lambda *_, **__: None)
    monkeypatch.setattr(guard.logger, "warning", lambda *_, **__: None)
    chance = random.Random(way)
    reached = places(way)
    assert len({method for method, _, _ in reached}) > 18, "some guarded methods are never called"
    ways = list(WAYS)
    seen = [places(before).keys() for before in ways[: ways.index(way)]]
    for place, times in reached.items():
        if any(place in others for others in seen):
            continue
        injector = Injector(place, chance.randrange(times))
        try:
            engine = RandomServing(1, way).run(injector, REQUESTS)
            assert injector.raised
            assert engine.errors == 1
        except Exception as error:
            raise AssertionError(f"after an error at {place}, time {injector.turn + 1}") from error
