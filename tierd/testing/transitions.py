"""Checks every transition of slots, reservations and leases against the core's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from unittest import mock

from tierd.core import states
from tierd.core.l2 import leases, reservations
from tierd.core.l2.slots import Slots
from tierd.core.states import SLOTS, TAKEN_BY, SlotEvent, SlotState

Seen = Counter[tuple[Enum, Enum]]
"""Number of times that each transition was seen, by state and event."""


def states_of(slots: Slots) -> list[SlotState]:
    """Return the state of each slot; AssertionError if a slot is in two places, or in none."""
    per = slots.slots_per_segment
    found = [SlotState.ABSENT] * (len(slots.live) * per)

    def put(places: Iterator[int], state: SlotState) -> None:
        for slot in places:
            assert found[slot] is SlotState.ABSENT, f"slot {slot} is {found[slot]} and {state}"
            found[slot] = state

    put(iter(slots.free), SlotState.FREE)
    put(iter(slots.writing.values()), SlotState.WRITING)
    put(iter(slots.quarantined), SlotState.QUARANTINED)
    put((s for s in slots.evicting if s not in slots.dropped), SlotState.EVICTING)
    put(iter(slots.dropped), SlotState.DROPPED)
    put((s for s in slots.items.values() if s in slots.unverified), SlotState.UNVERIFIED)
    put((s for s in slots.items.values() if s not in slots.unverified), SlotState.READABLE)
    for slot, state in enumerate(found):
        assert (state is SlotState.ABSENT) is not slots.live[slot // per], f"slot {slot} is lost"
    return found


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Count every transition in `seen`, and raise AssertionError at one that is in no table."""
    step = _counted(seen)
    with ExitStack() as stack:
        for name in TAKEN_BY:
            stack.enter_context(mock.patch.object(Slots, name, _watch(name, seen)))
        for module in (leases, reservations):
            stack.enter_context(mock.patch.object(module, "step", step))
        yield


def _watch(name: str, seen: Seen) -> Callable[..., object]:
    method: Callable[..., object] = getattr(Slots, name)

    def watching(self: Slots, *args: object) -> object:
        before = states_of(self)
        result = method(self, *args)
        after = states_of(self)
        size = max(len(before), len(after))
        for each in (before, after):
            each.extend([SlotState.ABSENT] * (size - len(each)))
        for slot, (old, new) in enumerate(zip(before, after, strict=True)):
            if old is not new:
                seen[old, _event(name, old, new, slot)] += 1
        return result

    return watching


def _event(name: str, old: SlotState, new: SlotState, slot: int) -> SlotEvent:
    """Return the event of a method that explains a slot's transition."""
    events = [event for event in TAKEN_BY[name] if SLOTS.get((old, event)) is new]
    assert len(events) == 1, f"{name} moved slot {slot} from {old} to {new}: in no table"
    return events[0]


def _counted(seen: Seen) -> Callable[..., object]:
    step: Callable[..., object] = states.step

    def counting(table: object, state: Enum, event: Enum) -> object:
        after = step(table, state, event)
        seen[state, event] += 1
        return after

    return counting
