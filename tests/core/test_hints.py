"""Hints: kept blocks, their times and quota; demoted blocks; and the messages of clients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.traffic import wait_until
from tierd.chain import ChainIndex
from tierd.client import HINT_MS_MAX, Client
from tierd.core import hints as hints_module
from tierd.core.hints import HIGH_PRIORITY_S, HintedNamespace, Hints, PrefixHint, Priority
from tierd.core.host import HostTier
from tierd.core.l2.space import Space
from tierd.core.reasons import Evicted
from tierd.eviction import POLICIES, make_policy
from tierd.eviction.policy import PrefixRequest
from tierd.eviction.reuse import Reuse
from tierd.wire import messages as m

PAGE = 4096
S = 1_000_000_000
SLOTS = 64
QUOTA = SLOTS // 4
NOW = 5 * S


class Scene:
    """A host tier of 64 slots with a quota of 16 blocks, and its clock."""

    def __init__(self, *models: str, pin_max_s: int = 3600) -> None:
        hints = Hints(QUOTA * PAGE, pin_max_s)
        self.host = HostTier(SLOTS * PAGE, 4 * PAGE, hints, "lru")
        self.now_ns = NOW
        self.spaces = [self.open(model) for model in models or ("a",)]
        self.space = self.spaces[0]

    def open(self, model: str) -> Space:
        space = self.host.open_space(blocks.namespace(PAGE, model=model))
        assert space is not None
        space._sessions = 1
        return space

    def store(
        self, tag: object, count: int = 4, space: Space | None = None, first: int = 0
    ) -> list[bytes]:
        """Store a chain from its block number `first` on; the hashes of all of it."""
        space = space or self.space
        hashes, parents = blocks.chain(count, tag)
        reservation, _ = self.host.reserve(1, space, hashes[first:], parents[first:])
        self.host.commit(1, reservation.reservation_id, count)
        self.host.check()
        return hashes

    def flood(self, space: Space | None = None, tag: object = "") -> None:
        """Store four times the capacity in short chains: whatever may go is gone."""
        for number in range(SLOTS):
            self.store(f"flood {tag} {number} {self.now_ns}", 4, space)

    def hint(self, hashes: Sequence[bytes], hint: PrefixHint, *spaces: Space) -> None:
        self.host.hint(list(spaces) or [self.space], hashes, hint, self.now_ns)
        self.host.check()

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * S)
        while self.host.expire_hints(self.now_ns):
            pass
        self.host.check()

    def here(self, hashes: Sequence[bytes], space: Space | None = None) -> list[bool]:
        return [block_hash in (space or self.space).items for block_hash in hashes]

    def count(self, name: str) -> int:
        return self.host.hints.counters[name]


def pin(seconds: float) -> PrefixHint:
    return PrefixHint(pin_ms=int(seconds * 1000))


# --- kept blocks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "seconds"),
    [
        (pin(100), 100),
        (PrefixHint(next_use_ms=20_000), 40),
        (PrefixHint(priority=Priority.HIGH), HIGH_PRIORITY_S),
        (PrefixHint(pin_ms=1000, next_use_ms=20_000), 40),
        (PrefixHint(pin_ms=90_000, next_use_ms=20_000), 90),
    ],
    ids=["pin", "next use", "high", "pin and later use", "longer pin"],
)
def test_prefix_is_kept_until_its_time_is_over(hint: PrefixHint, seconds: int) -> None:
    """A pinned system prompt would be computed again after a rush, or stay forever."""
    scene = Scene()
    hashes = scene.store("pinned")
    other = scene.store("other")
    scene.hint(hashes, hint)
    assert scene.count("pins_granted_blocks_total") == 4
    scene.flood()
    assert not any(scene.here(other))
    scene.sleep(seconds - 1)
    scene.flood()
    assert all(scene.here(hashes))
    scene.sleep(2)
    assert scene.host.hints.kept_bytes == 0
    assert scene.count("pins_expired_blocks_total") == 4
    scene.flood()
    assert not any(scene.here(hashes))


def test_quota_cuts_the_kept_prefix_without_a_hole() -> None:
    """One user would take all of L2, or the kept part of a prefix would start with a gap."""
    scene = Scene()
    hashes = scene.store("long", QUOTA + 5)
    scene.hint(hashes, pin(100))
    more = scene.store("more")
    scene.hint(more, pin(100))
    assert scene.host.hints.kept_bytes == QUOTA * PAGE
    assert scene.count("pins_granted_blocks_total") == QUOTA
    assert scene.count("pins_refused_blocks_total") == 5 + 4
    scene.flood()
    assert scene.here(hashes) == [True] * QUOTA + [False] * 5
    assert not any(scene.here(more))


def test_expired_pins_free_their_quota() -> None:
    """After an hour of pins, no further pin would be granted."""
    scene = Scene()
    scene.hint(scene.store("first", QUOTA), pin(10))
    scene.sleep(12)
    second = scene.store("second", QUOTA)
    scene.hint(second, pin(10))
    scene.flood()
    assert all(scene.here(second))


def test_repeated_pin_extends_without_using_quota() -> None:
    """A client that renews its pin would use up the quota, or another user's pin shorten it."""
    scene = Scene()
    hashes = scene.store("renewed", QUOTA)
    scene.hint(hashes, pin(50))
    scene.hint(hashes, pin(100))
    scene.hint(hashes, pin(1))
    assert scene.count("pins_refused_blocks_total") == 0
    assert scene.host.hints.kept_bytes == QUOTA * PAGE
    scene.sleep(60)
    scene.flood()
    assert all(scene.here(hashes))
    scene.sleep(42)
    scene.flood()
    assert not any(scene.here(hashes))


def test_pin_time_is_bounded() -> None:
    """A request to pin for a year would hold its quota until the daemon is restarted."""
    scene = Scene(pin_max_s=60)
    scene.hint(scene.store("year"), PrefixHint(pin_ms=HINT_MS_MAX, next_use_ms=(1 << 63) - 1))
    scene.sleep(62)
    assert scene.host.hints.kept_bytes == 0


def test_next_use_hints_leave_half_of_the_quota_to_pins() -> None:
    """Every request's likely next use would fill the quota, and no pin would be granted."""
    scene = Scene()
    scene.hint(scene.store("guess", QUOTA), PrefixHint(next_use_ms=100_000))
    assert scene.host.hints.kept_blocks == QUOTA // 2
    pinned = scene.store("pinned", QUOTA // 2)
    scene.hint(pinned, pin(100))
    assert scene.host.hints.kept_blocks == QUOTA
    scene.flood()
    assert all(scene.here(pinned))


def test_ranks_keep_the_same_prefix() -> None:
    """A prefix that one rank has lost is useless, so its pin on the other rank would be wasted."""
    scene = Scene("rank 0", "rank 1")
    for space in scene.spaces:
        hashes = scene.store("ranks", 12, space)
    # A namespace that is named twice counts once.
    scene.hint(hashes, pin(100), *scene.spaces, *scene.spaces)
    kept = [len(scene.host.hints.kept(space.digest)) for space in scene.spaces]
    assert kept == [QUOTA // 2, QUOTA // 2]
    assert scene.count("pins_refused_blocks_total") == 2 * 12 - QUOTA


def test_namespace_keeps_at_most_its_share() -> None:
    """The first engine to pin would take the whole quota and pin all of its own memory."""
    scene = Scene("a", "b")
    first, second = scene.spaces
    scene.flood(first)
    scene.flood(second)
    # Each namespace has some of the 16 segments, and all are allocated.
    share = QUOTA * first.live_segments * first.segment_bytes // scene.host.capacity_bytes
    assert 0 < share < QUOTA
    scene.hint(scene.store("mine", QUOTA, first), pin(100), first)
    assert len(scene.host.hints.kept(first.digest)) == share
    scene.hint(scene.store("yours", 2, second), pin(100), second)
    assert len(scene.host.hints.kept(second.digest)) == 2


def test_pin_may_come_before_its_blocks() -> None:
    """A request's last blocks are stored after its end, when its hint has already arrived."""
    scene = Scene()
    hashes, _ = blocks.chain(6, "late")
    scene.hint(hashes, pin(100))
    scene.flood()
    scene.store("late", 6)
    scene.flood()
    assert all(scene.here(hashes))


def test_pin_of_a_tail_does_not_keep_its_ancestors() -> None:
    """Pinning only the last blocks of many long prefixes would keep all of L2 on a small quota."""
    scene = Scene()
    hashes = scene.store("deep", 12)
    scene.hint(hashes[-1:], pin(100))
    scene.flood()
    assert not any(scene.here(hashes))


def test_pins_outlive_leases_and_sessions() -> None:
    """An engine that restarts would lose its pins just when it needs its cache."""
    scene = Scene()
    hashes = scene.store("restart")
    scene.hint(hashes, pin(100))
    scene.host.drop_owner(1)
    scene.space._sessions = 0
    other = scene.open("other")
    scene.flood(other)
    assert all(scene.here(hashes))


def test_pins_never_stop_stores() -> None:
    """An engine that has lent all memory except its pinned blocks could store nothing."""
    scene = Scene("a")
    scene.flood()
    hashes = scene.store("pinned", QUOTA)
    scene.hint(hashes, pin(1000))
    others = [scene.open(f"other {number}") for number in range(7)]
    # The first is idle for a time, and lends.
    scene.space._sessions = 0
    for space in others:
        scene.flood(space)
    assert all(scene.here(hashes))
    assert len(scene.space.items) == QUOTA
    scene.space._sessions = 1
    for number in range(40):
        new = scene.store(f"new {number}", 2)
        assert all(scene.here(new))
    assert scene.host.allocated_bytes <= scene.host.capacity_bytes


def test_pins_end_when_only_pinned_blocks_are_left() -> None:
    """With every slot pinned, a reservation would fail until the pins expire."""
    hints = Hints(8 * PAGE)
    host = HostTier(8 * PAGE, 4 * PAGE, hints, "lru")
    space = host.open_space(blocks.namespace(PAGE))
    assert space is not None
    hashes, parents = blocks.chain(8)
    for one, parent in zip(hashes, parents, strict=True):
        reservation, _ = host.reserve(1, space, [one], [parent])
        host.commit(1, reservation.reservation_id, 1)
    host.hint([space], hashes, pin(100), NOW)
    assert host.make_room_ahead(space, 2) == []
    new, new_parents = blocks.chain(2, "new")
    reservation, _ = host.reserve(1, space, new, new_parents)
    assert all(slot >= 0 for slot in reservation.slots)
    assert hints.counters["pins_overridden_blocks_total"] == 8
    assert hints.kept_bytes == 0
    assert host.evicted[Evicted.ROOM] == 2
    host.check()


def test_expiry_is_bounded_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full quota of pins that end at once would block the event loop for a tenth of a second."""
    monkeypatch.setattr(hints_module, "EXPIRED_AT_ONCE", 3)
    hints = Hints(1 << 20)
    hashes, _ = blocks.chain(10)
    hints.take([HintedNamespace(b"a", 1, 100), HintedNamespace(b"b", 1, 100)], hashes, pin(1), 0)
    left = []
    while hints.expire(3 * S):
        left.append(hints.kept_blocks)
        hints.check()
    assert left == [17, 14, 11, 8, 5, 2, 0]


def test_the_number_of_kept_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of blocks that are never stored would take memory that no quota counts."""
    monkeypatch.setattr(hints_module, "KEPT_MAX", 7)
    hints = Hints(1 << 40)
    hashes, _ = blocks.chain(10)
    hints.take([HintedNamespace(b"a", 1, 100), HintedNamespace(b"b", 1, 100)], hashes, pin(1), 0)
    assert hints.kept_blocks == 6
    hints.check()


# --- demoted blocks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "hint",
    [PrefixHint(session_ended=True), PrefixHint(priority=Priority.LOW)],
    ids=["ended", "low"],
)
def test_demoted_blocks_are_evicted_first(hint: PrefixHint) -> None:
    """Active sessions would lose their blocks to a session that has ended but was used last."""
    scene = Scene()
    kept = [scene.store(number) for number in range(12)]
    over = scene.store("over", 16)
    scene.hint(over, hint)
    for number in range(4):
        scene.store(f"new {number}")
        # Evicted from its end: the rest is still a prefix.
        assert scene.here(over) == [True] * (12 - 4 * number) + [False] * (4 + 4 * number)
    assert all(all(scene.here(hashes)) for hashes in kept)
    assert scene.count("demoted_blocks_total") == 16


def test_shared_ancestors_of_demoted_blocks_stay() -> None:
    """The end of one session would evict the system prompt of all others."""
    scene = Scene()
    prompt = scene.store("prompt", 4)
    ends = [blocks.chain(4, name)[0] for name in ("first", "second")]
    for tail in ends:
        parents = [prompt[-1], *tail[:-1]]
        reservation, _ = scene.host.reserve(1, scene.space, tail, parents)
        scene.host.commit(1, reservation.reservation_id, 4)
    fill = [scene.store(number) for number in range(13)]
    scene.hint([*prompt, *ends[0]], PrefixHint(session_ended=True))
    assert scene.count("demoted_blocks_total") == 4
    scene.store("new", 4)
    assert not any(scene.here(ends[0]))
    assert all(scene.here([*prompt, *ends[1], *fill[-1]]))


def test_use_cancels_a_demotion() -> None:
    """A user who returns to an ended session would never have a cache again."""
    scene = Scene()
    over = scene.store("over", 4)
    scene.hint(over, PrefixHint(session_ended=True))
    for _ in scene.host.count_use([scene.space], over, 0, 1.0):
        pass
    for number in range(12):
        scene.store(number)
    scene.host.prefix(scene.space, over)
    for number in range(4):
        scene.store(f"new {number}")
    assert all(scene.here(over))


def test_session_may_end_before_its_last_blocks_are_stored() -> None:
    """The last blocks of each session would stay longer than their more valuable ancestors."""
    scene = Scene()
    scene.store("over", 8)
    hashes, _ = blocks.chain(12, "over")
    scene.hint(hashes, PrefixHint(session_ended=True))
    scene.store("over", 12, first=8)
    kept = [scene.store(number) for number in range(13)]
    for number in range(3):
        scene.store(f"new {number}")
    assert not any(scene.here(hashes))
    assert all(all(scene.here(chain)) for chain in kept)


def test_pin_wins_over_a_demotion() -> None:
    """One user's end of a session would undo another user's pin of the same prompt."""
    scene = Scene()
    hashes = scene.store("both")
    scene.hint(hashes, pin(100))
    scene.hint(hashes, PrefixHint(session_ended=True))
    scene.flood()
    assert all(scene.here(hashes))
    scene.sleep(102)
    for number in range(15):
        scene.store(number)
    scene.store("new")
    assert not any(scene.here(hashes))


def test_demoted_blocks_are_not_evicted_while_leased() -> None:
    """A block would be evicted during a copy because its session has ended."""
    scene = Scene()
    hashes = scene.store("leased")
    slots = scene.host.prefix(scene.space, hashes)
    lease = scene.host.grant(1, [(scene.space, slots)], 0)
    scene.hint(hashes, PrefixHint(session_ended=True))
    scene.flood()
    assert scene.host.prefix(scene.space, hashes) == slots
    scene.host.release(lease.lease_id, 1)
    scene.store("new")
    assert not all(scene.here(hashes))


def test_number_of_remembered_demotions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of blocks that are never stored would be remembered forever."""
    monkeypatch.setattr("tierd.chain.DEMOTED_MAX", 16)
    chain = ChainIndex()
    for number in range(20):
        chain.demote(blocks.chain(3, number)[0])
        chain.check()


# --- with every policy, and at random ----------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_spares_kept_blocks(name: str) -> None:
    """A policy with its own order would evict pinned blocks, or never offer them again."""
    chain = ChainIndex(make_policy(name, 64, Reuse()))
    kept = dict.fromkeys(blocks.chain(4, "kept")[0])
    chain.kept = kept
    tags = ["kept", "over", *range(6)]
    for start, tag in enumerate(tags):
        hashes, parents = blocks.chain(4, tag)
        chain.use(PrefixRequest(hashes, float(start)))
        for item, (one, parent) in enumerate(zip(hashes, parents, strict=True), 4 * start):
            chain.insert(item, one, parent)
    over = blocks.chain(4, "over")[0]
    chain.demote(over)
    assert chain.evict(4, lambda _: False) == [7, 6, 5, 4]
    assert len(chain.evict(64, lambda _: False)) == 24
    assert chain.items.keys() == kept.keys()
    assert chain.keeping
    chain.check()
    gone = list(kept)
    kept.clear()
    chain.unkeep(gone)
    assert chain.evict(64, lambda _: False) == [3, 2, 1, 0]
    chain.check()


def test_moved_blocks_keep_their_hints() -> None:
    """A block moved to another segment would lose its pin, or never be evicted."""
    chain = ChainIndex()
    kept = dict.fromkeys(blocks.chain(2, "kept")[0])
    chain.kept = kept
    for start, tag in enumerate(["kept", "over", "newer"]):
        for item, (one, parent) in enumerate(zip(*blocks.chain(2, tag), strict=True), 2 * start):
            chain.insert(item, one, parent)
    chain.touch([2, 3])
    chain.demote(blocks.chain(2, "over")[0])
    chain.move(3, 8)
    chain.check()
    assert chain.evict(2, lambda _: False) == [8, 2]
    assert chain.evict(9, lambda _: False) == [5, 4]
    chain.move(1, 9)
    chain.check()
    assert chain.evict(9, lambda _: False) == []
    gone = list(kept)
    kept.clear()
    chain.unkeep(gone)
    assert chain.evict(9, lambda _: False) == [9, 0]
    chain.check()


class HintsAtRandom(RuleBasedStateMachine):
    """Two engines store, use, lease, hint and let time pass; L2's invariants hold throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene("a", "b", pin_max_s=60)
        self.fresh = 0

    def chain(self, number: int, count: int) -> tuple[list[bytes], list[bytes]]:
        """Chains 4 to 7 branch off the middle of chains 0 to 3."""
        hashes, parents = blocks.chain(8, number % 4)
        if number >= 4:
            tail, below = blocks.chain(4, number)
            hashes, parents = [*hashes[:4], *tail], [*parents[:4], hashes[3], *below[1:]]
        return hashes[:count], parents[:count]

    @rule(at=st.integers(0, 1), number=st.integers(0, 7), count=st.integers(1, 8))
    def store(self, at: int, number: int, count: int) -> None:
        space, host = self.scene.spaces[at], self.scene.host
        hashes, parents = self.chain(number, count)
        reservation, _ = host.reserve(1, space, hashes, parents)
        host.commit(1, reservation.reservation_id, count)
        assert all(one in space.items for one in hashes), "no lease is held, so there is room"

    @rule(at=st.integers(0, 1))
    def store_new(self, at: int) -> None:
        self.fresh += 1
        space = self.scene.spaces[at]
        assert all(self.scene.here(self.scene.store(f"new {self.fresh}", 8, space), space))

    @rule(at=st.integers(0, 1), number=st.integers(0, 7), count=st.integers(1, 8))
    def use(self, at: int, number: int, count: int) -> None:
        space = self.scene.spaces[at]
        hashes, _ = self.chain(number, count)
        for _ in self.scene.host.count_use([space], hashes, 0, self.scene.now_ns / S):
            pass
        self.scene.host.prefix(space, hashes)

    @rule(
        who=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        number=st.integers(0, 7),
        part=st.tuples(st.integers(0, 7), st.integers(1, 8)),
        hint=st.builds(
            PrefixHint,
            st.sampled_from((0, 0, 1, 5000, HINT_MS_MAX)),
            st.sampled_from((0, 0, 1000, (1 << 63) - 1)),
            st.sampled_from(list(Priority)),
            st.booleans(),
        ),
        backwards=st.booleans(),
    )
    def say(
        self,
        who: list[int],
        number: int,
        part: tuple[int, int],
        hint: PrefixHint,
        *,
        backwards: bool,
    ) -> None:
        hashes = self.chain(number, 8)[0][part[0] : part[0] + part[1]]
        if backwards:
            hashes = [*hashes[::-1], *hashes, bytes(32)]
        self.scene.hint(hashes, hint, *(self.scene.spaces[at] for at in who))

    @rule(seconds=st.sampled_from((0.5, 3.0, 70.0)))
    def wait(self, seconds: float) -> None:
        self.scene.sleep(seconds)
        if seconds > 62:
            assert self.scene.host.hints.kept_blocks == 0

    @rule(at=st.integers(0, 1), busy=st.booleans())
    def idle(self, at: int, *, busy: bool) -> None:
        self.scene.spaces[at]._sessions = int(busy)

    @rule(at=st.integers(0, 1), count=st.integers(1, 8))
    def make_room(self, at: int, count: int) -> None:
        self.scene.host.make_room_ahead(self.scene.spaces[at], count)

    @invariant()
    def sound(self) -> None:
        self.scene.host.check()
        for space in self.scene.spaces:
            for number in range(8):
                here = self.scene.here(self.chain(number, 8)[0], space)
                assert here == sorted(here, reverse=True), "a prefix has a hole"


HintsAtRandom.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHintsAtRandom = pytest.mark.slow(HintsAtRandom.TestCase)


# --- through a real daemon ----------------------------------------------------------------


def counter(client: Client, name: str) -> int:
    counters = client.status()["counters"]
    assert isinstance(counters, dict)
    return int(counters.get(name, 0))


def pinned_bytes(client: Client) -> int:
    host = client.status()["host"]
    assert isinstance(host, dict)
    return int(host["pinned_bytes"])


@pytest.mark.slow
def test_pin_holds_in_a_real_daemon_until_it_ends(tmp_path: Path) -> None:
    """A hint would be lost between client and L2, or its end go unnoticed."""
    size = 64 << 10
    with DaemonProcess(tmp_path, capacity="8MiB", storage="pin_share = 0.1\n") as daemon:
        client = daemon.client()
        try:
            handle = client.register(blocks.namespace(size))
            space = handle.namespace

            def store(tag: object, count: int) -> list[bytes]:
                hashes, parents = blocks.chain(count, tag)
                put = [
                    (h, parent, blocks.payload(space, h))
                    for h, parent in zip(hashes, parents, strict=True)
                ]
                assert all(client.put(handle, put))
                return hashes

            def flood(tag: str) -> None:
                for number in range(40):
                    store(f"{tag} {number}", 8)

            hashes = store("pinned", 16)
            client.hint([handle], hashes, pin_ms=3_600_000)
            assert pinned_bytes(client) == 12 * size
            assert counter(client, "pins_granted_blocks_total") == 12
            assert counter(client, "pins_refused_blocks_total") == 4
            flood("first")
            got = client.get(handle, hashes, 1000)
            assert [bytes(view) for view in got] == [
                blocks.payload(space, block_hash) for block_hash in hashes[:12]
            ]
            short = store("short", 2)
            client.hint([handle], hashes, session_ended=True)
            client.hint([handle], short, priority=-1)
            client.hint([handle], short, pin_ms=-5, next_use_ms=0)
            assert counter(client, "hints_total") == 4
            assert pinned_bytes(client) == 12 * size
            # From a session that has gone since.
            assert counter(client, "demoted_blocks_total") == 16 + 2
        finally:
            client.close()
        flooder = daemon.client()
        try:
            handle = flooder.register(blocks.namespace(size))
            assert len(flooder.get(handle, hashes, 1000)) == 12
        finally:
            flooder.close()


@pytest.mark.slow
def test_pin_expires_in_a_real_daemon(tmp_path: Path) -> None:
    """Expired pins would count against the quota until the daemon is restarted."""
    with DaemonProcess(tmp_path, capacity="8MiB", storage="") as daemon:
        client = daemon.client()
        try:
            handle = client.register(blocks.namespace(64 << 10))
            client.status()
            client.hint([handle], blocks.chain(3)[0], pin_ms=1)
            assert pinned_bytes(client) == 3 * (64 << 10)
            wait_until(lambda: not pinned_bytes(client), 20.0, "a pin does not expire")
            assert counter(client, "pins_expired_blocks_total") == 3
        finally:
            client.close()


def test_hints_without_a_daemon_do_nothing(tmp_path: Path) -> None:
    """An engine would fail or wait to send a hint that no daemon receives."""
    client = Client(str(tmp_path / "nobody.sock"))
    handle = client.register(blocks.namespace())
    client.hint([handle], blocks.chain(3)[0], pin_ms=1000)
    with pytest.raises(ValueError, match="not 32"):
        client.hint([handle], [b"short"], pin_ms=1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hint", "reason"),
    [
        (m.Hint([], bytes(32), 1, 0, 1, False), "handles, not 0"),
        (m.Hint([9], bytes(32), 1, 0, 1, False), "handle 9 is not registered"),
        (m.Hint([0] * 65, bytes(32), 1, 0, 1, False), "handles, not 65"),
        (m.Hint([0], bytes(31), 1, 0, 1, False), "hashes have 31 bytes"),
        (m.Hint([0], bytes(32 * (m.KEYS_PER_CALL_MAX + 1)), 1, 0, 1, False), "at most"),
        (m.Hint([0], bytes(32), 1, 0, 3, False), "priority of 3"),
    ],
    ids=["no handle", "unknown", "too many", "cut", "too long", "priority"],
)
def test_invalid_hint_ends_only_its_own_session(
    hints_daemon: DaemonProcess, hint: m.Hint, reason: str
) -> None:
    """An invalid hint would be accepted, or end other sessions as well."""
    client, other = hints_daemon.client(), hints_daemon.client()
    try:
        handle = client.register(blocks.namespace())
        client.status()
        assert handle.ready
        client._connection.send(hint)
        end = time.monotonic() + 10
        while client.connected:
            assert time.monotonic() < end
            client.wait(0.05)
        assert reason in client.last_error
        assert counter(other, "internal_errors_total") == 0
        assert counter(other, "pins_granted_blocks_total") == 0
    finally:
        client.close()
        other.close()


@pytest.fixture(scope="module")
def hints_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon shared by the tests that send invalid hints."""
    with DaemonProcess(tmp_path_factory.mktemp("hints"), capacity="8MiB", storage="") as daemon:
        yield daemon
