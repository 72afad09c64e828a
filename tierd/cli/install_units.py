"""`tierd install-units`: write the service's files for the Python environment that runs it."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

import tierd
from tierd.errors import ConfigError

FILES: Final = {
    "tierd.service": "etc/systemd/system/tierd.service",
    "tierd.socket": "etc/systemd/system/tierd.socket",
    "tierd-warm.service": "etc/systemd/system/tierd-warm.service",
    "tierd.service.d/gpu.conf": "etc/systemd/system/tierd.service.d/gpu.conf",
    "tierd.sysusers.conf": "etc/sysusers.d/tierd.conf",
    "tierd.tmpfiles.conf": "etc/tmpfiles.d/tierd.conf",
    "tierd.toml": "etc/tierd/tierd.toml",
}
"""Shipped files, and their paths below the prefix."""

GPU: Final = "tierd.service.d/gpu.conf"
OPERATORS: Final = "tierd.toml"
"""The operator's file: written once, never replaced."""

SHIPPED_COMMAND: Final = "/opt/tierd/bin/tierd"
"""The command in the shipped units."""

HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Directories that ProtectHome= and PrivateTmp= hide from the service."""

OLDEST: Final = 252
"""Oldest supported systemd, for which the shipped units are written: Debian 12's."""

NEXT: Final = """\
Review /etc/tierd/tierd.toml, then:
  systemd-sysusers tierd.conf && systemd-tmpfiles --create tierd.conf && systemctl daemon-reload
  systemctl enable --now tierd.socket tierd.service"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "install-units",
        help="write the systemd units for this installation",
        description="Write the systemd units, their sysusers.d and tmpfiles.d files, and an "
        "example /etc/tierd/tierd.toml, for the tierd that runs this command. An existing "
        "tierd.toml is kept; all other files are replaced, so run this again after an upgrade, "
        "and put your changes to units into drop-ins. Exit status 2: the command stopped at an "
        "error, and the message says why.",
        epilog="example: /opt/tierd/bin/tierd install-units",
    )
    parser.add_argument(
        "--prefix", type=Path, default=Path("/"), metavar="DIR", help="root to write to (default /)"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be written")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="give the service access to NVIDIA GPUs even if this machine has none",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files that differ, and list them; return the exit status."""
    command = own_command(Path(sysconfig.get_path("scripts")))
    check_visible([Path(command.split()[0]), *map(Path, (sys.prefix, sys.base_prefix)), _package()])
    version = systemd_version()
    gpu = args.gpu or Path("/dev/nvidiactl").exists()
    texts = unit_texts(command, version)
    if not gpu:
        del texts[GPU]
    would = "would be " if args.dry_run else ""
    for name, text in texts.items():
        path = args.prefix / FILES[name]
        try:
            done = install(path, text, keep=name == OPERATORS, dry_run=args.dry_run)
        except OSError as error:
            root = "" if os.geteuid() == 0 else ": run this as root, or pass --prefix DIR"
            raise ConfigError(f"cannot write {path}: {error.strerror}{root}") from error
        print(f"{would if done in ('written', 'replaced') else ''}{done}: {path}")
    if not gpu:
        print("skipped, no NVIDIA GPU on this machine: tierd.service.d/gpu.conf (see --gpu)")
    print(NEXT)
    return 0


def own_command(scripts: Path) -> str:
    """Return the command that starts the tierd of this environment, given its directory of
    scripts. Raises ConfigError for a path with special characters."""
    script = scripts / "tierd"
    command = str(script) if script.exists() else f"{sys.executable} -m tierd.cli.main"
    if re.search(r"[^\w/.+@=: -]", command) or " " in command.split(" -m ")[0]:
        raise ConfigError(f"{command}: install tierd at a path without special characters")
    return command


def check_visible(paths: Iterable[Path]) -> None:
    """Raise ConfigError if the service's sandbox hides one of these."""
    for path in paths:
        for real in (path.absolute(), path.resolve()):
            if any(real.is_relative_to(hidden) for hidden in HIDDEN):
                raise ConfigError(
                    f"{real} is hidden from the service, like everything in {', '.join(HIDDEN)}: "
                    "install tierd and its Python elsewhere, for example: /usr/bin/python3 -m "
                    "venv /opt/tierd && /opt/tierd/bin/pip install 'tierd[daemon]'"
                )


def systemd_version() -> int:
    """Return this machine's systemd version; without systemd, as in an image, the oldest one."""
    try:
        told = subprocess.run(["systemctl", "--version"], capture_output=True, text=True)
    except FileNotFoundError:
        return OLDEST
    found = re.match(r"systemd (\d+)", told.stdout)
    return int(found[1]) if found else OLDEST


def unit_texts(command: str, version: int) -> dict[str, str]:
    """Return all files, for a command and a systemd version. Raises ConfigError if too old."""
    if version < OLDEST:
        raise ConfigError(f"systemd {version} is too old: the units need {OLDEST} or newer")
    texts = {
        name: _shipped().joinpath(*name.split("/")).read_text(encoding="utf-8") for name in FILES
    }
    for name in FILES:
        texts[name] = texts[name].replace(SHIPPED_COMMAND, command)
    unit = texts["tierd.service"]
    if version >= 253:
        unit = unit.replace("Type=notify\n", "Type=notify-reload\n")
        unit = unit.replace("ExecReload=kill -HUP $MAINPID\n", "")
    if version >= 254:
        unit = unit.replace(
            "FileDescriptorStoreMax=",
            "# Kept after stops and failures; `systemctl clean --what=fdstore tierd` frees it.\n"
            "FileDescriptorStorePreserve=yes\nFileDescriptorStoreMax=",
        )
    texts["tierd.service"] = unit
    return texts


def install(path: Path, text: str, *, keep: bool, dry_run: bool) -> str:
    """Write `text` to `path` atomically if it differs; return what was done. Raises OSError."""
    if path.exists():
        if keep:
            return "kept"
        if path.read_text(encoding="utf-8") == text:
            return "unchanged"
        done = "replaced"
    else:
        done = "written"
    if not dry_run:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(text, encoding="utf-8")
        new.chmod(0o644)
        new.replace(path)
    return done


def _package() -> Path:
    return Path(tierd.__file__).parent


def _shipped() -> Traversable:
    """Return the directory of the shipped files: in the package, or beside it in a checkout."""
    packaged = importlib.resources.files(tierd) / "systemd"
    return packaged if packaged.is_dir() else _package().parent / "systemd"
