"""`tierd hotset`, /v1/hotset and the state directory, with a real daemon."""

from __future__ import annotations

import io
import itertools
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.blocks import chain, namespace, payload
from tests.support.daemon_process import DaemonProcess
from tests.support.raw_peer import RawPeer
from tierd.cli.common.operator import Operator
from tierd.cli.main import main
from tierd.client import Client
from tierd.daemon.http.admin import HOTSET
from tierd.daemon.session.handles import HANDLES_MAX
from tierd.hotset import Hot, HotRun, HotSet, pieces
from tierd.lines import sealed
from tierd.types import Namespace
from tierd.wire import messages as m

pytestmark = pytest.mark.slow

RANKS = [namespace(tp_size=2, tp_rank=rank) for rank in range(2)]
OTHER = namespace(model="other\x1b[31m", block_tokens=32)
HOT, _ = chain(8, "hot")
COLD, _ = chain(12, "cold")
ONE, _ = chain(3, "one")
REQUESTS = itertools.count(1)


def store(client: Client, spaces: Sequence[Namespace], count: int, tag: str) -> None:
    hashes, parents = chain(count, tag)
    for space in spaces:
        blocks = [(h, p, payload(space, h)) for h, p in zip(hashes, parents, strict=True)]
        assert all(client.put(client.register(space), blocks))


def use(client: Client, spaces: Sequence[Namespace], hashes: Sequence[bytes]) -> None:
    """Count one request, however often it must ask."""
    handles = [client.register(space) for space in spaces]
    request = next(REQUESTS)
    end = time.monotonic() + 20
    while True:
        pending = client.begin_acquire(handles, hashes, 5000, request=request)
        while not pending.done:
            client.wait(0.1)
        if pending.lease is not None:
            client.release(pending.lease)
            if pending.lease.blocks == len(hashes):
                return
        assert time.monotonic() < end


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Two ranks with what was used thrice and what was not, and another model; a state
    directory, and the admin's socket."""
    directory = tmp_path_factory.mktemp("hotset")
    admin = f'state_dir = "{directory}/state"\n[admin]\nlisten = "{directory}/admin.sock"'
    with DaemonProcess(directory, capacity="64MiB", extra=admin) as process:
        with closing(process.client()) as client:
            store(client, RANKS, 8, "hot")
            store(client, RANKS, 12, "cold")
            store(client, [OTHER], 3, "one")
            for _ in range(3):
                use(client, RANKS, HOT)
            use(client, RANKS, COLD)
        process.wait_backed_up()
        yield process


def tierd(daemon: DaemonProcess, *words: str) -> int:
    return main(["hotset", *words, "--socket", daemon.socket])


def runs_in(raw: bytes) -> list[Hot]:
    return list(HotSet(io.BytesIO(raw), "it"))


def summary(hots: Sequence[Hot]) -> list[tuple[list[bytes], int, list[bytes]]]:
    return [([s.digest for s in hot.namespaces], hot.run.uses, hot.run.hashes) for hot in hots]


DIGESTS = [space.digest for space in RANKS]
ALL = [(DIGESTS, 3, HOT), (DIGESTS, 1, COLD), ([OTHER.digest], 0, ONE)]


def wait_until_counted(daemon: DaemonProcess, path: Path) -> None:
    """Uses are counted behind the answers."""
    end = time.monotonic() + 20
    while True:
        assert tierd(daemon, "export", "-o", str(path)) == 0
        if summary(runs_in(path.read_bytes())) == ALL:
            return
        assert time.monotonic() < end


def test_export(
    daemon: DaemonProcess, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A hot set would lack ranks, models or uses; or a failed export cost the one before."""
    out = tmp_path / "hot.jsonl"
    wait_until_counted(daemon, out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]

    assert tierd(daemon, "export") == 0
    assert summary(runs_in(capsysbinary.readouterr().out)) == ALL

    assert tierd(daemon, "export", "--size", "64KiB") == 0
    assert summary(runs_in(capsysbinary.readouterr().out)) == ALL[:1]

    assert tierd(daemon, "export", "--namespace", OTHER.digest.hex()[:8]) == 0
    assert summary(runs_in(capsysbinary.readouterr().out)) == ALL[2:]

    assert tierd(daemon, "export", "--from", "file", "--namespace", DIGESTS[1].hex()) == 0
    found = summary(runs_in(capsysbinary.readouterr().out))
    assert found == [(DIGESTS[1:], 3, HOT), (DIGESTS[1:], 1, COLD)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "--from", "nowhere"], "no tier is named 'nowhere'; tiers: file"),
        (["export", "--namespace", "12"], "'12' is not a digest: pass its first 4 to 32 digits"),
        (["export", "--namespace", "1" * 32], f"known: {RANKS[0].digest.hex()} (test-model"),
        (["export", "--size", "8G"], "'8G' is not a size"),
        (["export", "-o", "/nowhere/hot.jsonl"], "cannot write /nowhere/hot.jsonl"),
        (["import", "/nowhere/hot.jsonl"], "cannot read /nowhere/hot.jsonl"),
        (["show", "/nowhere/hot.jsonl", "--from", "file"], "do not apply to FILE"),
        (["show", "--limit", "0"], "--limit must be at least 1"),
    ],
)
def test_wrong_usage(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """An operator would not learn what is wrong, or which names exist."""
    assert tierd(daemon, *words) == 2
    assert said in capsys.readouterr().err


def test_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script would take an empty hot set for a good one."""
    gone = str(tmp_path / "gone.sock")
    assert main(["hotset", "export", "-o", str(tmp_path / "hot"), "--socket", gone]) == 1
    assert "no answer from" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_show(daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator could not see what would be warmed, or a model's name would clear the screen."""
    out = tmp_path / "hot.jsonl"
    wait_until_counted(daemon, out)
    for words in (["show", str(out)], ["show"]):
        capsys.readouterr()
        assert tierd(daemon, *words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 5
        assert lines[1].split()[:6] == [
            "1",
            DIGESTS[0].hex()[:8],
            "and",
            "1",
            "more",
            "(test-model)",
        ]
        assert lines[1].split()[6:11] == ["128", "8", "64", "KiB", "3"]
        assert lines[1].endswith(HOT[0].hex()[:16])
        assert "(other?[31m)" in lines[3]
        assert lines[3].split()[-2] == "-"
        assert lines[4].startswith("3 runs, 23 blocks, 172 KiB; written 0h00m")
    assert tierd(daemon, "show", str(out), "--limit", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("3 runs (1 shown), 23 blocks")
    assert tierd(daemon, "show", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["runs"], output["blocks"], output["bytes"]) == (3, 23, 43 * 4096)
    assert output["shown"][2] == {
        "namespaces": [OTHER.digest.hex()],
        "model": OTHER.model,
        "tokens": 96,
        "blocks": 3,
        "bytes": 3 * 4096,
        "uses": 0,
        "age_s": None,
        "first_hash": ONE[0].hex(),
        "last_hash": ONE[-1].hex(),
    }


def test_import_teaches_uses_of_another_node(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that takes over from another would first evict the blocks that were hot there."""
    out = tmp_path / "hot.jsonl"
    wait_until_counted(daemon, out)
    raw = out.read_bytes().replace(b'"uses": 0, "age_s": null', b'"uses": 6, "age_s": 60')
    more, _ = chain(8, "gone")
    raw = raw.replace(HOT[0].hex().encode(), more[0].hex().encode())
    an_hour_ago = b'"written": %d' % (time.time() - 3600)
    raw = re.sub(rb'"written": \d+', an_hour_ago, raw)
    values = [json.loads(line) for line in raw.splitlines()]
    raw = b"".join(sealed({k: v for k, v in each.items() if k != "crc32"}) for each in values)
    out.write_bytes(raw)
    with DaemonProcess(tmp_path / "new", capacity="64MiB", storage="") as new:
        with closing(new.client()) as client:
            store(client, RANKS[:1], 8, "hot")
            store(client, [OTHER], 3, "one")
        capsys.readouterr()
        assert tierd(new, "import", str(out), "--json") == 0
        output = json.loads(capsys.readouterr().out)["namespaces"]
        assert output == {
            DIGESTS[0].hex(): {"blocks": 20, "in_host_memory": 7},
            DIGESTS[1].hex(): {"blocks": 20, "in_host_memory": 0},
            OTHER.digest.hex(): {"blocks": 3, "in_host_memory": 3},
        }
        with Operator(new.socket, "test") as operator:
            (page,) = operator.inventory(OTHER.digest, 0)
            assert page.uses == (6).to_bytes(4, "little") * 3
            assert 3659 <= m.unpack_slots(page.ages_s)[0] < 3900
        assert tierd(new, "import", str(out)) == 0
        said = capsys.readouterr().out
        assert "other?[31m: taught 3 blocks, 3 of them in host memory" in said
        assert f"`tierd warm --hotset {out}` loads the other blocks" in said
        # A session may register only this many namespaces.
        names = [n.to_bytes(2, "big") * 16 for n in range(HANDLES_MAX + 1)]
        many = [HotRun(OTHER.hash_root, [name], 1, 0, 1) for name in names]
        parts = pieces([([OTHER], many)], written_s=1, version="1")
        (tmp_path / "many.jsonl").write_bytes(b"".join(parts))
        assert tierd(new, "import", str(tmp_path / "many.jsonl")) == 0
        bad = tmp_path / "bad.jsonl"
        bad.write_bytes(raw[:-10])
        assert tierd(new, "import", str(bad)) == 2
        assert f"{bad}, line 8: the file was cut" in capsys.readouterr().err


def get(daemon: DaemonProcess, line: str, *, wait_s: float = 0.0) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(daemon.directory / "admin.sock"))
        sock.sendall(f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("hashes", "uses"), [(2, 1), (m.TAUGHT_MAX + 1, m.TAUGHT_MAX + 1)], ids=["few", "many"]
)
def test_malformed_teach_ends_the_session(daemon: DaemonProcess, hashes: int, uses: int) -> None:
    """A client could block the daemon's loop, and the engines with it."""
    with RawPeer(daemon.socket) as peer:
        fields = OTHER.to_fields()
        peer.say(m.Register(1, fields, want_segments=False))
        handle = peer.hear(m.Registered).handle
        numbers = m.pack_slots([1] * uses)
        peer.say(m.Teach(handle, bytes(32) * hashes, numbers, numbers))
        assert "TEACH needs uses and an age" in peer.ended()


def test_hot_set_is_served_over_http(daemon: DaemonProcess, tmp_path: Path) -> None:
    """A new node could not be warmed from one that has served for weeks."""
    wait_until_counted(daemon, tmp_path / "hot.jsonl")
    for path in (HOTSET, f"{HOTSET}?x=1"):
        head, _, body = get(daemon, f"GET {path}").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n")
        assert b"Content-Length" not in head
        assert summary(runs_in(body)) == ALL
    head, _, body = get(daemon, f"HEAD {HOTSET}").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert body == b""
    assert get(daemon, f"POST {HOTSET}").startswith(b"HTTP/1.1 405 ")


def test_uses_survive_a_restart(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Use counts would be lost: the first scan after a restart would evict hot blocks."""
    out = tmp_path / "hot.jsonl"
    wait_until_counted(daemon, out)
    assert daemon.stop() == 0
    kept = daemon.directory / "state" / "hotset.jsonl"
    assert summary(runs_in(kept.read_bytes())) == ALL
    daemon.start()
    assert daemon.status()["host"]["blocks"] == 0  # No service manager has kept it.
    with closing(daemon.client()) as client:
        use(client, RANKS, HOT)
    end = time.monotonic() + 20
    while True:
        assert tierd(daemon, "export", "-o", str(out)) == 0
        found = summary(runs_in(out.read_bytes()))
        if found == [(DIGESTS, 4, HOT)]:
            break
        assert time.monotonic() < end, found
    assert daemon.stop() == 0
    after = summary(runs_in(kept.read_bytes()))
    assert after == [(DIGESTS, 4, HOT), *ALL[1:]]
    daemon.start()
