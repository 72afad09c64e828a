"""Standard streams that whoever started the process has closed.

Their numbers would go to the next files that are opened: a log would then be written into a socket
or a database, and children would take that for their own stderr.
"""

from __future__ import annotations

import os
import sys


def reopen() -> None:
    """Have descriptors 0 to 2, before anything else is opened: stdout in the place of a closed
    stderr, so that the log is not lost, and /dev/null in that of the others."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            spare = os.dup(1) if fd == 2 else os.open(os.devnull, os.O_RDWR)
            # It has that number already, as a rule; children are to have it, too.
            os.dup2(spare, fd) if spare != fd else os.set_inheritable(fd, True)
            if spare > 2:
                os.close(spare)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  # as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
