"""Saved tokens: counted only if an engine used them and did not compute them."""

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
    """Report that the engine starts computing a request at token `computed`."""
    tokens = request.num_tokens - computed
    table = list(range(1, 2 + request.num_tokens // BLOCK_TOKENS))
    bench.run(request, computed, tokens, table, new=True)


def said(bench: Bench) -> tuple[int, int]:
    """Return the blocks that were reported to the daemon as wanted, and as loaded."""
    return bench.daemon.wanted, bench.daemon.loaded


# --- the connector ------------------------------------------------------------------------


def test_prefix_in_the_engines_cache_is_neither_requested_nor_saved() -> None:
    """Tiers would be read for requests that the engine answers alone, and all of it would count."""
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


def test_prefix_evicted_by_the_engine_is_loaded_from_the_daemon() -> None:
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
def test_failed_load_counts_no_savings(how: str) -> None:
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


def test_reload_after_preemption_counts_as_saved() -> None:
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


def test_savings_are_reported_after_a_restart_of_the_daemon() -> None:
    """A restart would lose the loads of the last incarnation, or count them twice."""
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


def test_request_without_a_daemon_is_not_a_miss() -> None:
    """A daemon's hit ratio would fall by tokens that engines computed before it started."""
    bench = Bench(daemon=FakeDaemon(up=False))
    request = FakeRequest("a", 22)
    bench.side.add(request)
    assert bench.side.matched_tokens("a", 0) == 0
    admitted(bench, request, 0)
    bench.daemon.up = True
    bench.step()
    assert said(bench) == (0, 0)


def test_early_savings_use_the_prefill_speed_measured_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that starts warm would show no saved time for its first loads."""
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
def test_no_tier_is_read_for_blocks_in_the_engines_cache(own: int) -> None:
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
def test_implausible_savings_reports_are_ignored(told: m.Loaded) -> None:
    """One broken client would spoil the node's counters until the next restart."""

    async def test(bench: NodeBench) -> None:
        line = Line(bench)
        line.say(told)
        assert isinstance(line.got[-1], m.Error)
        assert not bench.node.counters["requested_blocks_total"]
        assert not bench.node.counters["saved_tokens_total"]
        line.closed()

    run(test)


def test_savings_of_an_unknown_source_count_as_memory() -> None:
    """A reload that removes a tier would lose the savings of its blocks."""

    async def test(bench: NodeBench) -> None:
        bench.node.loaded([bench.space], 9, [1, 2, 0, 4], 7)
        counters = bench.node.counters
        assert counters["saved_tokens_total"] == 7 * bench.space.namespace.block_tokens
        assert counters["host_loaded_blocks_total"] == 5
        assert [tier.counters["loaded_blocks_total"] for tier in bench.tiers] == [2, 0]
        assert counters["saved_us_total"] == 7

    run(test)


def test_client_reports_its_loads_as_savings(l2_daemon: DaemonProcess) -> None:
    """Third-party engines would show no savings, whatever they load."""
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
