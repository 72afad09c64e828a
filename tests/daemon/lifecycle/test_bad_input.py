"""Operators' mistakes: each is refused with the wrong value, its place, and what to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.traffic import wait_until
from tierd.client import Client, RefusedError
from tierd.config import Config, backend_options, load, parse
from tierd.daemon.lifecycle.listening import listening_socket
from tierd.errors import ConfigError, NamespaceError
from tierd.types import Namespace
from tierd.wire import messages as m
from tierd.wire.session import encode
from tierd_backends.file import FileOptions

GOOD = '[host]\ncapacity = "64MiB"\n'
FILE = '[[storage]]\ntype = "file"\n'


def config(text: str, environ: Mapping[str, str] | None = None, *, at: Path) -> Config:
    path = at / "tierd.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, environ or {})


# --- the configuration ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[hosst]\ncapacity = 1\n", r"hosst is not a key; did you mean host\?"),
        ("sokcet = 'x'\n" + GOOD, r"sokcet is not a key; did you mean socket\?"),
        ("[host]\ncapactiy = '1GiB'\n", r"host\.capactiy is not a key; did you mean host\.capac"),
        (GOOD + "lease_ttl = 5000\n", r"host\.lease_ttl is not .*did you mean host\.lease_ttl_ms"),
        ("zzz = 1\n" + GOOD, r"zzz is not a key; known: host, socket, allow_uids"),
        ("", r"host\.capacity is missing"),
        ("[host]\n", r"host\.capacity is missing: .*8GiB"),
        ("host = 5\n", r"\[host\] must be a table"),
        ("[host]\ncapacity = '8G'\n", r"host\.capacity: '8G' is not a size: .*GiB"),
        ("[host]\ncapacity = '-1GiB'\n", r"host\.capacity: '-1GiB' is not a size"),
        ("[host]\ncapacity = -1\n", r"host\.capacity: -1 is not a size"),
        ("[host]\ncapacity = 0\n", r"host\.capacity must be more than 0"),
        (GOOD + "min = '65MiB'\n", r"host\.min must be more than 0 and at most host\.capacity"),
        (GOOD + "min = 0\n", r"host\.min must be more than 0"),
        ("[host]\ncapacity = 1.5\n", r"host\.capacity: 1\.5 is not a size"),
        ("[host]\ncapacity = true\n", r"host\.capacity: True is not a size"),
        ("[host]\ncapacity = ['1GiB']\n", r"host\.capacity: \['1GiB'\] is not a size"),
        (GOOD + "lease_ttl_ms = '30s'\n", r"host\.lease_ttl_ms: Expected `int`"),
        (GOOD + "lease_ttl_ms = 10\n", r"host\.lease_ttl_ms: Expected `int` >= 1000"),
        ("drain_timeout_ms = -1\n" + GOOD, r"drain_timeout_ms: Expected `int` >= 0"),
        ("socket = 7\n" + GOOD, r"socket: Expected `str`"),
        ("socket = ''\n" + GOOD, r"socket: Expected `str` of length >= 1"),
        ("allow_uids = ['root']\n" + GOOD, r"allow_uids\[0\]: Expected `int`"),
        ("allow_uids = [-1]\n" + GOOD, r"allow_uids\[0\]: Expected `int` >= 0"),
        (GOOD + "[storage]\ntype = 'file'\n", r"written as \[\[storage\]\]"),
        (GOOD + "[[storage]]\npath = '/x'\n", r"storage\.type is missing"),
        (GOOD + 2 * "[[storage]]\ntype = 'file'\n", r"two storage tiers are named 'file'"),
        (GOOD + "[[storage]]\ntype = 'file'\nname = 3\n", r"storage\[0\]\.name: Expected `str`"),
        (GOOD + FILE + "deadline_ms = 5\n", r"storage \(file\)\.deadline_ms: Expected `int` >= 10"),
        (GOOD + FILE + "deadline_ms = '2s'\n", r"storage \(file\)\.deadline_ms: Expected `int`"),
        (GOOD + FILE + "read_batches = 0\n", r"storage \(file\)\.read_batches: Expected `int` >="),
        (GOOD + FILE + "write_queue = '1G'\n", r"\(file\)\.write_queue: '1G' is not a size"),
        (GOOD + FILE + "write_queue = 0\n", r"storage \(file\)\.write_queue must be more than 0"),
        (GOOD + FILE + "fill_from_lower = 1\n", r"\(file\)\.fill_from_lower: Expected `bool`"),
        (
            GOOD + "".join(f"[[storage]]\ntype = 'file'\nname = 'f{n}'\n" for n in range(9)),
            "9 storage tiers are configured; the maximum is 8",
        ),
        ("[host\n", r"line 1"),
        ("socket = 'a'\nsocket = 'b'\n", r"socket|overwrite"),
    ],
)
def test_config_error_names_the_wrong_key(tmp_path: Path, text: str, says: str) -> None:
    """A misspelt key would be ignored, and the operator would run with its default."""
    with pytest.raises(ConfigError, match=says) as caught:
        config(text, at=tmp_path)
    assert str(tmp_path / "tierd.toml") in str(caught.value)


def test_config_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """The operator would get only a traceback for a wrong path."""
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        load(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path, {})
    (tmp_path / "latin.toml").write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "latin.toml", {})


def test_environment_overrides_the_config_file(tmp_path: Path) -> None:
    """A container could not be configured without writing a file into it."""
    environ = {
        "TIERD_SOCKET": "/run/other.sock",
        "TIERD_ALLOW_UIDS": "0, 1000",
        "TIERD_DRAIN_TIMEOUT_MS": "5",
        "TIERD_HOST_CAPACITY": "1GiB",
        "TIERD_HOST_LEASE_TTL_MS": "2000",
        "HOME": "/",
    }
    got = config("drain_timeout_ms = 7\n" + GOOD, environ, at=tmp_path)
    assert got.socket == "/run/other.sock"
    assert got.allow_uids == [0, 1000]
    assert got.drain_timeout_ms == 5
    assert got.host.capacity == 1 << 30
    assert got.host.lease_ttl_ms == 2000
    assert config("", {"TIERD_HOST_CAPACITY": "4096"}, at=tmp_path).host.capacity == 4096


def test_environment_overrides_a_tiers_key(tmp_path: Path) -> None:
    """A password would have to be in a file, or a container would need its own file."""
    environ = {
        "TIERD_STORAGE_FILE_DEADLINE_MS": "500",
        "TIERD_STORAGE_FILE_FILL_FROM_LOWER": "false",
        "TIERD_STORAGE_FILE_WRITE_QUEUE": "1MiB",
        "TIERD_STORAGE_FILE_PATH": "/data",
        "TIERD_STORAGE_FILE_THREADS": "7",
        "TIERD_STORAGE_FILE_SLOW_DISK_PATH": "/slow",
    }
    text = GOOD + FILE + "path = '/x'\ncapacity = '1GiB'\n" + FILE + "name = 'file-slow.disk'\n"
    first, second = config(text, environ, at=tmp_path).storage
    assert (first.deadline_ms, first.fill_from_lower, first.write_queue) == (500, False, 1 << 20)
    options = backend_options(first, FileOptions)
    assert (options.path, options.threads, options.capacity) == ("/data", 7, "1GiB")
    assert (second.deadline_ms, second.overrides) == (2000, {"path": "/slow"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DEADLINE_MS", "2s", "TIERD_STORAGE_FILE_DEADLINE_MS=2s in the environment"),
        ("FILL_FROM_LOWER", "2", "is neither true nor false"),
        ("TYPE", "s3", "TIERD_STORAGE_FILE_TYPE in the environment: this key can only"),
        ("THREADS", "many", "TIERD_STORAGE_FILE_THREADS=many in the environment"),
        ("PAHT", "/x", "did you mean TIERD_STORAGE_FILE_PATH?"),
        ("SLOW_SM", "1", "did you mean TIERD_STORAGE_FILE_SLOW_MS?"),
        ("WRITE_QUEUE", "much", "'much' is not a size"),
    ],
)
def test_wrong_tier_override_in_the_environment_is_refused(
    name: str, value: str, says: str
) -> None:
    """A typo in a container's environment would be ignored."""
    table = {"type": "file", "path": "/", "capacity": 1}
    raw: dict[str, object] = {"host": {"capacity": "1GiB"}, "storage": [table]}
    with pytest.raises(ConfigError) as caught:
        backend_options(parse(raw, {f"TIERD_STORAGE_FILE_{name}": value}).storage[0], FileOptions)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TIERD_ALLOW_UIDS", "0,root", "TIERD_ALLOW_UIDS=0,root in the environment"),
        ("TIERD_DRAIN_TIMEOUT_MS", "10s", "TIERD_DRAIN_TIMEOUT_MS=10s in the environment"),
        ("TIERD_DRAIN_TIMEOUT_MS", "-1", "drain_timeout_ms"),
        ("TIERD_HOST_CAPACITY", "lots", "host.capacity: 'lots'"),
        ("TIERD_HOST_LEASE_TTL_MS", "1", "host.lease_ttl_ms"),
        ("TIERD_HOST_CAPACTY", "1GiB", "is not a key; did you mean TIERD_HOST_CAPACITY?"),
        ("TIERD_HOST", "1GiB", "TIERD_HOST in the environment is not a key"),
        ("TIERD_ZZZ", "1", "TIERD_ZZZ in the environment is not a key; `tierd config docs`"),
        ("TIERD_STORAGE_NOBODY_PATH", "/", "begin with: none, as there is no tier"),
    ],
)
def test_wrong_override_in_the_environment_is_refused(name: str, value: str, says: str) -> None:
    """A typo in a user list would silently admit fewer users, or other users."""
    with pytest.raises(ConfigError) as caught:
        parse({"host": {"capacity": "1GiB"}}, {name: value})
    assert says in str(caught.value)


# --- starting -------------------------------------------------------------------------


def serve(text: str, at: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `tierd serve`, expecting it not to start."""
    path = at / "tierd.toml"
    path.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "tierd.cli.main", "serve", "--config", str(path)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[host]\ncapacty = '1GiB'\n", "did you mean host.capacity?"),
        ("[host]\ncapacity = '900TiB'\n", "lower host.capacity"),
        ("socket = '/proc/tierd/x.sock'\n" + GOOD, "cannot use socket /proc/tierd/x.sock"),
        (f"socket = '/tmp/{'x' * 120}'\n" + GOOD, "107 bytes"),
        ("socket = '{at}/s'\n" + GOOD + "[[storage]]\ntype = 'flie'\n", "'flie' is unknown; inst"),
        (
            "socket = '{at}/s'\n" + GOOD + "[[storage]]\ntype = 'file'\npaht = '/x'\n",
            "storage (file).paht is not a key; did you mean storage (file).path?",
        ),
        (
            "socket = '{at}/s'\n"
            + GOOD
            + "[[storage]]\ntype = 'file'\npath = '{at}/tierd.toml/x'\ncapacity = '1GiB'\n",
            "storage (file): {at}/tierd.toml/x cannot be used",
        ),
        (
            "socket = '{at}/s'\n"
            + GOOD
            + "[[storage]]\ntype = 'file'\npath = '{at}/f'\ncapacity = 'much'\n",
            "storage (file): capacity: 'much' is not a size",
        ),
    ],
    ids=["key", "memory", "unwritable", "long", "type", "option", "store", "option size"],
)
def test_serve_exits_with_2_on_wrong_input(tmp_path: Path, text: str, says: str) -> None:
    """systemd would restart it indefinitely, and the journal would hold a traceback."""
    done = serve(text.replace("{at}", str(tmp_path)), tmp_path)
    assert says.replace("{at}", str(tmp_path)) in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_wrong_command_line_exits_with_2(tmp_path: Path) -> None:
    """A script could not tell a typo from a daemon that is down."""
    for words, status in (
        (["serve", "--config", str(tmp_path / "none.toml")], 2),
        (["sevre"], 2),
        ([], 2),
        (["status", "--socket", str(tmp_path / "none.sock")], 1),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "tierd.cli.main", *words],
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert done.returncode == status, done.stderr
        assert done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "tierd", capacity="64MiB", storage="") as process:
        yield process


@pytest.mark.slow
def test_second_daemon_on_a_socket_is_refused_and_the_first_keeps_serving(
    running: DaemonProcess,
) -> None:
    """Two daemons on one socket: engines would talk to either, and one would leak."""
    assert running.process is not None
    client = running.client()
    try:
        handle = client.register(blocks.namespace())
        hashes, parents = blocks.chain(1)
        body = blocks.payload(handle.namespace, hashes[0])
        assert client.put(handle, [(hashes[0], parents[0], body)]) == [True]
        done = serve(running.config.read_text(), running.directory)
        assert done.returncode == 2
        assert (
            f"another tierd (pid {running.process.pid}) serves on {running.socket}" in done.stderr
        )
        assert "Traceback" not in done.stderr
        assert [bytes(view) for view in client.get(handle, hashes, 0)] == [body]
        assert Path(running.socket).is_socket()
        other = running.client()
        assert other.status()["version"]
        other.close()
    finally:
        client.close()


@pytest.mark.slow
def test_second_daemon_on_a_file_tier_directory_serves_without_it(tmp_path: Path) -> None:
    """Two daemons with copied configurations would write the same slabs."""
    with DaemonProcess(tmp_path / "tierd") as first:
        first.wait_tier("file", "ready")
        holder = (first.store / "LOCK").read_text().strip()
        text = first.config.read_text().replace(first.socket, str(tmp_path / "second.sock"))
        (tmp_path / "second.toml").write_text(text)
        second_log = tmp_path / "second.log"
        with second_log.open("wb") as log:
            words = ["serve", "--config", str(tmp_path / "second.toml")]
            second = subprocess.Popen([sys.executable, "-m", "tierd.cli.main", *words], stderr=log)
        says = f"{first.store} is in use by process {holder}"
        wait_until(lambda: says in second_log.read_text(), 20, "it is not refused")
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert second.wait(2) == 2
            assert not (tmp_path / "second.sock").exists()
        if second.poll() is None:
            # On a very busy machine the tier's warning comes after the wait for tiers is over.
            assert "serves without it" in second_log.read_text()
            second.terminate()
            assert second.wait(20) == 0
        assert first.tiers()["file"]["state"] == "ready"


@pytest.mark.slow
def test_socket_of_a_killed_daemon_is_replaced(running: DaemonProcess) -> None:
    """After a crash an operator would have to remove a file before tierd starts again."""
    running.kill()
    assert Path(running.socket).is_socket()
    running.start()
    assert running.stop() == 0
    assert not Path(running.socket).exists()


def test_regular_file_at_the_socket_path_is_not_deleted(tmp_path: Path) -> None:
    """A wrong path in the configuration would delete a file."""
    path = tmp_path / "precious"
    path.write_text("data")
    with (
        pytest.raises(ConfigError, match=r"precious exists and is not a socket"),
        listening_socket(path),
    ):
        pass
    assert path.read_text() == "data"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="is not a socket"), listening_socket(link):
        pass
    assert link.is_symlink()


def test_socket_is_accessible_to_owner_and_group_only(tmp_path: Path) -> None:
    """Every user of the node could read others' prompts out of the cache."""
    path = tmp_path / "tierd.sock"
    with listening_socket(path):
        assert path.stat().st_mode & 0o777 == 0o660
    assert not path.exists()


# --- clients --------------------------------------------------------------------------


@pytest.mark.slow
def test_client_of_another_release_is_told_the_version(
    running: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After half an upgrade the engine would always miss, with no reason given."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(running.socket)
        sock.sendall(encode(m.Hello(99, "next release")))
        said = b""
        while chunk := sock.recv(4096):
            said += chunk
    assert f"speaks protocol version {m.PROTOCOL_VERSION}, the client speaks 99".encode() in said
    assert b"install the same tierd release on both sides" in said
    monkeypatch.setattr(m, "PROTOCOL_VERSION", 99)
    client = running.client()
    try:
        with pytest.raises(RefusedError, match="the client speaks 99"):
            client.register(blocks.namespace())
        assert "the client speaks 99" in client.last_error
    finally:
        client.close()
    assert "client speaks protocol 99" in running.log.read_text()


FIELDS = blocks.namespace().to_fields()


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_namespace_with_a_missing_field_is_refused_by_name(name: str) -> None:
    """A default in its place would let KV of two models meet under one key."""
    with pytest.raises(NamespaceError, match=f"'{name}' is missing"):
        Namespace.from_fields({key: value for key, value in FIELDS.items() if key != name})
    wrong = [] if name == "groups" else object()
    with pytest.raises(NamespaceError, match=f"'{name}'"):
        Namespace.from_fields({**FIELDS, name: wrong})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tp_rank", 1, "'tp_rank' is not below 'tp_size'"),
        ("block_bytes", 0, "'block_bytes' is out of range"),
        ("block_bytes", 1 << 40, "'block_bytes' is out of range"),
        ("block_bytes", (1 << 30) + 1, "'block_bytes' exceeds"),
        ("block_tokens", True, "'block_tokens' must be an integer"),
        ("tp_size", 1.0, "'tp_size' must be an integer"),
        ("model", "", "'model' must be a non-empty string"),
        ("model", b"bytes", "'model' must be a non-empty string"),
        ("hash_root", bytes(31), "'hash_root' must be 32 bytes"),
        ("hash_scheme", "builtin", "--prefix-caching-hash-algo sha256_cbor"),
        ("hash_scheme", "sha256", "--prefix-caching-hash-algo sha256_cbor"),
        ("format_version", 1, "this tierd stores version 2"),
        ("groups", [1], "'groups' must be"),
        ("extra", 1, "'extra' is unknown"),
    ],
)
def test_namespace_with_a_wrong_field_is_refused_by_name(
    name: str, value: object, says: str
) -> None:
    """The engine would run on KV whose meaning has not been checked."""
    with pytest.raises(NamespaceError) as caught:
        Namespace.from_fields({**FIELDS, name: value})
    assert says in str(caught.value)


@pytest.mark.slow
def test_daemon_refuses_a_wrong_namespace_and_keeps_serving(running: DaemonProcess) -> None:
    """A third party's connector would register namespaces that the daemon cannot tell apart."""
    bad = [
        {key: value for key, value in FIELDS.items() if key != "kv_dtype"},
        {**FIELDS, "color": "red"},
        {**FIELDS, "hash_scheme": "builtin"},
        {**FIELDS, "tp_rank": "0"},
        {},
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(running.socket)
        sock.sendall(encode(m.Hello(m.PROTOCOL_VERSION, "third party")))
        for call, fields in enumerate(bad):
            sock.sendall(encode(m.Register(call + 1, fields, False)))
        sock.sendall(encode(m.Register(9, FIELDS, False)))
        end = encode(m.Registered(9, 0, 4096, 64 * 1024 // 32 // 4))
        said = b""
        while end not in said:
            said += sock.recv(4096)
    for reason in (b"'kv_dtype' is missing", b"'color' is unknown", b"sha256_cbor", b"'tp_rank'"):
        assert reason in said
    assert "third party): registration refused" in running.log.read_text()


def test_client_refuses_a_wrong_namespace(tmp_path: Path) -> None:
    """The mistake would show only as a cache that never hits."""
    client = Client(str(tmp_path / "none.sock"))
    wrong = {name: getattr(blocks.namespace(), name) for name in FIELDS} | {"tp_size": 0}
    with pytest.raises(NamespaceError, match="'tp_size'"):
        client.register(Namespace(**wrong))
    client.close()


STRANGER = """
import os, sys
from tests.support import blocks
from tierd.client import Client, RefusedError
# Not before the imports: this user may not be able to read the interpreter's files.
os.setgid(65534)
os.setuid(65534)
client = Client(sys.argv[1], name="stranger", call_timeout_ms=5000)
handle = client.begin_register(blocks.namespace())
told = []
for call in (
    lambda: client.register(blocks.namespace()) and "",
    lambda: client.put(handle, [(bytes(32), blocks.ROOT, bytes(4096))]),
    lambda: client.get(handle, [bytes(32)], 0),
):
    try:
        told.append(str(call()))
    except RefusedError as error:
        told.append(str(error))
print(*told, sep="; ")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_user_not_in_the_allow_list_is_refused() -> None:
    """Any user of the node could read the KV, and so the prompts, of all engines."""

    def stranger(process: DaemonProcess) -> str:
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, process.socket],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with tempfile.TemporaryDirectory() as name:
        # Not pytest's directory, which other users may not enter.
        directory = Path(name)
        directory.chmod(0o755)
        refuse_then_allow(directory, stranger)


def refuse_then_allow(directory: Path, stranger: Callable[[DaemonProcess], str]) -> None:
    with DaemonProcess(directory / "closed", capacity="64MiB", storage="") as process:
        assert stranger(process).count("refuses this process: Permission denied") == 3
        # The file's mode would keep this user out by itself.
        Path(process.socket).chmod(0o666)
        said = stranger(process)
        assert said.count("this process: uid 65534 may not connect: see allow_uids") == 3
        assert "uid 65534" in process.log.read_text()
        client = process.client()
        counters = client.status()["counters"]
        client.close()
        assert isinstance(counters, dict)
        assert counters["clients_refused_total"] == 1
    extra = "allow_uids = [0, 65534]"
    with DaemonProcess(directory / "open", capacity="64MiB", storage="", extra=extra) as process:
        assert stranger(process).startswith("; [True]; [<memory")
        closed = process.config.read_text()
        process.config.write_text(closed.replace(extra, "allow_uids = [0]"))
        process.reload()
        assert "Permission denied" in stranger(process)
        process.config.write_text(closed)
        process.reload()
        assert stranger(process).startswith("; [True]; [<memory")
        assert (
            doctor(process, "65534") == doctor(process, "nobody") == doctor(process, "root") == {}
        )
        assert doctor(process, "2000") == {
            "user_not_allowed": "user 2000 has uid 2000, which is not in allow_uids"
        }
        directory.chmod(0o700)
        assert list(doctor(process, "65534")) == ["user_denied"]


def doctor(process: DaemonProcess, user: str) -> dict[str, str]:
    """Return doctor's findings for a user, by code."""
    words = ["doctor", "--json", "--config", str(process.config), "--user", user]
    done = subprocess.run(
        [sys.executable, "-m", "tierd.cli.main", *words], capture_output=True, text=True, timeout=60
    )
    found = {each["code"]: each["what"] for each in json.loads(done.stdout)["findings"]}
    return {code: what for code, what in found.items() if code.startswith("user_")}


@pytest.mark.slow
def test_stop_during_startup_leaves_nothing_behind(tmp_path: Path) -> None:
    """An impatient operator's stop would leave an unsupervised daemon."""
    path = tmp_path / "tierd.toml"
    path.write_text(f"socket = '{tmp_path}/s'\n" + GOOD)
    child = subprocess.Popen(
        [sys.executable, "-m", "tierd.cli.main", "serve", "--config", str(path)],
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 20
    while not (tmp_path / "s").exists():
        assert time.monotonic() < end
        time.sleep(0.002)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) in (0, -signal.SIGTERM)
    with listening_socket(tmp_path / "s"):
        pass
