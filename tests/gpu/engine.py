"""An engine's process, as seen by the checks; `process` runs in it."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tierd.shared_memory.exports import Export, Part

PYTHON = os.environ.get("TIERD_GPU_ENGINE_PYTHON") or sys.executable
"""The Python that has torch."""

ALLOCATORS = {
    "cuda-vmm": "expandable_segments:True",
    "cuda-async": "backend:cudaMallocAsync",
}
"""PYTORCH_CUDA_ALLOC_CONF of each kind of engine."""

_FDS_MAX = 250
MESSAGE_MAX = 160_000
_ANSWER_S = 60.0
"""Timeout of an answer, the first of which takes 10 s: torch is imported."""


class Refused(Exception):  # noqa: N818 - an answer, not an error.
    """The engine cannot export its memory."""


class Shown(NamedTuple):
    """An engine's exports: allocations, each tensor's place in them, and events."""

    exports: list[Export]
    places: list[tuple[int, int]]
    handles: tuple[bytes, ...]


def pattern(seed: int, tensor: int, size_bytes: int) -> np.ndarray:
    """The bytes that `fill` writes to a tensor."""
    return np.random.default_rng([seed, tensor]).integers(0, 256, size_bytes, np.uint8)


class Engine:
    """The checks' end of an engine's process. Addresses are a tensor and an offset."""

    def __init__(self, kind: str, *, private_shm: bool = False) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.settimeout(_ANSWER_S)
        self._socket = near
        self._fds: list[int] = []
        command = [PYTHON, "-m", "tests.gpu.process", str(far.fileno()), kind]
        if private_shm:
            mount = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", mount, "sh", *command]
        environment = dict(os.environ)
        if kind in ALLOCATORS:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[kind]
        self._process = subprocess.Popen(
            command,
            pass_fds=[far.fileno()],
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        far.close()
        self.exports: Sequence[Export] = ()
        self.places: Sequence[tuple[int, int]] = ()
        self.handles: Sequence[bytes] = ()

    def _ask(self, *command: object) -> object:
        self._socket.send(pickle.dumps(command))
        return self._answer()

    def _answer(self) -> object:
        data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_MAX, _FDS_MAX)
        self._fds += fds
        if not data:
            raise RuntimeError("the engine's process has ended")
        answer = pickle.loads(data)
        if isinstance(answer, Refused):
            raise answer
        return answer

    def show(self, sizes: Sequence[int], *, counters: bool) -> None:
        """Allocate zeroed tensors and export them. Raises Refused with the reason."""
        first = len(self._fds)
        shown = self._ask("show", list(sizes), counters)
        assert isinstance(shown, Shown)
        self.places, self.handles = shown.places, shown.handles
        fds = iter(self._fds[first:])
        self.exports = [
            export._replace(
                parts=tuple(Part(offset, size, next(fds)) for offset, size, _ in export.parts)
            )
            for export in shown.exports
        ]

    def show_managed(self) -> None:
        """Try to export managed memory."""
        self._ask("show_managed")

    def fill(self, seed: int) -> None:
        """Write `pattern` to every tensor."""
        self._ask("fill", seed)

    def digests(self) -> list[str]:
        """SHA-256 of every tensor."""
        return self._ask("digests")  # type: ignore[return-value]

    def read(self, tensor: int, offset: int, size_bytes: int) -> bytes:
        """The bytes once the engine's stream is idle."""
        return self._ask("read", tensor, offset, size_bytes)  # type: ignore[return-value]

    def write_later(self, delay_s: float, tensor: int, offset: int, data: bytes) -> tuple[int, int]:
        """Event and value of a write that the engine's stream makes after a delay."""
        return self._ask("write_later", delay_s, tensor, offset, data)  # type: ignore[return-value]

    def copy_later(
        self, delay_s: float, target: tuple[int, int], source: tuple[int, int], size_bytes: int
    ) -> tuple[int, int]:
        """Like write_later; source and target are a tensor and an offset."""
        return self._ask("copy_later", delay_s, target, source, size_bytes)  # type: ignore[return-value]

    def steps(self, seconds: float, meanwhile: Callable[[], object]) -> list[float]:
        """Seconds of each step of a model, while `meanwhile` is called in a loop."""
        self._socket.send(pickle.dumps(("steps", seconds)))
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while not poller.poll(0):
            meanwhile()
        return self._answer()  # type: ignore[return-value]

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it; idempotent."""
        self.kill()
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())


def can_have_private_shm() -> bool:
    """Whether this user may mount."""
    if not shutil.which("unshare"):
        return False
    mount = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def engine(kind: str, *, private_shm: bool = False) -> Iterator[Engine]:
    """An engine that ends with the block."""
    made = Engine(kind, private_shm=private_shm)
    try:
        yield made
    finally:
        made.close()
