"""LoRA adapters in the vLLM connector: each has its own namespace, on both sides."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.support.engines.connector_bench import FakeRequest, block_hash, namespace
from tests.support.engines.fake_client import FakeClient, FakeDaemon, FakeHandle
from tests.support.engines.jobs_rig import Rig
from tests.support.engines.layers import forward
from tierd.errors import NamespaceError
from tierd_connectors.common.guard import Boundary
from tierd_connectors.common.namespaces import NO_ADAPTER, of_adapters, of_generation
from tierd_connectors.vllm.admission import adapter_of
from tierd_connectors.vllm.hints import NOTHING, RequestHints
from tierd_connectors.vllm.scheduler import SchedulerSide
from tierd_connectors.vllm.steps import Scheduled
from tierd_connectors.vllm.worker import mover as vllm_mover

if TYPE_CHECKING:
    from tierd.client import Client
    from tierd.types import Namespace

LORAS = {"sql": "r1", "poet": "r1"}
ADAPTERS = [NO_ADAPTER, *LORAS]


def lora(name: str, *, in_place: bool = False) -> object:
    return SimpleNamespace(lora_name=name, lora_path=f"/{name}", load_inplace=in_place)


def scheduler(daemon: FakeDaemon, loras: dict[str, str], ranks: int = 1) -> SchedulerSide:
    return SchedulerSide(
        cast("Client", FakeClient(daemon)),
        [namespace(rank, ranks) for rank in range(ranks)],
        deadline_ms=2000,
        boundary=Boundary(),
        loras=loras,
    )


def found(side: SchedulerSide, adapter: str, name: str = "r") -> int | None:
    """Tokens that a request of 14 finds, which is then over."""
    side.add(FakeRequest(name, 14), NOTHING, adapter)
    tokens = side.matched_tokens(name, 0)
    side.finish(name)
    return tokens


def put(daemon: FakeDaemon, adapter: str, loras: dict[str, str], ranks: int = 1) -> None:
    """Have the daemon hold the three blocks of such a request for an adapter."""
    for rank in range(ranks):
        digest = of_adapters(namespace(rank, ranks), loras)[adapter].digest
        for index in range(3):
            slot = next(daemon.ids)
            daemon.slots[slot] = bytearray(64)
            daemon.blocks[digest, block_hash(index)] = slot


# What is an adapter


def test_adapter_is_identified_by_name_and_revision() -> None:
    """Requests would get the KV of weights that the adapter no longer has."""
    assert adapter_of(None, LORAS) == NO_ADAPTER
    assert adapter_of(lora("sql"), LORAS) == "sql"
    assert adapter_of(lora("other"), LORAS) is None
    assert adapter_of(lora("sql"), {}) is None
    assert adapter_of(lora("sql", in_place=True), LORAS) is None, "replaced while running"
    assert adapter_of(SimpleNamespace(lora_name="sql"), LORAS) == "sql", "an older vLLM"


def test_every_adapter_and_revision_has_a_namespace() -> None:
    """Two adapters would share blocks, or a new adapter would change the others' namespaces."""
    names = of_adapters(namespace(), LORAS)
    assert names[NO_ADAPTER] == namespace()
    assert names["sql"].weights == "w+lora:sql=r1"
    assert of_adapters(namespace(), {**LORAS, "new": "1"}).items() >= names.items()
    others = [
        *names.values(),
        of_adapters(namespace(), {"sql": "r2"})["sql"],
        of_adapters(of_generation(namespace(), "g"), LORAS)["sql"],
        of_adapters(namespace(), {"sql": "=r1"})["sql"],
        of_adapters(namespace(), {"sql": "r1+lora:poet=r1"})["sql"],
    ]
    assert len({n.digest for n in others}) == len({n.family for n in others}) == len(others)
    with pytest.raises(NamespaceError):
        of_adapters(namespace(), {"sql": "1" * 5000})


# The scheduler's side


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("owner", ADAPTERS)
def test_blocks_are_found_only_by_their_adapter(owner: str, ranks: int) -> None:
    """A user would get an answer made of another adapter's KV."""
    daemon = FakeDaemon()
    put(daemon, owner, LORAS, ranks)
    side = scheduler(daemon, LORAS, ranks)
    for adapter in ADAPTERS:
        assert found(side, adapter) == (12 if adapter == owner else 0)
    assert not daemon.leases


def test_another_revision_finds_nothing() -> None:
    """A retrained adapter would be served with the KV of its old weights."""
    daemon = FakeDaemon()
    put(daemon, "sql", LORAS)
    assert found(scheduler(daemon, {"sql": "r2"}), "sql") == 0
    assert found(scheduler(daemon, {"sql": "r1", "more": "9"}), "sql") == 12


def test_loads_and_stores_carry_their_adapter() -> None:
    """They would copy between one adapter's slots and another's blocks."""
    daemon = FakeDaemon()
    put(daemon, "sql", LORAS)
    side = scheduler(daemon, LORAS)
    for name, adapter in (("a", "sql"), ("b", "poet"), ("c", NO_ADAPTER)):
        side.add(FakeRequest(name, 14), RequestHints(pin_s=1), adapter)
    assert side.matched_tokens("a", 0) == 12
    side.allocated("a", [1, 2, 3, 4], 12)
    steps = [Scheduled(name, True, (), 0, 14, lambda: [5, 6, 7, 8]) for name in "bc"]
    work = side.hand_over(side.build(steps, [], idle=False), idle=False)
    assert [load.adapter for load in work.loads] == ["sql"]
    assert [item.adapter for item in work.stores] == ["poet"] * 3 + [NO_ADAPTER] * 3
    for name in "abc":
        side.finish(name)
    names = of_adapters(namespace(), LORAS)
    hinted = [[handle.namespace for handle in handles] for handles, _, _ in daemon.hints]
    assert hinted == [[names["sql"]], [names["poet"]], [names[NO_ADAPTER]]]


def test_reset_changes_every_adapters_namespace() -> None:
    """Weights replaced in a running engine would leave the adapters on the old ones' KV."""
    daemon = FakeDaemon()
    put(daemon, "sql", LORAS)
    side = scheduler(daemon, LORAS)
    rig = attached()
    rig.daemon.blocks.clear()
    side.reset()
    assert found(side, "sql") == 0
    generation = side.hand_over(None, idle=True).generation
    fresh = of_adapters(of_generation(namespace(), generation), LORAS)
    sides = {adapter: handle.namespace for adapter, [handle] in side._namespaces.handles.items()}
    assert sides == fresh
    rig.mover.use(of_generation(rig.namespace, generation))
    rig.mover.submit_stores([rig.item(1, adapter="sql")])
    rig.finish()
    expected = of_adapters(of_generation(rig.namespace, generation), LORAS)["sql"].digest
    assert [digest for digest, _ in rig.daemon.blocks] == [expected]
    assert {a.handle.namespace.weights.count("reset") for a in rig.daemon.attachments} == {1}
    rig.close()


# The worker's side


@pytest.mark.parametrize("copier", ["worker", "daemon"])
def test_equal_hashes_of_two_adapters_are_kept_apart(copier: str) -> None:
    """The same tokens would be loaded as another adapter computed them."""
    rig = Rig(loras=LORAS)
    if copier == "daemon":
        rig.attach()
    blocks = dict(zip(ADAPTERS, (1, 2, 3), strict=True))
    # Each adapter's first copy is the worker's, while the daemon attaches.
    for turn in range(2):
        name = block_hash(turn)
        written = {adapter: rig.write(block) for adapter, block in blocks.items()}
        rig.mover.submit_stores([rig.item(b, name, adapter) for adapter, b in blocks.items()])
        rig.finish()
        assert {adapter: rig.stored(name, adapter) for adapter in ADAPTERS} == written
    assert rig.daemon.ended_copies == (1 + 3 if copier == "daemon" else 0)
    for adapter in ADAPTERS:
        rig.load([1], [4], adapter=adapter)
        rig.finish()
        assert rig.failed() == []
        assert rig.content(4) == written[adapter]
    assert rig.daemon.ended_copies == (4 + 3 if copier == "daemon" else 0)
    assert len(rig.daemon.attachments) == (3 if copier == "daemon" else 0)
    assert rig.boundary.errors == 0
    rig.close()


def test_adapter_is_registered_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory would be taken for unused adapters, or the first blocks of one not
    be stored."""
    rig = Rig(loras=LORAS)
    assert [handle.namespace for handle in rig.client.handles] == [rig.namespace]
    register, handles = rig.client.begin_register, rig.client.handles

    def unanswered(asked: Namespace) -> FakeHandle:
        handle = register(asked)
        handle.ready = False
        return handle

    def answer(timeout_s: float) -> None:
        handles[-1].ready = True

    monkeypatch.setattr(rig.client, "begin_register", unanswered)
    monkeypatch.setattr(rig.client, "wait", answer)
    content = rig.write(1)
    rig.mover.submit_stores([rig.item(1, adapter="sql")])
    rig.finish()
    assert rig.stored(block_hash(1), "sql") == content
    assert [handle.namespace for handle in handles] == [rig.namespace, rig.namespaces["sql"]]
    monkeypatch.setattr(rig.client, "wait", lambda _: None)
    monkeypatch.setattr(vllm_mover, "LOAD_MAP_WAIT_S", 0.0)
    rig.mover.submit_stores([rig.item(1, adapter="poet")])
    rig.finish()
    assert rig.stored(block_hash(1), "poet") is None, "the daemon does not answer"
    rig.close()


def attached() -> Rig:
    """A rig whose daemon copies for an adapter as well; block 1 is stored for all."""
    rig = Rig(loras=LORAS, layerwise=True)
    rig.attach()
    for block in (2, 1):
        rig.write(block)
        for adapter in ADAPTERS:
            rig.mover.submit_stores([rig.item(block, adapter=adapter)])
            rig.finish()
    forward(rig)
    return rig


def test_loads_of_several_adapters_run_at_once() -> None:
    """A load called off would be another's, whose pages the engine then takes back too early."""
    rig = attached()
    for into, adapter in enumerate(ADAPTERS, 3):
        rig.load([1], [into], adapter=adapter)
    rig.work()
    jobs = list(rig.daemon.jobs)
    assert len({job.job for job in jobs}) == len(ADAPTERS)
    rig.daemon.drop_session()
    rig.work()
    assert len(rig.mover.take_finished()) == len(ADAPTERS)
    assert [rig.content(block) for block in (3, 4, 5)] == [rig.content(1)] * 3
    late = rig.write(4)
    for job in jobs:
        while not job.over:
            job.advance()
    assert rig.content(4) == late, "a load that was taken back wrote a page"
    rig.close()


def test_an_adapter_s_load_is_reported_early() -> None:
    """Layer by layer would be for the model alone."""
    rig = attached()
    rig.load([1], [4], adapter="sql")
    rig.work()
    (job,) = rig.daemon.jobs
    job.advance()
    job.advance()
    rig.work()
    assert rig.failed() == [], "reported once the first layers are in place"
    rig.daemon.kill()
    rig.work()
    assert rig.content(4) == rig.content(1), "seen through without the daemon"
    rig.close()


def test_worker_copies_for_a_refused_adapter(caplog: pytest.LogCaptureFixture) -> None:
    """The whole engine would copy itself, or the adapter's prefixes be lost, without a word."""
    rig = Rig(loras=LORAS)
    rig.attach()
    rig.daemon.refuse = "no memory for staging"
    with caplog.at_level(logging.WARNING, logger="vllm.tierd"):
        for block in (1, 2, 3):
            content = rig.write(block)
            rig.mover.submit_stores([rig.item(block, adapter="sql")])
            rig.finish()
            assert rig.stored(block_hash(block), "sql") == content
    (line,) = caplog.messages
    assert "no memory for staging" in line
    assert rig.mover.attached
    rig.store([4])
    assert rig.daemon.ended_copies == 1
    rig.close()
