"""The `tierd flush` command, with a real daemon and a file tier."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.tiers.bench import SPACE
from tests.support.tiers.flushing import OTHER
from tierd.cli.flush import _matches_nothing
from tierd.cli.main import main
from tierd.types import Namespace


class Scene:
    """A daemon whose L2 and file tier hold blocks of two namespaces."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon

    def fill(self) -> None:
        hashes, parents = blocks.chain(40)
        self.daemon.wait_tier("disk", "ready")
        client = self.daemon.client()
        for space in (SPACE, OTHER):
            contents = [blocks.payload(space, h) for h in hashes]
            stored = list(zip(hashes, parents, contents, strict=True))
            assert all(client.put(client.register(space), stored))
        client.close()
        self.daemon.wait_backed_up()

    def count_served(self, namespace: Namespace) -> int:
        """Return how many blocks of a namespace an engine gets."""
        hashes, _ = blocks.chain(40)
        self.daemon.wait_tier("disk", "ready")
        client = self.daemon.client()
        try:
            return len(client.get(client.register(namespace), hashes, 5000))
        finally:
            client.close()

    def flush(self, *words: str) -> int:
        return main(["flush", "--socket", self.daemon.socket, *words])


@pytest.mark.slow
def test_flush_command(tmp_path, capsys, monkeypatch) -> None:
    """An operator's flush would be undone, also by a restart or a SIGKILL (34, 113)."""
    storage = (
        f'[[storage]]\ntype = "file"\nname = "disk"\npath = "{tmp_path}/store"\n'
        'capacity = "64MiB"\nreserve_free = "0"\nwrite_policy = "write_through"\n'
    )
    daemon = DaemonProcess(tmp_path, capacity="64MiB", storage=storage)
    with daemon:
        scene = Scene(daemon)
        scene.fill()
        assert scene.flush("--namespace", SPACE.digest.hex()[:4], "--yes") == 0
        out = capsys.readouterr().out
        assert "host: 40 blocks dropped" in out
        assert "disk: 40 blocks dropped" in out
        assert SPACE.digest.hex() in out
        assert OTHER.digest.hex() not in out
        assert (scene.count_served(SPACE), scene.count_served(OTHER)) == (0, 40)
        daemon.kill()
        daemon.start()
        assert (scene.count_served(SPACE), scene.count_served(OTHER)) == (0, 40)

        scene.fill()
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
        assert scene.flush("--all") == 2
        assert "--yes" in capsys.readouterr().err
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        assert scene.flush("--all", "--json") == 0
        output = capsys.readouterr()
        assert "40 blocks in host memory" in output.err
        result = json.loads(output.out)
        assert result["complete"]
        assert result["host"]["blocks"] == 80
        assert [tier["blocks"] for tier in result["tiers"]] == [80]
        assert scene.count_served(SPACE) == scene.count_served(OTHER) == 0
        assert daemon.status()["storage"][0]["blocks"] == 0

        for words, named in (
            (("--all", "--yes", "--tier", "tape"), "host, disk"),
            (("--namespace", "abc", "--yes"), "4 to 32 digits"),
            (("--namespace", "0123", "--yes"), "8 to 32 digits"),
            (("--namespace", "../../etc", "--yes"), "4 to 32 digits"),
        ):
            assert scene.flush(*words) == 2
            assert named in capsys.readouterr().err
        assert scene.flush("--namespace", "01234567", "--yes") == 1
        said = capsys.readouterr().err
        assert "no block matches namespace 01234567" in said
        assert f"{SPACE.digest.hex()} ({SPACE.model}, rank 0)" in said
        assert scene.flush("--namespace", SPACE.digest.hex(), "--yes") == 0, (
            "a known namespace without blocks"
        )
        scene.fill()
        daemon.wait_backed_up()
        daemon.stop()
        daemon.start()
        daemon.wait_tier("disk", "ready")
        capsys.readouterr()
        assert scene.flush("--namespace", SPACE.digest.hex()[:12], "--yes") == 0
        assert "no block matches" not in capsys.readouterr().err, "the tier knows the namespace"
        assert scene.flush("--all", "--yes", "--timeout", "0") == 1
        assert "the flush goes on" in capsys.readouterr().err
        daemon.stop()
        assert scene.flush("--all", "--yes") == 1
        assert "no answer from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("namespaces", "garbage", "left", "nothing"),
    [
        ({}, "", 0, True),
        ({"00": 0}, "", 0, True),
        ({"00": 1}, "", 0, False),
        ({}, "parts of it could not be read: x", 0, False),
        ({}, "", 1, False),
    ],
)
def test_flush_reports_no_match_only_if_every_tier_was_read(
    namespaces: dict[str, int], garbage: str, left: int, nothing: bool
) -> None:
    """A digest would be called a typing error because a slab of its blocks cannot be read."""
    result: dict[str, object] = {
        "namespaces": namespaces,
        "tiers": [{"garbage": "", "left": 0}, {"garbage": garbage, "left": left}],
    }
    assert _matches_nothing(result) is nothing
