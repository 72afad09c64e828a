"""A tiny real vLLM engine for tests, and prompts of whole random tokens.

Greedy tokens of its float32 model with random weights change when one element of the KV is wrong,
so equal tokens mean equal KV.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from engine.model import write_config
from engine.process import EngineProcess
from tests.support.daemon_process import DaemonProcess

BLOCK_TOKENS = 32
BLOCK_BYTES = 128 << 10
"""KV of one block of the tiny model."""

CONNECT_S = 20.0

# One unbound thread: threads that spin on barriers are very slow on a busy machine.
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def prompt(length: int, tag: object) -> list[int]:
    """Pseudo-random tokens; a tag always gives the same ones."""
    source = random.Random(str(tag))
    return [source.randrange(10, 15990) for _ in range(length)]


def whole_blocks(length: int) -> int:
    """Tokens of a prompt that can be cached: whole blocks that leave one token to compute."""
    return (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Engine(EngineProcess):
    """An engine with a model of `shape`; files in `directory`, no tierd if `socket` is empty."""

    def __init__(
        self, directory: Path, socket: str, *, shape: str = "tiny", **settings: object
    ) -> None:
        model = directory / "model"
        write_config(model, shape)
        environment = {**THREADS, **settings.pop("env", {})}  # type: ignore[dict-item]  # a dict
        extra = settings.get("extra", {})
        assert isinstance(extra, dict)
        self._daemon_copies = extra.get("transfer") == "host_ipc"
        given = {"model": str(model), "socket": socket, "env": environment, **settings}
        super().__init__(given, directory / "vllm.log")

    def reset(self) -> None:
        """Empty the engine's own cache; fails if any block is still in use."""
        assert self.call("reset")["reset"]

    def wait_connected(self, daemon: DaemonProcess) -> None:
        """Wait until both sides of the connector are connected to the present daemon."""
        epoch = daemon.status()["epoch"]
        end = time.monotonic() + CONNECT_S
        while True:
            stats = self.call("stats")
            if set(stats["epochs"]) == {epoch} and stats["attached"] == [self._daemon_copies]:
                break
            assert time.monotonic() < end
            self.generate([prompt(8, time.monotonic())], tokens=2)

    def wait_stored(self, daemon: DaemonProcess, blocks: int) -> None:
        """Wait until the daemon holds this number of blocks."""
        end = time.monotonic() + CONNECT_S
        while daemon.status()["host"]["blocks"] < blocks:
            assert time.monotonic() < end, daemon.status()

    def settled(self) -> dict:
        """The engine's counters; fails if any request has left state behind."""
        stats = self.call("stats")
        assert stats["off"] == "", stats
        assert stats["errors"] == 0, stats
        assert stats["leases"] == 0, stats
        assert stats["blocks_in_use"] == 0, stats
        return stats

    def kill_if_running(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._process.poll() is None:
            self.kill()
