"""Guarantees between an engine's process and a device: bytes, order, refusals, death.

Each check takes a Rig and returns results to report; it fails with an AssertionError.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.gpu.engine import Engine, Refused, engine, pattern
from tierd.device.api import Addresses, CannotOpenError, Device, Direction
from tierd.device.choice import HostScratch, choose, finish
from tierd.device.plan import NO_BOUNDS, CopyPlan, Strategy, issue
from tierd.shared_memory.exports import (
    Export,
    PageLayout,
    Run,
    counter_handle,
    layout_error,
    native_handle,
)

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Physical orders of layer, block, head, token and byte, as engines use them."""

Told = dict[str, object]


class Shape(NamedTuple):
    """Dimensions of a KV cache; the last is in bytes."""

    layers: int = 4
    blocks: int = 24
    heads: int = 3
    tokens: int = 16
    channel_bytes: int = 80


@dataclass
class Rig:
    """The device and the engines that the checks use."""

    device: Device
    kind: str
    """The kind of the engines, as in tests.gpu.engine."""
    shape: Shape = Shape()
    """The shape of the KV caches; with reserved addresses they must be larger than a chunk."""
    rounds: int = 10
    delay_s: float = 0.02
    """How long the engine's stream is kept busy: far longer than a copy takes."""
    free_bytes: Callable[[], int] | None = None
    """Free memory of the device, if it has its own."""

    @property
    def counters_only(self) -> bool:
        """Whether there are no native events."""
        return self.kind == "host"


class Laid(NamedTuple):
    """A layout in tensors that are not allocated yet."""

    sizes: list[int]
    runs: list[tuple[int, int, int]]
    """Tensor, offset and length."""
    stride: int
    blocks: int

    def block(self, content: list[np.ndarray], index: int) -> np.ndarray:
        """The bytes of a block, as a slot holds them."""
        return np.concatenate([self.place(content, index, run) for run in range(len(self.runs))])

    def place(self, content: list[np.ndarray], index: int, run: int) -> np.ndarray:
        """A run of a block, as a view."""
        tensor, offset, length = self.runs[run]
        begin = offset + index * self.stride
        return content[tensor][begin : begin + length]


def laid(order: str, shape: Shape) -> Laid:
    """A layout of `shape`; with layers outermost it has two tensors, like two layer groups."""
    dimensions = dict(zip("LBHNC", shape, strict=True))
    before, after = order.split("B")
    stride = int(np.prod([dimensions[name] for name in after]))
    starts = [
        int(np.ravel_multi_index(indices, [dimensions[name] for name in before]) if before else 0)
        for indices in itertools.product(*(range(dimensions[name]) for name in before))
    ]
    region = stride * shape.blocks
    tensors = 2 if before[:1] == "L" else 1
    regions = len(starts) // tensors
    runs = [(start // regions, start % regions * region, stride) for start in starts]
    return Laid([regions * region] * tensors, runs, stride, shape.blocks)


@contextlib.contextmanager
def mapped(
    rig: Rig, peer: Engine, sizes: list[int], *, counters: bool = True
) -> Iterator[list[int]]:
    """New tensors of an engine, and the addresses at which its exports are mapped in this
    process."""
    peer.show(sizes, counters=counters)
    bases = [rig.device.open(export) for export in peer.exports]
    try:
        yield bases
    finally:
        for base in bases:
            rig.device.close(base)


@contextlib.contextmanager
def shown(
    rig: Rig, sizes: list[int], *, counters: bool = True
) -> Iterator[tuple[Engine, list[int]]]:
    """An engine with such tensors, and the addresses at which its exports are mapped."""
    with engine(rig.kind) as peer, mapped(rig, peer, sizes, counters=counters) as bases:
        yield peer, bases


@contextlib.contextmanager
def scratch(rig: Rig, size_bytes: int) -> Iterator[HostScratch]:
    """Pinned host memory."""
    host = HostScratch(rig.device, size_bytes)
    try:
        yield host
    finally:
        host.close()


def page_layout(peer: Engine, form: Laid) -> PageLayout:
    """The layout in the engine's exports."""
    runs = []
    for tensor, offset, length in form.runs:
        export, begin = peer.places[tensor]
        runs.append(Run(export, begin + offset, length))
    return PageLayout(tuple(runs), form.stride, form.blocks)


def layouts(rig: Rig) -> Told:
    """Bytes are equal both ways, for all layouts and strategies, and no other byte changes."""
    told: Told = {}
    with engine(rig.kind) as peer:
        for name in LAYOUTS:
            form = laid(name, rig.shape)
            with mapped(rig, peer, form.sizes) as bases:
                told[name] = all_ways(rig, peer, form, bases)
    return told


def all_ways(rig: Rig, peer: Engine, form: Laid, bases: list[int]) -> str:
    """A round trip by each strategy, and the one that the device measures as the fastest."""
    device = rig.device
    layout = page_layout(peer, form)
    size = layout.block_bytes
    assert not layout_error(layout, [export.size_bytes for export in peer.exports], size)
    plan = CopyPlan(layout, bases)
    stream = device.create_stream(urgent=True)
    with scratch(rig, 2 * size * form.blocks) as host:
        staging = device.allocate(size * form.blocks)
        try:
            for strategy in plan.strategies:
                round_trip(rig, stream, peer, form, plan, strategy, host, staging)
        finally:
            device.free(staging)
    choice = choose(device, stream, layout, (size,), plan)
    assert "wrong" not in choice.how, choice.how
    return choice.how


def round_trip(
    rig: Rig,
    stream: int,
    peer: Engine,
    form: Laid,
    plan: CopyPlan,
    strategy: Strategy,
    host: HostScratch,
    staging: int,
) -> None:
    """Store all blocks, and load half of them to other blocks."""
    seed = random.Random(strategy.value).randrange(1 << 30)
    peer.fill(seed)
    content = [pattern(seed, tensor, size) for tensor, size in enumerate(form.sizes)]
    size = plan.block_bytes
    blocks = np.random.default_rng(seed).permutation(form.blocks).astype(np.uint64)
    slots = np.arange(form.blocks, dtype=np.uint64) * np.uint64(size) + np.uint64(host.address)

    def move(direction: Direction, chosen: Addresses, where: Addresses) -> None:
        way = (strategy, direction)
        issue(rig.device, stream, plan, way, chosen, where, NO_BOUNDS, staging)
        finish(rig.device, stream)

    host.bytes[:] = 0xEE
    move(Direction.STORE, blocks, slots)
    stored = host.bytes[: size * form.blocks].reshape(form.blocks, size)
    for slot, block in zip(stored, blocks.tolist(), strict=True):
        assert np.array_equal(slot, form.block(content, block)), f"block {block} by {strategy}"
    assert (host.bytes[size * form.blocks :] == 0xEE).all(), "bytes beyond the slots"

    half = form.blocks // 2
    move(Direction.LOAD, blocks[half:], slots[:half])
    for slot, block in zip(stored[:half], blocks[half:].tolist(), strict=True):
        at = 0
        for run, (_, _, length) in enumerate(form.runs):
            form.place(content, block, run)[:] = slot[at : at + length]
            at += length
    expected = [hashlib.sha256(tensor.tobytes()).hexdigest() for tensor in content]
    assert peer.digests() == expected, f"loads by {strategy}"


PAGE = 64 << 10


def order(rig: Rig) -> Told:
    """A store sees writes of the engine's stream before the event, and a load waits for the
    event."""
    told: Told = {}
    for counters in (True,) if rig.counters_only else (False, True):
        name = "counters" if counters else "native events"
        with shown(rig, [PAGE, PAGE], counters=counters) as (peer, bases):
            events = [rig.device.open_event(handle, bases) for handle in peer.handles]
            told[name] = stores_in_order(rig, peer, bases, events)
            loads_in_order(rig, peer, bases, events)
            for event in events:
                rig.device.close_event(event)
    return told


def stores_in_order(rig: Rig, peer: Engine, bases: list[int], events: list[int]) -> Told:
    """With a control: without waiting, the old bytes are seen, so the check can fail."""
    device = rig.device
    stream = device.create_stream(urgent=False)
    export, offset = peer.places[1]
    page = np.array([bases[export] + offset], np.uint64)
    length = np.array([PAGE], np.uint64)
    stale = 0
    with scratch(rig, PAGE) as host:
        slot = np.array([host.address], np.uint64)
        for number in range(1, rig.rounds + 1):
            event, value = peer.write_later(rig.delay_s, 1, 0, bytes([number]) * PAGE)
            device.copy(page, slot, length, Direction.STORE, stream)
            finish(device, stream)
            stale += int(host.bytes[0] != number)
            device.wait(stream, events[event], value)
            device.copy(page, slot, length, Direction.STORE, stream)
            finish(device, stream)
            assert (host.bytes == number).all(), f"round {number}: read before it was written"
    assert stale, "the control failed: nothing had to be waited for"
    return {"rounds": rig.rounds, "stale without waiting": stale}


def loads_in_order(rig: Rig, peer: Engine, bases: list[int], events: list[int]) -> None:
    """A load does not overwrite a page that the engine's stream has yet to read."""
    device = rig.device
    stream = device.create_stream(urgent=True)
    export, offset = peer.places[0]
    page = np.array([bases[export] + offset], np.uint64)
    length = np.array([PAGE], np.uint64)
    with scratch(rig, PAGE) as host:
        slot = np.array([host.address], np.uint64)
        for number in range(1, rig.rounds + 1):
            before = peer.read(0, 0, 1)
            event, value = peer.copy_later(rig.delay_s, (1, 0), (0, 0), PAGE)
            host.bytes[:] = number
            device.wait(stream, events[event], value)
            device.copy(page, slot, length, Direction.LOAD, stream)
            finish(device, stream)
            assert peer.read(1, 0, PAGE) == before * PAGE, f"round {number}: loaded too early"
            assert peer.read(0, 0, PAGE) == bytes([number]) * PAGE


def events(rig: Rig) -> Told:
    """An event without a record is complete; a newer record is waited for."""
    with shown(rig, [PAGE], counters=rig.counters_only) as (peer, bases):
        stream = rig.device.create_stream(urgent=False)
        opened = [rig.device.open_event(handle, bases) for handle in peer.handles]
        rig.device.wait(stream, opened[0], 0)
        finish(rig.device, stream)
        own = rig.device.create_event()
        assert rig.device.query(own), "an event without a record"
        event, value = peer.write_later(rig.delay_s, 0, 0, b"x")
        rig.device.wait(stream, opened[event], value)
        rig.device.record(own, stream)
        assert not rig.device.query(own), "an event whose stream still waits"
        finish(rig.device, stream)
        assert rig.device.query(own)
        for event in (own, *opened):
            rig.device.close_event(event)
        return {"events": len(opened)}


def openings(rig: Rig) -> Told:
    """An allocation is mapped once however often it is opened, until the last close."""
    device = rig.device
    with engine(rig.kind) as peer:
        peer.show([PAGE], counters=True)
        peer.fill(1)
        export, offset = peer.places[0]
        first = device.open(peer.exports[export])
        assert device.open(peer.exports[export]) == first
        device.close(first)
        stream = device.create_stream(urgent=False)
        with scratch(rig, PAGE) as host:
            device.copy(
                np.array([first + offset], np.uint64),
                np.array([host.address], np.uint64),
                np.array([PAGE], np.uint64),
                Direction.STORE,
                stream,
            )
            finish(device, stream)
            assert np.array_equal(host.bytes[:PAGE], pattern(1, 0, PAGE)), "closed too early"
        device.close(first)
        again = device.open(peer.exports[export])
        device.close(again)
        return {"same address when opened again": again == first}


def refusals(rig: Rig) -> Told:
    """Handles that cannot be opened are refused with a reason, and the device stays usable."""
    told: Told = {}
    device = rig.device
    with shown(rig, [PAGE]) as (peer, bases):
        good = peer.exports[0]
        wrong: dict[str, Export] = {
            "another device": good._replace(device=bytes(range(100, 116))),
            "a larger size": good._replace(size_bytes=good.size_bytes + (64 << 20)),
        }
        if good.parts:
            wrong["no parts"] = good._replace(parts=())
            wrong["a part of another size"] = good._replace(
                parts=(good.parts[0]._replace(offset=4096),)
            )
        else:
            wrong["no handle"] = good._replace(handle=b"")
            wrong["an unknown handle"] = good._replace(handle=bytes(64))
        for name, export in wrong.items():
            told[name] = refusal(device, export)
        for handle in (counter_handle(len(bases), 0), counter_handle(0, 1 << 40), b"\2", b""):
            told[f"event {handle[:13].hex()}"] = event_refusal(device, handle, bases)
        told["an unknown event"] = event_refusal(device, native_handle(bytes(64)), bases)
    openings(rig)
    return told


def refusal(device: Device, export: Export) -> str:
    """The reason for refusing an export."""
    return refused(lambda: device.open(export))


def event_refusal(device: Device, handle: bytes, bases: list[int]) -> str:
    """The reason for refusing an event."""
    return refused(lambda: device.open_event(handle, bases))


def refused(call: Callable[[], object]) -> str:
    """The message of a refusal, which leaves the device unchanged."""
    try:
        call()
    except CannotOpenError as error:
        reason = error
    else:
        raise AssertionError("opened")
    assert not reason.sticky, reason
    return str(reason)


def death(rig: Rig) -> Told:
    """An engine that dies in a step leaves a working device, and no other engine is affected."""
    device = rig.device
    told: Told = {}
    free = rig.free_bytes() if rig.free_bytes else 0
    size = (256 << 20) if rig.free_bytes else PAGE
    wait_stream, stream = (device.create_stream(urgent=False) for _ in range(2))
    waited = device.create_event()
    # With a counter, the memory could not be closed while a stream reads it.
    with shown(rig, [size], counters=rig.counters_only) as (peer, bases):
        export, offset = peer.places[0]
        peer.fill(3)
        opened = [device.open_event(handle, bases) for handle in peer.handles]
        event, value = peer.write_later(2.0, 0, 0, b"never")
        device.wait(wait_stream, opened[event], value)
        device.record(waited, wait_stream)
        peer.kill()
        with scratch(rig, PAGE) as host:
            device.copy(
                np.array([bases[export] + offset], np.uint64),
                np.array([host.address], np.uint64),
                np.array([PAGE], np.uint64),
                Direction.STORE,
                stream,
            )
            finish(device, stream)
            told["the dead engine's bytes"] = bool(
                np.array_equal(host.bytes[:PAGE], pattern(3, 0, size)[:PAGE])
            )
        told["the wait for its event ended"] = device.query(waited)
        for each in opened:
            device.close_event(each)
        begin = time.perf_counter()
    told["seconds to close its memory"] = round(time.perf_counter() - begin, 3)
    openings(rig)
    if rig.free_bytes:
        lost = free - rig.free_bytes()
        told["MiB not given back"] = lost >> 20
        assert lost < size, "the dead engine's memory is still held"
    return told


def pins(rig: Rig) -> Told:
    """Memory pinned in two calls, in one, or not at all: all of it can be copied."""
    device = rig.device
    stream = device.create_stream(urgent=True)
    memory = np.zeros(4 * PAGE, np.uint8)
    begin = -memory.ctypes.data % 4096
    host = memory[begin : begin + 3 * PAGE]
    address = host.ctypes.data
    target = device.allocate(3 * PAGE)
    lengths = np.full(3, PAGE, np.uint64)
    offsets = np.arange(3, dtype=np.uint64) * np.uint64(PAGE)
    slots, pages = offsets + np.uint64(address), offsets + np.uint64(target)
    pinned: list[int] = []
    for number, start in enumerate((None, 0, PAGE), 1):
        if start is not None:
            device.pin(address + start, PAGE)
            pinned.append(address + start)
        host[:] = number
        device.copy(pages, slots, lengths, Direction.LOAD, stream)
        finish(device, stream)
        host[:] = 0
        device.copy(pages, slots, lengths, Direction.STORE, stream)
        finish(device, stream)
        assert (host == number).all(), f"{number - 1} pins"
    for start in pinned:
        device.unpin(start)
    device.free(target)
    return {}


CHECKS: tuple[Callable[[Rig], Told], ...] = (
    openings,
    layouts,
    order,
    events,
    refusals,
    pins,
    death,
)
"""Checks that every device and every kind of memory must pass."""


def unshowable(kind: str, words: str) -> Told:
    """The refusal of an engine whose allocator's memory cannot be exported."""
    with engine(kind) as peer:
        try:
            if kind == "cuda":
                peer.show_managed()
            else:
                peer.show([PAGE], counters=True)
        except Refused as answer:
            reason = str(answer)
        else:
            raise AssertionError("shown")
    assert re.search(words, reason), reason
    return {"reason": reason}


def private_shm(rig: Rig) -> Told:
    """An engine with another /dev/shm: counters work, native events are refused."""
    with engine(rig.kind, private_shm=True) as peer:
        peer.show([PAGE], counters=False)
        bases = [rig.device.open(export) for export in peer.exports]
        try:
            rig.device.close_event(rig.device.open_event(peer.handles[0], bases))
            native = "opened"
        except CannotOpenError as error:
            native = str(error)
        for base in bases:
            rig.device.close(base)
    with engine(rig.kind, private_shm=True) as peer:
        peer.show([PAGE], counters=True)
        bases = [rig.device.open(export) for export in peer.exports]
        stream = rig.device.create_stream(urgent=False)
        opened = [rig.device.open_event(handle, bases) for handle in peer.handles]
        event, value = peer.write_later(rig.delay_s, 0, 0, b"x")
        rig.device.wait(stream, opened[event], value)
        finish(rig.device, stream)
        for base in bases:
            rig.device.close(base)
    return {"a native event": native, "counters": "work"}
