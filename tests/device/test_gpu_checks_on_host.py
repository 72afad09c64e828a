"""The checks of tests/gpu, on host memory and on CUDA in host memory, across two processes."""

from __future__ import annotations

import ctypes

import pytest

from bench.gpu import TARGETS, disturbance, measure, plain_cuda
from tests.gpu.__main__ import passes
from tests.gpu.checks import (
    CHECKS,
    Rig,
    Shape,
    layouts,
    openings,
    private_shm,
    refusals,
    unshowable,
)
from tests.gpu.engine import can_have_private_shm
from tests.gpu.memory import UUID
from tests.support.device.fake_cuda import FakeCuda
from tests.support.device.fake_cuda_calls import installed
from tierd.device.cuda import CudaDevice
from tierd.device.host import HostDevice

pytestmark = pytest.mark.slow


@pytest.fixture(params=["host", "fake", "fake-vmm"])
def rig(request):
    if request.param == "host":
        device = HostDevice()
        yield Rig(device, "host", rounds=3)
        device.shut()
        return
    fake = FakeCuda([UUID])
    with installed(fake) as driver:
        cuda = CudaDevice.find(UUID)
        large = Shape(channel_bytes=1000)
        shape = large if request.param == "fake-vmm" else Shape()
        yield Rig(cuda, request.param, shape, rounds=3)
        # A GPU's streams that wait for a dead engine end with the process.
        for work in fake.streams.values():
            work.clear()
        cuda.shut()
        assert not fake.opened
        assert not fake.pinned
        assert not fake.areas
        assert not driver.retained


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(rig, check):
    """On a GPU a check would fail because of a bug in the check."""
    if rig.kind != "fake-vmm" or check in (openings, layouts, refusals):
        check(rig)


def test_benchmark_measures_every_way(rig):
    """`make gpu-bench` would use up its time on the GPU without a result."""
    plain = plain_cuda if rig.kind != "host" else plain_host(rig.device)
    results = measure(rig.device, plain, (64 << 10, 2 << 20), 4 << 20, rounds=5)
    assert len(results) == 4
    for name, result in results.items():
        assert isinstance(result, dict)
        assert result["target"] in TARGETS.values()
        ways = (
            {"plain", "direct"} if name.startswith("2048") else {"plain", "direct", "2-D", "staged"}
        )
        assert ways <= set(result)
        assert all(result[way]["gb_per_s"] > 0 for way in ways)
    measured = disturbance(rig.device, rig.kind, 4 << 20, 0.05)
    assert len(measured) == 5


def plain_host(device):
    """One piece by memcpy."""

    def plain(page, slot, size, direction, stream):
        to, source = (page, slot) if direction.value == "load" else (slot, page)
        ctypes.memmove(to, source, size)

    return plain


def test_engine_that_cannot_export_its_memory_says_why():
    """The checks of refusals would pass for any answer of an engine."""
    with pytest.raises(AssertionError, match="without a file descriptor"):
        unshowable("fake-none", "a word that is not there")


def test_failed_check_is_reported_and_the_others_run(capsys):
    """The first surprise on a GPU would end a run that cannot be repeated soon."""

    def fails():
        raise ValueError("surprise")

    assert not passes("it", fails)
    assert passes("that", lambda: {"value": 1})
    lines = capsys.readouterr().out.splitlines()
    assert '"error": "ValueError: surprise"' in lines[0]
    assert '"passed": true' in lines[1]


@pytest.mark.skipif(not can_have_private_shm(), reason="needs the right to mount")
def test_an_engine_with_another_dev_shm(rig):
    """The check would fail on a GPU by its own way to start such an engine."""
    if rig.kind == "fake":
        result = private_shm(rig)
        assert result["counters"] == "work"
