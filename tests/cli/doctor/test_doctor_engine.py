"""`tierd doctor --engine`: whether an engine and this node's tierd mean the same by a block."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.doctor_scene import (
    ROOT,
    Examine,
    namespace,
    register,
)
from tests.support.fake_node import FakeEngine
from tests.support.traffic import wait_until
from tierd.cli.doctor.checks import engine as engine_checks
from tierd.hashing import hash_blocks, root_hash


@pytest.fixture
def attached(daemon: DaemonProcess) -> Iterator[Callable[[bytes], Callable[[list[int]], None]]]:
    """Return an engine's reaction to a prompt: it stores the blocks, chained to its own root."""
    client = daemon.client("vllm-scheduler")
    space = namespace()
    handle = register(client, space)

    def storing(root: bytes) -> Callable[[list[int]], None]:
        def compute(tokens: list[int]) -> None:
            hashes = hash_blocks(tokens, space.block_tokens, parent=root)
            parents = [root, *hashes[:-1]]
            buffers = [blocks.payload(space, each) for each in hashes]
            assert all(client.put(handle, list(zip(hashes, parents, buffers, strict=True))))

        return compute

    yield storing
    client.close()


def test_an_engine_that_agrees(daemon: DaemonProcess, examine: Examine, attached: Callable) -> None:
    """A sound engine would be called sick, or its first block's hash not be tried."""
    with FakeEngine(attached(ROOT)) as fake:
        found = examine("--engine", fake.url, "--socket", daemon.socket)
    assert found["hashes_agree"]["level"] == "ok"
    assert namespace().digest.hex() in found["hashes_agree"]["what"]
    assert found["load_failure_policy"]["level"] == "ok"
    assert found["rc"] != 1


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_an_engine_with_another_seed(
    daemon: DaemonProcess,
    examine: Examine,
    attached: Callable,
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
) -> None:
    """Blocks that no other engine finds would be stored forever."""
    monkeypatch.setattr(engine_checks, "STORED_S", 0.2)
    monkeypatch.setenv("PYTHONHASHSEED", "42" if known else "43")
    with FakeEngine(attached(root_hash("42"))) as fake:
        found = examine("--engine", fake.url, "--socket", daemon.socket)
    assert found["hash_drift"]["level"] == "fault"
    assert "its namespace matches PYTHONHASHSEED unset" in found["hash_drift"]["what"]
    assert ("its hashes match PYTHONHASHSEED '42'" in found["hash_drift"]["what"]) is known
    assert "PYTHONHASHSEED" in found["hash_drift"]["do"]
    assert found["rc"] == 1


def test_an_engine_that_stores_nothing(
    daemon: DaemonProcess,
    examine: Examine,
    attached: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connector that is off, or another engine's, would look as if it worked."""
    monkeypatch.setattr(engine_checks, "STORED_S", 0.2)
    with FakeEngine() as fake:
        found = examine("--engine", fake.url, "--socket", daemon.socket)
    assert found["nothing_stored"]["level"] == "fault"
    assert "TierdConnector" in found["nothing_stored"]["do"]


def test_an_engine_without_the_connector(daemon: DaemonProcess, examine: Examine) -> None:
    """An engine that was started without tierd would look as if it only missed."""
    wait_until(
        lambda: not any(space["sessions"] for space in daemon.status()["namespaces"]),
        10,
        "a session stays",
    )
    with FakeEngine() as fake:
        found = examine("--engine", fake.url, "--socket", daemon.socket)
    assert found["not_attached"]["level"] == "fault"
    assert "--kv-transfer-config" in found["not_attached"]["do"]


def test_engine_reports_are_checked(examine: Examine) -> None:
    """Settings with which tierd stays off would have to be found in the engine's log."""
    labels = 'block_size="16",enable_prefix_caching="False",prefix_caching_hash_algo="sha256"'
    with FakeEngine() as fake:
        fake.metrics = (
            f"vllm:cache_config_info{{{labels}}} 1.0\n"
            'vllm:tierd_errors_total{engine="0"} 2.0\n'
            'vllm:tierd_errors_total{engine="1"} 1.0\n'
            'vllm:tierd_load_failures_total{engine="0"} 4.0\n'
        )
        found = examine("--engine", fake.url)
    assert found["no_prefix_caching"]["level"] == "fault"
    assert "sha256_cbor" in found["hash_algorithm"]["do"]
    assert found["errors"]["what"].startswith("3 connector errors")
    assert found["load_failures"]["what"].startswith("4 loads")


def test_an_engine_that_is_down(examine: Examine) -> None:
    """A wrong address would be a traceback."""
    assert examine("--engine", "http://127.0.0.1:9")["engine_away"]["level"] == "fault"


def test_engine_with_errors(examine: Examine) -> None:
    """An engine whose core has died still answers on some paths."""
    with FakeEngine() as fake:
        fake.answers["/health"] = (503, b"")
        assert examine("--engine", fake.url)["engine_sick"]["level"] == "fault"


def test_server_that_is_not_vllm(examine: Examine) -> None:
    """The address of some other server would be a traceback."""
    with FakeEngine() as fake:
        fake.answers["/version"] = (200, b"<html>")
        assert examine("--engine", fake.url)["not_vllm"]["level"] == "fault"


def test_an_engine_that_does_not_answer(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hangs would hang the command."""
    monkeypatch.setattr(engine_checks, "ENGINE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert examine("--engine", url)["engine_away"]["level"] == "fault"
