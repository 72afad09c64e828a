"""Block hashes against the functions of the installed vLLM itself."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from tests.support.engines.engine_env import engine_python
from tierd.hashing import (
    KeyStyle,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    RequestExtras,
    hash_blocks,
    root_hash,
)

REFERENCE = Path(__file__).parents[1] / "data" / "vllm_reference.py"
CASES = 400


def make_case(rng: random.Random) -> dict:
    """A random request; each kind of extra key occurs in about a third of them."""
    case: dict = {
        "seed": rng.choice([None, "0", "42", "", "random", "tierd-\u00e9"]),
        "block_tokens": rng.choice([1, 5, 16, 32, 128]),
        "untagged": rng.random() < 0.4,
        "salt": rng.choice([None, None, "tenant-a", "x" * 300]),
        "lora": rng.choice([None, None, ["sql", "/adapters/sql"], ["sql", "/adapters/sql-2"]]),
        "prompt": [rng.choice([20, 250, 60_000, 150_000]) for _ in range(rng.randrange(1, 300))],
        "multimodal": [],
        "embeds": None,
        "embeds_width": 3,
        "generated": [rng.randrange(200_000) for _ in range(rng.choice([0, 0, 40]))],
    }
    case["prompt"] = [rng.randrange(top) for top in case["prompt"]]
    count = len(case["prompt"])
    if rng.random() < 0.4:
        offset = 0
        for item in range(rng.randrange(1, 6)):
            offset += rng.randrange(0, 40)
            length = rng.choice([0, 1, rng.randrange(60), rng.randrange(60)])
            if offset + length > count:
                break
            case["multimodal"].append([f"{item:064x}", offset, length])
            # Overlapping items (the sound of a video) have one hash only if no token follows.
            if case["generated"] or rng.random() < 0.8:
                offset += length
    if rng.random() < 0.25:
        case["prompt"] = [0] * count
        case["embeds"] = rng.randbytes(count * case["embeds_width"] * 4).hex()
    return case


def ours(case: dict) -> dict:
    tokens = case["prompt"] + case["generated"]
    embeds = None
    if case["embeds"] is not None:
        embeds = PromptEmbeds(bytes.fromhex(case["embeds"]), case["embeds_width"] * 4)
    extras = RequestExtras(
        salt=case["salt"],
        lora=Lora(*case["lora"]) if case["lora"] else None,
        multimodal=tuple(MultimodalItem(*item) for item in case["multimodal"]),
        prompt_embeds=embeds,
    )
    block_tokens = case["block_tokens"]
    style = KeyStyle.UNTAGGED if case["untagged"] else KeyStyle.TAGGED
    keys = extras.block_keys(len(tokens) // block_tokens, block_tokens, style)
    root = root_hash(case["seed"])
    hashes = hash_blocks(tokens, block_tokens, parent=root, extra=keys)
    return {"root": root.hex(), "hashes": [digest.hex() for digest in hashes]}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(400)  # importing vLLM alone takes 10 s, and 40 s beside other work
def test_hashes_are_the_installed_engines():
    """A warm-up, or an explanation of a miss, would name blocks that no engine requests."""
    rng = random.Random(20)
    cases = [make_case(rng) for _ in range(CASES)]
    done = subprocess.run(
        [engine_python(), REFERENCE],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert len(theirs) == len(cases)
    for case, their in zip(cases, theirs, strict=True):
        assert ours(case) == their, case
