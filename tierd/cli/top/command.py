"""`tierd top`: show the daemon's activity, refreshed once a second, until q.

Pure functions draw the screen from samples (`tierd.cli.top.sample`). The rest asks the daemon,
reads the keyboard, and survives restarts of the daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from tierd.cli.common.text import duration, latency, number, percent, printable, size
from tierd.cli.top.sample import NamespaceSample, Status, StatusSample, TierSample, sample
from tierd.client import DEFAULT_SOCKET, Client
from tierd.errors import TierdError

INTERVAL_S_MIN: Final = 0.1
"""A STATUS takes the daemon up to 1 ms with 8 namespaces and 25 ms with 1,024."""

INTERVAL_S_MAX: Final = 3600.0

HISTORY_MAX: Final = 240
"""Samples in the sparklines: four minutes at one sample per second."""

RESIZE_S: Final = 0.2
"""Longest time until a new terminal size is noticed."""

NAMESPACES_SHOWN_MAX: Final = 10

WHY_LEFT: Final = 2
"""Columns by which the reason under a tier is indented."""

_SPARKS: Final = "▁▂▃▄▅▆▇█"
_SPARKS_ASCII: Final = "_.-=+*#"
_SPARKED: Final = ("hits", "tokens/s", "read/s", "write/s")
"""Labels of the sparklines."""

_BAD: Final = ("failing", "unavailable")
_COLOURS: Final = {"ready": "green", **dict.fromkeys(_BAD, "bold red")}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "top",
        help="watch the activity of the daemon",
        description="Show tiers, throughput, hit ratio, queues, breakers and the namespaces with "
        "the most requested tokens, refreshed at each interval. q or Ctrl-C quits. If standard "
        "output is not a terminal, the command prints one frame. If no daemon answers, --once and "
        "--json exit with status 1; the live display waits for the daemon.",
        epilog="NO_COLOR in the environment turns colours off.",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="time between frames (default: 1)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print one frame after one interval")
    how.add_argument("--json", action="store_true", help="print one sample as JSON")
    parser.add_argument(
        "--socket",
        default=os.environ.get("TIERD_SOCKET", DEFAULT_SOCKET),
        help=f"the daemon's socket (default: $TIERD_SOCKET or {DEFAULT_SOCKET})",
    )
    parser.set_defaults(run=run)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not INTERVAL_S_MIN <= seconds <= INTERVAL_S_MAX:
        raise argparse.ArgumentTypeError(
            f"must be {INTERVAL_S_MIN:g} to {INTERVAL_S_MAX:g} seconds, got {text!r}"
        )
    return seconds


def run(args: argparse.Namespace) -> int:
    """Show the display, or print one frame or sample; return the exit status."""
    console = Console(highlight=False)
    with contextlib.closing(Watch(args.socket)) as watch:
        if console.is_terminal and not args.once and not args.json:
            return _live(watch, args.interval, console)
        watch.look()
        if not watch.problem:
            time.sleep(args.interval)
            watch.look()
        if watch.problem or watch.now is None:
            print(f"tierd: {watch.problem}", file=sys.stderr)
            return 1
        if args.json:
            print(json.dumps(dataclasses.asdict(watch.now), indent=2))
        else:
            for line in watch.frame(console.width, None, console.encoding):
                console.print(line, soft_wrap=True)
    return 0


# --- the daemon -----------------------------------------------------------------------


class TrendPoint(NamedTuple):
    """The values of one sample in the sparklines."""

    hit_ratio: float | None
    loaded_tokens_per_s: float | None
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None


NOTHING: Final = TrendPoint(None, None, None, None)
"""The point of a time when no daemon answers."""


class Watch:
    """Samples a daemon repeatedly, also across its restarts. Owns the connection."""

    def __init__(self, path: str) -> None:
        self.now: StatusSample | None = None
        self.problem = ""
        """Error of the last sample; empty if it succeeded."""
        self.history: deque[TrendPoint] = deque(maxlen=HISTORY_MAX)
        self._path = path
        self._client: Client | None = None
        self._before: Status | None = None

    def look(self) -> None:
        """Take the next sample. Blocks for at most one second."""
        if self._client is None:
            self._client = Client(self._path, name="tierd top", map_segments=False)
        try:
            status = self._client.status()
        except TierdError as error:
            self.problem = str(error)
            self.history.append(NOTHING)
            self.close()  # A new client connects at once; this one would back off.
            return
        self.problem = ""
        self.now = sample(self._before, status)
        if self._before is not None:
            self.history.append(_moment(self.now))
        self._before = status

    def frame(self, width: int, height: int | None, encoding: str = "utf-8") -> list[Text]:
        """Return the lines of the current frame."""
        if self.now is None:
            return [Text(line) for line in ("waiting for tierd", "", self.problem)]
        pen = Pen(width, encoding.lower().startswith("utf"))
        return draw(self.now, self.history, pen, height, self.problem)

    def close(self) -> None:
        """Close the connection; the next `look` opens a new one."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _moment(now: StatusSample) -> TrendPoint:
    return TrendPoint(
        now.hit_ratio,
        now.loaded_tokens_per_s,
        sum(tier.read_bytes_per_s for tier in now.tiers),
        sum(tier.written_bytes_per_s for tier in now.tiers),
    )


# --- drawing --------------------------------------------------------------------------


class Pen(NamedTuple):
    """The drawing area: its width in cells, and whether it shows Unicode."""

    width: int
    unicode: bool

    def bar(self, share: float, cells: int) -> str:
        """Return a bar such as [####----] for a share of 0 to 1."""
        full = round(min(max(share, 0.0), 1.0) * cells)
        return f"[{'#' * full}{'-' * (cells - full)}]"

    def sparkline(self, values: Sequence[float | None], cells: int, top: float = 0.0) -> str:
        """Return a sparkline of the last values. Each cell is a mean of HISTORY_MAX / cells
        values; the full height is `top` or the largest mean."""
        sparks = _SPARKS if self.unicode else _SPARKS_ASCII
        group = -(-HISTORY_MAX // cells)
        cut = [values[max(0, end - group) : end] for end in range(len(values), 0, -group)][:cells]
        means = [_mean([value for value in part if value is not None]) for part in cut]
        highest = max([top, *(mean for mean in means if mean is not None)]) or 1.0
        drawn = [
            " " if mean is None else sparks[min(int(mean / highest * len(sparks)), len(sparks) - 1)]
            for mean in means
        ]
        return "".join(reversed(drawn)).rjust(cells)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def draw(
    now: StatusSample,
    history: Sequence[TrendPoint],
    pen: Pen,
    height: int | None,
    problem: str = "",
) -> list[Text]:
    """Return at most `height` lines of at most `pen.width` cells, most important first. The
    namespaces fill the remaining lines."""
    above = [*_head(now, problem), *_host(now, pen), Text()]
    above += _tier_table(now.tiers, pen)
    sparks = [Text(), *_sparks(history, pen)] if len(history) > 1 else []
    room = NAMESPACES_SHOWN_MAX
    if height is not None:
        room = min(room, height - len(above) - len(sparks) - 2)
    shown = now.namespaces[: max(0, room)]
    spaces = [Text(), *_namespace_table(shown)] if shown else []
    lines = [*above, *spaces, *sparks][:height]
    for line in lines:
        line.truncate(pen.width)
        line.no_wrap = True
    return lines


def _head(now: StatusSample, problem: str) -> list[Text]:
    line = Text(f"tierd {now.version}", "bold")
    if problem:
        line.append(f"  waiting for tierd: {printable(problem)}", "bold red")
    else:
        line.append(f"  up {duration(now.uptime_s)}", "not bold")
    return [
        line,
        Text.assemble(
            "hits     ",
            (f"{percent(now.hit_ratio)} now", "bold"),
            f"  {percent(now.host_hit_ratio)} from host memory  "
            f"{percent(now.hit_ratio_since_start)} since start",
        ),
    ]


def _host(now: StatusSample, pen: Pen) -> list[Text]:
    capacity = now.host_capacity_bytes
    line = Text(
        f"host     {pen.bar(now.host_used_bytes / max(1, capacity), 10)} "
        f"{size(now.host_used_bytes)} of {size(capacity)}  {number(now.host_blocks)} blocks  "
        f"{number(now.leases)} leases"
    )
    if now.host_limit_bytes < capacity:
        line.append(f"  {size(now.host_limit_bytes)} under memory pressure", "bold yellow")
    evicted = now.evicted_blocks_per_s.items()
    return [
        line,
        Text(
            f"loaded   {number(now.loaded_tokens_per_s)} of "
            f"{number(now.requested_tokens_per_s)} tokens/s  "
            f"{number(now.loaded_blocks_per_s)} blocks/s  {size(now.loaded_bytes_per_s)}/s"
        ),
        Text(
            f"stored   {number(now.stored_blocks_per_s)} blocks/s  "
            f"{size(now.stored_bytes_per_s)}/s  {number(now.writing_blocks)} being written  "
            f"{number(now.backlog_blocks)} to back up"
        ),
        Text(
            "evicted  "
            + ("  ".join(f"{number(rate)} {why}" for why, rate in evicted) + " blocks/s")
        ),
    ]


def _row(cells: Sequence[tuple[str, int]]) -> str:
    """Return a table row of (text, width) cells; a negative width aligns to the right."""
    return " ".join(
        set_cell_size(text, width) if width > 0 else text.rjust(-width) for text, width in cells
    )


def _tier_table(tiers: Sequence[TierSample], pen: Pen) -> list[Text]:
    titles = ["tier", "state", "used", "read/s", "write/s", "get p99", "put p99", "queue"]
    widths = [10, 11, 6, -8, -8, -8, -8, -6, -6]
    lines = [Text(_row(list(zip([*titles, "hits"], widths, strict=True))), "dim")]
    for tier in tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else None
        cells = [
            printable(tier.name),
            tier.state,
            size(tier.used_bytes) if share is None else pen.bar(share, 4),
            size(tier.read_bytes_per_s),
            size(tier.written_bytes_per_s),
            latency(tier.read_p99_s),
            latency(tier.write_p99_s),
            number(tier.queue_blocks),
            percent(tier.hit_ratio),
        ]
        line = Text(_row(list(zip(cells, widths, strict=True))))
        colour = _COLOURS.get(tier.state, "yellow")
        line.stylize(colour, widths[0] + 1, widths[0] + 1 + cell_len(tier.state))
        lines.append(line)
        shut = [f"{what} {state}" for what, state in _breakers(tier) if state != "closed"]
        if shut or tier.why:
            why = ": ".join(filter(None, [", ".join(shut), printable(tier.why)]))
            lines.append(Text(" " * WHY_LEFT + why, "yellow"))
    return lines if tiers else [Text("no storage tiers", "dim")]


def _breakers(tier: TierSample) -> list[tuple[str, str]]:
    return [("reads", tier.reads), ("writes", tier.writes)]


def _namespace_table(namespaces: Sequence[NamespaceSample]) -> list[Text]:
    widths = [12, -9, -9, -9, -7, 80]
    titles = ["namespace", "blocks", "size", "tokens/s", "hits", "model"]
    lines = [Text(_row(list(zip(titles, widths, strict=True))).rstrip(), "dim")]
    for space in namespaces:
        cells = [
            space.digest,
            number(space.blocks),
            size(space.size_bytes),
            number(space.requested_tokens_per_s),
            percent(space.hit_ratio),
            printable(space.model),
        ]
        lines.append(Text(_row(list(zip(cells, widths, strict=True))).rstrip()))
    return lines


def _sparks(history: Sequence[TrendPoint], pen: Pen) -> list[Text]:
    last = history[-1]
    shows: tuple[Callable[[float], str], ...] = (percent, number, size, size)
    cells = max(10, min(60, pen.width - 20))
    lines = []
    for at, (name, show) in enumerate(zip(_SPARKED, shows, strict=True)):
        drawn = pen.sparkline([moment[at] for moment in history], cells, 1.0 if at == 0 else 0.0)
        value = last[at]
        lines.append(Text(f"{name:<8} {drawn} {'-' if value is None else show(value)}"))
    return lines


# --- the terminal ---------------------------------------------------------------------


def _live(watch: Watch, interval_s: float, console: Console) -> int:
    """Run the live display until q, Ctrl-C, SIGTERM or the end of the terminal."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            watch.look()
            end_s = time.monotonic() + interval_s
            drawn: ConsoleDimensions | None = None
            while (left_s := end_s - time.monotonic()) > 0:
                if drawn != console.size:
                    drawn = console.size
                    frame = watch.frame(drawn.width, drawn.height, console.encoding)
                    live.update(Group(*frame), refresh=True)
                if "q" in pressed(min(left_s, RESIZE_S)):
                    return 0
    return 0


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to the given seconds for keys and returns them; it returns
    "q" once the terminal is closed. Restores the terminal's settings at the end."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    fd = sys.stdin.fileno()

    def pressed(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        try:
            return os.read(fd, 64).decode("ascii", "replace") or "q"
        except OSError:  # The terminal has been closed.
            return "q"

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
