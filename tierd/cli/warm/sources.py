"""The sources of a warm: prompts, hot sets and the blocks of a tier, as one stream of wants.

A want is a chain of blocks of the ranks of one engine, parents first. Sources are read on demand,
never far ahead.
"""

from __future__ import annotations

import hashlib
import http.client
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from tierd.cli.common.engine import EngineAwayError, EngineRefusedError, EngineServer
from tierd.cli.common.namespaces import ADAPTER_MARK, Namespaces, Ranks
from tierd.cli.common.operator import Operator
from tierd.cli.common.prompts import Prompt, Tokenizer, hashes_of, parse, tokens_of
from tierd.cli.common.text import printable
from tierd.cli.warm.report import WarmReport
from tierd.errors import ConfigError
from tierd.hashing import Lora
from tierd.hotset import Forest, HotSet
from tierd.types import NEVER
from tierd.wire.messages import split_hashes, unpack_slots

LINE_BYTES_MAX: Final = 64 << 20
"""Longest line of a prompt file: a million token ids take less than 8 MB."""

URL_BYTES_MAX: Final = 4 << 30
"""Largest hot set of another node; one with a million blocks has 70 MB."""

URL_S: Final = 30.0
"""Longest wait for the next bytes of another node's hot set."""

INTRODUCED_S: Final = 15.0
"""Longest wait for an adapter's namespace after the engine has computed its first prompt."""

_POLL_S: Final = 0.1


class WantedBlocks(NamedTuple):
    """A chain of blocks to warm."""

    label: str
    ranks: Ranks
    hashes: Sequence[bytes]
    unit: str
    """Name of the unit in a journal."""
    tokens: list[int] | None = None
    """The prompt, from which an engine can compute the blocks."""
    model: str | None = None
    salt: str | None = None
    uses: int = 0
    """Number of uses on another node; 0 if unknown."""
    age_s: int = NEVER
    by_worth: bool = False
    """The source is ordered: later wants are worth less."""
    done: int | None = None
    """Number of blocks if an earlier run finished the unit, which is then skipped."""


class Sources:
    """Reads the sources of one command and tracks how much is read."""

    def __init__(
        self,
        operator: Operator,
        report: WarmReport,
        *,
        namespaces: Sequence[str],
        adapters: Mapping[str, str],
        tokenizer: Tokenizer | None,
        engine: EngineServer | None,
        skip_bad: bool,
        done: Callable[[str], int | None],
    ) -> None:
        """`done` returns the number of blocks of a finished unit, None for any other unit."""
        self.namespaces = Namespaces(operator)
        self.share: float | None = None
        """Share of the current source that has been read, 0 to 1; None if unknown."""
        self._size_bytes = 0
        """Size of the current file; 0 if unknown."""
        self._operator = operator
        self._report = report
        self._given = namespaces
        self._default: Ranks | None = None
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._engine = engine
        self._skip_bad = skip_bad
        self._done = done
        self._models: dict[str, bool] = {}
        """Model names of requests, and whether each is an adapter."""

    # --- hot sets -----------------------------------------------------------------------

    def hot_set(self, name: str) -> Iterator[WantedBlocks]:
        """Yield the runs of a hot set, from a file or another node."""
        try:
            yield from self._hot_set(name)
        except ConfigError as error:
            if not self._skip_bad:
                raise
            self._report.missing(printable(name), f"malformed: {error}")

    def _hot_set(self, name: str) -> Iterator[WantedBlocks]:
        try:
            with self._opened(name) as file:
                found = HotSet(file, name)
                age_s = max(0, int(time.time()) - found.written_s)
                for number, (ranks, run) in enumerate(found, 1):
                    self._note(file)
                    self.namespaces.learn(found.namespaces.values())
                    unit = _unit(b"run", ranks, run.hashes[-1], len(run.hashes))
                    since_s = NEVER if run.age_s == NEVER else min(run.age_s + age_s, NEVER)
                    yield WantedBlocks(
                        f"{printable(name)}, run {number}",
                        ranks,
                        run.hashes,
                        unit,
                        uses=run.uses,
                        age_s=since_s,
                        by_worth=True,
                        done=self._done(unit),
                    )
                self.namespaces.learn(found.namespaces.values())
        except OSError as error:
            raise ConfigError(f"{name}: {error.strerror or error}") from error

    # --- a tier ---------------------------------------------------------------------------

    def tier(self, name: str, number: int, size_bytes: int | None) -> Iterator[WantedBlocks]:
        """Yield the blocks of the namespaces in tier number `number`, most valuable first."""
        ranks = self.default()
        forest = Forest(ranks[0].hash_root)
        for page in self._operator.inventory(ranks[0].digest, number + 1):
            forest.add(
                split_hashes(page.hashes),
                split_hashes(page.parents),
                unpack_slots(page.uses),
                unpack_slots(page.ages_s),
            )
        block_bytes = sum(rank.block_bytes for rank in ranks)
        left = len(forest) if size_bytes is None else size_bytes // block_bytes
        whole = max(1, min(left, len(forest)))
        for count, run in enumerate(filter(None, forest.runs()), 1):
            hashes = run.hashes[:left]
            if not hashes:
                return
            left -= len(hashes)
            self.share = 1 - min(left, whole) / whole
            unit = _unit(b"run", ranks, hashes[-1], len(hashes))
            label, done = f"{name}, run {count}", self._done(unit)
            yield WantedBlocks(label, ranks, hashes, unit, by_worth=True, done=done)

    # --- prompts --------------------------------------------------------------------------

    def prompts(self, name: str) -> Iterator[WantedBlocks]:
        """Yield the prompts of a file, or of stdin."""
        with self._opened(name) as file:
            shown = "stdin" if name == "-" else printable(name)
            for number, line in enumerate(_lines(file), 1):
                self._note(file)
                where = f"{shown}, line {number}"
                try:
                    want = self._prompt(where, line)
                except EngineRefusedError as error:
                    self._report.missing(where, str(error))
                except EngineAwayError as error:
                    self._report.engine_away = str(error)
                    self._report.missing(where, str(error))
                except ConfigError as error:
                    if not self._skip_bad:
                        raise ConfigError(f"{where}: {error}") from error
                    self._report.missing(where, f"malformed: {error}")
                else:
                    if want is not None:
                        yield want

    def _prompt(self, where: str, line: bytes | None) -> WantedBlocks | None:
        if line is None:
            raise ConfigError(f"the line is too long: at most {LINE_BYTES_MAX} bytes are read")
        if not line.strip():
            return None
        prompt = parse(line, self._adapters)
        base = self._base(prompt)
        unit = _unit(line.strip(), base, *map(str.encode, prompt.lora or ()))
        if (done := self._done(unit)) is not None:
            return WantedBlocks(where, base, (), unit, done=done)
        by_engine = "tokens" not in prompt.request and self._tokenizer is self._engine
        if by_engine and self._report.engine_away:
            raise EngineAwayError(self._report.engine_away)
        tokens = tokens_of(prompt, self._tokenizer)
        model = prompt.model
        ranks = base
        if prompt.lora is not None:
            model = model or prompt.lora.name
            ranks = self._of_adapter(base, prompt.lora, tokens, prompt.salt)
        hashes = hashes_of(tokens, ranks[0], prompt.salt, prompt.lora)
        return WantedBlocks(where, ranks, hashes, unit, tokens, model, prompt.salt)

    def _base(self, prompt: Prompt) -> Ranks:
        if prompt.namespaces is not None:
            return self.namespaces.ranks(prompt.namespaces)
        base = self.default()
        model = prompt.model
        if prompt.lora is None and model is not None:
            if model not in self._models:
                self._models[model] = self.namespaces.has_adapter(model)
            if self._models[model]:
                raise ConfigError(
                    f"the model {model!r:.80} is an adapter: pass --lora NAME=PATH with the path "
                    "from which the engine loads it"
                )
        return base

    def default(self) -> Ranks:
        """Return the namespaces of --namespace, or the namespaces of the only engine."""
        if self._default is None:
            given = self._given
            self._default = self.namespaces.given(given) if given else self.namespaces.only()
        return self._default

    def _of_adapter(self, base: Ranks, lora: Lora, tokens: list[int], salt: str | None) -> Ranks:
        """Return an adapter's namespaces. The engine registers them at the adapter's first
        prompt."""
        if any(ADAPTER_MARK in rank.weights for rank in base):
            return base
        try:
            return self.namespaces.adapter(base, lora.name)
        except ConfigError:
            if self._engine is None:
                raise
        self._engine.compute(tokens, model=lora.name, salt=salt)
        end_s = time.monotonic() + INTRODUCED_S
        while True:
            try:
                return self.namespaces.adapter(base, lora.name)
            except ConfigError:
                if time.monotonic() >= end_s:
                    raise
            time.sleep(_POLL_S)

    # --- reading --------------------------------------------------------------------------

    def _opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file, stdin or a URL. Raises ConfigError if that fails."""
        self.share, self._size_bytes = None, 0
        try:
            if name == "-":
                return nullcontext(sys.stdin.buffer)
            if name.startswith(("http://", "https://")):
                return closing(_fetched(name))
            path = Path(name)
            self._size_bytes = path.stat().st_size
            file = path.open("rb")  # the caller closes it
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ConfigError(f"{name}: {getattr(why, 'strerror', None) or why}") from error
        return file

    def _note(self, file: BinaryIO) -> None:
        self.share = file.tell() / self._size_bytes if self._size_bytes else None


def _fetched(url: str) -> BinaryIO:
    """Download a URL into a temporary file: a node serves its hot set to one client at a time,
    and for a limited time."""
    with ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile())
        with urllib.request.urlopen(url, timeout=URL_S) as response:
            while piece := response.read(1 << 20):
                if file.tell() > URL_BYTES_MAX:
                    raise ConfigError(f"{url}: longer than {URL_BYTES_MAX} bytes")
                file.write(piece)
        file.seek(0)
        undo.pop_all()  # The caller closes it.
    return file


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines; None for each line that is too long."""
    while line := file.readline(LINE_BYTES_MAX):
        if len(line) < LINE_BYTES_MAX or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES_MAX)
        yield None


def _unit(what: bytes, ranks: Ranks, *rest: bytes | int) -> str:
    """Return a unique name of a unit that is equal in every run."""
    parts = [what, *(rank.digest for rank in ranks)]
    parts += [part if isinstance(part, bytes) else str(part).encode() for part in rest]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
