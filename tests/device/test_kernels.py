"""The gather kernel: it compiles for the GPUs of the day, and its arithmetic is right.

Its source is C++ but for a few words, so it also runs on the CPU here, one thread after another.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from tierd.device import kernels
from tierd.device.api import DeviceError

ON_CPU = """
#define __global__
#define __device__
#define __grid_constant__
struct uint3 {{ unsigned int x; }};
static uint3 blockIdx, threadIdx, blockDim, gridDim;
struct alignas(16) uint4 {{ unsigned int x, y, z, w; }};
{source}
extern "C" void launch(const void *parameters, int gather, unsigned blocks, unsigned threads)
{{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            (gather ? tierd_gather : tierd_scatter)(*(const Pieces *)parameters);
}}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_for(arch):
    """A GPU of this generation would have no kernel, and small pages no speed."""
    cubin = kernels.compile_for(arch)
    assert cubin[:4] == b"\x7fELF"
    assert kernels.GATHER in cubin
    assert kernels.SCATTER in cubin
    assert kernels.compile_for(arch) is cubin


def test_unknown_architecture_is_reported():
    """A GPU newer than NVRTC would end the copy process, not only this way to copy."""
    with pytest.raises(DeviceError, match=r"do not compile for sm_3.*gpu-arch") as failure:
        kernels.compile_for("sm_3")
    assert not failure.value.sticky


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The kernels as a function of the parameters, the direction, blocks and threads."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(ON_CPU.format(source=kernels.SOURCE))
    flags = ["-O1", "-w", "-shared", "-fPIC", *kernels.definitions(), "-o", "kernels.so"]
    subprocess.run([compiler, *flags, "kernels.cpp"], cwd=folder, check=True)
    launch = ctypes.CDLL(str(folder / "kernels.so")).launch
    launch.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint)
    launch.restype = None
    return launch


def run(on_cpu, pages, lengths, staging, *, gather):
    count = 0
    for parameters in kernels.launches(pages, lengths, staging):
        on_cpu(parameters.ctypes.data, gather, 2, 64)
        count += 1
    return count


CASES = {
    "pages of 4 KiB": [4096] * 40,
    "odd lengths, misaligned": [1, 15, 16, 17, 4095, 4097, 33, 20_001, 7],
    "few long ones, several stripes": [100_000, 16 << 10, (16 << 10) + 1],
    "more than one launch": [48] * (2 * kernels.PIECES_MAX + 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_kernels_move_every_byte_and_no_other(on_cpu, lengths):
    """A wrong offset in the kernel is a wrong token of the model."""
    rng = np.random.default_rng(1)
    sizes = np.array(lengths, np.uint64)
    total = int(sizes.sum())
    memory = rng.integers(0, 256, 2 * total + 64 * len(lengths), np.uint8)
    gaps = rng.permutation(len(lengths))
    begins = np.zeros(len(lengths), np.uint64)
    at = 0
    for index in gaps:
        begins[index] = at
        at += lengths[index] + int(rng.integers(0, 33))
    pages = begins + np.uint64(memory.ctypes.data)
    staging = np.zeros(total + 32, np.uint8)

    launches = run(on_cpu, pages, sizes, staging.ctypes.data + 16, gather=True)
    assert launches == -(-len(lengths) // kernels.PIECES_MAX)
    pieces = [memory[int(b) : int(b) + n] for b, n in zip(begins, lengths, strict=True)]
    assert np.array_equal(staging[16:-16], np.concatenate(pieces))
    assert not staging[:16].any()
    assert not staging[-16:].any()

    target = np.zeros_like(memory)
    expected = np.zeros_like(memory)
    for begin, size in zip(begins.tolist(), lengths, strict=True):
        expected[begin : begin + size] = memory[begin : begin + size]
    run(
        on_cpu,
        begins + np.uint64(target.ctypes.data),
        sizes,
        staging.ctypes.data + 16,
        gather=False,
    )
    assert np.array_equal(target, expected)


def test_long_pieces_are_launched_separately():
    """Offsets within a launch have 32 bits: beyond 4 GiB they would begin at 0 again."""
    sizes = np.array([kernels.PIECE_BYTES_MAX] * 3, np.uint64)
    launches = list(kernels.launches(np.zeros(3, np.uint64), sizes, 1 << 40))
    starts = [int(parameters[:8].view("<u8")[0]) for parameters in launches]
    assert starts == [1 << 40, (1 << 40) + 2 * kernels.PIECE_BYTES_MAX]
    with pytest.raises(DeviceError, match="at most"):
        list(kernels.launches(np.zeros(1, np.uint64), sizes[:1] + np.uint64(1), 0))


def test_parameters_fit_into_a_launch():
    """A launch whose parameters have a byte too many is refused by the GPU's driver."""
    (parameters,) = kernels.launches(np.zeros(1, np.uint64), np.ones(1, np.uint64), 0)
    assert parameters.nbytes <= 32_764
