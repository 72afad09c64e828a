"""Loads of the scheduler's side: planned, copied by the workers, and the leases held until then.

A lease is released once every rank has reported its load and, for a load that was reported early,
has completed it. The engine waits for every load, so a planned load is never lost: if it cannot be
made, the workers report it as failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierd_connectors.common.work import Load

if TYPE_CHECKING:
    from tierd.client import Client, Lease


class _LeasedLoad(NamedTuple):
    lease: Lease
    blocks: frozenset[int]


class LeasedLoads:
    """The loads that some rank has not ended. Used by the engine's scheduler thread only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._planned: dict[str, Load] = {}
        self._leased: dict[str, _LeasedLoad] = {}
        self._begun: list[str] = []
        self._finishing: dict[str, int] = {}
        self._finishing_leases: dict[str, list[Lease]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a request waits for its load."""
        return request_id in self._leased

    @property
    def leases_held(self) -> int:
        """Number of leases not released yet."""
        finishing = sum(len(leases) for leases in self._finishing_leases.values())
        return len(self._leased) + finishing

    def plan(self, load: Load, lease: Lease) -> None:
        """Plan a load, and take over its lease."""
        self._leased[load.request_id] = _LeasedLoad(lease, frozenset(load.blocks))
        self._planned[load.request_id] = load

    def fail(self, request_id: str, blocks: Sequence[int]) -> None:
        """Have the workers report failure for these blocks."""
        self._planned[request_id] = _doomed(request_id, blocks)

    def take_planned(self) -> list[Load]:
        """Return the loads planned since the last call, for the workers. Raises nothing."""
        planned, self._planned = self._planned, {}
        return list(planned.values())

    def take_begun(self) -> list[str]:
        """Return the requests whose loads were reported since the last call. Raises nothing."""
        begun, self._begun = self._begun, []
        return begun

    def finished(
        self,
        request_ids: Collection[str],
        invalid_blocks: Iterable[int],
        finishing: Mapping[str, int],
    ) -> list[str]:
        """Take loads that every rank has reported; some rank did not fill `invalid_blocks`.

        `finishing` is the sum of the ranks' changes in loads that were reported early and that they
        have not completed. Returns the requests whose loads failed.
        """
        self._begun.extend(request_ids)
        for request_id, count in finishing.items():
            left = self._finishing.pop(request_id, 0) + count
            if left:
                self._finishing[request_id] = left
            else:
                for lease in self._finishing_leases.pop(request_id, ()):
                    self._client.release(lease)
        failed: list[str] = []
        invalid = frozenset(invalid_blocks)
        if invalid:
            for request_id, load in self._leased.items():
                if not invalid.isdisjoint(load.blocks):
                    failed.append(request_id)
        for request_id in request_ids:
            done = self._leased.pop(request_id, None)
            if done is None:
                # No lease: `fail` planned this load.
                failed.append(request_id)
            elif request_id in self._finishing:
                self._finishing_leases.setdefault(request_id, []).append(done.lease)
            else:
                self._client.release(done.lease)
        return failed

    def start_over(self) -> None:
        """Fail the loads that were not sent to a worker, and forget the others.

        Leases of copies in progress are left to expire, not released: a worker may be reading their
        slots.
        """
        leased, self._leased = self._leased, {}
        planned = self._planned
        self._planned = {name: _doomed(name, load.blocks) for name, load in planned.items()}
        self._finishing_leases, self._finishing = {}, {}
        for request_id in planned:
            if request_id in leased:
                self._client.release(leased[request_id].lease)

    def release_all(self) -> None:
        """Release every lease, at the engine's end."""
        for load in self._leased.values():
            self._client.release(load.lease)
        for leases in self._finishing_leases.values():
            for lease in leases:
                self._client.release(lease)


def _doomed(request_id: str, blocks: Sequence[int]) -> Load:
    """Return a load that the workers report as failed."""
    return Load(request_id, b"", 0, list(blocks), [])
