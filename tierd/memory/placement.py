"""Placement of the arena's pages: huge pages and the NUMA node.

Requested before a page is touched. Both only make copies faster, so a request that the system
refuses is logged once, and the arena goes on without it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path
from typing import Final

from tierd.errors import ConfigError
from tierd.shared_memory.mapping import SharedMapping

_MADV_HUGEPAGE: Final = 14
_MPOL_PREFERRED: Final = 1
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_NODES_MAX: Final = 1024
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"
"""Prefix of the PCI class of GPUs: 0x0300 with a display, 0x0302 without."""

log = logging.getLogger("tierd")
_libc = ctypes.CDLL(None, use_errno=True)


class Placement:
    """The placement of all segments, decided once."""

    def __init__(
        self, *, huge_pages: bool = False, node: int | None = None, root: Path = Path("/")
    ) -> None:
        """`node` is the preferred NUMA node; None leaves the choice to the kernel."""
        self._root = root
        self.node = node
        self.huge_pages = huge_pages and self._can_be_huge()

    def apply(self, mapping: SharedMapping) -> None:
        """Request the placement of a mapping whose pages have not been touched yet."""
        if self.huge_pages:
            try:
                mapping.advise(_MADV_HUGEPAGE)
            except OSError as error:
                log.warning("host memory has no huge pages: %s", error)
                self.huge_pages = False
        if self.node is not None:
            try:
                _prefer(mapping, self.node)
            except OSError as error:
                log.warning("host memory is not bound to NUMA node %d: %s", self.node, error)
                self.node = None

    def status(self) -> dict[str, object]:
        """Return the placement of segments for STATUS."""
        return {"huge_pages": self.huge_pages, "numa_node": self.node}

    def _can_be_huge(self) -> bool:
        switch = self._root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
        try:
            chosen = switch.read_text().partition("[")[2].partition("]")[0]
        except OSError:
            chosen = ""
        if chosen in ("always", "within_size", "advise", "force"):
            return True
        log.info(
            "host memory has 4 KiB pages, because %s is %r; with huge pages, pinning is faster and "
            "takes less GPU memory: echo advise > %s",
            switch,
            chosen or "missing",
            switch,
        )
        return False


def find_node(wanted: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node for a value of `host.numa_node`, or None for no preference.

    "auto" means the node of the machine's NVIDIA GPUs if they all share one. Raises ConfigError
    for a node that the machine does not have.
    """
    if wanted == "off":
        return None
    nodes = root / "sys/devices/system/node"
    if wanted != "auto":
        if not (nodes / f"node{wanted}").is_dir():
            raise ConfigError(f"host.numa_node is {wanted}, but this machine has no such node")
        return int(wanted)
    if len(list(nodes.glob("node[0-9]*"))) < 2:
        return None
    found = {_number(device / "numa_node") for device in _gpus(root)} - {None, -1}
    if len(found) == 1:
        return found.pop()
    if found:
        log.info(
            "GPUs are on NUMA nodes %s, so host memory is not bound to a node; set host.numa_node, "
            "or run one tierd per node",
            ", ".join(sorted(str(node) for node in found)),
        )
    return None


def _gpus(root: Path) -> list[Path]:
    return [
        device
        for device in (root / "sys/bus/pci/devices").glob("*")
        if _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY)
    ]


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:
        return None


def _prefer(mapping: SharedMapping, node: int) -> None:
    number = _MBIND.get(platform.machine())
    if number is None or node >= _NODES_MAX:
        raise OSError(0, "tierd cannot bind memory on this machine")
    mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
    mask[node // 64] = 1 << node % 64
    # The policy belongs to the memfd, so it applies to pages that any process faults in.
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(mapping.address),
        ctypes.c_ulong(mapping.size_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_NODES_MAX),
        ctypes.c_uint(0),
    )
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
