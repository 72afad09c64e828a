"""Error messages for CUDA results: likely cause, remedy, and whether the context is lost."""

from __future__ import annotations

from typing import Final

from tierd.device.api import CannotOpenError, DeviceError

STICKY: Final = frozenset({4, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 911, 999})
"""Results after which the context is lost: illegal address, launch failure, ECC and others."""

REMEDIES: Final = {
    1: "its engine is gone, or daemon and engine are in different GPU instances of MIG",
    2: "the GPU has no memory left for the daemon: lower the engine's gpu_memory_utilization",
    46: "the GPU's compute mode is exclusive: nvidia-smi -c DEFAULT, or run MPS",
    100: "none is visible: see CUDA_VISIBLE_DEVICES, the container's --gpus and DeviceAllow",
    201: "the engine has the same PID in another PID namespace: use --pid=host for both, "
    "or start one of them later",
    304: "the operating system refused: see the container's devices and seccomp profile",
    400: "its engine is gone",
    800: "no permission for the GPU: see --gpus, DeviceAllow and the owner of /dev/nvidia*",
    801: "CUDA IPC is not possible here: WSL2, confidential computing, two GPU instances of MIG",
    999: "see --gpus, DeviceAllow and the owner of /dev/nvidia*",
}
"""Likely causes and remedies of results of opening a device, memory or an event."""


def failure(
    what: str, code: int, name: str, kind: type[DeviceError] = DeviceError, remedy: str = ""
) -> DeviceError:
    """Return the error for a CUDA result; a CannotOpenError names likely causes and remedies."""
    if kind is CannotOpenError:
        remedy = "; ".join(filter(None, [remedy, REMEDIES.get(code, "")]))
    message = f"{what}: {name} ({code})" + (f"; {remedy}" if remedy else "")
    return kind(message, sticky=code in STICKY)
