"""Whether anybody can have changed what an engine computes since it was started.

vLLM resets its caches when it pauses, for weights that may be replaced then, or stay. What runs in
the engine's own processes is vLLM's code alone (`identity.fields` refuses workers that are
others'), so only a call from outside can replace weights, or the model's code, and all of them take
one way, `EngineCore.collective_rpc`. An engine that has had none is what it was at its start. With
one that may change something it goes on in a namespace of its own, whether or not caches are reset.
In a process of its user's own, or with workers that its user can reach (Ray), there are other ways:
calls are noted all the same, and each reset counts.
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
"""What vLLM itself calls by this way and that only reads, or leaves weights and code alone."""

_told: weakref.WeakSet[Callers] = weakref.WeakSet()
_watched: set[type] = set()


class Callers:
    """Has `called` called before each call from outside; `watch` says whether that is so."""

    def __init__(self, called: Callable[[str], None]) -> None:
        self._called = called

    def note(self, method: object) -> None:
        """The engine's workers are about to be called."""
        if method not in _HARMLESS:
            self._called(method if isinstance(method, str) else "a function of the caller's")

    def watch(self, executor: object) -> bool:
        """Hear of calls from now on. False if there may be others that are not heard of, by the
        engine's setting `distributed_executor_backend`, or by where it runs."""
        core = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
        rpc = vars(core).get("collective_rpc") if core is not None else None
        if core is None or rpc is None:
            return False
        if core not in _watched:
            _watched.add(core)
            core.collective_rpc = _noting(rpc)
        _told.add(self)
        process = multiprocessing.current_process()
        alone = multiprocessing.parent_process() is not None
        return alone and process.name.startswith("EngineCore") and executor in ("uni", "mp")


def _noting(rpc: Callable[..., object]) -> Callable[..., object]:
    @wraps(rpc)
    def noting(self: object, method: object, *more: object, **named: object) -> object:
        for callers in list(_told):
            callers.note(method)
        return rpc(self, method, *more, **named)

    return noting
