"""After a restart, prefixes with more uses are found at least as often: with tiers that evict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.support.blocks import chain, namespace, payload
from tests.support.daemon_process import DaemonProcess
from tests.support.servers.redis import RedisServer
from tests.support.tiers.scene import is_idle, table
from tests.support.traffic import wait_until
from tierd.config import WritePolicy

pytestmark = pytest.mark.slow

SPACE = namespace(16 << 10)
HOST = "2MiB"
"""128 blocks, of which an eighth may be evicting; each tier holds about twice as many."""

TIER_MIB = 4
REQUESTS = 240
DOCUMENT = 8
"""Blocks of a prefix."""

ALWAYS = 6
"""One of this number of requests has the same prefix."""

PATIENT = {"deadline_ms": 20_000, "slow_ms": 20_000}
"""Deadline at which resident blocks are found, however busy the machine is."""

FEW = (1, 2, 8)
"""Numbers of uses that separate the groups of prefixes."""


class Work:
    """Requests to a daemon; some prefixes are far more popular than others."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.uses: Counter[int] = Counter()
        self._daemon = daemon

    def play(self) -> None:
        """Make requests one after the other; each finds its blocks or stores them."""
        random = Random(1)
        with closing(self._daemon.client()) as client:
            handle = client.register(SPACE)
            for number in range(REQUESTS):
                # The probability of a prefix is proportional to 1 / rank.
                document = int(REQUESTS ** random.random()) if number % ALWAYS else 0
                hashes, parents = chain(DOCUMENT, document)
                found = len(client.get(handle, hashes, 10_000))
                missing = zip(hashes[found:], parents[found:], strict=True)
                client.put(handle, [(h, parent, payload(SPACE, h)) for h, parent in missing])
                self.uses[document] += 1
                wait_until(lambda: is_idle(client.status()), 60, "blocks are not written")

    def hit_ratios(self) -> list[float]:
        """The share of blocks that is found and right, by number of uses, fewest first."""
        found, asked = Counter[int](), Counter[int]()
        with closing(self._daemon.client()) as client:
            handle = client.register(SPACE)
            # The most used first: loading the others evicts them again.
            for document, uses in self.uses.most_common():
                hashes, _ = chain(DOCUMENT, document)
                got = client.get(handle, hashes, 10_000)
                assert all(bytes(v) == payload(SPACE, h) for v, h in zip(got, hashes, strict=False))
                group = max(few for few in FEW if few <= uses)
                found[group] += len(got)
                asked[group] += DOCUMENT
        return [found[few] / asked[few] for few in FEW]


@dataclass(frozen=True, slots=True)
class EvictingTier:
    """A tier with room for twice the blocks of host memory, which evicts by itself."""

    options: dict[str, object]
    evict_no_more: Callable[[], object]


@pytest.fixture(params=["file", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EvictingTier]:
    """A tier that evicts when it is full. S3 is not one: a full bucket refuses blocks, so a prefix
    that becomes popular later is never stored."""
    if request.param == "file":
        options: dict[str, object] = {
            "type": "file",
            "path": str(tmp_path / "store"),
            "capacity": f"{TIER_MIB}MiB",
            "reserve_free": "0",
            "slab": "1MiB",
        }
        yield EvictingTier(options, lambda: None)
        return
    # To its LRU clock a test lasts as long as hours on a server: it must sample more keys.
    limits = ("--maxmemory", f"{TIER_MIB + 6}mb", "--maxmemory-samples", "64")
    # Marks of flushes, which become old within seconds here too, have no TTL and stay.
    server = RedisServer(tmp_path / "redis", *limits, "--maxmemory-policy", "volatile-lru")
    with server, closing(server.client()) as admin:
        options = {**server.options(), "type": "redis", "timeout_ms": 20_000, "ttl_s": 86_400}
        # Buffers of clients count as memory: reading would evict blocks of the last second.
        yield EvictingTier(options, lambda: admin.config_set("maxmemory", "0"))


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_popular_prefixes_are_found_more_often_after_a_restart(
    tmp_path: Path, tier: EvictingTier, policy: WritePolicy
) -> None:
    """A node's hottest prefixes would be lost with its host memory, and one-off documents kept."""
    kind = str(tier.options["type"])
    storage = table(kind, {**tier.options, **PATIENT, "write_policy": policy.value})
    prefetch = {"policy": "wait_complete"}
    node = DaemonProcess(tmp_path / "node", capacity=HOST, storage=storage, prefetch=prefetch)
    with node as daemon:
        daemon.wait_tier(kind, "ready", 60)
        work = Work(daemon)
        work.play()
        assert daemon.stop() == 0
        tier.evict_no_more()
        daemon.start()
        daemon.wait_tier(kind, "ready", 60)
        ratios = work.hit_ratios()
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0
    assert ratios[0] < 0.9, "the tier has not evicted enough"
