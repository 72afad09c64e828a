"""`tierd config`: what is wrong, what holds and why, and what there is to set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierd.cli.main import main

FILE = """
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
    made.write_text(FILE)
    return made


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
    """An operator would look in the file for what a variable has set, or a default."""
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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        ("capacity", "capacty", "did you mean host.capacity?"),
        ("kv-blocks", "Not A Bucket", "storage (s3): bucket is"),
        ("bucket =", "bukket =", "did you mean storage (s3).bucket?"),
        ("[host]", 'admin.listen = "0.0.0.0:9464"\n[host]', "which other machines may reach"),
        ("[host]", f'socket = "/{"x" * 200}"\n[host]', "longer than the 107 bytes"),
        ('type = "s3"', 'type = "tape"', "installed: "),
    ],
)
def test_check_says_what_serve_would(
    file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    """A mistake would be found by the restart that it was to be found before."""
    file.write_text(FILE.replace(old, new, 1))
    status = main(["config", "check", "--config", str(file)])
    printed = capsys.readouterr()
    assert said in printed.err
    assert status == (2 if said else 0)
    assert bool(said) != ("all is well" in printed.out)
    assert main(["config", "check", "--json", "--config", str(file)]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is not bool(said)
    assert said in report["problem"]


def test_check_warns_of_what_may_be_right_elsewhere(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file for a large machine could not be checked on a small one, or nothing would be said on
    the machine that it does not fit."""
    file.write_text(FILE.replace("64MiB", "900TiB").replace("[host]", '[host]\nnuma_node = "999"'))
    assert main(["config", "check", "--config", str(file)]) == 0
    printed = capsys.readouterr()
    assert "warning: host.capacity is" in printed.err
    assert "warning: host.numa_node is 999" in printed.err


def test_every_key_is_explained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key could be set, and nobody would know of it, or how to set it from the environment."""
    shown, _ = settings(capsys, file)
    assert main(["config", "docs", "--json"]) == 0
    told = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    common = {key.removeprefix("storage.") for key in told if key.startswith("storage.")}
    for key in shown:
        name = key.rpartition(".")[2]
        path = f"storage.{name}" if key.startswith("storage (") and name in common else key
        assert told[path]["about"].endswith("."), path
    assert told["host.capacity"]["default"] is None
    assert told["storage (file).path"]["variable"] == "TIERD_STORAGE_NAME_PATH"
    assert told["host.pin_max_s"]["live"]
    assert not told["host.eviction"]["live"]
    assert main(["config", "docs"]) == 0
    text = capsys.readouterr().out
    assert "drain_timeout_ms  (default 10000; live; TIERD_DRAIN_TIMEOUT_MS)" in text
    assert max(map(len, text.splitlines())) <= 120
