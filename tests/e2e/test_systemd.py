"""tierd as a service of a real systemd: an operator's actions, with engines attached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.blocks import chain, namespace, payload
from tests.support.servers.redis import RedisServer
from tests.support.systemd_machine import SITE, Machine, wait_running
from tests.support.traffic import BLOCK_BYTES, Traffic, wait_until
from tierd.hashing import KeyStyle, hash_blocks, root_hash

pytestmark = [pytest.mark.slow, pytest.mark.long]

UNITS = ("tierd.service", "tierd.socket", "tierd-warm.service")
ENGINE_UID = 54321
BLOCKS = 600
KEPT = 0.99
ANSWER_S = 5.0
"""Longest allowed call of an engine: its timeout is 2 s, and the machine may be busy."""

# Stops all niced threads of a process, like I/O calls that never return. They are stopped as long
# as this program runs.
STOP_THREADS = """
import ctypes, os, sys, time
ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, INTERRUPT, ALL = 0x4206, 0x4207, 0x40000000
tasks, stopped = f"/proc/{sys.argv[1]}/task", set()
while os.path.exists(tasks):
    for tid in {int(name) for name in os.listdir(tasks)} - stopped:
        if os.getpriority(os.PRIO_PROCESS, tid) > 0 and ptrace(SEIZE, tid, None, None) == 0:
            ptrace(INTERRUPT, tid, None, None)
            stopped.add(tid)
    # A thread that is killed has ended only once we know of it.
    for tid in stopped:
        try:
            os.waitpid(tid, ALL | os.WNOHANG)
        except ChildProcessError:
            pass
    time.sleep(0.02)
"""


def config(redis_url: str, tierd_uid: str) -> str:
    """A configuration with every kind of tier that runs here."""
    return f"""
        allow_uids = [0, {tierd_uid}, {ENGINE_UID}]
        [prefetch]
        min_tokens = 0
        break_even = false
        [host]
        capacity = "128MiB"
        [[storage]]
        type = "file"
        path = "/srv/kv"
        capacity = "256MiB"
        reserve_free = "0"
        write_policy = "write_back"
        [[storage]]
        type = "redis"
        url = "{redis_url}"
        write_policy = "write_back"
        """


@dataclass
class Service:
    """The tierd of a machine; it is running when a test begins."""

    machine: Machine
    good: str
    space = namespace(BLOCK_BYTES)
    hashes, parents = chain(BLOCKS, "kept")

    def configure(self, text: str) -> None:
        self.machine.write("/etc/tierd/tierd.toml", text)

    def systemctl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.machine.run("systemctl", *words, check=check)

    def show(self, *properties: str) -> list[str]:
        return self.machine.show("tierd", *properties)

    def status(self) -> dict:
        client = self.machine.client("status")
        try:
            status: dict = client.status()
        finally:
            client.close()
        return status

    def logged(self, text: str) -> bool:
        """Whether the journal has a line that matches."""
        found = self.machine.run("journalctl", "--quiet", f"--grep={text}", check=False)
        return found.returncode == 0

    def wait_for_tiers(self) -> None:
        """Wait until all tiers are ready: the sandbox allows a disk and a network."""
        wait_until(
            lambda: {tier["state"] for tier in self.status()["storage"]} == {"ready"},
            30,
            "a tier does not open",
        )

    def main_pid(self) -> int:
        [pid] = self.show("MainPID")
        return int(pid)

    def fill(self) -> None:
        """Store blocks."""
        client = self.machine.client("fill")
        try:
            handle = client.register(self.space)
            blocks = zip(self.hashes, self.parents, strict=True)
            client.put(handle, [(h, parent, payload(self.space, h)) for h, parent in blocks])
        finally:
            client.close()
        assert self.status()["host"]["blocks"] >= BLOCKS

    def proven(self) -> int:
        """Number of blocks that are found, every byte compared."""
        client = self.machine.client("prove")
        try:
            handle = client.register(self.space)
            lease = client.acquire([handle], self.hashes, 5000)
            if lease is None:
                return 0
            views = client.lease_views(handle, lease.epoch, lease.slots[0])
            assert views is not None
            for block_hash, view in zip(self.hashes, views, strict=False):
                assert view[:BLOCK_BYTES] == payload(self.space, block_hash)
            client.release(lease)
            return lease.blocks
        finally:
            client.close()

    def reads(self) -> int:
        """Bytes that storage tiers have delivered."""
        tiers = self.status()["storage"]
        return sum(tier["counters"].get("read_bytes_total", 0) for tier in tiers)

    def check_kept(self, traffic: Traffic) -> None:
        """Check that L2 has the blocks, and that they do not come from storage."""
        traffic.pause()
        try:
            reads = self.reads()
            assert self.proven() >= KEPT * BLOCKS
            read = (self.reads() - reads) // BLOCK_BYTES
            assert read <= (1 - KEPT) * BLOCKS, f"{read} of storage\n{self.machine.journal(100)}"
        finally:
            traffic.resume()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine on which the printed steps of `tierd install-units` were followed."""
    with Machine(tmp_path_factory.mktemp("machine")) as machine:
        told = machine.run("/opt/tierd/bin/tierd", "install-units", "--gpu").stdout
        [users] = [line for line in told.splitlines() if "systemd-sysusers" in line]
        machine.run("sh", "-ec", users)
        machine.run("install", "--directory", "--owner=tierd", "/srv/kv", "/srv/k2")
        yield machine


@pytest.fixture
def service(machine: Machine, redis_server: RedisServer) -> Service:
    """tierd, started if it was not running."""
    uid = machine.run("id", "--user", "tierd").stdout.strip()
    service = Service(machine, config(redis_server.url, uid))
    service.configure(service.good)
    service.systemctl("reset-failed")
    service.systemctl("start", "tierd.socket", "tierd.service")
    service.wait_for_tiers()
    return service


@pytest.fixture
def traffic(service: Service) -> Iterator[Traffic]:
    """Engines that load and store continuously: none waits too long or gets a wrong byte."""
    with Traffic(service.machine) as traffic:
        wait_until(lambda: any(s.blocks for s in traffic.since(0)), 20, "engines get nothing")
        yield traffic
        started = max(sample.ended for sample in traffic.since(0))
        wait_until(
            lambda: any(s.blocks for s in traffic.since(started)), 20, "engines get nothing more"
        )
    assert traffic.faults == []
    slow = [s for s in traffic.since(0) if s.seconds > ANSWER_S + traffic.stall_ms(s) / 1000]
    assert slow == []


def test_units_are_well_formed(machine: Machine) -> None:
    """systemd would complain about the units, or they would expose the node to the daemon."""
    for _ in ("with", "without"):
        told = machine.run("systemd-analyze", "verify", *UNITS)
        assert told.stdout + told.stderr == ""
        unit = "/etc/systemd/system/tierd.service"
        machine.run("systemd-analyze", "security", "--offline=true", "--threshold=25", unit)
        # Exposure with GPUs was checked above; the other tests use a node without GPUs.
        gpu = Path(f"{machine.root}{unit}.d/gpu.conf")
        gpu.unlink(missing_ok=True)
    machine.run("systemctl", "daemon-reload")


def test_start_waits_until_engines_are_served(service: Service) -> None:
    """`systemctl start` would return too early, and units ordered after tierd would fail."""
    service.systemctl("stop", "tierd.service")
    service.systemctl("start", "tierd.service")
    status_text, state = service.show("StatusText", "SubState")
    assert state == "running"
    assert "serving" in status_text
    assert service.status()["host"]["capacity_bytes"] == 128 << 20


def test_limits_reach_the_process(service: Service) -> None:
    """A crash would write terabytes of KV to the disk, or the kernel would kill the daemon for
    memory that the kill does not free."""
    pid = service.machine.host_pid(service.main_pid())
    filter_bits = int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16)
    assert filter_bits == 1 << 0 | 1 << 4, "private anonymous memory and ELF headers"
    assert os.stat(f"/proc/{pid}").st_uid != 0
    # In a container systemd cannot lower these two limits, and does not say so.
    assert service.show("LimitMEMLOCK", "OOMScoreAdjust") == ["infinity", "-900"]


def test_engines_of_other_users_are_served(service: Service) -> None:
    """An engine of another user would get no blocks, or every user of the node would get KV."""

    def status_as(uid: int) -> int:
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        return service.machine.run(*user, "/opt/tierd/bin/tierd", "status", check=False).returncode

    assert status_as(ENGINE_UID) == 0
    assert status_as(ENGINE_UID + 1) == 1


def test_kill_keeps_l2(service: Service, traffic: Traffic) -> None:
    """A crash of the daemon would cost the engines their whole host tier."""
    service.fill()
    # Blocks stored in the last moments have no checksum yet, and are lost in a crash.
    wait_until(lambda: not service.status()["host"]["backlog_blocks"], 20, "no checksums")
    [restarts] = service.show("NRestarts")
    service.systemctl("kill", "--signal=KILL", "--kill-whom=main", "tierd.service")
    wait_running(service.machine, int(restarts) + 1)
    service.check_kept(traffic)


def test_restart_keeps_l2(service: Service, traffic: Traffic) -> None:
    """A restart of the daemon would cost the engines their whole host tier."""
    service.fill()
    service.systemctl("restart", "tierd.service")
    service.check_kept(traffic)


def test_upgrade_keeps_l2(service: Service, traffic: Traffic) -> None:
    """Each new version of the daemon would start with an empty host tier."""
    service.fill()
    source = f"{service.machine.root}{SITE}/tierd"
    subprocess.run(["cp", "-r", source, f"{service.machine.root}/opt/next-tierd"], check=True)
    service.machine.run("sh", "-ec", "mkdir -p /opt/next && mv /opt/next-tierd /opt/next/tierd")
    package = Path(f"{service.machine.root}/opt/next/tierd/__init__.py")
    old = service.status()["version"]
    package.write_text(package.read_text().replace(f'"{old}"', '"99.0"'))
    service.machine.drop_in(
        "tierd.service", "next", "[Service]\nEnvironment=PYTHONPATH=/opt/next\n"
    )
    try:
        service.systemctl("restart", "tierd.service")
        assert service.status()["version"] == "99.0"
        service.check_kept(traffic)
    finally:
        service.machine.drop_in("tierd.service", "next", "")


def test_reload_takes_a_good_file_and_refuses_a_bad_one(service: Service) -> None:
    """A reload would have no effect, or a typing error in the file would stop the daemon."""
    pid = service.main_pid()
    service.configure(service.good.replace("[host]", "[host]\npin_max_s = 1234"))
    service.systemctl("reload", "tierd.service")
    wait_until(lambda: "pin_max_s" in service.machine.journal(), 10, "the change is not logged")

    service.configure(service.good.replace("128MiB", "much"))
    refused = service.systemctl("reload", "tierd.service", check=False)
    assert refused.returncode != 0
    assert "capacity" in service.machine.journal()
    # A signal sent by hand bypasses the check of the file.
    service.systemctl("kill", "--signal=HUP", "--kill-whom=main", "tierd.service")
    wait_until(lambda: "capacity" in service.show("StatusText")[0], 10, "no refusal in the status")
    assert service.main_pid() == pid
    assert service.show("SubState") == ["running"]
    assert service.status()["host"]["capacity_bytes"] == 128 << 20


def test_hung_thread_trips_the_watchdog(service: Service, traffic: Traffic) -> None:
    """An I/O call that never returns would leave a daemon that answers and does nothing."""
    service.machine.drop_in("tierd.service", "watchdog", "[Service]\nWatchdogSec=3s\nNice=0\n")
    try:
        service.systemctl("restart", "tierd.service")
        service.fill()
        pid = service.machine.host_pid(service.main_pid())
        [restarts] = service.show("NRestarts")
        with subprocess.Popen([sys.executable, "-c", STOP_THREADS, str(pid)]) as stopper:
            try:
                wait_running(service.machine, int(restarts) + 1)
            finally:
                stopper.kill()
        assert service.logged("Watchdog timeout")
        service.check_kept(traffic)
    finally:
        service.machine.drop_in("tierd.service", "watchdog", "")


def test_stop_drains(service: Service) -> None:
    """A stop would lose blocks that only host memory had, or engines would start it again."""
    service.systemctl("restart", "tierd.service")
    service.fill()
    service.systemctl("stop", "tierd.service")
    assert service.machine.show("tierd.socket", "ActiveState") == ["inactive"]
    client = service.machine.client("late")
    assert client.acquire([client.register(service.space)], service.hashes, 100) is None
    client.close()
    assert service.show("ActiveState") == ["inactive"]
    service.systemctl("start", "tierd.service")
    service.wait_for_tiers()
    assert service.proven() == BLOCKS


@pytest.mark.parametrize("shared", ["socket", "directory"])
def test_a_second_daemon_is_refused(service: Service, shared: str) -> None:
    """Two daemons would write to one directory, or systemd would restart the second forever."""
    text = service.good if shared == "directory" else service.good.replace("/srv/kv", "/srv/k2")
    if shared == "directory":
        text = f'socket = "/run/tierd/second.sock"\n{text}'
    service.machine.write("/etc/tierd/second.toml", text)
    root = service.machine.root
    unit = Path(f"{root}/etc/systemd/system/tierd.service").read_text()
    unit = unit.replace("tierd.toml", "second.toml").replace("tierd.socket", "")
    service.machine.write("/run/systemd/system/second.service", unit)
    service.systemctl("daemon-reload")
    served = service.systemctl("start", "second.service", check=False).returncode == 0
    told = service.machine.show("second", "ExecMainStatus", "NRestarts", "ActiveState")
    if served:
        # The machine is so slow that the tier's process came too late to refuse the start.
        assert shared == "directory"
        wait_until(lambda: service.logged("/srv/kv is in use by process"), 20, "it is shared")
        service.systemctl("stop", "second.service")
    else:
        assert told == ["2", "0", "failed"]
    assert {tier["state"] for tier in service.status()["storage"]} == {"ready"}


def test_bad_file_aborts_the_start(service: Service, traffic: Traffic) -> None:
    """With a wrong file, systemd and connecting engines would start the daemon in a loop."""
    service.systemctl("stop", "tierd.service")
    service.configure(service.good.replace("128MiB", "much"))
    assert service.systemctl("start", "tierd.service", check=False).returncode != 0
    assert service.show("ExecMainStatus", "NRestarts") == ["2", "0"]
    service.configure(service.good)
    service.systemctl("start", "tierd.service")


def test_boot_restores_the_hot_set(service: Service) -> None:
    """After a boot the first users would find empty host memory, although the disks have blocks."""
    service.fill()
    assert service.proven() == BLOCKS
    service.systemctl("stop", "tierd.service")  # It drains and keeps nothing, as at a boot.
    service.systemctl("start", "tierd.service")
    service.wait_for_tiers()
    assert service.status()["host"]["blocks"] == 0
    service.systemctl("start", "tierd-warm.service")
    reads = service.reads()
    assert reads >= BLOCKS * BLOCK_BYTES
    assert service.proven() == BLOCKS
    assert service.reads() == reads, "some blocks were not in host memory"


def test_warm_runs_after_a_start(service: Service) -> None:
    """Listed prefixes would not be warmed, or a node without a list could not start."""
    service.machine.run("rm", "--force", "/var/lib/tierd/hotset.jsonl")
    service.systemctl("start", "tierd-warm.service")
    assert service.logged("tierd-warm.service .* skipped because no trigger condition checks")
    tokens = [1, 2, 3, 4] * 16
    space = namespace(BLOCK_BYTES, hash_scheme=KeyStyle.TAGGED.value, hash_root=root_hash())
    fields = {**space.to_fields(), "hash_root": space.hash_root.hex()}
    prompts = [{"tokens": tokens, "namespace": fields}, {"tokens": tokens[1:], "namespace": fields}]
    service.machine.write("/etc/tierd/warm.jsonl", "".join(f"{json.dumps(p)}\n" for p in prompts))
    client = service.machine.client("store")
    hashes = hash_blocks(tokens, space.block_tokens, parent=space.hash_root)
    parents = [space.hash_root, *hashes]
    blocks = [(h, p, payload(space, h)) for h, p in zip(hashes, parents, strict=False)]
    client.put(client.register(space), blocks)
    client.close()
    service.systemctl("start", "tierd-warm.service")
    assert service.machine.show("tierd-warm", "Result") == ["success"]
    assert "4 of 7 blocks in host memory, of 2 prompts and runs" in service.machine.journal()


def test_journal_has_fields(service: Service) -> None:
    """Logs could not be filtered by tier or namespace."""
    told = service.machine.run("journalctl", "-u", "tierd", "-o", "json", "--no-pager").stdout
    entries = [json.loads(line) for line in told.splitlines()]
    own = [entry for entry in entries if entry.get("SYSLOG_IDENTIFIER") == "tierd"]
    assert any(entry["PRIORITY"] != "6" for entry in own), "all lines have one priority"
    assert any("CODE_FILE" in entry for entry in own)
