"""Block hashes per second, against sha256 of the same bytes alone."""

from __future__ import annotations

import hashlib
import random

import cbor2
import numpy as np

from bench.common import ROUNDS, interleaved, write_result
from tierd.hashing import RequestExtras, hash_blocks, root_hash

BLOCK_TOKENS = 16
BLOCKS = 8192
"""A prompt of 131,072 tokens."""
SHORT_BLOCKS = 32
"""A prompt of 512 tokens, where the fixed cost of a call shows."""
VOCABULARY = 128_000


def main() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(VOCABULARY) for _ in range(BLOCKS * BLOCK_TOKENS)]
    prompts = [
        tokens[first : first + SHORT_BLOCKS * BLOCK_TOKENS]
        for first in range(0, len(tokens), SHORT_BLOCKS * BLOCK_TOKENS)
    ]
    array = np.array(tokens, np.uint32)
    root = root_hash()
    salted = RequestExtras(salt="tenant").block_keys(BLOCKS, BLOCK_TOKENS)
    preimages: list[bytes] = []
    reference: list[bytes] = []

    def one_cbor2_a_block() -> None:
        preimages.clear()
        reference.clear()
        parent = root
        for first in range(0, len(tokens), BLOCK_TOKENS):
            ids = tuple(tokens[first : first + BLOCK_TOKENS])
            preimages.append(cbor2.dumps((parent, ids, None), canonical=True))
            parent = hashlib.sha256(preimages[-1]).digest()
            reference.append(parent)

    one_cbor2_a_block()
    assert hash_blocks(tokens, BLOCK_TOKENS, parent=root) == reference
    cases = {
        "sha256 of the same bytes": lambda: [hashlib.sha256(p).digest() for p in preimages],
        "tierd, list": lambda: hash_blocks(tokens, BLOCK_TOKENS, parent=root),
        "tierd, numpy array": lambda: hash_blocks(array, BLOCK_TOKENS, parent=root),
        "tierd, list, salted": lambda: hash_blocks(tokens, BLOCK_TOKENS, parent=root, extra=salted),
        "tierd, lists of 512": lambda: [
            hash_blocks(prompt, BLOCK_TOKENS, parent=root) for prompt in prompts
        ],
        "one cbor2 call a block": one_cbor2_a_block,
    }
    seconds = interleaved(cases)
    floor = seconds["sha256 of the same bytes"]
    results = {
        name: {
            "blocks_per_s": round(BLOCKS / taken),
            "us_per_block": round(taken / BLOCKS * 1e6, 3),
            "ratio_to_sha256": round(floor / taken, 3),
        }
        for name, taken in seconds.items()
    }
    print(f"blocks of {BLOCK_TOKENS} tokens, one core, median of {ROUNDS} rounds")
    for name, row in results.items():
        print(
            f"{name:26} {row['blocks_per_s']:>12,} blocks/s {row['us_per_block']:8.2f} us"
            f" {row['ratio_to_sha256']:6.2f} of sha256"
        )
    write_result(
        "hashing", {"block_tokens": BLOCK_TOKENS, "blocks": BLOCKS, "rounds": ROUNDS, **results}
    )


if __name__ == "__main__":
    main()
