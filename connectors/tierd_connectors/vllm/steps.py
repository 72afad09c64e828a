"""A step's requests and their blocks, without vLLM's classes.

The engine is asked for a request's whole block table whenever the request gets blocks. Tables are
never assembled here from each step's new blocks: an error in one step would shift all later blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class EngineRequest(Protocol):
    """The attributes of vLLM's Request that the connector uses."""

    @property
    def request_id(self) -> str: ...

    @property
    def arrival_time(self) -> float: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class Scheduled(NamedTuple):
    """A request that computes in this step.

    `computed` is the number of tokens whose KV exists before the step. `restarted`: the request was
    admitted in this step; otherwise `blocks` are its new blocks. `table` asks the engine for all of
    the request's blocks; None if it got no new blocks and the engine does not report its table.
    """

    request_id: str
    restarted: bool
    blocks: Sequence[int]
    computed: int
    tokens: int
    table: Callable[[], Sequence[int] | None]


def scheduled_requests(output: SchedulerOutput) -> list[Scheduled]:
    """Return the requests that compute in this step."""
    cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
    steps = [
        Scheduled(
            new.req_id,
            True,
            (),
            new.num_computed_tokens,
            tokens[new.req_id],
            functools.partial(_table, output, new.req_id),
        )
        for new in output.scheduled_new_reqs
    ]
    steps += [
        Scheduled(
            request_id,
            request_id in cached.resumed_req_ids,
            blocks[0] if blocks else (),
            computed,
            tokens[request_id],
            functools.partial(_table, output, request_id),
        )
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        )
    ]
    return steps


def _table(output: SchedulerOutput, request_id: str) -> Sequence[int] | None:
    state = output.kv_connector_block_state
    # vLLM 0.29 has the tables of requests with new blocks; later versions make any table.
    given = getattr(state, "block_ids", None)
    groups = state.get_block_ids(request_id) if given is None else given.get(request_id)
    return None if groups is None else groups[0]
