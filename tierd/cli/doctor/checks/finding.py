"""A finding of `tierd doctor`, and how checks are run so that none of them holds up the others."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tierd.cli.common.text import printable

TEXT_CHARS_MAX: Final = 600
"""Of a finding's text, part of which a server or an engine may have chosen."""


class Level(enum.IntEnum):
    """How bad a finding is; the worst is the greatest."""

    OK = 0
    NOTE = 1
    """Good to know; nothing has to be done."""
    WARNING = 2
    """It works, and worse than it could, or not for long."""
    FAULT = 3
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, why it matters, and what to do about it; both empty where all is well."""

    level: Level
    subject: str
    """What it is about: "daemon", "memory", "tier NAME", "engine" and the like."""
    code: str
    """The same for every finding of a kind, for scripts."""
    what: str
    why: str = ""
    do: str = ""

    def to_fields(self) -> dict[str, str]:
        """The finding for `--json`."""
        texts = {
            name: printable(getattr(self, name))[:TEXT_CHARS_MAX]
            for name in ("subject", "code", "what", "why", "do")
        }
        return {"level": self.level.name.lower(), **texts}


Check = Callable[[], Sequence[Finding]]


def gather(checks: Sequence[tuple[str, Check]], limit_s: float) -> list[Finding]:
    """The findings of checks, by subject, that run side by side in threads.

    One that has not ended after `limit_s`, a dead file system say, is a finding itself and is
    left behind: its thread ends with this process.
    """
    found: list[list[Finding] | None] = [None] * len(checks)

    def run(at: int, subject: str, check: Check) -> None:
        try:
            found[at] = list(check())
        except OSError as error:
            # Something vanished, or was closed to us, between two looks.
            found[at] = [_unseen(subject, str(error))]
        except KeyError as error:
            found[at] = [_unseen(subject, f"tierd does not tell of {error}: another version?")]

    threads = [
        threading.Thread(target=run, args=(at, subject, check), daemon=True)
        for at, (subject, check) in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    # A copy: a thread that is left behind may still write.
    return [
        finding
        for (subject, _), own in zip(checks, list(found), strict=True)
        for finding in (own if own is not None else [_silent(subject, limit_s)])
    ]


def _unseen(subject: str, why: str) -> Finding:
    return Finding(
        Level.WARNING,
        subject,
        "unseen",
        f"this could not be looked at: {why}",
        "whether it is well is not known",
        "run it again, as root or as tierd's user, and of the daemon's version",
    )


def _silent(subject: str, limit_s: float) -> Finding:
    return Finding(
        Level.FAULT,
        subject,
        "no_answer",
        f"no answer within {limit_s:g} s",
        "what hangs a look hangs tierd's own calls as well: each waits until its deadline",
        "see whether its server or disk answers: ping, mount, dmesg",
    )
