"""Findings of `tierd doctor`, and a runner of checks in which no check delays another."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tierd.cli.common.text import printable

TEXT_CHARS_MAX: Final = 600
"""Limit of each text of a finding, since a server or an engine may have written part of it."""


class Level(enum.IntEnum):
    """Severity of a finding; a greater value is worse."""

    OK = 0
    NOTE = 1
    """Information; no action is needed."""
    WARNING = 2
    """It works, but worse than it could, or may soon stop working."""
    FAULT = 3
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, why it matters and what to do. `why` and `do` are empty if all is well."""

    level: Level
    subject: str
    """The part that was checked, such as "daemon", "memory", "tier NAME" or "engine"."""
    code: str
    """Stable name of the kind of finding, for scripts."""
    what: str
    why: str = ""
    do: str = ""

    def to_fields(self) -> dict[str, str]:
        """Return the finding for `--json`."""
        texts = {
            name: printable(getattr(self, name))[:TEXT_CHARS_MAX]
            for name in ("subject", "code", "what", "why", "do")
        }
        return {"level": self.level.name.lower(), **texts}


Check = Callable[[], Sequence[Finding]]


def gather(checks: Sequence[tuple[str, Check]], limit_s: float) -> list[Finding]:
    """Run (subject, check) pairs in parallel threads and return their findings in order.

    A check that has not ended after `limit_s`, as on a dead file system, becomes a finding. Its
    thread is abandoned and ends with this process.
    """
    found: list[list[Finding] | None] = [None] * len(checks)

    def run(at: int, subject: str, check: Check) -> None:
        try:
            found[at] = list(check())
        except OSError as error:
            # A file vanished, or access to it was withdrawn, during the check.
            found[at] = [_unseen(subject, str(error))]
        except KeyError as error:
            found[at] = [_unseen(subject, f"tierd's status has no {error}: another version?")]

    threads = [
        threading.Thread(target=run, args=(at, subject, check), daemon=True)
        for at, (subject, check) in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    # Copy the list: an abandoned thread may still write to it.
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
        f"the check failed: {why}",
        "its state is unknown",
        "run tierd doctor again as root or tierd's user, in the same version as the daemon",
    )


def _silent(subject: str, limit_s: float) -> Finding:
    return Finding(
        Level.FAULT,
        subject,
        "no_answer",
        f"no answer within {limit_s:g} s",
        "tierd's own calls hang as well: each waits until its deadline",
        "check that its server or disk answers: ping, mount, dmesg",
    )
