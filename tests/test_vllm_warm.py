"""Warming with a real vLLM: what was warmed is what its next requests ask for.

One daemon and three engines, one after the other: what they did is looked at by many tests.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.daemon_process import DaemonProcess
from tests.vllm_server import Server, Streamed, write_adapter, write_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REVISIONS = {"sql": "1"}
"""Of the adapters that are offloaded; the other one, poet, is not."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def words(count: int, tag: str) -> str:
    """Text of so many tokens, the same for the same tag."""
    source = random.Random(tag)
    # A word that begins as a special token, w0 to w2, would be cut there.
    return " ".join(f"w{source.randrange(3000, 9990)}" for _ in range(count))


def ids(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


SYSTEM = words(900, "system")
"""What the prompts of the workload have in common."""

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
"""Requests whose prefixes are computed because somebody warms them."""


class First(NamedTuple):
    """What the first request of its kind got, and one that can have nothing from anywhere."""

    warm: Streamed
    cold: Streamed
    loaded_tokens: int
    """Of the prompt, by the engine's connector."""

    @property
    def prefix_tokens(self) -> int:
        """What can come from a cache: whole blocks that leave a token to compute."""
        return (self.warm.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Site:
    """A node whose engine and daemon come and go."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # A busy machine brings no prefix in the time that a user would grant.
        self.daemon = DaemonProcess(directory / "tierd", prefetch={"policy": "wait_complete"})
        self.model = write_model(directory / "model")
        self.adapters = {
            name: write_adapter(directory / name, seed) for seed, name in enumerate(("sql", "poet"))
        }
        template = directory / "template.jinja"
        template.write_text(TEMPLATE)
        paths = [f"{name}={path}" for name, path in self.adapters.items()]
        self._arguments = [
            *("--chat-template", str(template), "--enable-lora", "--max-lora-rank", "8"),
            *("--max-loras", "2", "--lora-modules", *paths),
        ]
        self._started = 0
        self._server: Server | None = None
        self._colds = 0

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def start_engine(self, transfer: str) -> None:
        """In place of the last one, whose own cache is gone."""
        self.stop_engine()
        self._started += 1
        self._server = Server(
            self.model,
            self.daemon.socket,
            self.directory / f"vllm-{self._started}.log",
            extra={"transfer": transfer, "loras": REVISIONS},
            arguments=self._arguments,
        )

    def stop_engine(self) -> None:
        if self._server is not None:
            assert self._server.stop() == 0
            self._server = None

    def close(self) -> None:
        """End what a failed test left."""
        if self._server is not None:
            self._server.kill()
        self.daemon.stop()

    def run(self, *words: str, status: int = 0) -> str:
        """What a command of `tierd` prints."""
        done = subprocess.run(
            [sys.executable, "-m", "tierd.cli.main", *words, "--socket", self.daemon.socket],
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def first(self, path: str, request: Mapping[str, object]) -> First:
        """A request, after the same one of a tenant whom nobody has seen."""
        self._colds += 1
        cold = self.server.stream(path, {**request, "cache_salt": f"cold-{self._colds}"})
        before = self.server.metric("vllm:tierd_loaded_tokens_total")
        warm = self.server.stream(path, request)
        after = self.server.metric("vllm:tierd_loaded_tokens_total")
        return First(warm, cold, round(after - before))

    def storage_reads(self) -> int:
        """Blocks that the daemon has read from its tier."""
        return self.daemon.tiers()["file"]["read_blocks"]


class Story:
    """All that happens, in order."""

    def __init__(self, site: Site) -> None:
        site.daemon.start()
        site.start_engine("host_ipc")
        self.warmed = self.compute(site)

        site.start_engine("shm")
        self.computed = {name: site.first(*asked) for name, asked in PROMPTS.items()}
        path, request = PROMPTS["text"]
        self.stranger = site.server.stream(path, {**request, "cache_salt": "b"})
        path, request = PROMPTS["sql"]
        self.unnamed = site.first(path, {**request, "model": "poet"})
        self.base = site.server.stream(path, {**request, "model": site.server.model})

        self.cold = {name: site.server.stream(*asked) for name, asked in WORKLOAD.items()}
        site.daemon.wait_backed_up()
        self.hotset = site.directory / "hotset.txt"
        site.run("hotset", "export", "--output", str(self.hotset))
        site.stop_engine()
        site.daemon.stop()

        site.daemon.start()
        self.host_blocks = site.daemon.status()["host"]["blocks"]
        site.start_engine("host_ipc")
        self.brought = json.loads(site.run("warm", "--hotset", str(self.hotset), "--json"))
        self.reads = site.storage_reads()
        self.again = {name: site.first(*asked) for name, asked in WORKLOAD.items()}
        self.reads_later = site.storage_reads()

    def compute(self, site: Site) -> dict:
        """Have the engine compute prompts that no tier has."""
        file = site.directory / "prompts.jsonl"
        lines = [json.dumps(request) for _, request in PROMPTS.values()]
        file.write_text("\n".join(lines) + "\n")
        adapter = f"sql={site.adapters['sql']}"
        shown = site.run(
            *("warm", "--engine", site.server.url, "--lora", adapter, "--json", str(file))
        )
        return json.loads(shown)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.close()


@pytest.fixture(scope="module")
def story(site: Site) -> Story:
    return Story(site)
