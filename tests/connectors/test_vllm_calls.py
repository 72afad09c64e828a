"""Calls from outside to an engine's workers are noticed; where they cannot be, that is known."""

from __future__ import annotations

import multiprocessing
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tierd_connectors.vllm.identity.calls import Callers


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's EngineCore, in the process that vLLM makes for it."""

    class EngineCore:
        def __init__(self) -> None:
            self.ran: list[object] = []

        def collective_rpc(self, method: object, *more: object) -> str:
            self.ran.append(method)
            return "done"

    module = ModuleType("vllm.v1.engine.core")
    vars(module)["EngineCore"] = EngineCore
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        multiprocessing, "current_process", lambda: SimpleNamespace(name="EngineCore_DP0")
    )
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
    return EngineCore


def test_call_is_reported_before_it_runs(core: Any) -> None:
    """Weights would be replaced under a namespace that says they are the old ones."""
    engine, noted = core(), []
    callers = [Callers(lambda how: noted.append((how, list(engine.ran)))) for _ in range(2)]
    assert all(each.watch("mp") for each in callers)
    assert engine.collective_rpc("update_weights", None, ("x",)) == "done"
    assert noted == [("update_weights", [])] * 2, "each connector, once"
    engine.collective_rpc(lambda worker: worker)
    assert noted[-1] == ("a function sent by a caller", ["update_weights"])
    for harmless in ("compute_weight_checksums", "get_model_inspection"):
        engine.collective_rpc(harmless)
    assert len(noted) == 4, "vLLM's own"


@pytest.mark.parametrize("what", ["own process", "a user's child", "ray", "no such method"])
def test_unobservable_calls_count_as_made(
    core: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A reset after an unobserved change would find the old weights' KV."""
    if what == "own process":
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    if what == "a user's child":
        monkeypatch.setattr(
            multiprocessing, "current_process", lambda: SimpleNamespace(name="Process-1")
        )
    if what == "no such method":
        del core.collective_rpc
    noted: list[str] = []
    callers = Callers(noted.append)
    assert not callers.watch("ray" if what == "ray" else "uni")
    if what != "no such method":
        core().collective_rpc("my_update")
        assert noted == ["my_update"], "what can be noticed is"
