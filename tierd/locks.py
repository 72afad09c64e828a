"""Lock files, looked at without taking them: a look must not keep a daemon from starting."""

from __future__ import annotations

from pathlib import Path


def holder_of(path: Path, root: Path = Path("/")) -> int:
    """The process that holds a lock file whose text is its id; 0 if none does, or that cannot be
    seen."""
    try:
        pid, inode = int(path.read_bytes()[:32]), path.stat().st_ino
        held = (root / "proc/locks").read_text().splitlines()
    except (OSError, ValueError):
        return 0
    # "1: FLOCK  ADVISORY  WRITE 4711 00:1a:815 0 EOF". Of the device some file systems tell
    # another number than stat() does.
    for fields in map(str.split, held):
        if fields[1:2] == ["FLOCK"] and fields[4] == str(pid):
            found = fields[5].rpartition(":")[2]
            if found == str(inode):
                return pid
    return 0


def parent_of(pid: int, root: Path = Path("/")) -> int:
    """The parent of a process; 0 if that is not known."""
    try:
        text = (root / f"proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name before it may have spaces and parentheses.
    return int(text.rpartition(")")[2].split()[1])
