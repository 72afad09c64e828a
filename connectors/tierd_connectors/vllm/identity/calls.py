"""Detects calls that may have changed an engine's weights or code since its start.

vLLM resets its caches at every pause, whether weights are replaced during it or not. Only vLLM's
code runs in the engine's processes (`identity.fields` refuses other workers), so only a call from
outside can replace weights or the model's code, and all such calls go through
`EngineCore.collective_rpc`. An engine without such a call computes the same KV as at its start.
After a call that may change the KV the engine uses a new namespace, whether caches are reset or
not. There are other ways if the engine runs in its user's process, or if its user can reach the
workers (Ray): then calls are still observed, and every reset leads to a new namespace.
"""

from __future__ import annotations

import multiprocessing
import sys
import weakref
from collections.abc import Callable
from functools import wraps

_HARMLESS = frozenset(
    {
        "compute_weight_checksums",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "release_late_interaction_query_cache",
        "update_max_model_len",
    }
)
"""Methods that vLLM itself calls this way, and that change neither weights nor code."""

_observers: weakref.WeakSet[Callers] = weakref.WeakSet()
_watched: set[type] = set()


class Callers:
    """Calls `called` before each call from outside, once `watch` is called."""

    def __init__(self, called: Callable[[str], None]) -> None:
        self._called = called

    def note(self, method: object) -> None:
        """Report a call to the engine's workers that is about to be made, unless harmless."""
        if method not in _HARMLESS:
            self._called(method if isinstance(method, str) else "a function sent by a caller")

    def watch(self, executor: object) -> bool:
        """Observe calls from now on. Returns False if some may be missed, because of `executor`
        (the setting `distributed_executor_backend`) or of the process that the engine runs in."""
        core = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
        rpc = vars(core).get("collective_rpc") if core is not None else None
        if core is None or rpc is None:
            return False
        if core not in _watched:
            _watched.add(core)
            core.collective_rpc = _noting(rpc)
        _observers.add(self)
        process = multiprocessing.current_process()
        alone = multiprocessing.parent_process() is not None
        return alone and process.name.startswith("EngineCore") and executor in ("uni", "mp")


def _noting(rpc: Callable[..., object]) -> Callable[..., object]:
    @wraps(rpc)
    def noting(self: object, method: object, *more: object, **named: object) -> object:
        for callers in list(_observers):
            callers.note(method)
        return rpc(self, method, *more, **named)

    return noting
