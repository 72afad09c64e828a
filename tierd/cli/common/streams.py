"""Reopens standard streams that the parent process has closed.

Without this, the next opened files would get their numbers: log lines would go into a socket or a
database, and children would use that file as their stderr.
"""

from __future__ import annotations

import os
import sys


def reopen() -> None:
    """Open missing descriptors 0 to 2; call it before any file is opened. A closed stderr becomes
    a copy of stdout, so that the log is not lost; a closed stdin or stdout becomes /dev/null."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            spare = os.dup(1) if fd == 2 else os.open(os.devnull, os.O_RDWR)
            # Usually `spare` has the right number already; children must inherit it.
            os.dup2(spare, fd) if spare != fd else os.set_inheritable(fd, True)
            if spare > 2:
                os.close(spare)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  # as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
