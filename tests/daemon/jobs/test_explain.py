"""Explain: where blocks are, and why they are missing elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import PAGE, SCOPE, SPACE, Bench, Tier, config, damage, run
from tierd.cli.common.operator import tables
from tierd.cli.explain.command import named_blocks
from tierd.cli.explain.reasons import said
from tierd.config import WritePolicy
from tierd.core.effects import Effect
from tierd.core.l3.unserved import BLOCKS_MAX, Unserved, Unserveds, Why
from tierd.core.l3.writes import Miss
from tierd.core.reasons import Dropped, Evicted
from tierd.daemon.jobs.explain import OTHERS_MAX, YOUNG_S
from tierd.daemon.session.acquiring import Patience
from tierd.daemon.session.orders import Orders
from tierd.errors import BackendError, RemoteProtocolError
from tierd.testing.faulty import FaultPlan, InjectedFault
from tierd.types import Namespace
from tierd.wire import messages as m


async def explain(bench: Bench, hashes: Sequence[bytes], namespace: Namespace = SPACE) -> dict:
    """Return the answer to an EXPLAIN."""
    body: dict = await bench.node.explainer.explain(namespace.digest, hashes)
    assert len(body["blocks"]) == len(hashes)
    m.encode(m.Explained(1, body))
    for block in named_blocks(body):
        for reason in tables(block["why"]):
            assert said(reason).what != reason["what"], "the command has no words for it"
    return body


def test_explain_locates_blocks() -> None:
    """Blocks would be reported where they are not."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        await bench.raw[0].delete_many(SCOPE, hashes[3:])
        bench.forget()
        assert await bench.acquire(hashes[:2]) == 2
        bench.node.learning.note([bench.space], hashes[:1], 0)
        await bench.learned()
        reservation = bench.node.reserve(1, bench.space, [blocks.ROOT], [b"p" * 32])
        body = await explain(bench, [*hashes, blocks.ROOT])
        assert body["known"]
        assert [(t["name"], t["state"], t["reads"]) for t in body["tiers"]] == [
            ("tier0", "ready", True),
            ("tier1", "ready", True),
        ]
        found = [(block["host"], block["tiers"]) for block in body["blocks"]]
        both = [0, 1]
        assert found == [
            *[("ready", both)] * 2,
            ("", both),
            ("", [1]),
            ("writing", []),
        ]
        assert [block["uses"] for block in body["blocks"]] == [1, 0, 0, 0, 0]
        assert [block["last_use_s"] is None for block in body["blocks"]] == [False, *[True] * 4]
        bench.node.host.abort(1, reservation.reservation_id)
        bench.check_nothing_is_left()

    run(test)


def test_explain_asks_tiers_about_blocks_that_no_engine_has_requested() -> None:
    """After a restart nothing could be explained before an engine has connected."""

    async def test(bench: Bench) -> None:
        other = blocks.namespace(model="other")
        body = await explain(bench, [b"h" * 32], other)
        assert not body["known"]
        assert body["blocks"][0]["tiers"] == []

    run(test)


def test_explain_reports_a_tier_without_an_answer_as_unknown() -> None:
    """One dead server would keep an operator waiting, or be reported as empty."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        bench.raw[0].hangs = {"contains"}
        began_s = bench.loop.time()
        body = await explain(bench, hashes)
        assert bench.loop.time() - began_s == pytest.approx(2.0, abs=0.1)
        assert [tier["reads"] for tier in body["tiers"]] == [False, True]
        assert [block["tiers"] for block in body["blocks"]] == [[1]] * 4
        await asyncio.sleep(0.1)
        bench.check_nothing_is_left()

    run(test, config("dead", deadline_ms=5000, slow_ms=5000), config("well"))


def test_explain_limits_hostile_requests() -> None:
    """A client could make the daemon search indefinitely, or crash on a wrong length."""

    async def test(bench: Bench) -> None:
        sent: list[m.Message] = []
        orders = Orders(bench.node, sent.append)
        for digest, count in ((SPACE.digest, m.EXPLAINED_MAX + 1), (b"short", 1), (b"", 0)):
            with pytest.raises(RemoteProtocolError, match="EXPLAIN names"):
                orders.explain(m.Explain(1, digest, b"h" * 32 * count))
        with pytest.raises(RemoteProtocolError):
            orders.explain(m.Explain(1, SPACE.digest, b"h" * 33))
        orders.explain(m.Explain(2, SPACE.digest, b"h" * 32 * m.EXPLAINED_MAX))
        orders.explain(m.Explain(3, SPACE.digest, b"h" * 32))
        assert isinstance(sent[0], m.Error)
        assert sent[0].call == 3
        async with asyncio.timeout(10):
            while len(sent) < 2:
                await asyncio.sleep(0.01)
        assert isinstance(sent[1], m.Explained)
        assert sent[1].call == 2
        assert len(m.encode(sent[1])) < 1 << 20
        # A session that has closed gets no answer.
        bench.raw[0].hangs = {"contains"}
        orders.explain(m.Explain(4, SPACE.digest, b"h" * 32))
        await asyncio.sleep(0.1)
        orders.close()
        await asyncio.sleep(5)
        assert len(sent) == 2
        bench.check_nothing_is_left()

    run(test)


# --- reasons ----------------------------------------------------------------------------


async def reasons_of(bench: Bench, block_hash: bytes) -> list[dict]:
    """Return the reasons given for one block."""
    reasons: list[dict] = (await explain(bench, [block_hash]))["blocks"][0]["why"]
    return reasons


def only_tier(**changes: object):
    """Configure the only tier of a test; it writes everything at once by default."""
    return config("disk", **changes)


def selective(bench: Bench, demand: float) -> None:
    """Set the demand of the tier's write budget."""
    bench.node.backups.queues[0].writes.budget.demand = demand


def test_explain_never_stored() -> None:
    """A prompt that no engine has stored would look like a lost one."""

    async def test(bench: Bench) -> None:
        await asyncio.sleep(7)
        never = {"what": "never_stored", "forgets": False}
        asked = blocks.chain(1, "asked")[0]
        bench.node.learning.note([bench.space], asked, 0)
        await bench.learned()
        [block] = (await explain(bench, asked))["blocks"]
        assert block["why"] == [{"what": "restart", "ago_s": 7, "kept": False}, never]
        assert block["uses"] == 1
        bench.node.counters["adopted_blocks_total"] = 1
        assert (await reasons_of(bench, asked[0]))[0] == {
            "what": "restart",
            "ago_s": 7,
            "kept": True,
        }
        await asyncio.sleep(YOUNG_S)
        assert await reasons_of(bench, asked[0]) == [never]
        # A block evicted so long ago that its record is gone cannot be told apart.
        for number in range(40):
            bench.store(25, number)
        bench.forget()
        assert await reasons_of(bench, asked[0]) == [{"what": "never_stored", "forgets": True}]

    run(test, only_tier(write_policy=WritePolicy.WRITE_BACK))


def test_explain_not_admitted_yet() -> None:
    """An operator would not learn that a block needs one more use, or when it is written."""

    async def test(bench: Bench) -> None:
        selective(bench, 0.2)
        [block_hash] = hashes = bench.store(1)
        [reason] = await reasons_of(bench, block_hash)
        assert reason["what"] == "not_admitted"
        assert (reason["uses"], reason["uses_min"]) == (0, 3)
        bench.node.learning.note([bench.space], hashes, 0)
        await bench.learned()
        [reason] = await reasons_of(bench, block_hash)
        assert (reason["uses"], reason["uses_min"]) == (1, 3)
        assert 0 <= reason["chance"] <= 1
        assert reason["chance_min"] == pytest.approx(0.2**0.1, abs=0.001)

    run(test, only_tier(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, write_uses=3))


def test_explain_waiting_for_eviction_with_write_back() -> None:
    """With write_back every block would look like a lost write."""

    async def test(bench: Bench) -> None:
        [block_hash] = bench.store(1)
        assert await reasons_of(bench, block_hash) == [
            {"what": "not_admitted", "tier": 0, "policy": "write_back"}
        ]

    run(test, only_tier(write_policy=WritePolicy.WRITE_BACK))


@pytest.mark.parametrize("by", Evicted)
def test_explain_evicted(by: Evicted) -> None:
    """An operator would not learn that memory is too small, or what evicted the block."""

    async def test(bench: Bench) -> None:
        selective(bench, 0.9)
        hashes = bench.store(3)
        await asyncio.sleep(100)
        effects: list[Effect] = []
        host = bench.node.host
        host._evictions.evict(bench.space, 1, by, host.now_s, effects)
        bench.node.memory._apply(effects)
        await asyncio.sleep(30)
        [block] = (await explain(bench, hashes[2:]))["blocks"]
        assert (block["host"], block["tiers"]) == ("", [])
        reasons = block["why"]
        assert reasons[0].pop("ago_s") in range(29, 32)
        assert reasons == [
            {"what": "evicted", "by": by.value},
            {"what": "refused_by_budget", "tier": 0, "demand": 0.9},
        ]
        # The reason stays after a request has asked for the block, and ends once it is back.
        bench.node.learning.note([bench.space], hashes, 0)
        await bench.learned()
        assert (await reasons_of(bench, hashes[2]))[1]["what"] == "refused_by_budget"
        selective(bench, 0.9)
        bench.store(3)
        assert [r["what"] for r in await reasons_of(bench, hashes[2])] == ["refused_by_budget"]

    run(test, only_tier(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE))


def test_explain_eviction_for_another_namespace() -> None:
    """Explain would give another reason than the counters."""

    async def test(bench: Bench) -> None:
        stored = [h for number in range(20) for h in bench.store(16, number)]
        reason = (await reasons_of(bench, next(h for h in stored if h not in bench.space.items)))[0]
        assert (reason["what"], reason["by"]) == ("evicted", "room")

    run(test, only_tier(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, write_share=0.01))


def test_explain_flushed() -> None:
    """A deliberate flush would look like a fault."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(2)
        await bench.backed_up()
        await asyncio.sleep(5)
        flushes = bench.node.flushes
        work = flushes.begin("", host=True, numbers=[0])
        bench.node.spawn(lambda: flushes.run(work), "flush")
        async with flushes.tiers_alone:
            assert (await reasons_of(bench, hashes[0]))[0] == {"what": "being_flushed"}
        await work.done.wait()
        await asyncio.sleep(9)
        reasons = await reasons_of(bench, hashes[0])
        assert [reason.pop("ago_s") in range(8, 11) for reason in reasons] == [True, True]
        assert reasons == [{"what": "flushed"}, {"what": "flushed", "tier": 0}]
        # The reason does not apply to a block stored later.
        bench.store(2)
        await bench.backed_up()
        await bench.raw[0].delete_many(bench.tiers[0].epochs.now(SPACE.digest), hashes)
        bench.forget()
        assert [r["what"] for r in await reasons_of(bench, hashes[0])] == [
            "evicted",
            "tier_dropped",
        ]

    run(test, only_tier())


def test_explain_ignores_a_flush_of_another_tier() -> None:
    """A tier that is too small would be excused by each flush of another tier."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(2)
        await bench.backed_up()
        await asyncio.sleep(5)
        flushes = bench.node.flushes
        work = flushes.begin("", host=False, numbers=[1])
        bench.node.spawn(lambda: flushes.run(work), "flush")
        await work.done.wait()
        await bench.raw[0].delete_many(SCOPE, hashes)
        reasons = await reasons_of(bench, hashes[0])
        assert [(r["what"], r["tier"]) for r in reasons] == [("tier_dropped", 0), ("flushed", 1)]

    run(test, config("small"), config("flushed"))


def test_explain_checksum_failed() -> None:
    """A failing disk would cost hits without being noticed."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(3)
        await bench.backed_up()
        bench.forget()
        damage(bench.raw[0], hashes[1])
        assert await bench.acquire(hashes) == 1
        await asyncio.sleep(60)
        reasons = await reasons_of(bench, hashes[1])
        assert reasons[0]["what"] == "evicted"
        assert reasons[1].pop("ago_s") in range(59, 62)
        assert reasons[1:] == [{"what": "checksum_failed", "tier": 0}]
        # In L2 as well; the reason ends once the block is there again.
        slot = bench.space.items[hashes[0]]
        bench.node.memory.drop(bench.space, [slot])
        [reason] = await reasons_of(bench, hashes[0])
        assert reason == {"what": "checksum_failed", "ago_s": reason["ago_s"]}
        bench.store(3)
        await bench.backed_up()
        assert await reasons_of(bench, hashes[1]) == []
        await asyncio.sleep(5)
        await bench.raw[0].delete_many(SCOPE, hashes)
        assert [r["what"] for r in await reasons_of(bench, hashes[1])] == ["tier_dropped"]

    run(test, only_tier())


def test_explain_breaker_open() -> None:
    """During an outage blocks would be reported as lost."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(2)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].hangs = {"get"}
        assert await bench.acquire(hashes, 3.0) == 0
        await asyncio.sleep(1)
        body = await explain(bench, hashes)
        assert body["blocks"][0]["why"][0] == {"what": "breaker_open", "tier": 0}
        [tier] = body["tiers"]
        assert not tier["reads"]
        assert tier["circuits"]["reads"]["state"] == "open"
        assert "no answer within" in tier["circuits"]["reads"]["why"]
        assert tier["circuits"]["reads"]["since_s"] > 0
        # It does not apply to blocks that the tier is known to lack.
        bench.node.backups.queues[0].writes.missed.add(SPACE.digest, hashes[:1], Miss.FULL)
        assert [r["what"] for r in await reasons_of(bench, hashes[0])] == ["evicted"]

    run(test, only_tier())


def test_explain_tier_not_open_or_not_answering() -> None:
    """A wrong password would look like an empty tier."""

    async def test(bench: Bench) -> None:
        bench.raw[0].hangs = {"contains"}
        body = await explain(bench, [b"h" * 32])
        assert [r["what"] for r in body["blocks"][0]["why"]][:2] == ["no_answer", "unavailable"]
        assert body["tiers"][1]["why"] == "wrong password"
        await asyncio.sleep(0.1)
        bench.raw[0].hangs = set()
        bench.raw[0].plan = FaultPlan({InjectedFault.FAIL_CALL: 1.0})
        assert (await reasons_of(bench, b"h" * 32))[0] == {"what": "no_answer", "tier": 0}

    away = Tier()
    away.open_errors = [BackendError("wrong password")] * 1000
    configs = config("slow", deadline_ms=9000, slow_ms=9000), config("away")
    run(test, *configs, raw=[Tier(), away])


def test_explain_deadline_missed() -> None:
    """A slow tier would look like an empty one."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].takes_s = 0.5
        nobodys = b"n" * 32
        assert await bench.acquire([*hashes, nobodys], 0.3) == 0
        bench.raw[0].takes_s = 0.0
        await asyncio.sleep(5)
        [block] = (await explain(bench, hashes[:1]))["blocks"]
        assert block["tiers"] == [0]
        assert block["why"][0]["what"] == "deadline_missed"
        assert block["why"][0]["ago_s"] in range(4, 7)
        assert [r["what"] for r in await reasons_of(bench, nobodys)] == ["restart", "never_stored"]
        # Or the engine did not wait for it.
        patience = Patience()
        patience.end()
        bench.raw[0].takes_s = 0.5
        end_ns = bench.loop.now_ns + 10**10
        await bench.node.acquire(1, [bench.space], hashes, end_ns, patience=patience)
        bench.raw[0].takes_s = 0.0
        assert (await reasons_of(bench, hashes[0]))[0]["ago_s"] < 2
        # Until a request has got it.
        assert await bench.acquire(hashes) == 4
        assert await reasons_of(bench, hashes[0]) == []
        await asyncio.sleep(2)
        bench.forget()
        assert [r["what"] for r in await reasons_of(bench, hashes[0])] == ["evicted"]

    run(test, only_tier())


def test_explain_load_not_worth_it() -> None:
    """Loads that are refused on purpose would look like a fault."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].takes_s = 1.0
        assert await bench.acquire(hashes) == 4
        bench.forget()
        end_ns = bench.loop.now_ns + 10**10
        lease = await bench.node.acquire(
            1, [bench.space], hashes, end_ns, prefill_tokens_per_s=10**6
        )
        assert lease is None
        bench.raw[0].takes_s = 0.0
        assert [r["what"] for r in await reasons_of(bench, hashes[3])] == ["not_worth", "evicted"]

    run(test, only_tier(slow_ms=60_000, deadline_ms=60_000))


def test_explain_backup_skipped_or_waiting() -> None:
    """A tier too slow to be written to, or one that fails, would look like a choice."""

    async def test(bench: Bench) -> None:
        raw = bench.raw[0]
        raw.takes_s = 1.0
        first = bench.store(4, "first")
        second = bench.store(4, "second")
        assert await reasons_of(bench, first[0]) == [{"what": "waiting", "tier": 0}]
        assert await reasons_of(bench, second[3]) == [{"what": "skipped", "tier": 0, "by": "full"}]
        await bench.backed_up()
        raw.takes_s, raw.hangs = 0.0, {"put"}
        third = bench.store(4, "third")
        await bench.backed_up()
        assert await reasons_of(bench, third[0]) == [{"what": "skipped", "tier": 0, "by": "failed"}]
        assert not bench.tiers[0].writes_allowed
        fourth = bench.store(4, "fourth")
        assert await reasons_of(bench, fourth[0]) == [{"what": "skipped", "tier": 0, "by": "away"}]

    run(test, only_tier(write_queue=4 * PAGE))


def test_explain_dropped_by_the_tier() -> None:
    """A tier that is too small would look like a write that never happened."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(3)
        await bench.backed_up()
        await asyncio.sleep(10)
        await bench.raw[0].delete_many(SCOPE, hashes)
        dropped = {"what": "tier_dropped", "tier": 0}
        [reason] = await reasons_of(bench, hashes[0])  # L2 still has it.
        assert reason.pop("had_s") in range(9, 12)
        assert reason == dropped
        bench.forget()
        evicted, reason = await reasons_of(bench, hashes[0])
        assert evicted["what"] == "evicted"
        assert {**dropped, "had_s": reason["had_s"]} == reason
        # A block that another incarnation wrote counts as well, once it was read from the tier.
        bench.store(3)
        await bench.backed_up()
        bench.forget()
        bench.node.backups.queues[0].history._records.records.clear()
        assert await bench.acquire(hashes) == 3
        await bench.raw[0].delete_many(SCOPE, hashes)
        bench.forget()
        assert (await reasons_of(bench, hashes[0]))[1]["what"] == "tier_dropped"

    run(test, only_tier())


def test_explain_evicting_and_dropped() -> None:
    """A block that can still be served would be reported missing, or a dropped one present."""

    async def test(bench: Bench) -> None:
        bench.raw[0].hangs = {"put"}
        hashes = bench.store(2)
        bench.forget()
        assert bench.space.evicting
        body = await explain(bench, hashes)
        assert [block["host"] for block in body["blocks"]] == ["evicting", "evicting"]
        slots = [s for s, (h, _) in bench.space.evicting.items() if h == hashes[1]]
        bench.node.memory.drop(bench.space, slots)
        body = await explain(bench, hashes)
        assert [block["host"] for block in body["blocks"]] == ["evicting", ""]
        await bench.backed_up()

    run(test, only_tier(write_policy=WritePolicy.WRITE_BACK))


def test_explain_tier_not_filled_by_promotions() -> None:
    """A tier left out on purpose would be reported to have dropped its blocks."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(2)
        await bench.backed_up()
        await bench.raw[0].delete_many(SCOPE, hashes)
        bench.node.backups.queues[0].history._records.records.clear()
        bench.forget()
        assert await bench.acquire(hashes) == 2
        assert await reasons_of(bench, hashes[0]) == [
            {"what": "not_admitted", "tier": 0, "policy": "fill_from_lower"}
        ]

    run(test, config("upper", fill_from_lower=False), config("lower"))


def test_flushed_blocks_do_not_count_as_hits_at_twice_the_capacity() -> None:
    """After each flush `hit_ratio_at_twice` would ask for memory that does not help."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        slots = [bench.space.items[h] for h in hashes[2:]]
        bench.node.memory.drop(bench.space, slots, Dropped.FLUSHED)
        assert bench.space.twice(hashes) == 2
        bench.forget()
        assert bench.space.twice(hashes) == 2

    run(test, only_tier())


def test_explain_dropped_block_that_another_node_wrote() -> None:
    """A shared tier's dropped block would have no reason if another node had written it."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(1)
        await bench.backed_up()
        queue = bench.node.backups.queues[0]
        queue.history._records.records.clear()
        bench.node.backups.note_lost(bench.space, list(bench.space.items.values()), queue.bit)
        bench.store(1)  # Like an engine that computes the prompt again: the tier answers PRESENT.
        await bench.backed_up()
        await bench.raw[0].delete_many(SCOPE, hashes)
        bench.forget()
        assert [r["what"] for r in await reasons_of(bench, hashes[0])] == [
            "evicted",
            "tier_dropped",
        ]

    run(test, only_tier())


def test_explain_block_of_another_namespace() -> None:
    """After a change of model or version the reason for a cold cache would be hidden."""

    async def test(bench: Bench) -> None:
        near = bench.node.register(blocks.namespace(PAGE, weights="rev-2"))
        far = bench.node.register(blocks.namespace(PAGE, weights="rev-3", kv_dtype="fp8"))
        bench.node.register(blocks.namespace(PAGE, hash_root=b"x" * 32))
        hashes = bench.store(2, space=far)
        bench.store(1, space=near)
        await bench.backed_up()
        body = await explain(bench, [*hashes, b"n" * 32])
        assert body["others"] == [
            {
                "digest": near.digest.hex(),
                "model": "test-model",
                "differs": {"weights": ["rev-1", "rev-2"]},
            },
            {
                "digest": far.digest.hex(),
                "model": "test-model",
                "differs": {"weights": ["rev-1", "rev-3"], "kv_dtype": ["float32", "fp8"]},
            },
        ]
        # A namespace with another hash root cannot have them.
        assert bench.raw[0].calls("contains") == 3
        first, second, third = [block["why"] for block in body["blocks"]]
        assert first[:2] == [
            {"what": "other_namespace", "other": 0, "in": ["host", 0]},
            {"what": "other_namespace", "other": 1, "in": ["host", 0]},
        ]
        assert second[0] == {"what": "other_namespace", "other": 1, "in": ["host", 0]}
        assert third[0]["what"] == "restart"
        # A tier alone is enough, even if the requested namespace is unknown.
        bench.forget()
        body = await explain(bench, hashes, blocks.namespace(PAGE, weights="rev-9"))
        assert not body["known"]
        assert body["blocks"][1]["why"][0] == {"what": "other_namespace", "other": 0, "in": [0]}
        assert body["others"][0]["differs"] is None

    run(test, only_tier())


def test_explain_searches_a_bounded_number_of_namespaces() -> None:
    """On a node of a thousand namespaces one question would keep the tiers busy."""

    async def test(bench: Bench) -> None:
        for number in range(2 * OTHERS_MAX):
            bench.node.register(blocks.namespace(PAGE, weights=f"rev-{number + 2}"))
        await explain(bench, [b"n" * 32])
        assert bench.raw[0].calls("contains") == 1 + OTHERS_MAX

    run(test, only_tier())


def test_explain_unverified_block() -> None:
    """After a restart with kept memory, tiers would seem to be left out."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(1)
        slot = bench.space.items[hashes[0]]
        bench.space._unverified[slot] = b"c" * 16
        [block] = (await explain(bench, hashes))["blocks"]
        assert (block["host"], block["why"]) == ("unverified", [{"what": "waiting", "tier": 0}])

    run(test, only_tier(write_policy=WritePolicy.WRITE_BACK))


def test_record_of_unserved_requests_is_bounded() -> None:
    """A day of slow reads would use up the daemon's memory."""
    unserveds = Unserveds()
    digest, hashes = b"d" * 16, [b"h" * 32] * 1000
    for number in range(100):
        unserveds.note(Unserved(Why.LATE, number, frozenset([digest]), hashes))
    kept = [note.at_s for note in unserveds.latest(Why.LATE, digest)]
    assert kept == [*range(99, 99 - BLOCKS_MAX // 1000, -1)]
    assert not list(unserveds.latest(Why.LATE, b"o" * 16))
    assert not list(unserveds.latest(Why.NOT_WORTH, digest))
    # A request larger than the bound is kept alone.
    unserveds.note(Unserved(Why.LATE, 100, frozenset([digest]), [b"h" * 32] * (BLOCKS_MAX + 1)))
    assert [note.at_s for note in unserveds.latest(Why.LATE, digest)] == [100]
