"""Inspection of lock files without locking them, which could keep a daemon from starting."""

from __future__ import annotations

from pathlib import Path


def holder_of(path: Path, root: Path = Path("/")) -> int:
    """Return the id of the process that holds a lock file, or 0 if none is known to hold it.

    The file's text is the id of its holder; /proc/locks confirms it.
    """
    try:
        pid, inode = int(path.read_bytes()[:32]), path.stat().st_ino
        held = (root / "proc/locks").read_text().splitlines()
    except (OSError, ValueError):
        return 0
    # "1: FLOCK  ADVISORY  WRITE 4711 00:1a:815 0 EOF". Only the inode is compared: for some file
    # systems the device number differs from that of stat().
    for fields in map(str.split, held):
        if fields[1:2] == ["FLOCK"] and fields[4] == str(pid):
            found = fields[5].rpartition(":")[2]
            if found == str(inode):
                return pid
    return 0


def parent_of(pid: int, root: Path = Path("/")) -> int:
    """Return the id of a process's parent, or 0 if it is not known."""
    try:
        text = (root / f"proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The process name may contain spaces and parentheses, so split after the last one.
    return int(text.rpartition(")")[2].split()[1])
