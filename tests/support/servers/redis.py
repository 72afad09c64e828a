"""Real Redis servers for tests, the demo and benchmarks: alone, with TLS and users, a cluster.

    with RedisServer(directory) as server:
        server.options()        # keys of a [[storage]] table
        server.client()         # a plain redis-py client, to inspect and change data

Ports are free ones; nothing is persistent. `redis-server` must be installed (Debian: apt-get
install redis-server).
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis
import trustme
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

READY_S = 20.0
BUS_OFFSET = 10_000
"""Cluster nodes talk to each other on their port plus this number."""

USER = "tierd"
PASSWORD = "open-sesame"
LEAST_RIGHTS = (
    "+get +set +exists +unlink +scan +getrange +watch +multi +exec +sadd +srem +smembers "
    "+touch +pexpire "
    "+cluster|slots +cluster|nodes +asking"
)
"""The rights that the tier needs, on its prefix."""


def free_port() -> int:
    """A free port whose cluster bus port is free as well."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + BUS_OFFSET))
            return port


class Certificates:
    """A CA and a server's certificate for 127.0.0.1, as PEM files."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert(host)
        self.ca = str(directory / "ca.pem")
        self.cert = str(directory / "server.pem")
        self.key = str(directory / "server.key")
        authority.cert_pem.write_to_path(self.ca)
        certificate.cert_chain_pems[0].write_to_path(self.cert)
        certificate.private_key_pem.write_to_path(self.key)


class RedisServer:
    """One redis-server with its files in `directory`, on TCP and on a unix socket.

    `arguments` are for its command line, such as "--maxmemory", "8mb". With `rights` only USER with
    PASSWORD may log in and has only these rights; with `tls` its port speaks TLS only.
    """

    def __init__(
        self, directory: Path, *arguments: str, rights: str = "", tls: bool = False
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.arguments = list(arguments)
        self.tls = Certificates(directory) if tls else None
        self.rights = rights
        self.port = free_port()
        self.socket_path = directory / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """URL of its TCP port."""
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        """URL of its unix socket."""
        return f"unix://{self.socket_path}"

    def options(self, *, port: int | None = None, unix: bool = False) -> dict[str, object]:
        """Keys of a [[storage]] table of type "redis" that reach it, or a proxy's port."""
        url = self.unix_url if unix else self.url
        if port is not None:
            url = url.replace(str(self.port), str(port))
        options: dict[str, object] = {"url": url}
        if self.rights:
            options |= {"username": USER, "password": PASSWORD}
        if self.tls and not unix:
            options["tls_ca"] = self.tls.ca
        return options

    def client(self) -> redis.Redis:
        """A plain client with all rights; the caller closes it."""
        return redis.Redis(
            unix_socket_path=str(self.socket_path),
            username="admin" if self.rights else None,
            password=PASSWORD if self.rights else None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    def start(self) -> None:
        """Start and wait until it answers."""
        assert self.process is None
        self._spawn()
        end = time.monotonic() + READY_S
        while not self._answers():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                self.process.wait()
                raise RuntimeError(f"redis-server did not start:\n{self._log()[-2000:]}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End it, in whatever state it is."""
        if self.process is not None:
            self.kill()

    def kill(self) -> None:
        """SIGKILL and reap."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def pause(self) -> None:
        """SIGSTOP: its sockets stay open and are not read."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill it, if it runs, and start it again without data."""
        self.stop()
        self.start()

    def _spawn(self) -> None:
        listen = ["--port", str(self.port)]
        if self.tls:
            listen = ["--port", "0", "--tls-port", str(self.port)]
            listen += ["--tls-cert-file", self.tls.cert, "--tls-key-file", self.tls.key]
            listen += ["--tls-ca-cert-file", self.tls.ca, "--tls-auth-clients", "no"]
        users = []
        if self.rights:
            file = self.directory / "users.acl"
            file.write_text(
                f"user default off\nuser admin on >{PASSWORD} ~* &* +@all\n"
                f"user {USER} on >{PASSWORD} resetchannels -@all {self.rights}\n"
            )
            users = ["--aclfile", str(file)]
        command = ["redis-server", "--bind", "127.0.0.1", *listen]
        command += ["--unixsocket", str(self.socket_path), "--dir", str(self.directory)]
        command += ["--save", "", "--appendonly", "no", *users, *self.arguments]
        with (self.directory / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def _answers(self) -> bool:
        client = self.client()
        try:
            client.ping()
        except RedisError:
            return False
        finally:
            client.close()
        return True

    def _log(self) -> str:
        return (self.directory / "redis.log").read_text(errors="replace")


class RedisCluster:
    """Three masters without replicas, which serve their slots while others are down."""

    def __init__(self, directory: Path) -> None:
        self.nodes = [
            RedisServer(
                directory / f"node-{number}",
                *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
                *("--cluster-require-full-coverage", "no"),
            )
            for number in range(3)
        ]

    def __enter__(self) -> RedisCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL of the first node."""
        return self.nodes[0].url

    def options(self) -> dict[str, object]:
        """Keys of a [[storage]] table of type "redis" that reach it."""
        return {"url": self.url, "cluster": True}

    def start(self) -> None:
        """Start the nodes and share the slots between them."""
        try:
            for node in self.nodes:
                node.start()
            clients = [node.client() for node in self.nodes]
            share = 16384 // len(clients)
            for number, client in enumerate(clients):
                last = 16383 if number == len(clients) - 1 else (number + 1) * share - 1
                # As cluster tools do: nodes of the same epoch would need time to resolve conflicts,
                # and would meanwhile take back slots that were moved.
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
            end = time.monotonic() + READY_S
            while not all(_is_whole(client, len(clients)) for client in clients):
                assert time.monotonic() < end, "the cluster's nodes did not find each other"
                time.sleep(0.02)
            for client in clients:
                client.close()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.stop()

    def node_of(self, key: bytes) -> RedisServer:
        """The node that keeps `key`, in the order of their start."""
        slot = redis.crc.key_slot(key)
        return self.nodes[min(slot // (16384 // len(self.nodes)), len(self.nodes) - 1)]


def _is_whole(client: redis.Redis, nodes: int) -> bool:
    info = client.execute_command("CLUSTER", "INFO").split()
    wanted = {b"cluster_state:ok", b"cluster_slots_assigned:16384"}
    return wanted | {b"cluster_known_nodes:%d" % nodes} <= set(info)
