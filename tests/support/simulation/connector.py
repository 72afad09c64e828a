"""TierdConnector in a simulated engine: the real class, on simulated engine memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.engines.fake_vllm import connector_module
from tests.support.simulation.pool import Memory
from tierd.types import Namespace
from tierd_connectors.vllm.worker import memory as rank_memory
from tierd_connectors.vllm.worker.mover import Mover


@contextmanager
def started_with(
    memory: Memory, namespace: Namespace, mover: Callable[..., Mover]
) -> Iterator[None]:
    """Give workers of the connector this memory when they register their caches."""
    group = SimpleNamespace(rank_in_group=0)
    groups = SimpleNamespace(
        get_pp_group=lambda: group,
        get_tp_group=lambda: SimpleNamespace(rank_in_group=namespace.tp_rank),
    )
    facts: dict[str, Any] = {
        "importlib": SimpleNamespace(import_module=lambda name: groups),
        "check_engine": lambda *_: None,
        "kv_views": lambda *_: [],
        "kv_blocks": lambda *_: memory.blocks,
        "fingerprint_of": lambda *_: None,
        "namespace_of": lambda *_, **__: namespace,
        "PageMap": lambda *_: memory,
    }
    with (
        mock.patch.multiple(rank_memory, **facts),
        mock.patch.object(connector_module(), "Mover", mover),
    ):
        yield
