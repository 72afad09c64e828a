"""`tierd config`: errors, the values in effect with their origin, and all keys."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tierd.cli.main import main
from tierd.config import OTHER_VARIABLES, load
from tierd.errors import ConfigError

GOOD = """socket = "{at}/s"
[host]
capacity = "64MiB"
"""
DISK = """[[storage]]
type = "file"
name = "disk"
path = "{at}/kv"
capacity = "1GiB"
"""
FILE = """socket = "{at}/s"
[host]
capacity = "64MiB"
[[storage]]
type = "redis"
url = "redis://u:hunter1@127.0.0.1:6379"
slow_ms = 300
[[storage]]
type = "s3"
bucket = "kv-blocks"
access_key = "hunter2"
secret_key = "hunter3"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "tierd.toml"
    made.write_text(FILE.replace("{at}", str(tmp_path)))
    return made


def tierd(*words: str, files: int = 4096) -> subprocess.CompletedProcess[str]:
    """The command, as an operator gives it, with a limit of open files."""
    limit = ["prlimit", f"--nofile={files}:{files}", sys.executable, "-m", "tierd.cli.main"]
    return subprocess.run([*limit, *words], capture_output=True, text=True, timeout=60)


def settings(
    capsys: pytest.CaptureFixture[str], file: Path
) -> tuple[dict[str, object], dict[str, str]]:
    """Values and origins, as shown."""
    assert main(["config", "show", "--json", "--config", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    return {s["key"]: s["value"] for s in found}, {s["key"]: s["origin"] for s in found}


def test_values_are_shown_with_their_origin(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would look in the file for a value that a variable or a default has set."""
    monkeypatch.setenv("TIERD_HOST_PIN_SHARE", "0.1")
    monkeypatch.setenv("TIERD_STORAGE_S3_PREFIX", "elsewhere")
    monkeypatch.setenv("TIERD_STORAGE_S3_SLOW_MS", "77")
    values, origins = settings(capsys, file)
    for key, value, origin in (
        ("host.capacity", "64MiB", "file"),
        ("host.pin_share", 0.1, "TIERD_HOST_PIN_SHARE"),
        ("host.lease_ttl_ms", 30_000, "default"),
        ("storage (redis).slow_ms", 300, "file"),
        ("storage (redis).deadline_ms", 2000, "default"),
        ("storage (s3).bucket", "kv-blocks", "file"),
        ("storage (s3).connections", 8, "default"),
        ("storage (s3).prefix", "elsewhere", "TIERD_STORAGE_S3_PREFIX"),
        ("storage (s3).slow_ms", 77, "TIERD_STORAGE_S3_SLOW_MS"),
        ("prefetch.min_tokens", 256, "default"),
    ):
        assert (values[key], origins[key]) == (value, origin)
    assert main(["config", "show", "--config", str(file)]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == len(values)
    assert 'storage (s3).prefix = "elsewhere"' in text


def test_secrets_are_not_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is pasted into a ticket would open the store."""
    for more in ([], ["--json"]):
        assert main(["config", "show", "--config", str(file), *more]) == 0
        assert "hunter" not in capsys.readouterr().out
    values, _ = settings(capsys, file)
    assert values["storage (redis).url"] == "redis://***@127.0.0.1:6379"
    assert values["storage (redis).password"] == ""
    assert values["storage (s3).secret_key"] == "(not shown)"


WRONG = {
    "key": ("capacity", "capacty", "did you mean host.capacity?"),
    "bucket": ("kv-blocks", "Not A Bucket", "storage (s3): bucket is"),
    "option": ("bucket =", "bukket =", "did you mean storage (s3).bucket?"),
    "open port": ("[host]", 'admin.listen = "0.0.0.0:9464"\n[host]', "other machines can reach"),
    "port": (
        "[host]",
        'admin.listen = "192.0.2.1:9464"\nadmin.allow_remote = true\n[host]',
        "cannot",
    ),
    "long": ("{at}/s", f"/{'x' * 200}", "longer than the 107 bytes"),
    "file": ("{at}/s", "{at}/tierd.toml", "is not a socket"),
    "below a file": ("{at}/s", "{at}/tierd.toml/s", "tierd.toml is not a directory"),
    "one socket": ("[host]", 'admin.listen = "{at}/s"\n[host]', "socket and admin.listen are both"),
    "type": ('type = "s3"', 'type = "tape"', "installed: "),
    "memory": ("64MiB", "900TiB", "host.capacity is 900 TiB, but "),
    "node": ("[host]", '[host]\nnuma_node = "999"', "host.numa_node is 999"),
    "case": ("[host]", '[host]\neviction = "LRU"', 'case-sensitive: write "lru"'),
    "choice": (
        "[host]",
        '[host]\neviction = "hazzard"',
        'is not one of hazard, credit, lru, lfu, s3fifo, arc; did you mean "hazard"?',
    ),
    "option case": ('type = "s3"', 'type = "s3"\nsse = "aes256"', 'case-sensitive: write "AES256"'),
    "unit": ("64MiB", "1G", 'write "1GiB" for units of 1,073,741,824 bytes'),
    "one path": ("[[storage]]", DISK + DISK.replace("disk", "other") + "[[storage]]", "at {at}/kv"),
    "one link": (
        "[[storage]]",
        DISK + DISK.replace("disk", "other").replace("{at}/kv", "{at}/link") + "[[storage]]",
        "storage (disk) and storage (other) are both at",
    ),
    "below": ("[[storage]]", DISK.replace("{at}", "{at}/tierd.toml") + "[[storage]]", "directory"),
    "format": ("[[storage]]", DISK.replace("/kv", "/old") + "[[storage]]", "this tierd writes"),
    "files": ("[[storage]]", f'{DISK}slab = "1KiB"\n[[storage]]', "raise LimitNOFILE, or `slab`"),
    "sizes": (
        "[[storage]]",
        DISK.replace("1GiB", "much") + 'reserve_free = "101%"\n[[storage]]',
        "storage (disk): capacity: 'much' is not a size",
    ),
    "policy": (
        "[[storage]]",
        f'{DISK}eviction = "LFU"\n[[storage]]',
        'case-sensitive: write "lfu"',
    ),
}
"""Configurations that `serve` refuses: a text of the file, its replacement, and the error."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", *WRONG])
def test_check_reports_the_errors_of_serve(file: Path, name: str) -> None:
    """A mistake would be found by the restart that it was to be found before."""
    old, new, said = WRONG.get(name, ("", "", ""))
    text, at = FILE.replace(old, new, 1), str(file.parent)
    file.write_text(text.replace("{at}", at))
    (file.parent / "old").mkdir()
    (file.parent / "old" / "FORMAT").write_text("tierd file store 0\n")
    (file.parent / "link").symlink_to("kv")
    before = sorted(file.parent.rglob("*"))
    checked = tierd("config", "check", "--config", str(file), files=1000)
    assert said.replace("{at}", at) in checked.stderr
    assert checked.returncode == (2 if said else 0)
    assert ("no problems" in checked.stdout) is not bool(said)
    assert sorted(file.parent.rglob("*")) == before, "a check leaves something"
    if said:
        served = tierd("serve", "--config", str(file), files=1000)
        assert (served.returncode, served.stderr) == (2, checked.stderr)
        assert sorted(file.parent.rglob("*")) == before, "what cannot serve leaves something"


def test_all_errors_are_reported_at_once(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with five mistakes would take five restarts."""
    monkeypatch.setenv("TIERD_HOST_PIN_SHAER", "0.1")
    monkeypatch.setenv("TIERD_DRAIN_TIMEOUT_MS", "soon")
    text = FILE.replace("64MiB", "900TiB").replace("[host]", 'lisen = ""\n[host]\neviction = "LRU"')
    text = text.replace("slow_ms = 300", 'slow_ms = "300ms"\nttl_s = -1').replace("kv-", "KV-")
    file.write_text(text.replace("{at}", str(file.parent)) + "sse = 1\nprefiks = 2\n")
    assert main(["config", "check", "--json", "--config", str(file)]) == 2
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    output = report["problems"]
    for said in (
        "lisen is not a key",
        "host.eviction: 'LRU'",
        "TIERD_DRAIN_TIMEOUT_MS=soon",
        "TIERD_HOST_PIN_SHAER in the environment is not a key; did you mean TIERD_HOST_PIN_SHARE?",
        "storage (redis).slow_ms: Expected `int`",
        "storage (redis).ttl_s: Expected `int` >= 0",
        "storage (s3).sse: ",
        "storage (s3).prefiks is not a key; did you mean storage (s3).prefix?",
        "storage (s3): bucket is 'KV-blocks'",
        "host.capacity is 900 TiB",
    ):
        [problem] = [problem for problem in output if said in problem]
        assert problem.startswith(f"{file}: ")
    assert len(output) == 10
    assert main(["config", "check", "--config", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"tierd: {problem}" for problem in output]


REDIS = {
    "prefix": ("a{b}", "prefix is 'a{b}'"),
    "password_file": ("/p", "set the password once"),
    "username": ("v", "set the user once"),
    "cluster": (True, "a cluster has no databases"),
    "tls_ca": ("ca.pem", "tls_ca and tls_cert need a url that begins with rediss://"),
    "tls_key": ("key.pem", "tls_key needs tls_cert"),
    "capacity": ("1G", "capacity: '1G' is not a size"),
    "ttl_s": (-1, "ttl_s: Expected `int` >= 0"),
}
S3 = {
    "endpoint": ("host:1", "endpoint is 'host:1'"),
    "prefix": ("/a", "prefix is '/a'"),
    "secret_key": ("", "access_key and secret_key belong together"),
    "profile": ("x", "access_key and profile exclude each other"),
    "region": ("eu west", "region is 'eu west'"),
    "storage_class": ("GLACIER", "storage_class is GLACIER"),
    "tls_ca": ("/nowhere/ca.pem", "tls_ca /nowhere/ca.pem is not a file"),
    "connections": (0, "connections is 0"),
    "timeout_ms": (-1, "timeout_ms is -1"),
    "capacity": ("1G", "capacity: '1G' is not a size"),
    # The next check, "aws:kms" for a kms_key, follows once this one is corrected.
    "sse": (1, "sse: "),
    "kms_key": ("k", ""),
}


@pytest.mark.parametrize(
    ("sound", "wrong"),
    [
        ('type = "redis"\nurl = "redis://u:hunter1@host/3"\n', REDIS),
        ('type = "redis"\nurl = "http://host/?ssl=true"\n', {"ttl_s": REDIS["ttl_s"]}),
        ('type = "redis"\n', {"prefix": REDIS["prefix"]}),
        ('type = "s3"\nbucket = "KV"\naccess_key = "hunter2"\n', S3),
    ],
    ids=["redis", "redis's url", "redis without url", "s3"],
)
def test_all_errors_of_a_tier_are_reported_at_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sound: str,
    wrong: dict[str, tuple[object, str]],
) -> None:
    """Each mistake in a table would need another restart to be found."""
    file = tmp_path / "tierd.toml"
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, (value, _) in wrong.items())
    file.write_text(f"{GOOD}[[storage]]\n{sound}{table}".replace("{at}", str(tmp_path)))
    assert main(["config", "check", "--json", "--config", str(file)]) == 2
    output = json.loads(capsys.readouterr().out)["problems"]
    said = [words for _, words in wrong.values() if words]
    if "http://" in sound:
        said += ["url has the scheme 'http'", "url has parameters"]
    elif "url" not in sound and "redis" in sound:
        said = ["storage (redis).url is missing"]
    elif "KV" in sound:
        said.append("bucket is 'KV'")
    for words in said:
        assert len([problem for problem in output if words in problem]) == 1, words
    assert len(output) == len(said)
    assert "hunter" not in str(output)


@pytest.mark.slow
def test_check_warns_as_serve_does(tmp_path: Path) -> None:
    """A limit that keeps host memory small would be found after the restart, in the log."""
    file = tmp_path / "tierd.toml"
    file.write_text(GOOD.replace("{at}", str(tmp_path)).replace("64MiB", "1GiB"))
    done = tierd("config", "check", "--config", str(file), files=256)
    assert done.returncode == 0
    [warning] = done.stderr.splitlines()
    assert warning.startswith("tierd: warning: host.capacity is 1.00 GiB and needs ")
    assert "no problems" not in done.stdout
    done = tierd("config", "check", "--json", "--config", str(file), files=256)
    report = json.loads(done.stdout)
    assert (report["ok"], report["problems"]) == (True, [])
    assert [f"tierd: warning: {each}" for each in report["warnings"]] == [warning]
    assert not tierd("config", "check", "--elsewhere", "--config", str(file), files=256).stderr
    limit = ["prlimit", "--nofile=256:256"]
    served = DaemonProcess(tmp_path / "tierd", capacity="1GiB", storage="", launcher=limit)
    with served as daemon:
        assert warning.removeprefix("tierd: warning: ") in daemon.log.read_text()


def test_check_of_a_file_for_another_machine(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file for a large machine could not be checked on a small one."""
    text = FILE.replace("64MiB", "900TiB").replace("[host]", '[host]\nnuma_node = "999"')
    file.write_text(text)
    assert main(["config", "check", "--elsewhere", "--config", str(file)]) == 0
    file.write_text(text.replace("bucket", "bukket"))
    assert main(["config", "check", "--elsewhere", "--config", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.slow
def test_check_while_tierd_is_running(tmp_path: Path) -> None:
    """The check before a reload would call a file wrong because tierd runs with it, or one right
    that another tierd's directory, port or socket stands against."""
    admin = '[admin]\nlisten = "127.0.0.1:0"\n'
    with DaemonProcess(tmp_path / "tierd", extra=admin) as daemon:
        daemon.wait_tier("file", "ready")
        assert tierd("config", "check", "--config", str(daemon.config)).returncode == 0
        text = daemon.config.read_text()
        other = tmp_path / "other.toml"
        other.write_text(text.replace(daemon.socket, str(tmp_path / "other.sock")))
        for words in (("config", "check"), ("serve",)):
            done = tierd(*words, "--config", str(other))
            assert done.returncode == 2
            assert f"storage (file): {daemon.store} is in use by process" in done.stderr
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listen = f"127.0.0.1:{taken.getsockname()[1]}"
            other.write_text(
                GOOD.replace("{at}", str(tmp_path)) + f'[admin]\nlisten = "{listen}"\n'
            )
            done = tierd("config", "check", "--config", str(other))
            assert (done.returncode, done.stderr.count(listen)) == (2, 1)
        again = tierd("serve", "--config", str(daemon.config))
        assert again.returncode == 2
        assert f"another tierd (pid {daemon.pid}) serves on {daemon.socket}" in again.stderr


def test_other_variables_are_not_errors(file: Path) -> None:
    """In a pod beside a Service named tierd, or in its own tests, tierd would not start."""
    environ = {
        "TIERD_SERVICE_HOST": "10.0.0.1",
        "TIERD_SERVICE_PORT": "9464",
        "TIERD_SERVICE_PORT_METRICS": "9464",
        "TIERD_PORT": "tcp://10.0.0.1:9464",
        "TIERD_PORT_9464_TCP": "tcp://10.0.0.1:9464",
        "TIERD_PORT_9464_TCP_ADDR": "10.0.0.1",
        "TIERD_METRICS_SERVICE_HOST": "10.0.0.1",
        "TIERDOWN": "1",
        **dict.fromkeys(OTHER_VARIABLES, "x"),
    }
    load(file, environ)
    with pytest.raises(ConfigError, match="TIERD_SERVICE"):
        load(file, {"TIERD_SERVICE": "1"})


def test_own_variables_are_known() -> None:
    """A variable of the tests would keep the daemons that they start from starting."""
    root = Path(__file__).parents[2]
    read = re.compile(
        r"(?:environ(?:\.get\(|\[|\.setdefault\()|getenv\(|\$\{?|^)\W{0,2}(TIERD_[A-Z_]+[A-Z])",
        re.MULTILINE,
    )
    named = set()
    for path in [root / "Makefile", *root.glob("*/**/*.py"), *root.glob("*/**/*.sh")]:
        if ".venv" not in path.parts and "build" not in path.parts:
            named |= set(read.findall(path.read_text()))
    named -= {"TIERD_SOCKET"}
    assert named
    assert named <= OTHER_VARIABLES


def test_every_key_has_a_description(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key would be undocumented, or its environment variable unknown."""
    shown, _ = settings(capsys, file)
    assert main(["config", "docs", "--json"]) == 0
    output = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    common = {key.removeprefix("storage.") for key in output if key.startswith("storage.")}
    for key in shown:
        name = key.rpartition(".")[2]
        path = f"storage.{name}" if key.startswith("storage (") and name in common else key
        assert output[path]["about"].endswith("."), path
    assert output["host.capacity"]["default"] is None
    assert output["storage (file).path"]["variable"] == "TIERD_STORAGE_NAME_PATH"
    assert output["host.pin_max_s"]["live"]
    assert not output["host.eviction"]["live"]
    assert main(["config", "docs"]) == 0
    text = capsys.readouterr().out
    assert "drain_timeout_ms  (default 10000; live; TIERD_DRAIN_TIMEOUT_MS)" in text
    assert max(map(len, text.splitlines())) <= 120
