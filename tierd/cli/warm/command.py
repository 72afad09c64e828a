"""`tierd warm`: load prefixes into host memory or a storage tier before requests need them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from tierd.cli.common.engine import EngineServer
from tierd.cli.common.namespaces import add_namespace
from tierd.cli.common.operator import Operator, add_socket, table, tables, whole
from tierd.cli.common.progress import ProgressLine
from tierd.cli.common.prompts import LocalTokenizer
from tierd.cli.warm.dry_run import Estimate, estimate
from tierd.cli.warm.journal import FinishedUnit, WarmJournal, still_there
from tierd.cli.warm.report import WarmReport
from tierd.cli.warm.run import Replays, Warmer, WarmOptions
from tierd.cli.warm.sources import Sources, WantedBlocks
from tierd.errors import ConfigError, TierdError
from tierd.sizes import parse_size, parse_time

ALL: Final = 0
FAILED: Final = 1
WRONG: Final = 2
PARTLY: Final = 3
INTERRUPTED: Final = 130
"""Exit statuses."""

HOST: Final = "host memory"

INDEX_S_MAX: Final = 300.0
"""Longest wait for tiers that are still being indexed."""

INDEX_POLL_S: Final = 0.2

SHOW_S: Final = 0.1
"""Interval at which the line on a terminal is rewritten."""

LINES_S: Final = 10.0
"""Interval of progress lines without a terminal."""

REPLAYS_AHEAD: Final = 4
"""Prompts that may wait for the engine, per prompt that it computes at a time."""


class _DeadlineError(Exception):
    """The deadline has passed; raised wherever the command is."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "warm",
        help="load prefixes into host memory before requests need them",
        description="Load prefixes from the daemon's tiers into host memory, with a lower priority "
        "than requests. Leased, pinned and more valuable blocks are not evicted for them. A line "
        'of a FILE is a JSON list of token ids, an object with "tokens" and optionally "salt", '
        '"lora" ([name, path]) and "namespace" (fields or digest, or a list with one per rank), '
        'or a request of the OpenAI API with "prompt" or "messages".',
        epilog="Exit status: 0 all blocks are there, 3 some are missing (the output says which "
        "and why), 1 no daemon answers, or the engine does not and nothing was warmed, 2 wrong "
        "input (blocks warmed before it stay), 130 interrupted.",
    )
    source = parser.add_argument_group("what to warm")
    source.add_argument("file", nargs="*", metavar="FILE", help="prompts, one per line; - is stdin")
    source.add_argument(
        "--hotset",
        action="append",
        default=[],
        metavar="FILE|URL",
        help="a hot set file, or another node's: http://NODE:PORT/v1/hotset; may be repeated",
    )
    source.add_argument(
        "--from", dest="source", metavar="TIER", help="all blocks in a tier, most valuable first"
    )
    source.add_argument("--size", help="with --from: stop after this size, as in 100GiB")
    source.add_argument("--if-exists", action="store_true", help="skip files that do not exist")
    source.add_argument(
        "--skip-bad",
        action="store_true",
        help="skip malformed lines and hot sets, and exit with status 3 (default: stop there)",
    )
    meaning = parser.add_argument_group("how to hash the prompts")
    add_namespace(meaning)
    meaning.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="path from which the engine loads the adapter that requests name as their model",
    )
    meaning.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="tokenize text with this tokenizer; needs the package transformers",
    )
    meaning.add_argument(
        "--engine",
        metavar="URL",
        help="this vLLM computes blocks that no tier has, and tokenizes text without --tokenizer",
    )
    how = parser.add_argument_group("how to warm")
    how.add_argument("--to", metavar="TIER", help="copy blocks there (default: host memory)")
    how.add_argument(
        "--dry-run", action="store_true", help="show where the blocks are, and load none"
    )
    how.add_argument("--deadline", metavar="TIME", help="stop after this time (90, 90s, 5m, 1h)")
    how.add_argument("--rate", help="read rate limit, as in 200MB/s")
    how.add_argument(
        "--concurrency",
        type=int,
        default=4,
        metavar="N",
        help="prompts that the engine computes at a time (default: %(default)s)",
    )
    how.add_argument(
        "--pin", metavar="TIME", help="keep the blocks in host memory for this time, as in 30m"
    )
    how.add_argument(
        "--verify", action="store_true", help="also verify the blocks that are there already"
    )
    how.add_argument(
        "--resume",
        metavar="JOURNAL",
        help="skip prompts and runs that this journal lists as finished, and add new ones to it",
    )
    how.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Warm the prefixes; return the exit status."""
    order = _order(args)
    run_ = _Run(args, order)
    try:
        with _alarm(order.end_s), ExitStack() as stack:
            operator = stack.enter_context(Operator(args.socket, "tierd warm"))
            if args.resume and not args.dry_run:
                journal = WarmJournal(args.resume, args.to or HOST)
                run_.journal = stack.enter_context(closing(journal))
            run_.warm(operator)
    except _DeadlineError:
        run_.report.late = not run_.over
    except KeyboardInterrupt:
        run_.report.interrupted = True
    except ConfigError:
        raise
    except TierdError as error:
        run_.failure = error
    finally:
        run_.progress.clear()
    return run_.end()


class _Run:
    """One run of the command, from its options to its exit status."""

    def __init__(self, args: argparse.Namespace, order: WarmOptions) -> None:
        """Check the options that do not depend on the daemon. Raises ConfigError."""
        self.report = WarmReport()
        self.progress = ProgressLine(lines_s=LINES_S)
        self.journal: WarmJournal | None = None
        self.over = False
        """All sources were processed before the deadline."""
        self.failure: TierdError | None = None
        """The error of the daemon that ended the run."""
        self._args = args
        self._order = order
        self._adapters = _adapters(args.lora)
        self._engine = EngineServer(args.engine) if args.engine else None
        self._tokenizer = LocalTokenizer(args.tokenizer) if args.tokenizer else self._engine
        if args.size and not args.source:
            raise ConfigError("--size needs --from TIER")
        self._size_bytes = parse_size(args.size) if args.size else None
        if args.concurrency < 1:
            raise ConfigError(f"--concurrency must be at least 1, got {args.concurrency}")
        self._warmer: Warmer | None = None
        self._still: Mapping[str, FinishedUnit] = {}
        self._estimate: Estimate | None = None
        self._shown_s = 0.0

    def warm(self, operator: Operator) -> None:
        """Warm all sources, or estimate. Raises DisconnectedError, RefusedError, ConfigError."""
        args = self._args
        status = operator.status()
        names = [str(tier["name"]) for tier in tables(status["storage"])]
        for name in filter(None, (args.to, args.source)):
            if name not in names:
                known = ", ".join(names) or "none"
                raise ConfigError(f"no tier is named {name!r}; tiers: {known}")
        if args.to:
            self._order.target = names.index(args.to) + 1
        else:
            self._order.room_bytes = whole(table(status["host"])["limit_bytes"])
        wait_for_tiers(operator, self.progress.say)
        if self.journal is not None:
            self._still = still_there(self.journal, operator, self._order.target)
        sources = Sources(
            operator,
            self.report,
            namespaces=args.namespace or (),
            adapters=self._adapters,
            tokenizer=self._tokenizer,
            engine=self._engine,
            skip_bad=args.skip_bad,
            done=self._done,
        )
        wants = self._wants(sources, names)
        if args.dry_run:
            self._estimate = estimate(operator, wants, self._order.target)
            return
        ahead = REPLAYS_AHEAD * args.concurrency
        self._warmer = Warmer(
            operator,
            self._order,
            self.report,
            Replays(self._engine, args.concurrency) if self._engine else None,
            ahead,
            on_finished=self._finished,
            on_progress=lambda: self._show(sources),
        )
        self._warmer.run(wants)
        self.over = not self.report.late

    def end(self) -> int:
        """Print the result; return the exit status."""
        args, report = self._args, self.report
        error = None if self._warmer is None else self._warmer.wrong
        if report.late and self._warmer is not None:
            self._warmer.give_up()
        if self._estimate is not None:
            return self._tell_estimate(self._estimate)
        if self.failure is None or report.units:
            lines = [json.dumps(report.as_json())] if args.json else report.lines(args.to or HOST)
            print("\n".join(lines))
        if self.failure is not None:
            print(f"tierd: {self.failure}", file=sys.stderr)
            return FAILED
        if report.interrupted:
            return INTERRUPTED
        if error is not None:
            print(f"tierd: {error}", file=sys.stderr)
            return WRONG
        if report.engine_away:
            print(f"tierd: {report.engine_away}", file=sys.stderr)
        if report.whole:
            return ALL
        return FAILED if report.engine_away and not report.had else PARTLY

    def _tell_estimate(self, found: Estimate) -> int:
        report = self.report
        if self._args.json:
            print(json.dumps({**found.as_json(), "reasons": report.reasons_as_json()}))
        else:
            told = [*found.lines(self._args.to or HOST), *report.reason_lines()]
            print("\n".join(told))
        return ALL if report.whole else PARTLY

    def _wants(self, sources: Sources, tiers: list[str]) -> Iterator[WantedBlocks]:
        """Yield all wants: hot sets first, since prompts may use their namespaces."""
        args = self._args
        for name in (*args.hotset, *args.file):
            if args.if_exists and "://" not in name and name != "-" and not Path(name).exists():
                continue
            yield from sources.hot_set(name) if name in args.hotset else sources.prompts(name)
        if args.source:
            number = tiers.index(args.source)
            yield from sources.tier(args.source, number, self._size_bytes)
        if not (args.file or args.hotset or args.source):
            yield from sources.prompts("-")

    def _done(self, unit: str) -> int | None:
        done = self._still.get(unit)
        return None if done is None else done.blocks

    def _finished(self, want: WantedBlocks) -> None:
        if self.journal is not None:
            last = want.hashes[-1] if want.hashes else b""
            digests = tuple(rank.digest for rank in want.ranks)
            self.journal.finish(want.unit, FinishedUnit(digests, last, len(want.hashes)))

    def _show(self, sources: Sources) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= SHOW_S:
            self._shown_s = now_s
            under_way = (0, 0) if self._warmer is None else self._warmer.under_way()
            self.progress.bar(*self.report.progress(*under_way, sources.share))


def wait_for_tiers(operator: Operator, say: Callable[[str], None]) -> None:
    """Wait until no tier is being opened or indexed: until then a tier misses its own blocks."""
    end_s = time.monotonic() + INDEX_S_MAX
    while time.monotonic() < end_s:
        states = {str(tier["state"]) for tier in tables(operator.status()["storage"])}
        if not states & {"opening", "indexing"}:
            return
        say("waiting for the tiers to be indexed")
        time.sleep(INDEX_POLL_S)


@contextmanager
def _alarm(end_s: float | None) -> Iterator[None]:
    """Raise _DeadlineError at a time of time.monotonic(), also during a wait."""
    if end_s is None:
        yield
        return

    def ring(*_: object) -> None:
        raise _DeadlineError

    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise _DeadlineError
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, left_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _order(args: argparse.Namespace) -> WarmOptions:
    deadline_s = parse_time(args.deadline) if args.deadline is not None else None
    rate = parse_size(args.rate.removesuffix("/s")) if args.rate else 0
    if args.rate and rate < 1:
        raise ConfigError(f"--rate must be more than 0, got {args.rate}")
    return WarmOptions(
        bytes_per_s=rate,
        pin_s=parse_time(args.pin) if args.pin else 0.0,
        verify=args.verify,
        end_s=None if deadline_s is None else args.began_s + deadline_s,
    )


def _adapters(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not name or not equals or not path:
            raise ConfigError(f"--lora {word}: pass NAME=PATH")
        found[name] = path
    return found
