"""A real `tierd serve` in a subprocess, for tests, the demo and benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.service_manager import ServiceManager
from tierd.client import Client

READY_S = 120.0
"""Timeout for whatever the daemon has to do, on a busy machine: it detects a hang only."""


class DaemonProcess:
    """`tierd serve` in `directory`, with its socket, file tier and log there.

    `storage` is TOML text for `[[storage]]` tables, which may accept writes only some time after
    the start; None means a file tier in `directory`, which is open once the daemon has started.
    `prefetch` has keys of the `[prefetch]` table. With a `manager`, that service manager starts the
    daemon; otherwise `launcher` is a command that executes the command after it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity: str = "256MiB",
        storage: str | None = None,
        extra: str = "",
        prefetch: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        manager: ServiceManager | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.socket = str(directory / "tierd.sock")
        self.store = directory / "store"
        self.log = directory / "tierd.log"
        self.config = directory / "tierd.toml"
        self._own_tier = storage is None
        if storage is None:
            storage = (
                f'[[storage]]\ntype = "file"\npath = "{self.store}"\ncapacity = "2GiB"\n'
                'reserve_free = "0"\n'
            )
        # A small model computes faster than a busy machine loads, which most tests do not test.
        keys = {"min_tokens": 0, "break_even": False, **(prefetch or {})}
        waits = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        self.config.write_text(
            f'socket = "{self.socket}"\n{extra}\n[prefetch]\n{waits}\n'
            f'[host]\ncapacity = "{capacity}"\n{storage}',
            encoding="utf-8",
        )
        self.env = {**os.environ, **(env or {})}
        self.manager = manager
        self._launcher = launcher
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DaemonProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the daemon and wait until it answers."""
        assert self.process is None
        with self.log.open("ab") as log:
            command = ["-m", "tierd.cli.main", "serve", "--config", str(self.config)]
            if self.manager is not None:
                self.process = self.manager.start(command, log=log.fileno(), env=self.env)
            else:
                self.process = subprocess.Popen(
                    [*self._launcher, sys.executable, *command],
                    stdout=log,
                    stderr=log,
                    env=self.env,
                )
        end = time.monotonic() + READY_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"tierd did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.01)
        while self._own_tier and self.tiers()["file"]["state"] in ("opening", "indexing"):
            assert time.monotonic() < end, "the file tier does not open"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL and reap."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit status, 0 if it was not running."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(READY_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.process = None
        return status

    def reload(self) -> None:
        """SIGHUP, and wait until the daemon has read its configuration."""
        before = self._reloads()
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + READY_S
        while self._reloads() == before:
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.01)

    def client(self, name: str = "test") -> Client:
        """A new client of this daemon; the caller closes it."""
        return Client(self.socket, name=name, call_timeout_ms=5000)

    def status(self) -> dict:
        """The daemon's status, from the command that an operator uses."""
        done = subprocess.run(
            [sys.executable, "-m", "tierd.cli.main", "status", "--json", "--socket", self.socket],
            capture_output=True,
            text=True,
            check=True,
        )
        status: dict = json.loads(done.stdout)
        return status

    def wait_backed_up(self, timeout_s: float = READY_S) -> dict:
        """Wait until no block is waiting for a checksum or a backup; returns the status."""
        client = Client(self.socket, name="test-status", map_segments=False)
        try:
            end = time.monotonic() + timeout_s
            while True:
                status: dict = client.status()
                if status["host"]["backlog_blocks"] == 0:
                    return status
                assert time.monotonic() < end, status
                time.sleep(0.01)
        finally:
            client.close()

    def wait_tier(self, name: str, state: str, timeout_s: float = READY_S) -> None:
        """Wait until a storage tier is in the given state."""
        end = time.monotonic() + timeout_s
        while (tier := self.tiers()[name])["state"] != state:
            assert time.monotonic() < end, tier
            time.sleep(0.02)

    def tiers(self) -> dict[str, dict]:
        """The status of each storage tier, by name."""
        client = Client(self.socket, name="test-status", map_segments=False)
        try:
            status: dict = client.status()
        finally:
            client.close()
        return {tier["name"]: tier for tier in status["storage"]}

    def _reloads(self) -> int:
        counters = self.status()["counters"]
        return sum(
            counters.get(f"reloads_{outcome}_total", 0) for outcome in ("applied", "refused")
        )

    def _answers(self) -> bool:
        probe = Client(self.socket, name="test-probe", map_segments=False, call_timeout_ms=500)
        try:
            probe.status()
        except Exception:
            return False
        finally:
            probe.close()
        return True
