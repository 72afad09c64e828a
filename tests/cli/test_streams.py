"""tierd with standard streams that are closed, as some supervisors start it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_serve_with_closed_streams(tmp_path: Path, closed: str) -> None:
    """It would exit with 1 silently, or write its log into a file that gets descriptor 2."""
    daemon = DaemonProcess(tmp_path, launcher=("sh", "-c", f'exec "$@" {closed}', "sh"))
    with daemon:
        daemon.wait_tier("file", "ready")
        client = daemon.client()
        space = client.register(blocks.namespace(4096))
        hashes, parents = blocks.chain(4)
        contents = [blocks.payload(space.namespace, block_hash) for block_hash in hashes]
        assert all(client.put(space, [*zip(hashes, parents, contents, strict=True)]))
        client.close()
        daemon.wait_backed_up()
        null = closed.count("&-") == 3
        for fd in (1, 2):
            where = os.readlink(f"/proc/{daemon.pid}/fd/{fd}")
            assert where == ("/dev/null" if null else str(daemon.log))
        assert daemon.stop() == 0
    assert ("serves on" in daemon.log.read_text()) != null
