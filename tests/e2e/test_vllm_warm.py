"""Warming with a real vLLM: the engine's next requests find the warmed blocks.

One daemon and three engines, one after the other; many tests check the results of one sequence.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.engines.vllm_server import Server, Streamed, write_adapter, write_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
STORED_S = 60.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REVISIONS = {"sql": "1"}
"""The adapter that is offloaded; the other one, poet, is not."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def words(count: int, tag: str) -> str:
    """Text of this number of tokens; a tag always gives the same text."""
    source = random.Random(tag)
    # A word that begins like a special token, w0 to w2, would be split there.
    return " ".join(f"w{source.randrange(3000, 9990)}" for _ in range(count))


def ids(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


SYSTEM = words(900, "system")
"""The common beginning of the workload's prompts."""

WORKLOAD: dict[str, tuple[str, dict[str, object]]] = {
    "one": (COMPLETIONS, {"prompt": ids(SYSTEM + " " + words(200, "one")), "cache_salt": "a"}),
    "two": (COMPLETIONS, {"prompt": ids(SYSTEM + " " + words(150, "two")), "cache_salt": "a"}),
    "tenant": (COMPLETIONS, {"prompt": ids(SYSTEM + " " + words(120, "b")), "cache_salt": "b"}),
    "sql": (COMPLETIONS, {"prompt": ids(SYSTEM + " " + words(90, "sql")), "model": "sql"}),
}
"""Requests whose prefixes come back from storage."""

PROMPTS: dict[str, tuple[str, dict[str, object]]] = {
    "tokens": (COMPLETIONS, {"prompt": ids(words(1000, "tokens"))}),
    "text": (COMPLETIONS, {"prompt": words(700, "text"), "cache_salt": "a"}),
    "chat": (
        CHAT,
        {"messages": [{"role": "user", "content": words(800, "chat")}], "cache_salt": "a"},
    ),
    "sql": (COMPLETIONS, {"prompt": ids(words(600, "adapter")), "model": "sql"}),
}
"""Requests whose prefixes are computed for a warm."""


class First(NamedTuple):
    """The first request of its kind, and a request that nothing can be cached for."""

    warm: Streamed
    cold: Streamed
    loaded_tokens: int
    """Tokens of the prompt that the engine's connector loaded."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens that a cache can supply: whole blocks that leave a token to compute."""
        return (self.warm.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Site:
    """A node whose engine and daemon come and go."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        store = directory / "store"
        self.daemon = DaemonProcess(
            directory / "tierd",
            # Otherwise prompts that were requested once would not be written.
            storage=f'[[storage]]\ntype = "file"\npath = "{store}"\ncapacity = "2GiB"\n'
            'reserve_free = "0"\nwrite_policy = "write_through"\n',
            # A busy machine does not load a prefix within a user's usual deadline.
            prefetch={"policy": "wait_complete"},
        )
        self.model = write_model(directory / "model")
        self.adapters = {
            name: write_adapter(directory / name, seed) for seed, name in enumerate(("sql", "poet"))
        }
        template = directory / "template.jinja"
        template.write_text(TEMPLATE)
        paths = [f"{name}={path}" for name, path in self.adapters.items()]
        # One slot more than adapters: on CPUs vLLM computes the model's own tokens with what is
        # in the last one, when an adapter's are in the same batch (vllm-project/vllm#48421).
        self._arguments = [
            *("--chat-template", str(template), "--enable-lora", "--max-lora-rank", "8"),
            *("--max-loras", str(len(paths) + 1), "--lora-modules", *paths),
        ]
        self._started = 0
        self._server: Server | None = None
        self._colds = 0

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def start_engine(self, transfer: str) -> None:
        """Start an engine in place of the previous one, whose own cache is lost."""
        self.stop_engine()
        self._started += 1
        self._server = Server(
            self.model,
            self.daemon.socket,
            self.directory / f"vllm-{self._started}.log",
            extra={"transfer": transfer, "loras": REVISIONS},
            arguments=self._arguments,
        )
        # Less than a block: an engine's first steps take longer than any later ones.
        self._server.complete([5] * 8)

    def stop_engine(self) -> None:
        if self._server is not None:
            assert self._server.stop() == 0
            self._server = None

    def close(self) -> None:
        """End servers that a failed test has left."""
        if self._server is not None:
            self._server.kill()
        self.daemon.stop()

    def run(self, *words: str, statuses: Sequence[int] = (0,)) -> str:
        """The output of a `tierd` command."""
        done = subprocess.run(
            [sys.executable, "-m", "tierd.cli.main", *words, "--socket", self.daemon.socket],
            capture_output=True,
            text=True,
        )
        assert done.returncode in statuses, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def write(self, name: str, *requests: Mapping[str, object]) -> str:
        """Write a file with requests, one per line; returns its path."""
        file = self.directory / name
        file.write_text("".join(json.dumps(request) + "\n" for request in requests))
        return str(file)

    @property
    def lora(self) -> list[str]:
        """Options that a command needs to hash an adapter's requests."""
        return ["--lora", f"sql={self.adapters['sql']}"]

    def explain(self, request: Mapping[str, object]) -> dict:
        """The output of `tierd explain` for a request whose blocks are all present."""
        file = self.write("asked.json", request)
        lora = self.lora if request.get("model") == "sql" else []
        explained: dict = json.loads(self.run("explain", file, *lora, "--json"))
        return explained

    def compute(self, prompts: str) -> list[dict]:
        """The reports of `tierd warm` on a file's prompts, repeated until all of it is stored.

        A busy machine's daemon may be too late for a store, which an engine then drops.
        """
        command = ["warm", "--engine", self.server.url, *self.lora, "--json", prompts]
        reports: list[dict] = []
        end = time.monotonic() + STORED_S
        while not reports or reports[-1]["missing"]:
            assert time.monotonic() < end, reports
            reports.append(json.loads(self.run(*command, statuses=(0, 3))))
        return reports

    def serve(self, asked: Collection[tuple[str, Mapping[str, object]]]) -> None:
        """Make requests, again until all of their blocks are stored, which is after the answer."""
        file = self.write("served.jsonl", *(request for _, request in asked))
        command = ["warm", *self.lora, "--dry-run", "--json", file]
        end = time.monotonic() + STORED_S
        while True:
            for path, request in asked:
                self.server.stream(path, request)
            found = json.loads(self.run(*command, statuses=(0, 3)))
            if found["here"] == found["blocks"]:
                return
            assert time.monotonic() < end, found

    def first(self, path: str, request: Mapping[str, object]) -> First:
        """A request, and then the same request of a new tenant."""
        before = self.server.metric("vllm:tierd_loaded_tokens_total")
        warm = self.server.stream(path, request)
        after = self.server.metric("vllm:tierd_loaded_tokens_total")
        self._colds += 1
        cold = self.server.stream(path, {**request, "cache_salt": f"cold-{self._colds}"})
        return First(warm, cold, round(after - before))

    def storage_reads(self) -> int:
        """How often the daemon has read its tier."""
        reads: int = self.daemon.tiers()["file"]["counters"]["get_calls_total"]
        return reads


class Story:
    """The whole sequence, in order."""

    def __init__(self, site: Site) -> None:
        # Storage is empty, and an engine computes the blocks to warm.
        site.daemon.start()
        site.start_engine("host_ipc")
        prompts = site.write("prompts.jsonl", *(request for _, request in PROMPTS.values()))
        self.computed = site.compute(prompts)
        site.start_engine("shm")
        self.after_restart = {name: site.first(*asked) for name, asked in PROMPTS.items()}
        path, request = PROMPTS["text"]
        self.tenant = site.server.stream(path, {**request, "cache_salt": "b"})
        path, request = PROMPTS["sql"]
        self.base = site.server.stream(path, {**request, "model": site.server.model})
        lookups = site.server.metric("vllm:tierd_lookups_total")
        self.unnamed = site.first(path, {**request, "model": "poet"})
        self.unnamed_lookups = site.server.metric("vllm:tierd_lookups_total") - lookups

        # A workload is served, then everything is stopped; storage keeps its blocks.
        site.serve(WORKLOAD.values())
        site.daemon.wait_backed_up()
        hotset = str(site.directory / "hotset")
        site.run("hotset", "export", "-o", hotset)
        site.stop_engine()
        site.daemon.stop()

        site.daemon.start()
        self.host_blocks = site.daemon.status()["host"]["blocks"]
        self.brought = json.loads(site.run("warm", "--hotset", hotset, "--json"))
        site.start_engine("host_ipc")
        self.explained = [site.explain(request) for _, request in WORKLOAD.values()]
        reads = site.storage_reads()
        self.after_wipe = {name: site.first(*asked) for name, asked in WORKLOAD.items()}
        self.reads = site.storage_reads() - reads
        config = str(site.daemon.config)
        # Warnings may concern this machine, errors concern tierd or the engine.
        self.findings = json.loads(
            site.run(
                *("doctor", "--config", config, "--engine", site.server.url, "--json"),
                statuses=(0, 3),
            )
        )
        self.errors = site.server.metric("vllm:tierd_errors_total")
        site.stop_engine()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    site = Site(tmp_path_factory.mktemp("site"))
    try:
        yield Story(site)
    finally:
        site.close()


def test_warmed_prefixes_survive_an_engine_restart(story: Story) -> None:
    """After a deploy the first users would wait, although chats, text and adapters were warmed."""
    report = story.computed[-1]
    assert (report["missing"], report["reasons"]) == (0, [])
    blocks = sum(first.prefix_tokens for first in story.after_restart.values()) // BLOCK_TOKENS
    assert sum(each["computed"] for each in story.computed) == report["blocks"] >= blocks
    for first in story.after_restart.values():
        assert first.loaded_tokens == first.warm.cached_tokens >= 0.95 * first.prefix_tokens
        assert first.cold.cached_tokens == 0
        assert first.warm.tokens == first.cold.tokens


def test_warm_of_one_tenant_never_serves_another(story: Story) -> None:
    """A tenant could tell from the time of its first answer what another tenant had asked."""
    assert story.tenant.cached_tokens == 0
    assert story.tenant.tokens == story.after_restart["text"].cold.tokens


def test_warm_of_an_adapter_serves_only_that_adapter(story: Story) -> None:
    """Equal tokens would get another adapter's KV, and a wrong answer."""
    assert story.base.cached_tokens == 0
    assert story.unnamed.warm.cached_tokens == story.unnamed.loaded_tokens == 0
    assert story.unnamed_lookups == 0, "an adapter without a revision is offloaded"
    answers = [story.base.tokens, story.unnamed.warm.tokens]
    assert story.after_restart["sql"].warm.tokens not in answers


def test_hot_set_restores_served_prefixes(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    """After a reboot the first users would wait for storage, or for the prompt's computation."""
    assert story.host_blocks == 0
    assert (story.brought["missing"], story.brought["reasons"]) == (0, [])
    for first in story.after_wipe.values():
        assert first.warm.cached_tokens >= 0.95 * first.prefix_tokens
        assert first.warm.tokens == first.cold.tokens
    # The beginning of the second prompt is by then in the engine's own cache.
    for name in ("one", "tenant", "sql"):
        first = story.after_wipe[name]
        assert first.loaded_tokens == first.warm.cached_tokens
    assert story.reads == 0, "a request read the tier after the warm"
    with capsys.disabled():
        for name, first in [*story.after_restart.items(), *story.after_wipe.items()]:
            cold_s, warm_s = first.cold.first_token_s, first.warm.first_token_s
            assert min(cold_s, warm_s) > 0
            print(f"\n{name}: first token after {cold_s:.3f} s cold, {warm_s:.3f} s warm", end="")


def test_explain_and_doctor_report_warmed_blocks(story: Story) -> None:
    """An operator would be told of misses, or of faults, that do not exist."""
    for explained, (_, request) in zip(story.explained, WORKLOAD.values(), strict=True):
        prompt = request["prompt"]
        assert isinstance(prompt, list)
        assert explained["tokens_there"] == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        states = {rank["host"] for block in explained["blocks"] for rank in block["ranks"]}
        assert states == {"ready"}, "a block is in storage only"
    assert story.findings["counts"]["fault"] == 0
    said = [finding["what"] for finding in story.findings["findings"]]
    assert any("stored under the hash" in what for what in said)
    assert story.errors == 0
