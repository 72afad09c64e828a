"""`tierd explain`: show where a prompt's blocks are, and why blocks are missing."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from tierd.cli.common.engine import EngineAwayError, EngineRefusedError, EngineServer
from tierd.cli.common.namespaces import ADAPTER_MARK, Namespaces, Ranks, add_namespace
from tierd.cli.common.operator import Operator, add_socket, table, tables
from tierd.cli.common.prompts import LocalTokenizer, Prompt, Tokenizer, hashes_of, parse, tokens_of
from tierd.cli.common.text import printable
from tierd.cli.explain.reasons import said
from tierd.errors import ConfigError, TierdError
from tierd.hashing import Lora
from tierd.types import Namespace
from tierd.wire.messages import EXPLAINED_MAX

ALL: Final = 0
AWAY: Final = 1
PARTLY: Final = 3
"""Exit statuses."""

HASH: Final = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)

HERE: Final = ("ready", "unverified", "evicting")
"""States in which L2 can serve a block."""

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"

Block = dict[str, object]
"""A block of one rank from an EXPLAINED message, with tiers and namespaces looked up."""


class Asked(NamedTuple):
    """Blocks to explain, parents first; `tokens` is None for bare hashes."""

    ranks: Ranks
    hashes: Sequence[bytes]
    tokens: int | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "explain",
        help="say where a prompt's blocks are, or why they are missing",
        description="Show for each block of a prompt where it is, and why host memory or a tier "
        "lacks it. Loads nothing and counts as no use. A FILE has one prompt: a JSON list of token "
        'ids, an object with "tokens", a request of the OpenAI API with "prompt" or "messages", or '
        "plain text.",
        epilog="Exit status: 0 all blocks are in host memory or a tier, 3 some are not, 1 no "
        "daemon or engine answers, 2 wrong usage.",
    )
    what = parser.add_argument_group("what to explain (one of these)")
    what.add_argument(
        "what", nargs="*", metavar="FILE|HASH", help="a prompt (- is stdin), or block hashes in hex"
    )
    what.add_argument("--text", help="a prompt as text")
    what.add_argument("--tokens", metavar="LIST", help='a prompt as token ids, "[1, 2, ...]"')
    meaning = parser.add_argument_group("how to hash the prompt")
    add_namespace(meaning)
    meaning.add_argument("--salt", help="the requests' cache_salt")
    meaning.add_argument("--lora", metavar="NAME=PATH", help="the requests' LoRA adapter")
    meaning.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="tokenize text with this tokenizer; needs the package transformers",
    )
    meaning.add_argument("--engine", metavar="URL", help="tokenize text with this vLLM")
    parser.add_argument("--all", action="store_true", help="print one line per block")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain the blocks; return the exit status."""
    given = _given(args)
    try:
        with Operator(args.socket, "tierd explain") as operator:
            asked = _asked(args, given, Namespaces(operator))
            ranks = [_explained(operator, rank.digest, asked.hashes) for rank in asked.ranks]
    except ConfigError:
        raise
    except EngineRefusedError as error:
        raise ConfigError(str(error)) from error
    except (EngineAwayError, TierdError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return AWAY
    answer = _Answer(asked, ranks)
    if args.json:
        print(json.dumps(answer.as_json(), indent=2))
    else:
        bold = sys.stdout.isatty()
        for line in answer.lines(each=args.all, bold=bold):
            print(line)
    return ALL if answer.missing is None else PARTLY


# --- options ----------------------------------------------------------------------------


def _given(args: argparse.Namespace) -> list[bytes] | Prompt:
    """Return the block hashes or the prompt given on the command line. Raises ConfigError."""
    given = [args.text is not None, args.tokens is not None, bool(args.what)]
    if sum(given) != 1:
        raise ConfigError("pass exactly one of FILE, block hashes, --text and --tokens")
    if args.what and all(HASH.fullmatch(word) for word in args.what):
        if args.salt is not None or args.lora is not None:
            raise ConfigError("--salt and --lora do not apply to block hashes: leave them out")
        return [bytes.fromhex(word) for word in args.what]
    if args.text is not None:
        prompt = Prompt({"prompt": args.text}, None, None, None, None)
    elif args.tokens is not None:
        prompt = _parsed("--tokens", args.tokens.encode())
    elif len(args.what) == 1:
        prompt = _of_file(args.what[0])
    else:
        raise ConfigError("pass one FILE, or block hashes of 64 hex digits each")
    if args.lora is not None:
        name, found, path = args.lora.partition("=")
        if not (name and found and path):
            raise ConfigError("--lora: want NAME=PATH")
        prompt = prompt._replace(lora=Lora(name, path))
    return prompt if args.salt is None else prompt._replace(salt=args.salt)


def _of_file(name: str) -> Prompt:
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    shown = "stdin" if name == "-" else name
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{shown} is empty")
    if not lines[0].lstrip().startswith((b"[", b"{")):
        try:
            return Prompt({"prompt": content.decode()}, None, None, None, None)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{shown}: {error}") from error
    if len(lines) > 1 and _is_json(lines[0]):
        raise ConfigError(f"{shown} has {len(lines)} prompts: pass one of its lines on stdin")
    return _parsed(shown, content)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parsed(name: str, content: bytes) -> Prompt:
    try:
        return parse(content, {})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _asked(args: argparse.Namespace, given: list[bytes] | Prompt, known: Namespaces) -> Asked:
    if isinstance(given, list):
        return Asked(_ranks(args, known), given, None)
    own = given.namespaces
    ranks = _ranks(args, known) if own is None else known.ranks(own)
    if given.lora is not None and ADAPTER_MARK not in ranks[0].weights:
        ranks = known.adapter(ranks, given.lora.name)
    tokens = tokens_of(given, _tokenizer(args))
    hashes = hashes_of(tokens, ranks[0], given.salt, given.lora)
    if not hashes:
        raise ConfigError(
            f"the prompt has {len(tokens)} tokens, less than one block: tierd stores only full "
            f"blocks of {ranks[0].block_tokens} tokens"
        )
    return Asked(ranks, hashes, len(tokens))


def _ranks(args: argparse.Namespace, known: Namespaces) -> Ranks:
    return known.given(args.namespace) if args.namespace else known.only()


def _tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    if args.tokenizer is not None:
        return LocalTokenizer(args.tokenizer)
    return None if args.engine is None else EngineServer(args.engine)


# --- the answer -------------------------------------------------------------------------


def _explained(
    operator: Operator, digest: bytes, hashes: Sequence[bytes]
) -> tuple[bool, list[Block]]:
    """Ask the daemon; return whether it knows the namespace, and the named blocks."""
    known, blocks = False, list[Block]()
    for start in range(0, len(hashes), EXPLAINED_MAX):
        body = operator.explain(digest, hashes[start : start + EXPLAINED_MAX])
        known = bool(body["known"])
        blocks += named_blocks(body)
    return known, blocks


def named_blocks(body: Mapping[str, object]) -> list[Block]:
    """Return the blocks of an EXPLAINED message, with names in place of tier numbers."""
    tiers, others = tables(body["tiers"]), tables(body["others"])
    return [_named(block, tiers, others) for block in tables(body["blocks"])]


def _named(
    block: Block, tiers: Sequence[Mapping[str, object]], others: Sequence[Mapping[str, object]]
) -> Block:
    """Replace tier numbers by names, and resolve the tiers and namespaces in the reasons."""

    def name(number: object) -> object:
        return tiers[number]["name"] if isinstance(number, int) else number

    reasons = []
    for reason in tables(block["why"]):
        shown = dict(reason)
        if isinstance(number := reason.get("tier"), int):
            shown["tier"] = tiers[number]
        if isinstance(number := shown.pop("other", None), int):
            shown["namespace"] = others[number]
        if isinstance(places := reason.get("in"), list):
            shown["in"] = [name(place) for place in places]
        reasons.append(shown)
    held = block["tiers"]
    assert isinstance(held, list)
    return {**block, "tiers": [name(number) for number in held], "why": reasons}


class _Answer:
    """The explained blocks of all ranks."""

    def __init__(self, asked: Asked, explained: Sequence[tuple[bool, list[Block]]]) -> None:
        self._asked = asked
        self._known = [known for known, _ in explained]
        self._blocks = list(zip(*(blocks for _, blocks in explained), strict=True))
        self.missing = next(
            (at for at, found in enumerate(self._blocks) if not _is_there(found)), None
        )
        """Index of the first block that some rank lacks; None if all ranks have all blocks."""

    @property
    def _block_tokens(self) -> int:
        return self._asked.ranks[0].block_tokens

    def as_json(self) -> dict[str, object]:
        """Return the whole answer. Reasons hold the tier's name, not its status."""
        had = len(self._blocks) if self.missing is None else self.missing
        tokens = {
            "tokens": self._asked.tokens,
            "tokens_there": had * self._block_tokens,
        }
        return {
            "namespaces": [
                {"digest": rank.digest.hex(), "model": rank.model, "known": known}
                for rank, known in zip(self._asked.ranks, self._known, strict=True)
            ],
            "block_tokens": self._block_tokens,
            **(tokens if self._asked.tokens is not None else {}),
            "blocks": [
                {
                    "hash": block_hash.hex(),
                    "there": _is_there(found),
                    "ranks": [{**block, "why": _plain(block)} for block in found],
                }
                for block_hash, found in zip(self._asked.hashes, self._blocks, strict=True)
            ],
        }

    def lines(self, *, each: bool, bold: bool) -> Iterator[str]:
        """Yield the text: one line per run of equal blocks, or per block if `each`."""
        for rank, known in zip(self._asked.ranks, self._known, strict=True):
            if not known:
                yield f"no engine has used namespace {rank.digest.hex()} since tierd started"
        places = range(len(self._blocks))
        for _, run in groupby(places, lambda at: at if each else _alike(self._blocks[at])):
            yield from self._run(list(run), bold=bold)
        if self._asked.tokens is not None:
            yield from self._sum()

    def _run(self, places: Sequence[int], *, bold: bool) -> Iterator[str]:
        found, first = self._blocks[places[0]], places[0] == self.missing
        what = f"block {places[0]}" if len(places) == 1 else f"blocks {places[0]}-{places[-1]}"
        if self._asked.tokens is not None:
            what += f" ({len(places) * self._block_tokens} tokens)"
        else:
            what += f" ({self._asked.hashes[places[0]].hex()[:16]}...)"
        line = f"{what}: {self._where(found)}"
        yield f"{BOLD}{line}{PLAIN}" if first and bold else line
        told: dict[str, str] = {}
        for rank, block in zip(self._asked.ranks, found, strict=True):
            who = f"{_rank(rank)}: " if len(found) > 1 else ""
            for reason in tables(block["why"]):
                words = said(reason)
                told.setdefault(f"{who}{words.what}", words.do)
        for what, do in told.items():
            yield f"    {what}"
            if do and first:
                yield f"      -> {do}"

    def _where(self, found: Sequence[Block]) -> str:
        places = [_place(block) for block in found]
        if len(set(places)) == 1:
            return places[0]
        ranks = map(_rank, self._asked.ranks)
        return ", ".join(f"{rank} {place}" for rank, place in zip(ranks, places, strict=True))

    def _sum(self) -> Iterator[str]:
        count = len(self._blocks)
        had = count if self.missing is None else self.missing
        brought = sum(not all(map(_is_here, found)) for found in self._blocks[:had])
        later = sum(map(_is_there, self._blocks[had:]))
        size = self._block_tokens
        line = f"A request would load {had * size} of {self._asked.tokens} tokens now"
        if brought:
            line += f", {brought * size} of them from a tier"
        yield line + "."
        if later:
            yield f"{later * size} more tokens follow missing block {self.missing}: not usable."


def _rank(namespace: Namespace) -> str:
    """Return a rank's name."""
    if namespace.pp_size == namespace.cp_size == 1:
        return f"rank {namespace.tp_rank}"
    return f"rank pp{namespace.pp_rank} tp{namespace.tp_rank} cp{namespace.cp_rank}"


def _is_here(block: Block) -> bool:
    return block["host"] in HERE


def _is_there(found: Sequence[Block]) -> bool:
    """Return whether every rank has the block in L2 or a tier."""
    return all(_is_here(block) or block["tiers"] for block in found)


def _alike(found: Sequence[Block]) -> list[object]:
    """Return a key that is equal for blocks with the same place and reasons."""
    return [
        (
            block["host"],
            block["tiers"],
            [
                (reason["what"], reason.get("by"), table(reason.get("tier", {})).get("name"))
                for reason in tables(block["why"])
            ],
        )
        for block in found
    ]


_HOST: Final = {
    "ready": "host memory",
    "unverified": "host memory (not yet verified)",
    "evicting": "host memory (evicting)",
}


def _place(block: Block) -> str:
    where = [_HOST[str(block["host"])]] if _is_here(block) else []
    tiers = block["tiers"]
    assert isinstance(tiers, list)
    where += [f"tier {printable(name)}" for name in tiers]
    if where:
        return "in " + " and ".join(where)
    return "MISSING, being stored now" if block["host"] == "writing" else "MISSING"


def _plain(block: Block) -> list[dict[str, object]]:
    """Return a block's reasons with each tier reduced to its name."""
    return [
        {**reason, "tier": table(reason["tier"])["name"]} if "tier" in reason else reason
        for reason in tables(block["why"])
    ]
