"""The kernels that move small pieces between pages and staging memory on the GPU.

Copy engines move pieces below some 28 KiB at a tenth of their speed, so such pieces are gathered
on the GPU first. The list of pieces is passed as kernel parameters, so there is no table in
device memory to upload in order and to keep.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from tierd.device.api import Addresses, DeviceError

GATHER: Final = b"tierd_gather"
"""The kernel from pages to staging memory."""

SCATTER: Final = b"tierd_scatter"
"""The kernel from staging memory to pages."""

BLOCKS: Final = 8
"""Thread blocks per launch: enough to saturate PCIe, but few of the engine's processors."""

THREADS: Final = 512

PIECES_MAX: Final = 2046
"""Maximum pieces per launch, limited by the 32,764 bytes of a kernel's parameters."""

PIECE_BYTES_MAX: Final = 1 << 30
"""Maximum bytes per piece: keeps every sum of the kernel in 32 bits. Copy engines are as fast
for longer pieces."""

_STRIPE_BYTES: Final = 16 << 10

_PIECE = np.dtype([("address", "<u8"), ("staged", "<u4"), ("length", "<u4")])
_HEAD = np.dtype([("staging", "<u8"), ("count", "<u4"), ("stripes", "<u4")])

SOURCE: Final = """
struct Piece { unsigned long long address; unsigned int staged; unsigned int length; };

struct Pieces {
    unsigned long long staging;
    unsigned int count;
    unsigned int stripes;
    Piece piece[PIECES_MAX];
};

static __device__ void copy(char *__restrict__ to, const char *__restrict__ from,
                            unsigned int size, unsigned int lane)
{
    unsigned int vectors = 0;
    if ((((unsigned long long)to | (unsigned long long)from) & 15) == 0) {
        vectors = size / 16;
        uint4 *__restrict__ wide_to = (uint4 *)to;
        const uint4 *__restrict__ wide_from = (const uint4 *)from;
#pragma unroll 4
        for (unsigned int i = lane; i < vectors; i += 32)
            wide_to[i] = wide_from[i];
    }
    for (unsigned int i = vectors * 16 + lane; i < size; i += 32)
        to[i] = from[i];
}

/* A warp takes a stripe of a piece at a time, so that few long pieces keep all warps busy. */
static __device__ void move(const Pieces &pieces, bool gather)
{
    const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned int warps = gridDim.x * blockDim.x / 32;
    const unsigned int units = pieces.count * pieces.stripes;
    for (unsigned int unit = thread / 32; unit < units; unit += warps) {
        const Piece piece = pieces.piece[unit % pieces.count];
        const unsigned int begin = unit / pieces.count * STRIPE_BYTES;
        if (begin >= piece.length)
            continue;
        const unsigned int rest = piece.length - begin;
        const unsigned int size = rest < STRIPE_BYTES ? rest : STRIPE_BYTES;
        char *page = (char *)piece.address + begin;
        char *staged = (char *)pieces.staging + piece.staged + begin;
        if (gather)
            copy(staged, page, size, thread % 32);
        else
            copy(page, staged, size, thread % 32);
    }
}

extern "C" __global__ void tierd_gather(const __grid_constant__ Pieces pieces)
{
    move(pieces, true);
}

extern "C" __global__ void tierd_scatter(const __grid_constant__ Pieces pieces)
{
    move(pieces, false);
}
"""


def definitions() -> list[str]:
    """Return the compiler options that pass this module's constants to the source."""
    return [f"-DPIECES_MAX={PIECES_MAX}", f"-DSTRIPE_BYTES={_STRIPE_BYTES}u"]


def launches(pages: Addresses, lengths: Addresses, staging: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the parameters of the launches that move these pieces, contiguous in staging memory.

    Raises DeviceError for a piece longer than PIECE_BYTES_MAX.
    """
    if lengths.size and int(lengths.max()) > PIECE_BYTES_MAX:
        raise DeviceError(
            f"a piece has {int(lengths.max())} bytes; a kernel moves at most {PIECE_BYTES_MAX}"
        )
    begin = 0
    while begin < lengths.size:
        part = lengths[begin : begin + PIECES_MAX]
        ends = np.cumsum(part)
        count = max(1, int(np.searchsorted(ends, 2 * PIECE_BYTES_MAX, side="right")))
        part, ends = part[:count], ends[:count]
        parameters = np.zeros(_HEAD.itemsize + PIECES_MAX * _PIECE.itemsize, np.uint8)
        head = parameters[: _HEAD.itemsize].view(_HEAD)
        head["staging"] = staging
        head["count"] = count
        head["stripes"] = -(-int(part.max()) // _STRIPE_BYTES)
        table = parameters[_HEAD.itemsize :].view(_PIECE)[:count]
        table["address"] = pages[begin : begin + count]
        table["staged"] = ends - part
        table["length"] = part
        yield parameters
        begin += count
        staging += int(ends[-1])


@functools.cache
def compile_for(arch: str) -> bytes:
    """Return the kernels' cubin for an architecture such as sm_90; needs no GPU and no driver.

    Raises DeviceError if NVRTC is missing or does not know the architecture.
    """
    try:
        from cuda.bindings import nvrtc

        _, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"tierd.cu", 0, [], [])
    except (ImportError, RuntimeError) as error:
        raise DeviceError(
            f"no kernels without NVRTC (pip install 'tierd[cuda]'): {error}"
        ) from error
    options = [option.encode() for option in (f"--gpu-architecture={arch}", *definitions())]
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.rstrip(b"\0").decode(errors="replace").strip()
            raise DeviceError(f"the kernels do not compile for {arch}: {result.name} {text}")
        cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
