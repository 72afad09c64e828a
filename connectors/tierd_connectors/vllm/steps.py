"""What the engine says of a step, without vLLM's classes: who computes, and in which blocks.

Block tables are asked of the engine anew whenever a request has got blocks, and never put
together here from what came in each step: an error in one step would shift all that follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class EngineRequest(Protocol):
    """What is used of vLLM's Request."""

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

    `computed` are the tokens whose KV exists before the step. `restarted` says that it was
    admitted in this step; else `blocks` are those that it has got since. `table` are all of its
    blocks, asked of the engine anew; None if none came and the engine does not tell.
    """

    request_id: str
    restarted: bool
    blocks: Sequence[int]
    computed: int
    tokens: int
    table: Callable[[], Sequence[int] | None]


def scheduled_requests(output: SchedulerOutput) -> list[Scheduled]:
    """The requests that compute in this step."""
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
    # vLLM 0.29 has the tables of requests that have got blocks, later versions make any.
    given = getattr(state, "block_ids", None)
    groups = state.get_block_ids(request_id) if given is None else given.get(request_id)
    return None if groups is None else groups[0]
