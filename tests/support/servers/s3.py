"""Real S3 servers for tests and benchmarks, each in its own directory.

`SeaweedFS` follows the S3 contract. `Rclone` is the awkward dialect: it ignores conditions on a
PUT. Both listen on free ports of 127.0.0.1 only, and several can run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

import boto3
import botocore.config
import botocore.exceptions

START_S = 30.0
"""Timeout of a start, which takes a second on an idle machine."""

STOP_S = 10.0
START_TRIES = 5
"""Starts with other ports if another process took one between the check and the use."""

ACCESS_KEY = "AKTIERD"
SECRET_KEY = "SKTIERDSECRET"
REGION = "us-east-1"

_PROBE = "tierd-probe"
_buckets = itertools.count()
_session = boto3.session.Session()  # One, because it reads a megabyte of JSON.


class Tls(NamedTuple):
    """PEM files of a server's certificate, its key, and the authority that clients trust."""

    certificate: Path
    key: Path
    authority: Path


class S3Server:
    """A server process over the data in `directory`. A context manager that starts and ends it."""

    ports_needed = 1

    def __init__(self, directory: Path, *, tls: Tls | None = None) -> None:
        """With `tls` it speaks https only."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.log = directory / "server.log"
        self.data = directory / "data"
        self.tls = tls
        self.access_key = ACCESS_KEY
        self.secret_key = SECRET_KEY
        self.region = REGION
        self.ports: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The command to run on `self.ports`; the first is the S3 port."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        """The port of S3; the same after a restart."""
        return self.ports[0]

    @property
    def endpoint(self) -> str:
        """URL of the server, without a slash at its end."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start with the existing data, and wait until it answers."""
        assert self.process is None
        for _ in range(START_TRIES if not self.ports else 1):
            self.ports = self.ports or _free_ports(self.ports_needed)
            started = False
            try:
                started = self._start()
            finally:
                if not started:
                    self.kill()
            if started:
                return
            self.ports = []
        raise RuntimeError(f"the S3 server did not start:\n{self.log.read_text()[-4000:]}")

    def _start(self) -> bool:
        self.data.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={
                    **os.environ,
                    "GOMEMLIMIT": "600MiB",
                    "HOME": str(self.directory),
                    "TMPDIR": str(self.directory),
                },
            )
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            if self._answers():
                return True
            time.sleep(0.02)
        return False

    def _answers(self) -> bool:
        """Whether objects can be read and written; buckets can be listed long before that."""
        client = self.client()
        try:
            if _PROBE not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=_PROBE)
            elif "Contents" in client.list_objects_v2(Bucket=_PROBE):
                client.get_object(Bucket=_PROBE, Key=_PROBE)["Body"].read()
            client.put_object(Bucket=_PROBE, Key=_PROBE, Body=b"probe")
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            return False
        finally:
            client.close()
        return True

    def stop(self) -> None:
        """SIGTERM and reap; SIGKILL if that takes too long."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL and reap; stored data stays. Does nothing if it is not running."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self.process is None:
            return
        process, self.process = self.process, None
        process.send_signal(signal.SIGCONT)
        process.send_signal(how)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for port in self.ports:
            # SeaweedFS leaves sockets in /tmp, whatever its configuration.
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and are not answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def restart(self, *, empty: bool = False) -> None:
        """SIGKILL and start on the same port, with the same data or empty."""
        self.kill()
        if empty:
            shutil.rmtree(self.data)
        self.start()

    def client(self) -> Any:
        """A plain boto3 client with short timeouts, to access data without the code under test.
        Closing it is optional."""
        config = botocore.config.Config(
            connect_timeout=2,
            read_timeout=10,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return _session.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=config,
            verify=str(self.tls.authority) if self.tls else None,
        )

    def make_bucket(self, name: str = "") -> str:
        """Create a bucket, with a new name unless one is given; returns its name."""
        name = name or f"tierd-{os.getpid()}-{next(_buckets)}"
        client = self.client()
        client.create_bucket(Bucket=name)
        client.close()
        return name

    def options(self, bucket: str, **more: object) -> dict[str, object]:
        """Keys of a `[[storage]]` table of type "s3" for a bucket of this server."""
        return {
            "bucket": bucket,
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            **more,
        }


class SeaweedFS(S3Server):
    """`weed mini`: conditional puts, DeleteObjects, strict signatures."""

    ports_needed = 10

    def command(self) -> list[str]:
        identities = self.directory / "s3.json"
        identities.write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": "tierd",
                            "credentials": [
                                {"accessKey": self.access_key, "secretKey": self.secret_key}
                            ],
                            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                        }
                    ]
                }
            )
        )
        names = ("s3", "master", "volume", "filer", "admin")
        http = zip(names, self.ports[:5], strict=True)
        grpc = zip(names, self.ports[5:], strict=True)
        return [
            str(Path(sys.executable).parent / "weed"),
            f"-logdir={self.directory}",
            "mini",
            f"-dir={self.data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-admin.ui=false",
            "-webdav=false",
            "-master.telemetry=false",
            "-volume.fileSizeLimitMB=64",
            "-filer.localSocket=filer.sock",
            "-s3.localSocket=s3.sock",
            f"-s3.config={identities}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"-{name}.port={port}" for name, port in http),
            *(f"-{name}.port.grpc={port}" for name, port in grpc),
            *self._tls_flags(),
        ]

    def _tls_flags(self) -> list[str]:
        if self.tls is None:
            return []
        return [f"-s3.cert.file={self.tls.certificate}", f"-s3.key.file={self.tls.key}"]


class SmallDisk(SeaweedFS):
    """A server with its data on a separate small disk, in a mount namespace (see `can_run`)."""

    @staticmethod
    def can_run() -> bool:
        """Whether this user may create mount namespaces."""
        return not subprocess.run(["unshare", "-rm", "true"], check=False).returncode

    def command(self) -> list[str]:
        mount = f'mount -t tmpfs -o size=160m tmpfs "{self.data}" && exec "$@"'
        return ["unshare", "-rm", "sh", "-c", mount, "sh", *super().command()]

    @property
    def _ballast(self) -> Path:
        """A file on the disk, as this process sees it."""
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/root{self.data}/ballast")

    def fill_disk(self) -> None:
        """Leave no room."""
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))

    def free_disk(self) -> None:
        """Make room again."""
        self._ballast.unlink()


class Rclone(S3Server):
    """`rclone serve s3` over a directory: ignores If-None-Match, so every racing put wins."""

    def command(self) -> list[str]:
        command = [
            str(Path(sys.executable).parent / "rclone"),
            "serve",
            "s3",
            f"--addr=127.0.0.1:{self.port}",
            f"--auth-key={self.access_key},{self.secret_key}",
            "--config=/dev/null",
            "--vfs-cache-mode=off",
            str(self.data),
        ]
        if self.tls is not None:
            command += [f"--cert={self.tls.certificate}", f"--key={self.tls.key}"]
        return command


def _free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1, below the range for outgoing connections."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 2000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")
