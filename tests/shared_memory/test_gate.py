"""The gate between an engine that takes pages back and a daemon that writes them."""

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
    """An engine's view and a copying process's."""
    engine, copier = Gate(gate_fd), Gate(gate_fd)
    yield engine, copier
    engine.close()
    copier.close()


def test_load_is_called_off_before_it_begins(sides: tuple[Gate, Gate]) -> None:
    """A late copy would write pages that another request owns by now."""
    engine, copier = sides
    engine.prepare(7)
    assert engine.call_off(7)
    assert not copier.enter(7)
    assert copier.unwanted(7)


def test_load_that_writes_is_not_given_up_but_told(sides: tuple[Gate, Gate]) -> None:
    """The engine would reuse pages under a copy, or wait until a long one is through."""
    engine, copier = sides
    engine.prepare(7)
    assert copier.enter(7)
    assert not copier.unwanted(7)
    assert not engine.call_off(7)
    assert copier.unwanted(7)
    copier.leave(7)
    assert engine.call_off(7)
    assert not copier.enter(7)


def test_loads_do_not_meet(sides: tuple[Gate, Gate]) -> None:
    """One load that is called off would stop others."""
    engine, copier = sides
    for job in (0, 1, GATE_JOBS - 1):
        engine.prepare(job)
    assert engine.call_off(1)
    assert copier.enter(0)
    assert copier.enter(GATE_JOBS - 1)
    copier.advance(0, 70_000)
    assert engine.progress(0) == 70_000
    assert engine.progress(GATE_JOBS - 1) == 0


def test_number_of_a_load_that_was_called_off_is_spent(sides: tuple[Gate, Gate]) -> None:
    """A daemon that was stopped would take a new load for the one whose message it still has."""
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


def test_two_loads_of_one_place_are_kept_apart(sides: tuple[Gate, Gate]) -> None:
    """The end of one would open the other's pages to the engine while they are written."""
    engine, copier = sides
    assert copier.enter(5)
    assert not copier.enter(5 + GATE_JOBS)
    assert not engine.call_off(5)
    copier.leave(5)
    assert not copier.enter(5)


def test_what_is_no_gate_is_refused(gate_fd: int) -> None:
    """A peer could cut the file, and the copying process would die of a SIGBUS."""
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
    """A negative number would lock somebody else's place."""
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
def test_no_page_is_written_once_its_load_is_called_off(gate_fd: int) -> None:
    """Of two processes that race for a page, both would have it: a request reads another's KV."""
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
                # Both sides have to win now and then, at whatever speed they run.
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
    """An engine would keep the pages of a load for ever once the daemon's process is killed."""
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
