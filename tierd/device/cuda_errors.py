"""CUDA's results in words: what may be the cause, what to change, and whether to go on."""

from __future__ import annotations

from typing import Final

from tierd.device.api import CannotOpenError, DeviceError

STICKY: Final = frozenset({4, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 911, 999})
"""Results after which the context is lost: illegal address, launch failure, ECC and the like."""

REMEDIES: Final = {
    1: "its engine is gone, or daemon and engine are in different GPU instances of MIG",
    2: "the GPU has no memory left for the daemon: lower the engine's gpu_memory_utilization",
    46: "the GPU's compute mode is exclusive: nvidia-smi -c DEFAULT, or run MPS",
    100: "none is visible: see CUDA_VISIBLE_DEVICES, the container's --gpus and DeviceAllow",
    201: "the engine has the same PID in another PID namespace: use --pid=host for both, "
    "or start one of them later",
    304: "the operating system refuses: see the container's devices and seccomp profile",
    400: "its engine is gone",
    800: "no permission for the GPU: see --gpus, DeviceAllow and the owner of /dev/nvidia*",
    801: "CUDA IPC is not possible here: WSL2, confidential computing, two GPU instances of MIG",
    999: "see --gpus, DeviceAllow and the owner of /dev/nvidia*",
}
"""What an opening that ends in this result may be cured by."""


def failure(
    what: str, code: int, name: str, kind: type[DeviceError] = DeviceError, remedy: str = ""
) -> DeviceError:
    """The error for a result of CUDA's; an opening that fails says what may be the cause."""
    if kind is CannotOpenError:
        remedy = "; ".join(filter(None, [remedy, REMEDIES.get(code, "")]))
    message = f"{what}: {name} ({code})" + (f"; {remedy}" if remedy else "")
    return kind(message, sticky=code in STICKY)
