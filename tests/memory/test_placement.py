"""Where the arena's memory comes from, and the limit that a container sets."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
from pathlib import Path

import pytest

from tierd.errors import ConfigError
from tierd.limits import memory_limit, shortfalls
from tierd.memory.arena import check_capacity
from tierd.memory.placement import Placement, find_node
from tierd.shared_memory.mapping import SharedMapping

MIB = 1 << 20


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def gpu(root: Path, address: str, node: int, *, vendor: str = "0x10de") -> None:
    device = f"sys/bus/pci/devices/{address}"
    put(root, f"{device}/vendor", vendor)
    put(root, f"{device}/class", "0x030200")
    put(root, f"{device}/numa_node", str(node))


def nodes(root: Path, count: int) -> None:
    for node in range(count):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)


def test_memory_is_bound_to_the_node_of_the_gpus(tmp_path: Path) -> None:
    """Every copy would cross the link between two sockets."""
    nodes(tmp_path, 2)
    gpu(tmp_path, "0000:81:00.0", 1)
    gpu(tmp_path, "0000:c1:00.0", 1)
    gpu(tmp_path, "0000:02:00.0", 0, vendor="0x1a03")
    assert find_node("auto", tmp_path) == 1
    assert find_node("0", tmp_path) == 0
    assert find_node("off", tmp_path) is None


def test_gpus_on_two_nodes_bind_nothing(tmp_path: Path, caplog) -> None:
    """Half of the GPUs would have all of their memory on the other socket, without a log line."""
    nodes(tmp_path, 2)
    gpu(tmp_path, "0000:02:00.0", 0)
    gpu(tmp_path, "0000:81:00.0", 1)
    caplog.set_level("INFO")
    assert find_node("auto", tmp_path) is None
    assert "NUMA nodes 0, 1" in caplog.text
    assert "host.numa_node" in caplog.text


def test_one_node_or_no_gpu_binds_nothing(tmp_path: Path) -> None:
    """A machine without a choice would log one."""
    nodes(tmp_path, 1)
    gpu(tmp_path, "0000:02:00.0", 0)
    assert find_node("auto", tmp_path) is None
    (tmp_path / "other").mkdir()
    nodes(tmp_path / "other", 2)
    assert find_node("auto", tmp_path / "other") is None


def test_missing_numa_node_is_refused(tmp_path: Path) -> None:
    """A typing error in the configuration would go unnoticed."""
    nodes(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"host\.numa_node is 7"):
        find_node("7", tmp_path)


@pytest.mark.parametrize(("switch", "huge"), [("advise", True), ("never", False), ("deny", False)])
def test_huge_pages_are_used_where_the_kernel_allows_them(
    tmp_path: Path, caplog, switch: str, huge: bool
) -> None:
    """An operator would not learn why pinning memory takes so long."""
    choices = " ".join(
        f"[{name}]" if name == switch else name for name in ("always", "advise", "never", "deny")
    )
    put(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", choices)
    caplog.set_level("INFO")
    assert Placement(huge_pages=True, root=tmp_path).huge_pages is huge
    assert ("echo advise" in caplog.text) is not huge
    assert not Placement(huge_pages=False, root=tmp_path).huge_pages


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86_64's system call is known")
def test_settings_are_applied(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """The settings would be accepted, displayed and ignored."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * MIB)
    mapping = SharedMapping(fd, 2 * MIB)
    advised: list[int] = []
    monkeypatch.setattr(SharedMapping, "advise", lambda _, advice: advised.append(advice))
    placement = Placement(node=0)
    placement.huge_pages = True
    placement.apply(mapping)
    if os.strerror(errno.EPERM) in caplog.text or os.strerror(errno.ENOSYS) in caplog.text:
        pytest.skip("this container may not set memory policies")
    assert advised == [mmap.MADV_HUGEPAGE]
    assert placement.status() == {"huge_pages": True, "numa_node": 0}
    mode, mask = ctypes.c_int(-1), ctypes.c_ulong()
    call = ctypes.CDLL(None).syscall
    at = ctypes.c_void_p(mapping.address)
    # get_mempolicy of an address.
    assert call(239, ctypes.byref(mode), ctypes.byref(mask), 64, at, 2) == 0
    assert (mode.value, mask.value) == (1, 1)
    os.close(fd)


def test_kernel_refusal_is_logged_once(caplog) -> None:
    """The log would fill, or a segment would fail for lack of an optional optimisation."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * MIB)
    mapping = SharedMapping(fd, 2 * MIB)
    placement = Placement(node=900)
    placement.apply(mapping)
    placement.apply(mapping)
    assert caplog.text.count("NUMA node 900") == 1
    assert placement.status()["numa_node"] is None
    os.close(fd)


def test_container_limit_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's limit would kill tierd hours after its start."""
    put(tmp_path, "proc/self/cgroup", "0::/pod/tierd")
    put(tmp_path, "sys/fs/cgroup/memory.max", "max")
    put(tmp_path, "sys/fs/cgroup/pod/memory.max", str(64 * MIB))
    put(tmp_path, "sys/fs/cgroup/pod/tierd/memory.max", str(128 * MIB))
    limit = memory_limit(tmp_path)
    assert limit.size_bytes == 64 * MIB
    monkeypatch.setattr("tierd.memory.arena.memory_limit", lambda: limit)
    check_capacity(60 * MIB)
    with pytest.raises(ConfigError, match="container's limit"):
        check_capacity(64 * MIB)


def test_cgroup_v1_limit_is_respected(tmp_path: Path) -> None:
    """In a container under cgroup v1 the limit would be ignored."""
    put(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/ab\n0::/")
    # Inside the container its own group is the root.
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(32 * MIB))
    assert memory_limit(tmp_path).size_bytes == 32 * MIB


def test_without_cgroups_all_memory_is_available(tmp_path: Path) -> None:
    """tierd would not start where /sys/fs/cgroup is missing."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limit(tmp_path).size_bytes == ram


LIMITS = {
    resource.RLIMIT_NOFILE: (1000, "needs 2304 descriptors, but RLIMIT_NOFILE is 1000"),
    resource.RLIMIT_FSIZE: (1 << 20, "RLIMIT_FSIZE is 1048576 bytes"),
    resource.RLIMIT_AS: (1 << 30, "RLIMIT_AS is 1.00 GiB"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limit_that_is_too_low_is_named_at_start(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Stores would fail later, and no log line would name the limit to raise."""
    low, words = LIMITS[limit]
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (low if which == limit else infinity, infinity)
    )
    capacity = 128 << 30
    (line,) = shortfalls(capacity, 256 << 20, missing_bytes=capacity, available_bytes=capacity)
    assert words in line
    assert "raise it" in line


def test_unavailable_memory_is_reported_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory would stay below its capacity without a reason in the log."""
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinity, infinity))
    found = shortfalls(8 << 30, 64 << 20, missing_bytes=6 << 30, available_bytes=1 << 30)
    assert ["1.00 GiB of memory are available" in line for line in found] == [True]
