"""The gate between an engine that reclaims pages and a daemon that writes them."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tierd.shared_memory.gate import GATE_JOBS, Gate, make_gate

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def gate_fd() -> Iterator[int]:
    fd = make_gate()
    yield fd
    os.close(fd)


@pytest.fixture
def sides(gate_fd: int) -> Iterator[tuple[Gate, Gate]]:
    """The engine's view of the gate, and a copying process's."""
    engine, copier = Gate(gate_fd), Gate(gate_fd)
    yield engine, copier
    engine.close()
    copier.close()


def test_load_can_be_cancelled_before_it_begins(sides: tuple[Gate, Gate]) -> None:
    """A late copy would write pages that another request owns by now."""
    engine, copier = sides
    engine.prepare(7)
    assert engine.call_off(7)
    assert not copier.enter(7)
    assert copier.unwanted(7)


def test_cancelling_a_load_that_writes_marks_it_unwanted(sides: tuple[Gate, Gate]) -> None:
    """The engine would reuse pages during a copy, or wait until a long copy ends."""
    engine, copier = sides
    engine.prepare(7)
    assert copier.enter(7)
    assert not copier.unwanted(7)
    assert not engine.call_off(7)
    assert copier.unwanted(7)
    copier.leave(7)
    assert engine.call_off(7)
    assert not copier.enter(7)


def test_loads_are_independent(sides: tuple[Gate, Gate]) -> None:
    """Cancelling one load would stop others."""
    engine, copier = sides
    for job in (0, 1, GATE_JOBS - 1):
        engine.prepare(job)
    assert engine.call_off(1)
    assert copier.enter(0)
    assert copier.enter(GATE_JOBS - 1)
    copier.advance(0, 70_000)
    assert engine.progress(0) == 70_000
    assert engine.progress(GATE_JOBS - 1) == 0


def test_number_of_a_cancelled_load_is_not_reused(sides: tuple[Gate, Gate]) -> None:
    """A daemon that was stopped would take a new load for a cancelled one, whose message it still
    has."""
    engine, copier = sides
    old, new = 5, 5 + GATE_JOBS
    assert engine.call_off(old)
    with pytest.raises(ValueError, match="called off: use a number"):
        engine.prepare(old)
    copier.advance(old, 3)
    engine.prepare(new)
    assert engine.progress(new) == 0
    assert not copier.enter(old)
    assert copier.enter(new)


def test_two_loads_in_one_place_are_independent(sides: tuple[Gate, Gate]) -> None:
    """The end of one load would release the other's pages to the engine during a write."""
    engine, copier = sides
    assert copier.enter(5)
    assert not copier.enter(5 + GATE_JOBS)
    assert not engine.call_off(5)
    copier.leave(5)
    assert not copier.enter(5)


def test_invalid_gate_file_is_refused(gate_fd: int) -> None:
    """A peer could truncate the file, and the copying process would die of SIGBUS."""
    loose = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, os.fstat(gate_fd).st_size)
    with pytest.raises(ValueError, match="not a sealed gate"):
        Gate(loose)
    os.close(loose)
    read, write = os.pipe()
    with pytest.raises(OSError, match="Invalid argument"):
        Gate(read)
    os.close(read)
    os.close(write)


def test_job_out_of_range_is_refused(sides: tuple[Gate, Gate]) -> None:
    """A negative number would lock another job's place."""
    with pytest.raises(ValueError, match="numbered from 0"):
        sides[0].call_off(-1)


ROUNDS = 600
_GO, _OUTCOME, _PAGE = 0, 8, 64
_PAGE_BYTES = 256

COPIER = f"""
import mmap, os, struct, sys
from tierd.shared_memory.gate import Gate
gate, shared = Gate(int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 4096)
for job in range(1, {ROUNDS} + 1):
    while struct.unpack_from("<Q", shared, {_GO})[0] < job:
        os.sched_yield()
    entered = gate.enter(job)
    if entered:
        for at in range({_PAGE}, {_PAGE} + {_PAGE_BYTES}):
            shared[at] = 255
        gate.leave(job)
    struct.pack_into("<Q", shared, {_OUTCOME}, 2 * job + entered)
"""


@pytest.mark.slow
def test_no_page_is_written_after_cancellation(gate_fd: int) -> None:
    """Engine and copying process would both own a page, and a request would read another's KV."""
    shared_fd = os.memfd_create("shared", 0)
    os.ftruncate(shared_fd, 4096)
    shared = mmap.mmap(shared_fd, 4096)
    command = [sys.executable, "-c", COPIER, str(gate_fd), str(shared_fd)]
    gate = Gate(gate_fd)
    entered = 0
    delay_s = 10e-6
    with subprocess.Popen(command, pass_fds=(gate_fd, shared_fd)) as copier:
        try:
            for job in range(1, ROUNDS + 1):
                gate.prepare(job)
                shared[_PAGE : _PAGE + _PAGE_BYTES] = bytes(_PAGE_BYTES)
                struct.pack_into("<Q", shared, _GO, job)
                end = time.perf_counter() + delay_s
                while time.perf_counter() < end:
                    pass
                while not gate.call_off(job):
                    pass
                mine = bytes([job % 250]) * _PAGE_BYTES
                shared[_PAGE : _PAGE + _PAGE_BYTES] = mine
                while (outcome := struct.unpack_from("<Q", shared, _OUTCOME)[0]) < 2 * job:
                    assert copier.poll() is None or job == ROUNDS
                assert shared[_PAGE : _PAGE + _PAGE_BYTES] == mine
                entered += outcome & 1
                # Both sides must win sometimes, whatever their speed.
                delay_s *= 1 / 1.2 if outcome & 1 else 1.2
            assert copier.wait() == 0
        finally:
            copier.kill()
    gate.close()
    shared.close()
    os.close(shared_fd)
    assert 0 < entered < ROUNDS


@pytest.mark.slow
def test_death_of_the_copying_process_opens_the_gate(gate_fd: int) -> None:
    """An engine would keep the pages of a load forever after the daemon's process was killed."""
    code = "import sys; from tierd.shared_memory.gate import Gate; g = Gate(int(sys.argv[1]))\n"
    code += "assert g.enter(3); print('in', flush=True); sys.stdin.read()"
    gate = Gate(gate_fd)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code, str(gate_fd)], pass_fds=(gate_fd,), stdin=pipe, stdout=pipe
    ) as copier:
        assert copier.stdout is not None
        assert copier.stdout.readline() == b"in\n"
        assert not gate.call_off(3)
        copier.kill()
        copier.wait()
    assert gate.call_off(3)
    gate.close()
