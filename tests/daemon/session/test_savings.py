"""What counts as saved: what an engine computed on and did not compute, and nothing else."""

from __future__ import annotations

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.engines.connector_bench import BLOCK_TOKENS, Bench, FakeRequest
from tests.support.engines.fake_client import FakeDaemon
from tests.support.tiers.bench import Bench as NodeBench
from tests.support.tiers.bench import run
from tests.support.tiers.line import Line
from tierd.client import by_source
from tierd.wire import messages as m


def admitted(bench: Bench, request: FakeRequest, computed: int) -> None:
    """The engine begins to compute a request from there on."""
    tokens = request.num_tokens - computed
    table = list(range(1, 2 + request.num_tokens // BLOCK_TOKENS))
    bench.run(request, computed, tokens, table, new=True)


def said(bench: Bench) -> tuple[int, int]:
    """Blocks that the daemon was told were wanted, and loaded."""
    return bench.daemon.wanted, bench.daemon.loaded


# --- the connector ------------------------------------------------------------------------


def test_what_the_engine_has_itself_is_neither_asked_for_nor_saved() -> None:
    """Tiers would be read for requests that the engine answers alone, and all of it count."""
    bench = Bench(daemon=FakeDaemon(answering=False))
    bench.put(5)
    mostly, wholly = FakeRequest("mostly", 22), FakeRequest("wholly", 22)
    bench.side.add(mostly, own=3)
    bench.side.add(wholly, own=5)
    assert [[*map(len, hashes)] for _, _, hashes in bench.daemon.waiting] == [[32, 32], []]
    assert bench.side.matched_tokens("wholly", 20) == 0, "it waits for nothing"
    bench.daemon.answering = True
    assert bench.side.matched_tokens("mostly", 12) == 8
    bench.side.allocated("mostly", [1, 2, 3, 100, 101], 8)
    (load,) = bench.step([], idle=True).loads
    digest = bench.namespaces[0].digest
    held = [slot for (name, _), slot in bench.daemon.blocks.items() if name == digest]
    assert load.slots == [held[3:]]
    bench.side.finished_loads({"mostly"}, ())
    admitted(bench, mostly, 20)
    admitted(bench, wholly, 20)
    assert said(bench) == (2, 2)
    assert bench.side.leases_held == 0


def test_an_engine_that_has_evicted_what_it_had_is_served_from_there() -> None:
    """A request would wait in a queue, lose its prefix to others, and be computed whole."""
    bench = Bench()
    bench.put(5)
    request = FakeRequest("a", 22)
    bench.side.add(request, own=4)
    assert bench.side.matched_tokens("a", 16) == 4
    assert bench.side.matched_tokens("a", 8) == 12
    assert bench.side.matched_tokens("a", 4) == 16
    assert bench.daemon.lookups == 3
    assert len(bench.daemon.leases) == 1
    bench.load(request, 4)
    bench.side.finished_loads({"a"}, [101])
    # The engine has freed its blocks, and has less than before.
    assert bench.side.matched_tokens("a", 0) == 0
    assert bench.daemon.lookups == 3, "a load that failed is not tried again"
    admitted(bench, request, 0)
    assert said(bench) == (5, 0)


@pytest.mark.parametrize("how", ["aborted", "failed", "cut", "not taken", "reset"])
def test_a_load_that_comes_to_nothing_saves_nothing(how: str) -> None:
    """tierd would look best where it only costs time."""
    bench = Bench()
    bench.put(5)
    request = FakeRequest("a", 22)
    bench.side.add(request)
    if how == "not taken":
        assert bench.side.matched_tokens("a", 0) == 20
        admitted(bench, request, 0)
        assert said(bench) == (5, 0)
        return
    bench.load(request, 0)
    if how == "aborted":
        bench.side.finish("a")
    if how == "reset":
        bench.side.reset()
    invalid = {"failed": [100], "cut": [102]}.get(how, [])
    bench.side.finished_loads({"a"}, invalid)
    if how in ("failed", "cut"):
        admitted(bench, request, 0 if how == "failed" else 8)
    bench.step()
    assert said(bench) == {"failed": (5, 0), "cut": (5, 2)}.get(how, (0, 0))
    loaded = bench.side.tally.drain().get("loaded_tokens", 0)
    assert loaded == said(bench)[1] * BLOCK_TOKENS


def test_a_request_that_is_preempted_saves_what_it_loads_again() -> None:
    """The engine would have computed it twice."""
    bench = Bench()
    bench.put(5)
    request = FakeRequest("a", 22)
    bench.side.add(request)
    for turn in (1, 2):
        bench.load(request, 0)
        bench.side.finished_loads({"a"}, ())
        admitted(bench, request, 20)
        assert said(bench) == (turn * 5, turn * 5)
        bench.step(preempted=["a"])


def test_savings_are_told_once_the_daemon_is_back() -> None:
    """A restart would lose what was loaded from the life before, or count it twice."""
    bench = Bench()
    bench.put(5)
    request = FakeRequest("a", 22)
    bench.side.add(request)
    bench.load(request, 0)
    bench.daemon.up = False
    bench.side.finished_loads({"a"}, ())
    admitted(bench, request, 20)
    bench.step()
    assert said(bench) == (0, 0)
    bench.daemon.up = True
    bench.step()
    bench.step()
    assert said(bench) == (5, 5)


def test_a_request_that_no_daemon_was_asked_about_is_no_miss() -> None:
    """The hit ratio of a daemon would fall by what engines computed before it was there."""
    bench = Bench(daemon=FakeDaemon(up=False))
    request = FakeRequest("a", 22)
    bench.side.add(request)
    assert bench.side.matched_tokens("a", 0) == 0
    admitted(bench, request, 0)
    bench.daemon.up = True
    bench.step()
    assert said(bench) == (0, 0)


def test_time_is_saved_at_the_speed_that_is_found_out_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that starts warm would have saved no second of what it loads first."""
    bench = Bench()
    bench.put(5)
    request = FakeRequest("a", 22)
    bench.side.add(request)
    bench.load(request, 0)
    bench.side.finished_loads({"a"}, ())
    admitted(bench, request, 20)
    assert (said(bench), bench.daemon.prefill_us) == ((5, 5), 0)
    monkeypatch.setattr(type(bench.side._speed), "tokens_per_s", 10)
    bench.step()
    bench.step()
    assert (said(bench), bench.daemon.prefill_us) == ((5, 5), 2_000_000)


# --- the daemon ---------------------------------------------------------------------------


@pytest.mark.parametrize("own", [0, 5, 8, 9, 1 << 40])
def test_no_tier_is_read_for_what_the_engine_has(own: int) -> None:
    """Hundreds of MiB were read from a disk for requests that vLLM answered itself."""

    async def test(bench: NodeBench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        line = Line(bench)
        acquired = await line.acquired(hashes, own)
        left = max(0, 8 - own)
        assert acquired.blocks == left
        assert set(bench.space.items) == set(hashes[8 - left :])
        assert acquired.sources == bytes([1]) * left
        slots = m.unpack_slots(acquired.slots)
        for block_hash, slot in zip(hashes[8 - left :], slots, strict=True):
            payload = bench.node.memory.payload(bench.space, slot)
            assert payload == blocks.payload(bench.space.namespace, block_hash)
        bench.node.host.release(acquired.lease, 7)
        await bench.learned()
        assert bench.space.reuse.uses(hashes[0]) == bench.space.reuse.uses(hashes[7]) > 0
        line.closed()

    run(test)


@pytest.mark.parametrize(
    "told",
    [
        m.Loaded([0], 2, [1, 2], 0),
        m.Loaded([0], m.LOADED_MAX + 1, [], 0),
        m.Loaded([0], 1, [], m.LOADED_US_MAX + 1),
        m.Loaded([], 1, [], 0),
        m.Loaded([1], 1, [], 0),
    ],
)
def test_a_client_that_says_nonsense_is_not_believed(told: m.Loaded) -> None:
    """One broken client would spoil the counters of a node for as long as it runs."""

    async def test(bench: NodeBench) -> None:
        line = Line(bench)
        line.say(told)
        assert isinstance(line.got[-1], m.Error)
        assert not bench.node.counters["requested_blocks_total"]
        assert not bench.node.counters["saved_tokens_total"]
        line.closed()

    run(test)


def test_a_source_that_is_no_tier_counts_as_memory() -> None:
    """A reload that leaves out a tier would lose what its blocks have saved."""

    async def test(bench: NodeBench) -> None:
        bench.node.loaded([bench.space], 9, [1, 2, 0, 4], 7)
        counters = bench.node.counters
        assert counters["saved_tokens_total"] == 7 * bench.space.namespace.block_tokens
        assert counters["host_loaded_blocks_total"] == 5
        assert [tier.counters["loaded_blocks_total"] for tier in bench.tiers] == [2, 0]
        assert counters["saved_us_total"] == 7

    run(test)


def test_a_real_client_loads_and_tells(l2_daemon: DaemonProcess) -> None:
    """Engines that are none of ours would have saved nothing, whatever they get."""
    client = l2_daemon.client()
    try:
        handle = client.register(blocks.namespace(4096))
        hashes, parents = blocks.chain(6)
        payloads = [blocks.payload(handle.namespace, each) for each in hashes]
        assert all(client.put(handle, list(zip(hashes, parents, payloads, strict=True))))
        before = client.status()["counters"]
        assert isinstance(before, dict)
        assert client.get(handle, blocks.chain(8)[0], 0) == payloads
        pending = client.begin_acquire([handle], hashes, 0, own=4)
        while not pending.done:
            client.wait(1)
        lease = pending.lease
        assert lease is not None
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert [bytes(view[:4096]) for view in views or ()] == payloads[4:]
        assert client.loaded([handle], 2, by_source(lease.sources[:1]), prefill_us=3)
        client.release(lease)
        after = client.status()["counters"]
        assert isinstance(after, dict)
        names = ("requested_blocks_total", "loaded_blocks_total", "saved_us_total")
        assert [after[name] - before.get(name, 0) for name in names] == [10, 7, 3]
    finally:
        client.close()
