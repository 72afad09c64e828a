"""`tierd hash`: compute the block hashes of prompts as the engine does.

For each input line, a JSON list of token ids, it writes one output line, a JSON list of hex
digests. It holds one line at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import IO

from tierd.errors import ConfigError, HashInputError
from tierd.hashing import KeyStyle, Lora, RequestExtras, hash_blocks, root_hash

DEFAULT_BLOCK_TOKENS = 16
"""vLLM's default block size on a GPU. Its CPU engine needs a multiple of 32."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "hash",
        help="compute the block hashes of prompts given as token ids",
        description="Compute block hashes as vLLM does with --prefix-caching-hash-algo "
        "sha256_cbor. Each input line is a JSON list of token ids. Each output line is a JSON list "
        "of hex digests, one per full block.",
    )
    parser.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="input; - (default) reads stdin"
    )
    parser.add_argument(
        "--seed",
        help="the engine's PYTHONHASHSEED (default: unset, as vLLM >= 0.29 handles it)",
    )
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=DEFAULT_BLOCK_TOKENS,
        metavar="N",
        help="tokens per block, the engine's --block-size (default: %(default)s)",
    )
    parser.add_argument("--salt", help="the requests' cache_salt")
    parser.add_argument(
        "--lora", nargs=2, metavar=("NAME", "PATH"), help="the requests' LoRA adapter"
    )
    parser.add_argument(
        "--untagged",
        action="store_true",
        help="include salt and LoRA in the hash as vLLM <= 0.30 does",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Hash every line; return the exit status, 2 at the first bad line. Raises ConfigError."""
    if args.block_tokens < 1:
        raise ConfigError(f"--block-tokens must be at least 1, got {args.block_tokens}")
    style = KeyStyle.UNTAGGED if args.untagged else KeyStyle.TAGGED
    extras = RequestExtras(salt=args.salt, lora=Lora(*args.lora) if args.lora else None)
    try:
        root = root_hash(args.seed)
        extras.block_keys(1, args.block_tokens, style)
    except HashInputError as error:
        raise ConfigError(str(error)) from error
    if args.file == "-":
        return _hash_lines(sys.stdin.buffer, "stdin", root, args.block_tokens, extras, style)
    try:
        source = open(args.file, "rb")  # noqa: SIM115 (a failed write is not an error of this file)
    except OSError as error:
        raise ConfigError(f"{args.file}: {error.strerror}") from error
    with source:
        return _hash_lines(source, args.file, root, args.block_tokens, extras, style)


def _hash_lines(
    source: IO[bytes],
    name: str,
    root: bytes,
    block_tokens: int,
    extras: RequestExtras,
    style: KeyStyle,
) -> int:
    plain = extras == RequestExtras()
    for number, line in enumerate(source, 1):
        try:
            tokens = json.loads(line)
            if not isinstance(tokens, list):
                raise HashInputError(f"a line must hold a list of token ids, not {tokens!r:.40}")
            blocks = len(tokens) // block_tokens
            keys = None if plain else extras.block_keys(blocks, block_tokens, style)
            hashes = hash_blocks(tokens, block_tokens, parent=root, extra=keys)
        except (ValueError, RecursionError) as error:
            print(f"tierd hash: {name}, line {number}: not JSON: {error}", file=sys.stderr)
            return 2
        except HashInputError as error:
            print(f"tierd hash: {name}, line {number}: {error}", file=sys.stderr)
            return 2
        print(json.dumps([digest.hex() for digest in hashes]), flush=True)
    return 0
