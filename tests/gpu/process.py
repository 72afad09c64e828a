"""Runs in an engine's process: executes the checks' commands, one message each."""

from __future__ import annotations

import hashlib
import pickle
import socket
import sys
import time

from tests.gpu.engine import MESSAGE_MAX, Refused, Shown, pattern
from tests.gpu.memory import managed, memory_of
from tierd.device.api import CannotOpenError
from tierd.device.engine_cuda import MemorySpan


class _Process:
    """Its methods are named like the messages; each returns an answer and descriptors to send."""

    def __init__(self, kind: str) -> None:
        self._memory = memory_of(kind)
        self._spans: list[MemorySpan] = []

    def show(self, sizes: list[int], counters: bool) -> tuple[object, list[int]]:
        self._spans = [MemorySpan(self._memory.allocate(size), size) for size in sizes]
        exports, places = self._memory.show(self._spans, counters=counters)
        fds = [part.fd for export in exports for part in export.parts]
        return Shown(list(exports), places, tuple(self._memory.handles)), fds

    def show_managed(self) -> tuple[object, list[int]]:
        self._memory.show([MemorySpan(managed(), 1)], counters=False)
        return None, []

    def fill(self, seed: int) -> tuple[object, list[int]]:
        for tensor, span in enumerate(self._spans):
            self._memory.write(span.address, pattern(seed, tensor, span.size_bytes).tobytes())
        for span in self._spans:
            self._memory.read(span.address, 1)
        return None, []

    def digests(self) -> tuple[object, list[int]]:
        read = [self._memory.read(*span) for span in self._spans]
        return [hashlib.sha256(data).hexdigest() for data in read], []

    def read(self, tensor: int, offset: int, size_bytes: int) -> tuple[object, list[int]]:
        return self._memory.read(self._spans[tensor].address + offset, size_bytes), []

    def write_later(
        self, delay_s: float, tensor: int, offset: int, data: bytes
    ) -> tuple[object, list[int]]:
        self._memory.delay(delay_s)
        self._memory.write(self._spans[tensor].address + offset, data)
        return self._memory.record(), []

    def copy_later(
        self, delay_s: float, target: tuple[int, int], source: tuple[int, int], size_bytes: int
    ) -> tuple[object, list[int]]:
        to, origin = (self._spans[tensor].address + at for tensor, at in (target, source))
        self._memory.delay(delay_s)
        self._memory.copy(to, origin, size_bytes)
        return self._memory.record(), []

    def steps(self, seconds: float) -> tuple[object, list[int]]:
        taken = []
        end = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            self._memory.step()
            taken.append(time.perf_counter() - begin)
        return taken[len(taken) // 10 :], []


def main(fd: int, kind: str) -> None:
    with socket.socket(fileno=fd) as near:
        process = _Process(kind)
        while data := near.recv(MESSAGE_MAX):
            name, *arguments = pickle.loads(data)
            try:
                answer, fds = getattr(process, name)(*arguments)
            except CannotOpenError as error:
                answer, fds = Refused(str(error)), []
            socket.send_fds(near, [pickle.dumps(answer)], fds)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
