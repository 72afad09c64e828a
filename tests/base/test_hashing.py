"""Block hashes: the published vectors, cbor2 as the reference, and refused input."""

from __future__ import annotations

import enum
import hashlib
import json
from pathlib import Path

import cbor2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd import hashing
from tierd.errors import HashInputError
from tierd.hashing import (
    ExtraKeys,
    KeyStyle,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    RequestExtras,
    hash_blocks,
    root_hash,
)
from tierd.types import HASH_SCHEMES

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "hash_vectors.json").read_text())
ROOT = root_hash("0")

# Every width of a token's encoding, and both sides of every border between two widths.
TOKENS = st.one_of(
    st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, hashing.TOKEN_MAX]),
    st.integers(0, 300),
    st.integers(0, 130_000),
    st.integers(0, hashing.TOKEN_MAX),
)
PARTS = st.one_of(st.text(max_size=30), st.binary(max_size=30), st.integers(-(2**40), 2**40))
KEYS = st.one_of(PARTS.filter(lambda part: type(part) is not int), st.tuples(PARTS, PARTS, PARTS))
EXTRA = st.one_of(st.none(), st.tuples(KEYS), st.tuples(KEYS, KEYS))


def reference(
    tokens: list[int], block_tokens: int, parent: bytes, extra: list[ExtraKeys | None] | None = None
) -> list[bytes]:
    """One cbor2 call per block, as in the engine."""
    hashes = []
    for block in range(len(tokens) // block_tokens):
        ids = tuple(tokens[block * block_tokens : (block + 1) * block_tokens])
        keys = extra[block] if extra is not None else None
        parent = hashlib.sha256(cbor2.dumps((parent, ids, keys), canonical=True)).digest()
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors(vector):
    """A warm-up would fill the store with blocks that no engine ever requests."""
    extras = RequestExtras(
        salt=vector["salt"], lora=Lora(*vector["lora"]) if vector["lora"] else None
    )
    root = root_hash(vector["seed"])
    assert root.hex() == vector["root"]
    block_tokens = vector["block_tokens"]
    keys = extras.block_keys(len(vector["tokens"]) // block_tokens, block_tokens)
    hashes = hash_blocks(vector["tokens"], block_tokens, parent=root, extra=keys)
    assert [digest.hex() for digest in hashes] == vector["hashes"]


@settings(deadline=None, max_examples=60)
@given(st.lists(TOKENS, max_size=200), st.integers(1, 40), st.binary(min_size=32, max_size=32))
def test_every_encoding_of_a_token_is_canonical(tokens, block_tokens, parent):
    """Prompts with certain token ids would never hit."""
    want = reference(tokens, block_tokens, parent)
    assert hash_blocks(tokens, block_tokens, parent=parent) == want
    assert hash_blocks(tuple(tokens), block_tokens, parent=parent) == want
    for dtype in (np.uint32, np.int64, np.uint64, ">i8"):
        array = np.array(tokens, dtype)
        assert hash_blocks(array, block_tokens, parent=parent) == want
        strided = np.repeat(array, 2)[::2]
        assert hash_blocks(strided, block_tokens, parent=parent) == want


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_extra_keys_are_canonical(data):
    """Salted, LoRA or image prompts would never hit, or hit each other's blocks."""
    extra = data.draw(st.lists(EXTRA, min_size=1, max_size=4))
    tokens = data.draw(st.lists(TOKENS, min_size=3 * len(extra), max_size=3 * len(extra) + 2))
    assert hash_blocks(tokens, 3, parent=ROOT, extra=extra) == reference(tokens, 3, ROOT, extra)


@pytest.mark.parametrize("block_tokens", [1, 16, 23, 24, 128, 255, 256, 9000, 65536])
def test_prompts_longer_than_the_scratch(block_tokens):
    """Hashes would break off or repeat where one batch of tokens ends and the next starts."""
    count = max(3 * hashing._TOKENS_AT_ONCE, 2 * block_tokens) + 5
    tokens = np.random.default_rng(block_tokens).integers(0, 1 << 17, count).tolist()
    want = reference(tokens, block_tokens, ROOT)
    assert hash_blocks(tokens, block_tokens, parent=ROOT) == want


@settings(deadline=None, max_examples=60)
@given(st.lists(TOKENS, min_size=8, max_size=60), st.integers(0, 8))
def test_hashing_can_continue_from_any_block(tokens, first):
    """A prompt hashed in two parts would lose its prefix at the seam."""
    whole = hash_blocks(tokens, 4, parent=ROOT)
    first = min(first, len(whole))
    parent = whole[first - 1] if first else ROOT
    assert hash_blocks(tokens[first * 4 :], 4, parent=parent) == whole[first:]


@pytest.mark.parametrize("tokens", [[], (), [1, 2, 3], np.array([], np.int32)])
def test_partial_block_has_no_hash(tokens):
    """A short prompt would be an error, or get a block that no engine knows."""
    assert hash_blocks(tokens, 4, parent=ROOT) == []
    assert hash_blocks(tokens, 4, parent=ROOT, extra=[]) == []
    # Even a huge block size must cost nothing.
    assert hash_blocks(tokens, 1 << 62, parent=ROOT) == []


def test_separated_requests_have_different_hashes():
    """One tenant, adapter or image would be served the KV of another."""
    item = MultimodalItem("cat", 1, 4)
    requests = [
        RequestExtras(),
        RequestExtras(salt="a"),
        RequestExtras(salt="b"),
        RequestExtras(lora=Lora("a", "/x")),
        RequestExtras(lora=Lora("a", "/y")),
        RequestExtras(multimodal=(MultimodalItem("a", 0, 1),)),
        RequestExtras(multimodal=(item,)),
        RequestExtras(multimodal=(item._replace(offset=2),)),
        RequestExtras(multimodal=(item._replace(identifier="dog"),)),
        RequestExtras(prompt_embeds=PromptEmbeds(bytes(32), 4)),
        RequestExtras(prompt_embeds=PromptEmbeds(bytes([1]) * 32, 4)),
    ]
    tokens = [0] * 8
    last = [
        hash_blocks(tokens, 4, parent=ROOT, extra=request.block_keys(2, 4))[-1]
        for request in requests
    ]
    assert len(set(last)) == len(requests)


EVERYTHING = RequestExtras(
    salt="s",
    lora=Lora("sql", "/adapters/sql"),
    multimodal=(MultimodalItem("cat", 3, 6), MultimodalItem("dog", 9, 2)),
    prompt_embeds=PromptEmbeds(bytes(range(36)), 3),
)


def test_tagged_keys():
    """Salt, LoRA, images and embeddings would miss on vLLM >= 0.31."""
    digests = [hashlib.sha256(bytes(range(36))[i * 12 : i * 12 + 12]).digest() for i in range(4)]
    lora = ("lora", "sql", "/adapters/sql")
    assert EVERYTHING.block_keys(4, 4) == [
        (lora, ("mm", "cat", 3), ("cache_salt", "s"), ("prompt_embeds", digests[0])),
        (lora, ("mm", "cat", -1), ("prompt_embeds", digests[1])),
        (lora, ("mm", "cat", -5), ("mm", "dog", 1), ("prompt_embeds", digests[2])),
        (lora, ("prompt_embeds", hashlib.sha256(b"").digest())),
    ]
    assert RequestExtras(salt="s").block_keys(2, 4) == [(("cache_salt", "s"),), None]


def test_untagged_keys():
    """Salt, LoRA, images and embeddings would miss on vLLM <= 0.30."""
    digest = hashlib.sha256(bytes(range(12))).digest()
    first, second, *_ = EVERYTHING.block_keys(4, 4, KeyStyle.UNTAGGED)
    assert first == ("sql", ("cat", 3), "s", digest)
    assert second is not None
    assert second[:2] == ("sql", ("cat", -1))


def test_styles_are_the_schemes_of_a_namespace():
    """A namespace made from a style would be refused at registration."""
    assert {style.value for style in KeyStyle} <= HASH_SCHEMES


class Token(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, True], r"token 1 must be int, got bool: True"),
        ([1, 2.0], r"token 1 must be int, got float: 2.0"),
        ([np.int64(1), 2], r"token 0 must be int, got int64: "),
        ([Token.ONE, 2], r"token 0 must be int, got Token: "),
        ([1, None], r"token 1 must be int, got NoneType: None"),
        ([1, "2"], r"token 1 must be int, got str: '2'"),
        ([1, -1], r"token 1 is out of range 0\.\.4294967295: -1"),
        ([1 << 32, 1], r"token 0 is out of range 0\.\.4294967295: 4294967296"),
        ([1, 1 << 200], r"token 1 is out of range"),
        ([1, 2, 3, 4, -5], r"token 4 is out of range"),
        (np.array([1, -1]), r"token 1 is out of range 0\.\.4294967295: -1"),
        (np.array([1, 1 << 63], np.uint64), r"token 1 is out of range"),
        (np.array([1.0, 2.0]), r"one-dimensional array of integers, got 1 dimensions of float64"),
        (np.array([True, False]), r"got 1 dimensions of bool"),
        (np.array([1, 2], object), r"got 1 dimensions of object"),
        (np.array([[1, 2]]), r"got 2 dimensions of int64"),
        ("ab", r"tokens must be a list, a tuple or a numpy array, got str: 'ab'"),
        (b"ab", r"got bytes: b'ab'"),
        (bytearray(b"ab"), r"got bytearray: "),
        (memoryview(b"ab"), r"got memoryview: "),
        (range(2), r"got range: range\(0, 2\)"),
        (iter([1, 2]), r"got list_iterator: "),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else type(value).__name__,
)
def test_wrong_tokens_are_refused(tokens, message):
    """Blocks would be stored under a hash that the engine computes for no prompt."""
    with pytest.raises(HashInputError, match=message):
        hash_blocks(tokens, 2, parent=ROOT)


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        (memoryview(ROOT), "parent must be bytes, got memoryview"),
        (bytearray(ROOT), "parent must be bytes, got bytearray"),
        (ROOT.hex(), "parent must be bytes, got str: '4e1195df"),
        (None, "parent must be bytes, got NoneType"),
        (ROOT[:16], "parent must be 32 bytes, got 16"),
        (b"", "parent must be 32 bytes, got 0"),
    ],
)
def test_wrong_parents_are_refused(parent, message):
    """A prefix would be chained to bytes that the engine never chains to."""
    with pytest.raises(HashInputError, match=message):
        hash_blocks([1, 2], 2, parent=parent)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([()], r"extra keys are \(\)"),
        ([[("cache_salt", "s")]], "extra keys must be tuple or None, got list"),
        (["s"], "extra keys must be tuple or None, got str: 's'"),
        ([(["cache_salt", "s"],)], "extra key must be str, bytes or tuple, got list"),
        ([(None,)], "extra key must be str, bytes or tuple, got NoneType"),
        ([(5,)], "extra key must be str, bytes or tuple, got int: 5"),
        ([(("mm", "a", 1.0),)], "part of an extra key must be str, bytes or int, got float: 1.0"),
        ([(("mm", "a", True),)], "part of an extra key must be str, bytes or int, got bool"),
        ([(("mm", "a", np.int64(1)),)], "part of an extra key must be .* got int64"),
        ([(("embeds", memoryview(b"")),)], "part of an extra key must be .* got memoryview"),
        ([(("embeds", bytearray()),)], "part of an extra key must be .* got bytearray"),
        ([(("mm", ("a",)),)], "part of an extra key must be .* got tuple"),
        ([("\udc80",)], r"extra key has no UTF-8 form: '\\udc80'"),
        ([(("mm", "\udc80", 0),)], r"part of an extra key has no UTF-8 form"),
        ([None, None], "extra has 2 entries for 1 blocks"),
        ([], "extra has 0 entries for 1 blocks"),
    ],
)
def test_wrong_extra_keys_are_refused(extra, message):
    """A tenant's or an adapter's blocks would be stored under a hash that means something else."""
    with pytest.raises(HashInputError, match=message):
        hash_blocks([1, 2], 2, parent=ROOT, extra=extra)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"salt": b"s"}, "salt must be str, got bytes"),
        ({"salt": ""}, "salt is empty"),
        ({"salt": "\udc80"}, "salt has no UTF-8 form"),
        ({"lora": ("a", "/a")}, "lora must be Lora, got tuple"),
        ({"lora": Lora._make(("a", Path("/a")))}, "lora path must be str, got PosixPath"),
        ({"lora": Lora._make((1, "/a"))}, "lora name must be str, got int: 1"),
        ({"multimodal": (("a", 0, 1),)}, "multimodal item must be MultimodalItem, got tuple"),
        (
            {"multimodal": (MultimodalItem._make((b"a", 0, 1)),)},
            "identifier must be str, got bytes",
        ),
        ({"multimodal": (MultimodalItem._make(("a", 0.0, 1)),)}, "offset must be int, got float"),
        ({"multimodal": (MultimodalItem("a", 0, True),)}, "length must be int, got bool"),
        ({"multimodal": (MultimodalItem("a", -1, 1),)}, "not sorted by offset"),
        ({"multimodal": (MultimodalItem("a", 0, -1),)}, "not sorted by offset"),
        (
            {"multimodal": (MultimodalItem("a", 4, 1), MultimodalItem("b", 0, 1))},
            "not sorted by offset at MultimodalItem",
        ),
        ({"prompt_embeds": b"abcd"}, "prompt_embeds must be PromptEmbeds, got bytes"),
        (
            {"prompt_embeds": PromptEmbeds._make(("abcd", 1))},
            "data must be bytes or memoryview, got str",
        ),
        ({"prompt_embeds": PromptEmbeds(b"abcd", 0)}, "token_bytes must be at least 1, got 0"),
    ],
)
def test_wrong_requests_are_refused(fields, message):
    """A mistake of the caller would become another request's hash."""
    with pytest.raises(HashInputError, match=message):
        RequestExtras(**fields).block_keys(1, 4)


@pytest.mark.parametrize("block_tokens", [0, -16, 16.0, True, "16", None, np.int64(16)])
def test_wrong_block_sizes_are_refused(block_tokens):
    """A block size from a config file would be taken for another size."""
    with pytest.raises(HashInputError, match="block_tokens must be"):
        hash_blocks([1, 2], block_tokens, parent=ROOT)


def test_seeds():
    """Two engines that share no prefix would be treated as sharing one, or the reverse."""
    assert root_hash() == root_hash("vllm-none-hash")
    assert root_hash("") != root_hash()
    for wrong in (0, b"0", True):
        with pytest.raises(HashInputError, match="seed must be str, got"):
            root_hash(wrong)  # type: ignore[arg-type]
