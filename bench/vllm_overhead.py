"""Output throughput of a real vLLM with the connector attached and no hits, against vLLM alone.

Two engines stay up and take turns on the same work with new prompts each time, so a slow minute
affects both. Stores are on: the blocks of every prompt and answer go to tierd.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

from bench.common import write_result
from engine.model import write_config
from engine.process import EngineProcess
from tests.support.daemon_process import DaemonProcess

TURNS = 10
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 64
TARGET = 0.98


def main() -> None:
    source = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as name:
        scratch = Path(name)
        write_config(scratch / "model", "demo")
        model = {"model": str(scratch / "model"), "kv_gib": 1}
        with (
            DaemonProcess(scratch / "tierd", capacity="1GiB") as daemon,
            EngineProcess(model, scratch / "without.log") as without,
            EngineProcess({**model, "socket": daemon.socket}, scratch / "with.log") as attached,
        ):
            engines = {"without": without, "attached": attached}
            speed: dict[str, list[float]] = {"without": [], "attached": []}
            for turn in range(TURNS + 1):
                # Each engine goes first in half of the turns.
                for kind in sorted(engines, reverse=bool(turn % 2)):
                    prompts = [
                        [source.randrange(10, 15990) for _ in range(PROMPT_TOKENS)]
                        for _ in range(REQUESTS)
                    ]
                    answer = engines[kind].generate(prompts, OUTPUT_TOKENS)
                    assert not any(answer["cached"])
                    if turn:
                        speed[kind].append(REQUESTS * OUTPUT_TOKENS / answer["seconds"])
                print({kind: round(values[-1], 1) for kind, values in speed.items() if values})
            stored = daemon.wait_backed_up()["counters"]["stored_blocks_total"]
    medians = {kind: statistics.median(values) for kind, values in speed.items()}
    ratio = medians["attached"] / medians["without"]
    pairs = [a / b for a, b in zip(speed["attached"], speed["without"], strict=True)]
    results: dict = {
        "tokens_per_s": {kind: round(value, 1) for kind, value in medians.items()},
        "ratio_of_medians": round(ratio, 4),
        "median_of_pair_ratios": round(statistics.median(pairs), 4),
        "pair_ratios": [round(pair, 3) for pair in sorted(pairs)],
        "target": TARGET,
        "turns": TURNS,
        "blocks_stored": stored,
    }
    print(results)
    write_result("vllm_overhead", results)


if __name__ == "__main__":
    main()
