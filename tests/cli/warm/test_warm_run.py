"""How wants become calls to the daemon, and which namespaces are chosen; with fake daemons."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import blocks
from tierd.cli.common.engine import EngineServer
from tierd.cli.common.namespaces import Namespaces
from tierd.cli.warm import run as warm_run
from tierd.cli.warm.calls import AHEAD_BLOCKS, CALL_BLOCKS_MAX
from tierd.cli.warm.report import WarmReport
from tierd.cli.warm.run import FULL_CALLS, Replays, Warmer, WarmOptions
from tierd.cli.warm.sources import WantedBlocks
from tierd.errors import ConfigError
from tierd.types import Namespace
from tierd.wire.messages import Warmed, Warmth

SPACE = blocks.namespace()


class Daemon:
    """Answers WARMs in order, as `fate` says."""

    def __init__(self, fate: Callable[[bytes], Warmth]) -> None:
        self.calls: list[list[bytes]] = []
        self._fate = fate
        self._answered = 0

    def register(self, namespace):
        return 1

    def begin_warm(self, handle, hashes, **_):
        self.calls.append(hashes)
        return len(self.calls)

    def next_warmed(self, timeout_s):
        # Nothing comes before it is waited for.
        if not timeout_s or self._answered == len(self.calls):
            return None
        self._answered += 1
        outcomes = bytes(map(self._fate, self.calls[self._answered - 1]))
        return Warmed(self._answered, outcomes, {"pinned": 0, "unverified": 0})


def warmer(daemon: Daemon, replays_max: int = 9) -> Warmer:
    return Warmer(
        daemon,  # type: ignore[arg-type]
        WarmOptions(room_bytes=1 << 30),
        WarmReport(),
        None,
        replays_max,
        on_finished=lambda want: None,
        on_progress=lambda: None,
    )


def want(number: int, *, by_worth: bool = False, tokens: list[int] | None = None) -> WantedBlocks:
    hashes, _ = blocks.chain(4 + number)
    return WantedBlocks(
        f"{number}", (SPACE,), hashes, f"{number}", tokens=tokens, by_worth=by_worth
    )


def test_shared_blocks_are_requested_once_per_call() -> None:
    """A long system prompt would count as read once for each prompt that begins with it."""
    daemon = Daemon(lambda _: Warmth.BROUGHT)
    run = warmer(daemon)
    run.run(iter([want(number) for number in range(20)]))
    assert all(len(set(hashes)) == len(hashes) for hashes in daemon.calls)
    assert len(daemon.calls) < 20, "small wants go together while calls are under way"
    assert run.report.brought == run.report.blocks == sum(range(4, 24))


def test_less_valuable_blocks_are_skipped_after_full_calls() -> None:
    """A hot set of millions of blocks would be read to its end although nothing fits."""
    daemon = Daemon(lambda _: Warmth.NO_ROOM)
    run = warmer(daemon)
    run.run(iter([want(number % 9, by_worth=True) for number in range(5000)]))
    assert FULL_CALLS <= len(daemon.calls) < 30
    assert (run.report.units, run.report.had) == (5000, 0)
    [reason] = run.report.reasons.values()
    assert reason.blocks == run.report.blocks


def test_deadline_while_waiting_for_answers_is_reported() -> None:
    """A warm that was cut off would say that all is warm, and a deploy go on."""
    daemon = Daemon(lambda _: Warmth.BROUGHT)
    run = warmer(daemon)

    def nothing_comes(timeout_s: float) -> None:
        if timeout_s:  # All wants have been read.
            run.order.end_s = 0.0

    daemon.next_warmed = nothing_comes  # type: ignore[method-assign]
    run.run(iter([want(0)]))
    assert run.report.late
    run.give_up()
    assert not run.report.whole
    assert (run.report.blocks, run.report.had) == (4, 0)


class StuckReplays(Replays):
    """An engine that does not come to an end, until the deadline is there."""

    def __init__(self, order: WarmOptions) -> None:
        self.pending = 0
        self._order = order
        self._looks = 0

    def begin(self, unit):
        self.pending += 1

    def ended(self):
        self._looks += self.pending > 0
        if self._looks > 5000:
            self._order.end_s = 0.0
        yield from ()


def test_reading_pauses_while_the_engine_is_behind(monkeypatch) -> None:
    """All prompts of a large file would be in memory while an engine computes the first ones."""
    monkeypatch.setattr(warm_run, "ENGINE_LOOK_S", 1e-9)
    read = []

    def wants():
        for number in range(9000):
            read.append(number)
            yield want(0, tokens=[1])

    run = warmer(Daemon(lambda _: Warmth.NOWHERE), replays_max=5)
    run.replays = StuckReplays(run.order)
    run.run(wants())
    # What has been read ahead by then goes to the engine as well.
    assert len(read) < 2 * AHEAD_BLOCKS / 4
    assert run.report.late
    run.give_up()
    assert run.report.blocks == 4 * len(read)


def test_progress_covers_all_blocks() -> None:
    """The bar of one long prompt would say "0 of 0 blocks" until it is there, and that of several
    always that all are."""
    run = warmer(Daemon(lambda _: Warmth.BROUGHT))
    count = 4 * CALL_BLOCKS_MAX
    output: list[tuple[float | None, str]] = []
    run.on_progress = lambda: output.append(run.report.progress(*run.under_way(), 1.0))
    run.run(iter([want(count - 4), want(0)]))
    parts = [part for part, _ in output]
    assert parts == sorted(parts)  # type: ignore[type-var]  # none is None
    assert output[0] == (0.0, output[0][1])
    assert len({*parts}) > 4
    assert {text.split(", ")[0].partition(" of ")[2] for _, text in output[1:]} == {"2.05 k blocks"}
    assert output[-1][0] == 1.0
    assert output[-1][1].startswith("2.05 k of 2.05 k blocks, ")
    part, text = run.report.progress(0, 0, 0.5)
    assert (part, "blocks so far, " in text) == (0.5, True)


class Known:
    """A daemon that knows some namespaces."""

    def __init__(self, *known: Namespace) -> None:
        self._known = {namespace.digest: namespace for namespace in known}

    def status(self):
        return {"namespaces": [{"digest": digest.hex()} for digest in self._known]}

    def describe(self, digest):
        return self._known[digest]


def known(*spaces: Namespace) -> Namespaces:
    return Namespaces(Known(*spaces))  # type: ignore[arg-type]


def test_only_engine_is_the_default() -> None:
    """An operator with one engine would have to copy digests; one with two would warm the wrong
    one's."""
    ranks = tuple(blocks.namespace(tp_size=2, tp_rank=rank) for rank in range(2))
    adapter = blocks.namespace(tp_size=2, tp_rank=0, weights="rev-1+lora:sql=7")
    assert known(ranks[1], adapter, ranks[0]).only() == ranks
    with pytest.raises(ConfigError, match=f"more than one engine: .*{SPACE.digest.hex()}"):
        known(*ranks, SPACE).only()
    with pytest.raises(ConfigError, match="more than one engine"):
        known(SPACE, blocks.namespace(layout="LBNHC")).only()
    with pytest.raises(ConfigError, match="knows no namespace yet"):
        known(adapter).only()


def test_adapter_with_several_revisions_is_refused() -> None:
    """A prompt of an adapter would be warmed under a revision that no engine serves."""
    one, two, longer = (
        blocks.namespace(weights=f"rev-1+lora:{name}") for name in ("sql=7", "sql=8", "sql2=7")
    )
    assert known(SPACE, one, longer).adapter((SPACE,), "sql") == (one,)
    with pytest.raises(ConfigError, match="2 revisions of the adapter sql"):
        known(SPACE, one, two).adapter((SPACE,), "sql")
    other = blocks.namespace(weights="rev-1+lora:sql=7", kv_dtype="fp8")
    with pytest.raises(ConfigError, match="no namespace of the adapter sql"):
        known(SPACE, longer, other).adapter((SPACE,), "sql")
    assert known(one).has_adapter("sql")
    assert not known(SPACE, longer).has_adapter("sql")


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://h:x", "http://h?x=1"])
def test_wrong_urls(url) -> None:
    """A typing mistake would look like an engine that is down."""
    with pytest.raises(ConfigError, match="--engine"):
        EngineServer(url)
