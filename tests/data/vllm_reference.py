"""vLLM's own block hashes of the cases on stdin, both as JSON. Runs in the engine's Python.

A case is a request as the engine sees it: its prompt, and the tokens that it then generates one at
a time.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request


def request_of(case, hasher):
    """The case as a vLLM request with all of its tokens hashed."""
    embeds = None
    if case["embeds"] is not None:
        rows = bytearray.fromhex(case["embeds"])
        embeds = torch.frombuffer(rows, dtype=torch.float32).reshape(-1, case["embeds_width"])
    lora = LoRARequest(case["lora"][0], 1, case["lora"][1]) if case["lora"] else None
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for identifier, offset, length in case["multimodal"]
    ]
    request = Request(
        request_id="r",
        prompt_token_ids=None if embeds is not None else case["prompt"],
        prompt_embeds=embeds,
        sampling_params=SamplingParams(max_tokens=100),
        pooling_params=None,
        mm_features=features,
        lora_request=lora,
        cache_salt=case["salt"],
        block_hasher=hasher,
    )
    for token in case["generated"]:
        request.append_output_token_ids(token)
    return request


def untagged_hashes(request, block_tokens):
    """Hashes of vLLM <= 0.30, whose keys vLLM still publishes in KV events."""
    hashes = []
    parent = None
    item = 0
    tokens = list(request.all_token_ids)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        stop = start + block_tokens
        keys, item = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, item)
        (untagged,) = kv_cache_utils.to_event_extra_keys([keys])
        parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, tokens[start:stop], untagged)
        hashes.append(parent)
    return hashes


def answer(case):
    """The root and the block hashes of one case, as hex."""
    if case["seed"] is None:
        os.environ.pop("PYTHONHASHSEED", None)
    else:
        os.environ["PYTHONHASHSEED"] = case["seed"]
    kv_cache_utils.init_none_hash(sha256_cbor)
    hasher = kv_cache_utils.get_request_block_hasher(case["block_tokens"], sha256_cbor)
    request = request_of(case, hasher)
    hashes = request.block_hashes
    if case["untagged"]:
        hashes = untagged_hashes(request, case["block_tokens"])
    root = kv_cache_utils.NONE_HASH.hex()
    return {"root": root, "hashes": [digest.hex() for digest in hashes]}


# vLLM logs to stdout while it is imported, so the answer is the last line.
print()
print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
