"""A namespace in host memory: its slots, its sessions and its times of use."""

from __future__ import annotations

from typing import Final

from tierd.chain import ChainIndex
from tierd.core.l2.slots import Slots
from tierd.eviction.reuse import Reuse
from tierd.types import Namespace


class Space(Slots):
    """The slots of one namespace, and the state that decides when it gives up memory or ends.

    `reuse` is the book of uses of its blocks, resident or not. `used_s` is when an engine last
    stored or asked for blocks, and `since_s` when it got memory, both by `HostTier.now_s`. Until
    `known_until_s` a client that lost its connection may return with its mapped segments.
    `worthless` stays set: no engine will ask for the blocks once the sessions have ended.
    """

    __slots__ = (
        "_ended",
        "_known_until_s",
        "_sessions",
        "_since_s",
        "_used_s",
        "_worthless",
        "digest",
        "namespace",
        "reuse",
    )

    def __init__(
        self,
        namespace: Namespace,
        slots_per_segment: int,
        reuse: Reuse,
        chain: ChainIndex,
        now_s: int = 0,
    ) -> None:
        super().__init__(namespace.slot_bytes, slots_per_segment, chain)
        self.namespace: Final = namespace
        self.digest: Final = namespace.digest
        self.reuse: Final = reuse
        self._sessions = 0
        self._used_s = now_s
        self._since_s = 0
        self._known_until_s = 0
        self._worthless = False
        self._ended = False

    @property
    def sessions(self) -> int:
        """Number of registrations by sessions."""
        return self._sessions

    @property
    def used_s(self) -> int:
        """When an engine last stored or asked for blocks."""
        return self._used_s

    @property
    def since_s(self) -> int:
        """When it got memory."""
        return self._since_s

    @property
    def known_until_s(self) -> int:
        """Until when a client may return with the segments that it has mapped."""
        return self._known_until_s

    @property
    def worthless(self) -> bool:
        """Whether no engine will ask for its blocks once its sessions have ended."""
        return self._worthless

    @property
    def ended(self) -> bool:
        """Whether `HostTier.end_space` has removed it."""
        return self._ended

    @property
    def is_free(self) -> bool:
        """Whether it has no sessions, and no slot is or may be held or written."""
        return not (
            self._sessions
            or self._writing
            or self._evicting
            or self._quarantined
            or self._leased_before
            or any(self._refs)
        )

    def _register(self, now_s: int, *, worthless: bool) -> None:
        self._sessions += 1
        self._worthless = self._worthless or worthless
        self._used_s = now_s

    def _unregister(self, known_until_s: int, *, worthless: bool) -> None:
        assert self._sessions > 0
        self._sessions -= 1
        self._known_until_s = max(self._known_until_s, known_until_s)
        self._worthless = self._worthless or worthless
