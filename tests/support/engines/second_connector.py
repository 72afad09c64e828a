"""A second vLLM connector for tests, which loads beside tierd under vLLM's MultiConnector.

For prompts that begin with MARK it fills the blocks that the engine allocated with a constant, at
once, and reports the load when the test says so. Runs in the engine's process, which imports it by
name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

MARK = 777
BLOCK_TOKENS = 32


class State:
    """What the test sets and sees; scheduler and worker run in one process."""

    offers = True
    finishes = False
    filled = 0


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    blocks: dict[str, list[int]] = field(default_factory=dict)


class SecondConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped
    """Loads wrong KV, so that any use of it shows."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._planned: dict[str, list[int]] = {}
        self._offered: set[str] = set()
        self._filled: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, blocks in self._get_connector_metadata().blocks.items():
            for cache in self._caches.values():
                cache[blocks] = 0.25
            self._filled.add(request_id)
            State.filled += len(blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        if not State.finishes:
            return None, None
        filled, self._filled = self._filled, set()
        return None, filled or None

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        known = request.request_id in self._offered or request.prompt_token_ids[0] != MARK
        tokens = (request.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS - computed
        return (0, False) if known or not State.offers or tokens <= 0 else (tokens, True)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        if external:
            self._offered.add(request.request_id)
            count = external // BLOCK_TOKENS
            self._planned[request.request_id] = blocks.get_block_ids()[0][-count:]

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        planned, self._planned = self._planned, {}
        return Loads(planned)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
