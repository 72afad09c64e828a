"""Logging: destination, format and the suppression of floods.

On a terminal or in a pipe the log is text. Under systemd it goes to the journal, with fields to
select by (`journalctl TIERD_TIER=s3`), and a traceback is one entry. Logging never waits for the
journal.

A call may add fields: `log.warning("...", extra={"tierd": {"tier": name}})`.
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tierd.config import LogConfig, LogFormat, LogLevel

JOURNAL: Final = Path("/run/systemd/journal/socket")

REPEATS_MAX: Final = 50
PERIOD_S: Final = 10.0
"""At most REPEATS_MAX lines from one place in the code are logged in PERIOD_S seconds; further
lines are counted."""

PLACES_MAX: Final = 1024
"""Maximum places in the code whose lines are counted separately. The code has fewer, but format
strings that are built at run time count as places too."""

_PRIORITIES: Final = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
_BUSY: Final = (errno.EAGAIN, errno.ENOBUFS)
_DONT_WAIT: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_ENVIRON: Final = ("TIERD_CHILD_LOG_FORMAT", "TIERD_CHILD_LOG_LEVEL")

_current = LogConfig()
"""Log settings of this process; its children get a copy."""


def configure(config: LogConfig, process: str = "") -> None:
    """Set up the log of this process; `process` is its name in the log, empty for the daemon."""
    global _current
    _current = LogConfig(format=config.format, level=config.level)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, Calm)]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(Calm(_output(config.format, process)))
    root.setLevel(config.level.value.upper())


def set_level(level: LogLevel) -> None:
    """Set the log level of this process and of children started from now on."""
    _current.level = level
    logging.getLogger().setLevel(level.value.upper())


def for_children() -> dict[str, str]:
    """Return the environment variables that pass the log settings to a child."""
    return dict(zip(_ENVIRON, (_current.format.value, _current.level.value), strict=True))


def configure_child(process: str, environ: Mapping[str, str]) -> None:
    """Set up the log of a child whose environment has the variables of `for_children`."""
    form, level = (environ.get(name) for name in _ENVIRON)
    config = LogConfig()
    if form is not None and level is not None:
        config = LogConfig(format=LogFormat(form), level=LogLevel(level))
    configure(config, process)


def stderr_is_journal() -> bool:
    """Whether stderr is connected to the journal."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def _output(form: LogFormat, process: str) -> logging.Handler:
    if form is LogFormat.JOURNAL or (form is LogFormat.AUTO and stderr_is_journal()):
        return Journal(process)
    handler = logging.StreamHandler()
    if form is LogFormat.JSON:
        handler.setFormatter(Json(process))
    else:
        who = f"{process}[%(process)d] " if process else ""
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s")
        )
    return handler


# --- formats ----------------------------------------------------------------------------


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    """Return the fields that the log call gave besides the message."""
    given = getattr(record, "tierd", None)
    return given if isinstance(given, Mapping) else {}


class Json(logging.Formatter):
    """Formats a record as one line with a JSON object."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without a newline."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if self._process:
            line["process"] = self._process
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**_fields(record), **line}, default=str)


class Journal(logging.Handler):
    """Sends native entries to the systemd journal.

    Entries that a busy journal does not take are dropped and counted. If there is no journal, or
    an entry is too long for it, lines with a priority go to stderr in the format of sd-daemon(3).
    """

    def __init__(self, process: str = "", path: Path = JOURNAL) -> None:
        super().__init__()
        self.dropped = 0
        """Entries dropped since the journal last took one."""
        self._process = process
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Send an entry."""
        try:
            message = self.format(record)
            priority = _PRIORITIES.get(record.levelno, 6)
            if self.dropped:
                lost = f"{self.dropped} lines were lost: the journal did not take them"
                if self._send({"MESSAGE": lost, "PRIORITY": 4, "SYSLOG_IDENTIFIER": "tierd"}):
                    self.dropped = 0
            entry = {
                "MESSAGE": message,
                "PRIORITY": priority,
                "SYSLOG_IDENTIFIER": "tierd",
                "CODE_FILE": record.pathname,
                "CODE_LINE": record.lineno,
                "CODE_FUNC": record.funcName,
                "TIERD_LOGGER": record.name,
                **{f"TIERD_{_key(name)}": value for name, value in _fields(record).items()},
            }
            if self._process:
                entry["TIERD_PROCESS"] = self._process
            if not self._send(entry):
                self.dropped += 1
        except Exception:  # noqa: BLE001  # as all handlers do: a bad log call is shown on stderr
            self.handleError(record)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def _send(self, entry: Mapping[str, object]) -> bool:
        """Send an entry; return whether the journal or stderr took it."""
        data = b"".join(_packed(name, str(value)) for name, value in entry.items())
        try:
            self._socket.sendmsg([data], [], _DONT_WAIT, self._path)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            lines = str(entry["MESSAGE"]).splitlines() or [""]
            sys.stderr.write("".join(f"<{entry['PRIORITY']}>{line}\n" for line in lines))
            sys.stderr.flush()
        return True


def _key(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def _packed(name: str, value: str) -> bytes:
    """Return a field in the journal's native format."""
    text = value.encode("utf-8", "replace")
    if b"\n" not in text:
        return b"%s=%s\n" % (name.encode(), text)
    return b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(text)), text)


# --- floods -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Window:
    """Recent lines of one place in the code."""

    ends_s: float
    count: int = 0
    last: logging.LogRecord | None = None
    """The last record that was held back."""


class Calm(logging.Handler):
    """Passes records to an output, but holds back a flood of one message from one place.

    At the end of the period it logs how often the message was repeated.
    """

    def __init__(
        self, output: logging.Handler, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Owns `output`."""
        super().__init__()
        self._output = output
        self._now_s = now_s
        self._windows: dict[tuple[str, int, str], _Window] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record to the output, or count it."""
        now_s, place = self._now_s(), (record.pathname, record.lineno, str(record.msg))
        window = self._windows.get(place)
        if window is None or now_s >= window.ends_s:
            if window is not None:
                self._tell(window)
            if len(self._windows) >= PLACES_MAX:
                self.flush()
            window = self._windows[place] = _Window(now_s + PERIOD_S)
        window.count += 1
        if window.count <= REPEATS_MAX:
            self._output.handle(record)
            return
        window.last = record
        if self._timer is None:
            self._timer = threading.Timer(PERIOD_S, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Log the counts of held-back records and reset all counters."""
        with self._guard:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for window in self._windows.values():
                self._tell(window)
            self._windows.clear()
            self._output.flush()

    def close(self) -> None:
        """Log the counts of held-back records and close the output."""
        self.flush()
        self._output.close()
        super().close()

    @property
    def _guard(self) -> threading.RLock:
        assert self.lock is not None
        return self.lock

    def _tell(self, window: _Window) -> None:
        if window.last is None:
            return
        record = copy.copy(window.last)
        more = window.count - REPEATS_MAX
        record.msg = f"{record.getMessage()} (repeated {more:,} times in {PERIOD_S:.0f} s)"
        record.args, record.exc_info, record.exc_text = (), None, None
        window.last = None
        self._output.handle(record)
