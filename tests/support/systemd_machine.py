"""A container with a real systemd, booted in a second from this machine's own files.

All its writes go to memory that is freed when it ends. tierd is installed as an operator would
install it: from a wheel, in /opt/tierd. It shares this machine's network.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import Self

import pytest

from tests.support.traffic import children
from tierd.client import Client

BOOT_S = 30.0
COMMAND_S = 60.0
SOCKET = "/run/tierd/tierd.sock"
TOOLS = ("systemd-nspawn", "systemctl", "systemd-analyze", "unshare", "nsenter", "dbus-daemon")
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"/opt/tierd/lib/{PYTHON}/site-packages"

# Mounts are in a mount namespace of the container, so they disappear however the container ends.
_BOOT = """
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/machine"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/machine"
cat > "$1/machine/etc/systemd/system/tierd-machine.target" <<END
[Unit]
Requires=basic.target dbus.service
After=basic.target dbus.service
AllowIsolate=yes
END
# None of this machine's timers may run in it.
ln -s /dev/null "$1/machine/etc/systemd/system/timers.target"
at=$1/machine
shift
exec systemd-nspawn -q -D "$at" --boot --register=no --keep-unit --console=pipe --link-journal=no \
  --hostname=tierd-machine "$@" -- --unit=tierd-machine.target
"""


def unavailable(why: str) -> None:
    """Skip the test, or fail it where TIERD_REQUIRE_SYSTEMD is set."""
    if os.environ.get("TIERD_REQUIRE_SYSTEMD"):
        pytest.fail(f"no machine with systemd: {why}", pytrace=False)
    pytest.skip(f"no machine with systemd: {why}")


class Machine:
    """Boots on entry, with tierd installed; powered off at exit."""

    def __init__(self, directory: Path) -> None:
        """`directory` is empty, and owned by the machine from now on."""
        self._directory = directory
        self._console = directory / "console"
        self._process: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            unavailable("only root can boot one")
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            unavailable(f"{', '.join(missing)} missing (Debian: systemd systemd-container dbus)")
        try:
            self._boot()
            self._install()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        if self._leader:
            os.kill(self._leader, signal.SIGRTMIN + 4)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def root(self) -> Path:
        """The root of its file system."""
        return Path(f"/proc/{self._leader}/root")

    @property
    def socket(self) -> str:
        """tierd's socket, as a path on this machine."""
        return f"{self.root}{SOCKET}"

    def client(self, name: str) -> Client:
        """A new client of its tierd; the caller closes it."""
        return Client(self.socket, name=name, call_timeout_ms=2000)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in it as root."""
        inside = ["nsenter", "-t", str(self._leader), "-m", "-u", "-i", "-n", "-p", "-C", "--"]
        done = subprocess.run(
            [*inside, *command], capture_output=True, text=True, timeout=COMMAND_S, cwd="/"
        )
        if check:
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.journal()}"
        return done

    def show(self, unit: str, *properties: str) -> list[str]:
        """Properties of a unit."""
        told = self.run("systemctl", "show", unit, f"--property={','.join(properties)}").stdout
        values = dict(line.split("=", 1) for line in told.splitlines())
        return [values[name] for name in properties]

    def journal(self, lines: int = 40) -> str:
        """The last lines of its log."""
        return self.run("journalctl", "--no-pager", f"--lines={lines}", check=False).stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file in it."""
        target = Path(f"{self.root}{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        target.chmod(mode)

    def drop_in(self, unit: str, name: str, text: str) -> None:
        """Change a unit until the machine is off or the drop-in is removed; empty text removes
        it."""
        path = f"/run/systemd/system/{unit}.d/{name}.conf"
        if text:
            self.write(path, text)
        else:
            Path(f"{self.root}{path}").unlink(missing_ok=True)
        self.run("systemctl", "daemon-reload")

    def host_pid(self, pid: int) -> int:
        """The id on this machine of a process in it."""
        for path in Path("/proc").glob("[0-9]*/status"):
            try:
                found = re.search(r"^NSpid:\t.*\t(\d+)$", path.read_text(), re.MULTILINE)
            except (FileNotFoundError, ProcessLookupError):
                continue
            own = os.stat(path.parent / "ns/pid").st_ino if found else 0
            theirs = os.stat(f"/proc/{self._leader}/ns/pid").st_ino
            if found and int(found[1]) == pid and own == theirs:
                return int(path.parent.name)
        raise ProcessLookupError(f"the machine has no process {pid}")

    def _boot(self) -> None:
        top = self._directory / "top"
        top.mkdir()
        binds = [f"--bind-ro={sysconfig.get_path('purelib')}:/opt/packages"]
        if not sys.base_prefix.startswith("/usr"):
            binds.append(f"--bind-ro={sys.base_prefix}:/opt/python")
        # It ends with the test process, even if that is killed.
        boot = ["setpriv", "--pdeathsig=TERM"]
        boot += ["unshare", "--mount", "--propagation=private", "sh", "-euc", _BOOT, "sh", str(top)]
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                [*boot, *binds],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        end = time.monotonic() + BOOT_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > end:
                unavailable(f"it does not boot here: {self._console.read_text()[-2000:]}")
            time.sleep(0.05)

    def _is_up(self) -> bool:
        assert self._process is not None
        try:
            below = children(self._process.pid)
            if not below:
                return False
            self._leader = below[0]
            active = self.run("systemctl", "is-active", "tierd-machine.target", check=False)
        except OSError:
            return False
        return active.stdout.strip() == "active"

    def _install(self) -> None:
        """Install tierd in /opt/tierd as `pip install tierd` would, without the network."""
        site = Path(f"{self.root}{SITE}")
        site.mkdir(parents=True)
        packages = Path(sysconfig.get_path("purelib"))
        for entry in packages.iterdir():
            if "tierd" not in entry.name:
                (site / entry.name).symlink_to(f"/opt/packages/{entry.name}")
        with zipfile.ZipFile(build_wheel(self._directory)) as wheel:
            wheel.extractall(site)
        for name in ("tierd", "tierd_backends"):
            compileall.compile_dir(site / name, quiet=1, workers=1)
        home = "/opt/python" if not sys.base_prefix.startswith("/usr") else sys.base_prefix
        self.write("/opt/tierd/pyvenv.cfg", f"home = {home}/bin\n")
        (Path(f"{self.root}/opt/tierd/bin")).mkdir()
        for name in ("python", PYTHON):
            Path(f"{self.root}/opt/tierd/bin/{name}").symlink_to(f"{home}/bin/{PYTHON}")
        start = "import sys\nfrom tierd.cli.main import main\nsys.exit(main())\n"
        self.write("/opt/tierd/bin/tierd", f"#!/opt/tierd/bin/python\n{start}", 0o755)
        # Python may be linked to a library at its build path, which the service cannot see.
        self.write("/etc/ld.so.conf.d/python.conf", f"{home}/lib\n")
        self.run("ldconfig")


def build_wheel(directory: Path) -> Path:
    """Build this checkout's wheel in `directory`; returns its path."""
    checkout = Path(__file__).parents[2]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    [wheel] = directory.glob("*.whl")
    return wheel


def wait_running(machine: Machine, restarts: int, timeout_s: float = 30.0) -> None:
    """Wait until systemd has restarted tierd `restarts` times and tierd is ready."""
    end = time.monotonic() + timeout_s
    while True:
        told = machine.show("tierd", "NRestarts", "SubState")
        if int(told[0]) >= restarts and told[1] == "running":
            return
        assert time.monotonic() < end, f"tierd was not restarted: {told}\n{machine.journal()}"
        time.sleep(0.05)
