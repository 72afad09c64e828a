"""TierdConnector in a simulated engine: the real class, on simulated engine memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from tests.support.engines.fake_vllm import connector_module
from tests.support.simulation.pool import Memory
from tierd.types import Namespace
from tierd_connectors.vllm.worker.mover import Mover


@contextmanager
def started_with(
    memory: Memory, namespace: Namespace, mover: Callable[..., Mover]
) -> Iterator[None]:
    """Give workers of the connector this memory when they register their caches."""
    module = connector_module()
    group = SimpleNamespace(rank_in_group=0)
    groups = SimpleNamespace(
        get_pp_group=lambda: group,
        get_tp_group=lambda: SimpleNamespace(rank_in_group=namespace.tp_rank),
    )
    instead: dict[str, object] = {
        "importlib": SimpleNamespace(import_module=lambda name: groups),
        "check_engine": lambda *_: None,
        "kv_views": lambda *_: [],
        "kv_blocks": lambda *_: memory.blocks,
        "fingerprint_of": lambda *_: None,
        "namespace_of": lambda *_, **__: namespace,
        "PageMap": lambda *_: memory,
        "Mover": mover,
    }
    real = {name: getattr(module, name) for name in instead}
    try:
        vars(module).update(instead)
        yield
    finally:
        vars(module).update(real)
