"""Shows what tierd is for, on this machine: prefixes that survive a restart of engine and tierd.

A real vLLM answers conversations about long documents. Then the engine is restarted, then both
engine and tierd, and the same conversations are replayed: the prefixes come from tierd, and the
answers are the same tokens. On success the last line is `demo: ok` and the exit status 0.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.common import write_result
from engine.model import write_config
from engine.process import EngineProcess
from tests.support.daemon_process import DaemonProcess

SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 600, 1500, 50, 16
CONVERSATIONS, TURNS = 3, 2
BLOCK_TOKENS = 32

SERVED_MIN = 0.9
"""Share of the first turns' whole blocks that tierd must serve after a restart."""


@dataclass
class Pass:
    """One replay of all conversations by a fresh engine."""

    name: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_turn_blocks: int = 0
    first_turn_s: list[float] = field(default_factory=list)
    later_turn_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    from_tierd: int = 0
    from_storage: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="use and keep this directory")
    parser.add_argument("--record", action="store_true", help="write bench/results/demo.json")
    args = parser.parse_args()
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
        return show(args.keep, record=args.record)
    with tempfile.TemporaryDirectory(prefix="tierd-demo-") as scratch:
        return show(Path(scratch), record=args.record)


def show(scratch: Path, *, record: bool) -> int:
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    write_config(scratch / "model", "demo")
    passes = []
    with DaemonProcess(scratch / "tierd", capacity="2GiB") as daemon:
        say("tierd serves, with an empty file tier")
        passes.append(replay(Pass("cold"), scratch, daemon, say))
        passes.append(replay(Pass("engine restarted"), scratch, daemon, say))
        daemon.stop()
        daemon.start()
        say("tierd restarted: its host memory is empty")
        passes.append(replay(Pass("tierd restarted"), scratch, daemon, say))
    print_table(passes)
    faults = verdict(passes)
    if record and not faults:
        write_result("demo", {entry.name: summary(entry) for entry in passes})
    for fault in faults:
        print(f"demo: {fault}")
    print("demo: failed" if faults else "demo: ok")
    return 1 if faults else 0


def replay(result: Pass, scratch: Path, daemon: DaemonProcess, say: Callable[[str], None]) -> Pass:
    """Replay all conversations, turn by turn, with an engine that has just started."""
    say(f"{result.name}: starting vLLM")
    settings = {"model": str(scratch / "model"), "socket": daemon.socket, "kv_gib": 2}
    with EngineProcess(settings, scratch / "vllm.log") as engine:
        # In a new process the first prompt of more than one chunk is slow; without this warm-up the
        # comparison would favour tierd.
        engine.generate([tokens("warm-up " + result.name, 600)], tokens=1)
        before = (loaded(engine), storage_hits(daemon))
        talks = [
            tokens("system", SYSTEM_TOKENS) + tokens(f"document {i}", DOCUMENT_TOKENS)
            for i in range(CONVERSATIONS)
        ]
        for turn in range(TURNS):
            for i in range(CONVERSATIONS):
                prompt = talks[i] + tokens(f"question {i}.{turn}", QUESTION_TOKENS)
                answer = engine.generate([prompt], ANSWER_TOKENS)
                talks[i] = prompt + answer["tokens"][0]
                result.answers.append(answer["tokens"][0])
                result.prompt_tokens += len(prompt)
                result.cached_tokens += answer["cached"][0]
                (result.later_turn_s if turn else result.first_turn_s).append(answer["ttft"][0])
                result.first_turn_blocks += 0 if turn else (len(prompt) - 1) // BLOCK_TOKENS
            say(f"{result.name}: turn {turn + 1} of {TURNS} answered")
        result.from_tierd = loaded(engine) - before[0]
    daemon.wait_backed_up()
    result.from_storage = (storage_hits(daemon) - before[1]) * BLOCK_TOKENS
    return result


def loaded(engine: EngineProcess) -> int:
    """Tokens that this engine has loaded from tierd, by the engine's own metrics."""
    return int(engine.call("stats").get("loaded_tokens", 0))


def storage_hits(daemon: DaemonProcess) -> int:
    """Blocks that the file tier has delivered, by tierd's status."""
    return int(daemon.status()["storage"][0]["counters"].get("get_hit_total", 0))


def tokens(tag: str, count: int) -> list[int]:
    """Pseudo-random token ids below the model's vocabulary size; a tag always gives the same
    ones."""
    source = random.Random(tag)
    return [source.randrange(10, 15990) for _ in range(count)]


def print_table(passes: list[Pass]) -> None:
    cold = passes[0]
    print(
        f"\n{'pass':<17}{'prompt':>8}{'from tierd':>12}{'(L2':>8}{'L3)':>8}{'TTFT first':>12}"
        f"{'later':>8}{'speed-up':>10}  answers"
    )
    print(f"{'':<17}{'tokens':>8}{'tokens':>12}{'':>16}{'turn, s':>12}{'turns':>8}{'':>10}")
    for entry in passes:
        first = statistics.median(entry.first_turn_s)
        later = statistics.median(entry.later_turn_s)
        speed = statistics.median(cold.first_turn_s) / first
        same = "" if entry is cold else "identical" if entry.answers == cold.answers else "DIFFER"
        memory = max(0, entry.from_tierd - entry.from_storage)
        print(
            f"{entry.name:<17}{entry.prompt_tokens:>8}{entry.from_tierd:>12}{memory:>8}"
            f"{min(entry.from_storage, entry.from_tierd):>8}{first:>12.3f}{later:>8.3f}"
            f"{speed:>9.1f}x  {same}"
        )
    print("(medians; later turns find most of their prefix in the engine's own cache)\n")


def summary(entry: Pass) -> dict[str, float]:
    """One replay, as recorded in bench/results."""
    return {
        "prompt_tokens": entry.prompt_tokens,
        "tokens_from_tierd": entry.from_tierd,
        "tokens_from_storage": min(entry.from_storage, entry.from_tierd),
        "first_turn_ttft_s": round(statistics.median(entry.first_turn_s), 3),
        "later_turn_ttft_s": round(statistics.median(entry.later_turn_s), 3),
    }


def verdict(passes: list[Pass]) -> list[str]:
    """Reasons why the demo failed; empty if it is ok."""
    cold, engine, both = passes
    faults = []
    for entry in (engine, both):
        if entry.answers != cold.answers:
            faults.append(f"{entry.name}: answers differ from the cold ones")
        # The shared system prompt is loaded once, and is then in the engine's own cache.
        shared = (CONVERSATIONS - 1) * (SYSTEM_TOKENS // BLOCK_TOKENS)
        expected = (entry.first_turn_blocks - shared) * BLOCK_TOKENS
        if entry.from_tierd < SERVED_MIN * expected:
            faults.append(f"{entry.name}: {entry.from_tierd} tokens from tierd, not {expected}")
    if both.from_storage < SERVED_MIN * both.from_tierd:
        faults.append("tierd restarted: its file tier did not serve the prefixes")
    return faults


if __name__ == "__main__":
    sys.exit(main())
