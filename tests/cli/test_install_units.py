"""`tierd install-units`: files that it writes, keeps and refuses. Other tests run systemd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.cli import install_units
from tierd.cli.install_units import FILES, check_visible, own_command, unit_texts
from tierd.cli.main import main
from tierd.config import load
from tierd.errors import ConfigError

COMMAND = "/srv/kv/bin/tierd"


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the tests may lie in a home directory."""
    monkeypatch.setattr(install_units, "HIDDEN", ())


def files(root: Path) -> dict[str, str]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_text() for path in found}


@pytest.mark.usefixtures("visible")
def test_units_are_written_once_and_operator_files_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An upgrade overwrites the operator's configuration, or leaves old units behind."""
    command = ["install-units", "--gpu", "--prefix", str(tmp_path)]
    assert main([*command, "--dry-run"]) == 0
    assert files(tmp_path) == {}
    assert main(command) == 0
    written = files(tmp_path)
    assert set(written) == set(FILES.values())
    (tmp_path / FILES["tierd.toml"]).write_text("mine")
    (tmp_path / FILES["tierd.socket"]).write_text("old")
    capsys.readouterr()
    assert main(command) == 0
    assert files(tmp_path) == {**written, FILES["tierd.toml"]: "mine"}
    output = capsys.readouterr().out.splitlines()
    assert f"kept: {tmp_path / FILES['tierd.toml']}" in output
    assert f"replaced: {tmp_path / FILES['tierd.socket']}" in output
    assert f"unchanged: {tmp_path / FILES['tierd.service']}" in output


def test_example_configuration_is_valid(tmp_path: Path) -> None:
    """The first start of a new installation fails."""
    path = tmp_path / "tierd.toml"
    path.write_text(unit_texts(COMMAND, 252)["tierd.toml"])
    config = load(path, {})
    assert config.socket in unit_texts(COMMAND, 252)["tierd.socket"]


@pytest.mark.parametrize("version", [252, 253, 254, 257])
def test_units_match_the_installed_systemd(version: int) -> None:
    """A new systemd is used as if it were old, or an old one complains of keys."""
    unit = unit_texts(COMMAND, version)["tierd.service"].splitlines()
    assert ("Type=notify-reload" in unit) == (version >= 253)
    assert ("Type=notify" in unit) == (version < 253)
    assert ("ExecReload=kill -HUP $MAINPID" in unit) == (version < 253)
    assert ("FileDescriptorStorePreserve=yes" in unit) == (version >= 254)
    assert f"ExecStart={COMMAND} serve --config /etc/tierd/tierd.toml" in unit


def test_an_old_systemd_is_refused() -> None:
    """Units that systemd half understands are installed without a word."""
    with pytest.raises(ConfigError, match="249 is too old: the units need 252"):
        unit_texts(COMMAND, 249)


def test_paths_hidden_from_the_service_are_refused(tmp_path: Path) -> None:
    """The service cannot start, for a reason that no log names."""
    with pytest.raises(ConfigError, match="/home/venv/bin/tierd is hidden from the service"):
        check_visible([Path("/usr/bin/python3"), Path("/home/venv/bin/tierd")])
    with pytest.raises(ConfigError, match="without special characters"):
        own_command(_with_script(tmp_path / "a b"))
    assert own_command(_with_script(tmp_path)) == f"{tmp_path}/tierd"


@pytest.mark.usefixtures("visible")
def test_unwritable_prefix_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator without rights gets a traceback."""
    (tmp_path / "etc").write_text("a file")
    assert main(["install-units", "--prefix", str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}/etc/systemd/system/tierd.service" in capsys.readouterr().err


def _with_script(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tierd").touch()
    return directory


def test_every_file_is_shipped() -> None:
    """A file of systemd/ is forgotten by the command."""
    shipped = Path(__file__).parents[2] / "systemd"
    assert {str(p.relative_to(shipped)) for p in shipped.rglob("*") if p.is_file()} == set(FILES)
