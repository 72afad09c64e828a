"""Tiers that cannot be opened at start: the daemon serves, says why, and tries again."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.blocks import chain, namespace, payload
from tests.support.daemon_process import DaemonProcess
from tests.support.servers.fake_s3 import FakeS3, error
from tests.support.servers.proxy import Proxy
from tests.support.servers.redis import PASSWORD, Certificates, RedisServer
from tests.support.servers.s3 import SeaweedFS, Tls
from tests.support.tiers.scene import table
from tests.support.traffic import wait_until
from tierd.client import Client, Handle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TIMES_MS = {"probe_ms": 100, "deadline_ms": 20_000, "slow_ms": 20_000, "timeout_ms": 20_000}
"""Retried at once, and never abandoned: a server that has just started takes its time."""

PROBES = 2
"""Attempts to open the tier before it is repaired; one log line must cover them all."""

NAME = "server.test"
"""A host that only the `Resolver` knows."""

WAIT_S = 20.0
BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """Options of a tier that cannot be opened, its expected error, and its repair."""

    options: dict[str, object]
    told: tuple[str, ...]
    mend: Callable[[], object]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only file in which an S3 client looks for credentials."""
    file = tmp_path / "credentials"
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return file


class Resolver:
    """Answers lookups of NAME by the daemon and its workers: an address, "unknown" or "hang".

    The last one blocks uninterruptibly, as the system's resolver does, until the answer changes: on
    a lock that the test holds meanwhile.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answer = directory / "answer"
        self._lock = (directory / "lock").open("w")
        self.say("unknown")
        (directory / "sitecustomize.py").write_text(
            "import fcntl, pathlib, socket\n"
            "real = socket.getaddrinfo\n"
            "def getaddrinfo(host, *rest, **more):\n"
            f"    if host != {NAME!r}:\n"
            "        return real(host, *rest, **more)\n"
            f"    with open({self._lock.name!r}) as lock:\n"
            "        fcntl.flock(lock, fcntl.LOCK_SH)\n"
            f"        answer = pathlib.Path({str(self._answer)!r}).read_text()\n"
            "    if answer == 'unknown':\n"
            "        raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')\n"
            "    return real(answer, *rest, **more)\n"
            "socket.getaddrinfo = getaddrinfo\n"
        )
        path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
        monkeypatch.setenv("PYTHONPATH", path)

    def say(self, answer: str) -> None:
        """Set the answer."""
        fresh = self._answer.with_suffix(".new")
        fresh.write_text(answer)
        fresh.replace(self._answer)
        fcntl.flock(self._lock, fcntl.LOCK_EX if answer == "hang" else fcntl.LOCK_UN)

    def close(self) -> None:
        """Release all waiting lookups."""
        self._lock.close()


@pytest.fixture
def resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    """A resolver for daemons that start from here on."""
    directory = tmp_path / "resolver"
    directory.mkdir()
    made = Resolver(directory, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Stops everything that a test has started."""
    with ExitStack() as opened:
        yield opened


class Setting:
    """A daemon with a file tier, and below it the tier of a case."""

    def __init__(self, directory: Path, stack: ExitStack, kind: str, case: Case) -> None:
        self.case = case
        file = {"path": str(directory / "store"), "capacity": "64MiB", "reserve_free": "0"}
        options = {"name": "below", **TIMES_MS, **case.options}
        self.daemon = stack.enter_context(
            DaemonProcess(
                directory / "daemon",
                capacity="32MiB",
                storage=table("file", file) + table(kind, options),
            )
        )
        self.client: Client = self.daemon.client()
        stack.callback(self.client.close)
        self.space = namespace(BLOCK_BYTES)
        self.handle: Handle = self.client.register(self.space)
        # Blocks stored before the file tier is open reach it when stored again.
        wait_until(
            lambda: self.client.status()["storage"][0]["state"] == "ready",  # type: ignore[index]
            WAIT_S,
            "the file tier is not opened",
        )

    def tier(self) -> dict:
        """The status of the tier under test."""
        status: dict = self.client.status()
        found: dict = status["storage"][1]
        return found

    def store(self, tag: str) -> None:
        """Store a chain and read it back."""
        hashes, parents = chain(4, tag)
        right = [payload(self.space, h) for h in hashes]
        assert all(self.client.put(self.handle, list(zip(hashes, parents, right, strict=True))))
        assert [bytes(view) for view in self.client.get(self.handle, hashes, 1000)] == right

    def reconnect(self) -> None:
        """Wait until the client has found the daemon again."""

        def found() -> bool:
            self.client.wait(0.05)
            return self.handle.ready

        self.client.poll()
        wait_until(found, WAIT_S, "the client does not find the daemon again")

    def warnings_and_errors(self) -> list[str]:
        """Warnings and errors in the log."""
        lines = self.daemon.log.read_text().splitlines()
        return [line for line in lines if " WARNING " in line or " ERROR " in line]

    def check(self) -> None:
        """Assert that it serves without the tier, logs the reason once, and uses it after
        repair."""
        self.store("without")
        wait_until(
            lambda: self.tier()["counters"].get("open_failed_total", 0) >= PROBES,
            WAIT_S,
            "it is not tried again",
        )
        tier = self.tier()
        assert tier["state"] == "unavailable"
        (line,) = self.warnings_and_errors()
        assert "storage tier below: unavailable" in line
        for word in self.case.told:
            assert word in line, line
            assert word in tier["why"], tier["why"]
        assert self.daemon.wait_backed_up()["storage"][0]["blocks"] == 4
        self.case.mend()
        wait_until(lambda: self.tier()["state"] == "ready", WAIT_S, "it is not opened")
        assert self.tier()["why"] == ""
        self.store("with")
        tier = self.daemon.wait_backed_up()["storage"][1]
        assert tier["counters"]["put_stored_total"] == 4, tier
        assert len(self.warnings_and_errors()) == 1, self.warnings_and_errors()


def test_redis_that_starts_later_is_used(tmp_path: Path, stack: ExitStack) -> None:
    """A server that starts after tierd would never be used."""
    server = RedisServer(tmp_path / "server")
    told = (f"127.0.0.1:{server.port}", "is it running")
    case = Case(server.options(), told, lambda: stack.enter_context(server))
    Setting(tmp_path, stack, "redis", case).check()


def test_redis_without_the_required_password(tmp_path: Path, stack: ExitStack) -> None:
    """A forgotten password would look like an empty tier."""
    server = stack.enter_context(RedisServer(tmp_path / "server"))
    admin = stack.enter_context(server.client())
    admin.config_set("requirepass", PASSWORD)
    case = Case(server.options(), ("password",), lambda: admin.config_set("requirepass", ""))
    Setting(tmp_path, stack, "redis", case).check()


def test_redis_with_a_wrong_password(tmp_path: Path, stack: ExitStack) -> None:
    """A wrong password would look like an empty tier, and a right one need a restart."""
    server = stack.enter_context(RedisServer(tmp_path / "server"))
    with server.client() as admin:
        admin.config_set("requirepass", PASSWORD)
    file = tmp_path / "password"
    file.write_text("another")
    options = {**server.options(), "password_file": str(file)}
    case = Case(options, ("password",), lambda: file.write_text(PASSWORD))
    Setting(tmp_path, stack, "redis", case).check()


def test_redis_with_an_untrusted_certificate(tmp_path: Path, stack: ExitStack) -> None:
    """The wrong CA would cost the tier without a message, or not be checked."""
    server = stack.enter_context(RedisServer(tmp_path / "server", tls=True))
    assert server.tls is not None
    right = Path(server.tls.ca).read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    file = Path(Certificates(other).ca)
    options = {**server.options(), "tls_ca": str(file)}
    case = Case(options, ("certificate", "tls_ca"), lambda: file.write_bytes(right))
    Setting(tmp_path, stack, "redis", case).check()


def test_s3_that_starts_later_is_used(tmp_path: Path, stack: ExitStack, weed: SeaweedFS) -> None:
    """A server that starts after tierd would never be used."""
    proxy = stack.enter_context(Proxy(("127.0.0.1", weed.port)))
    proxy.refuse()
    where = f"http://127.0.0.1:{proxy.port}"
    options = weed.options(weed.make_bucket(), endpoint=where)
    Setting(tmp_path, stack, "s3", Case(options, (where, "refused"), proxy.accept)).check()


def test_s3_with_a_missing_bucket(tmp_path: Path, stack: ExitStack, weed: SeaweedFS) -> None:
    """A missing bucket would look like an empty one."""
    name = "made-later"
    case = Case(weed.options(name), (name, "bucket"), lambda: weed.make_bucket(name))
    Setting(tmp_path, stack, "s3", case).check()


@pytest.mark.parametrize("secret", ["", "another"])
def test_s3_with_missing_or_wrong_credentials(
    tmp_path: Path, stack: ExitStack, weed: SeaweedFS, keys: Path, secret: str
) -> None:
    """Missing or wrong credentials would look like an empty tier."""

    def write(secret: str) -> None:
        lines = ("[default]", f"aws_access_key_id={weed.access_key}")
        keys.write_text("\n".join([*lines, f"aws_secret_access_key={secret}", ""]))

    if secret:
        write(secret)
    told = ("secret key",) if secret else ("credentials", "access_key")
    options = weed.options(weed.make_bucket(), access_key="", secret_key="")
    Setting(tmp_path, stack, "s3", Case(options, told, lambda: write(weed.secret_key))).check()


def test_s3_with_an_untrusted_certificate(tmp_path: Path, stack: ExitStack) -> None:
    """The wrong CA would cost the tier without a message, or not be checked."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir()
    wrong.mkdir()
    made = Certificates(right)
    tls = Tls(Path(made.cert), Path(made.key), Path(made.ca))
    server = SeaweedFS(tmp_path / "server", tls=tls)
    stack.enter_context(server)
    file = Path(Certificates(wrong).ca)
    options = server.options(server.make_bucket(), tls_ca=str(file))

    def mend() -> None:
        file.write_bytes(Path(made.ca).read_bytes())

    Setting(tmp_path, stack, "s3", Case(options, ("certificate", "tls_ca"), mend)).check()


def test_redis_with_an_unresolvable_name(
    tmp_path: Path, stack: ExitStack, resolver: Resolver
) -> None:
    """A name that DNS does not have yet would keep tierd from starting, or cost the tier."""
    server = stack.enter_context(RedisServer(tmp_path / "server"))
    options: dict[str, object] = {"url": server.url.replace("127.0.0.1", NAME)}
    case = Case(options, (NAME, "cannot be resolved", "url"), lambda: resolver.say("127.0.0.1"))
    Setting(tmp_path, stack, "redis", case).check()


def test_s3_with_an_unresolvable_name(
    tmp_path: Path, stack: ExitStack, weed: SeaweedFS, resolver: Resolver
) -> None:
    """A name that DNS does not have yet would keep tierd from starting, or cost the tier."""
    endpoint = weed.endpoint.replace("127.0.0.1", NAME)
    options = weed.options(weed.make_bucket(), endpoint=endpoint)
    told = (NAME, "Name or service not known", "endpoint")
    case = Case(options, told, lambda: resolver.say("127.0.0.1"))
    Setting(tmp_path, stack, "s3", case).check()


def test_s3_in_another_region(tmp_path: Path, stack: ExitStack, keys: Path) -> None:
    """A bucket of another region would look like an empty one, with the right region unnamed."""
    fake = stack.enter_context(FakeS3())
    elsewhere = error(301, "PermanentRedirect", x_amz_bucket_region="eu-north-1")
    fake.script = lambda request: (
        None if "/eu-north-1/s3/" in request.headers["authorization"] else [elsewhere]
    )
    config = keys.parent / "config"
    config.write_text("[default]\nregion = eu-west-3\n")
    case = Case(
        fake.options(),
        (fake.endpoint, "set region to eu-north-1"),
        lambda: config.write_text("[default]\nregion = eu-north-1\n"),
    )
    Setting(tmp_path, stack, "s3", case).check()


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_hanging_resolver_delays_neither_start_nor_stop(
    tmp_path: Path,
    stack: ExitStack,
    resolver: Resolver,
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    """DNS that does not answer would keep tierd from starting and stopping, engines from the other
    tiers, and the tier away permanently."""
    if kind == "redis":
        server = stack.enter_context(RedisServer(tmp_path / "server"))
        options: dict[str, object] = {"url": server.url.replace("127.0.0.1", NAME)}
    else:
        weed: SeaweedFS = request.getfixturevalue("weed")
        endpoint = weed.endpoint.replace("127.0.0.1", NAME)
        options = weed.options(weed.make_bucket(), endpoint=endpoint)
    resolver.say("hang")
    case = Case(options, (), lambda: resolver.say("127.0.0.1"))
    # The constructor returns once it has started, and serves with its other tier.
    setting = Setting(tmp_path, stack, kind, case)
    setting.store("without")
    assert setting.daemon.wait_backed_up()["storage"][0]["blocks"] == 4
    assert setting.tier()["state"] in ("opening", "unavailable")
    # Not 1, the exit status of a daemon that abandons unfinished work.
    assert setting.daemon.stop() == 0
    setting.daemon.start()
    setting.reconnect()
    setting.store("again")
    assert setting.tier()["state"] in ("opening", "unavailable")
    case.mend()
    wait_until(lambda: setting.tier()["state"] == "ready", WAIT_S, "it is not opened")
    setting.store("with")
    tier = setting.daemon.wait_backed_up()["storage"][1]
    assert tier["counters"]["put_stored_total"] == 4, tier
