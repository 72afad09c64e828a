"""A small generator of traces in Mooncake's format: conversations, a shared prompt, scans."""

from __future__ import annotations

import json
import random

BLOCK_TOKENS = 512


def trace_lines(
    seed: int, requests: int = 400, scan_every: int = 25, turn_blocks: int = 6, reach: float = 12.5
) -> list[bytes]:
    """Chats that return with their whole history and a little more, and sometimes a long scan.

    A turn adds up to `turn_blocks`; a chat that returns has on average `reach` younger chats.
    """
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 30))
    chats: list[list[int]] = []
    lines = []
    now_ms = 0
    for number in range(requests):
        now_ms += int(rng.expovariate(1 / 400))
        if number % scan_every == scan_every - 1:
            ids = [next(fresh) for _ in range(40)]
        else:
            if not chats or rng.random() < 0.4:
                chats.append([0])
            # Usually a recent chat.
            chat = chats[-1 - min(int(rng.expovariate(1 / reach)), len(chats) - 1)]
            chat += [next(fresh) for _ in range(rng.randint(1, turn_blocks))]
            ids = chat
        tokens = len(ids) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        record = {
            "timestamp": now_ms,
            "input_length": tokens,
            "output_length": rng.randint(1, 400),
            "hash_ids": ids,
        }
        lines.append(json.dumps(record).encode() + b"\n")
    return lines
