"""Block hashes as vLLM computes them with `--prefix-caching-hash-algo sha256_cbor`.

A block's hash is the sha256 of canonical CBOR `[parent, [tokens], extra keys | null]`;
the parent of a sequence's first block is the root, the sha256 of the CBOR of a seed
text. This module decides which bytes are hashed, and refuses every value that CBOR
would encode differently from the engine. It does not know what a block
holds: model, dtype and layout are in the namespace, not in the hash.

vLLM's default algorithm, `sha256`, hashes a pickle, a format specific to Python. This module
does not reproduce it.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import countOf
from typing import NamedTuple

import cbor2
import numpy as np
import numpy.typing as npt

from tierd.errors import HashInputError
from tierd.types import HASH_BYTES

DEFAULT_SEED = "vllm-none-hash"
"""Seed of vLLM >= 0.29 if PYTHONHASHSEED is unset. Older versions draw a random root instead."""

TOKEN_MAX = (1 << 32) - 1
"""Largest token id, far above any vocabulary: the encoder below has 5 bytes per token."""

ExtraKey = str | bytes | tuple[str | bytes | int, ...]
"""One value, besides tokens and parent, that distinguishes a block from others."""

ExtraKeys = tuple[ExtraKey, ...]
"""All extra keys of a block in the engine's order. Never empty: None stands for no keys."""

Tokens = list[int] | tuple[int, ...] | npt.NDArray[np.integer]
"""Token ids: a list or tuple of `int`, or a one-dimensional numpy array of any integer type."""

_TOKENS_AT_ONCE = 8192
"""Tokens encoded together: their scratch (0.4 MB) stays in the cache; 4 times more costs 10 %."""

_PARENT_HEAD = b"\x83\x58" + bytes([HASH_BYTES])
"""CBOR of an array of three items, up to the head of the first, a byte string of HASH_BYTES."""

_NULL = b"\xf6"
"""CBOR of the extra keys of a block that has none."""


class KeyStyle(enum.Enum):
    """How extra keys are written; the value is the namespace's `hash_scheme`."""

    TAGGED = "vllm-sha256-cbor-tagged"
    """vLLM >= 0.31: each key is a tuple that starts with the kind of the key."""

    UNTAGGED = "vllm-sha256-cbor-untagged"
    """vLLM <= 0.30: bare values, and a LoRA adapter's path does not count."""


class Lora(NamedTuple):
    """A LoRA adapter as the request names it."""

    name: str
    path: str


class MultimodalItem(NamedTuple):
    """An image, audio or video item: the engine's identifier and its range of tokens."""

    identifier: str
    offset: int
    length: int


class PromptEmbeds(NamedTuple):
    """Embeddings given instead of tokens, `token_bytes` per token.

    The engine lists token 0 for each position that has an embedding; these zeros are hashed
    as the prompt's tokens.
    """

    data: bytes | memoryview
    token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExtras:
    """Fields of a request, besides its tokens, that its KV depends on."""

    salt: str | None = None
    lora: Lora | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    """Sorted by offset. If items overlap, a block has only the items that vLLM's pass finds."""
    prompt_embeds: PromptEmbeds | None = None

    def block_keys(
        self, blocks: int, block_tokens: int, style: KeyStyle = KeyStyle.TAGGED
    ) -> list[ExtraKeys | None]:
        """Extra keys of a prompt's first `blocks` blocks, for `hash_blocks`.

        Raises HashInputError for a value of a wrong type, an empty salt, or items that
        are out of order.
        """
        _check_count("block_tokens", block_tokens)
        self._check()
        tagged = style is KeyStyle.TAGGED
        common: ExtraKeys = ()
        if self.lora is not None:
            common = (("lora", self.lora.name, self.lora.path) if tagged else self.lora.name,)
        items = _multimodal_keys(self.multimodal, blocks, block_tokens, tagged)
        digests = _embeds_digests(self.prompt_embeds, blocks, block_tokens)
        out: list[ExtraKeys | None] = []
        for block, (item_keys, digest) in enumerate(zip(items, digests, strict=True)):
            keys = common + item_keys
            if self.salt is not None and block == 0:
                keys += (("cache_salt", self.salt) if tagged else self.salt,)
            if digest is not None:
                keys += (("prompt_embeds", digest) if tagged else digest,)
            out.append(keys or None)
        return out

    def _check(self) -> None:
        if self.salt is not None:
            _check_text("salt", self.salt)
            if not self.salt:
                raise HashInputError("salt is empty, which engines take for no salt; pass None")
        if self.lora is not None:
            _check_type("lora", self.lora, Lora)
            _check_text("lora name", self.lora.name)
            _check_text("lora path", self.lora.path)
        last = 0
        for item in self.multimodal:
            _check_type("multimodal item", item, MultimodalItem)
            _check_text("multimodal identifier", item.identifier)
            _check_type("multimodal offset", item.offset, int)
            _check_type("multimodal length", item.length, int)
            if item.offset < last or item.length < 0:
                raise HashInputError(f"multimodal items are not sorted by offset at {item}")
            last = item.offset
        if self.prompt_embeds is not None:
            _check_type("prompt_embeds", self.prompt_embeds, PromptEmbeds)
            data, token_bytes = self.prompt_embeds
            if type(data) is not bytes and type(data) is not memoryview:
                raise _wrong_type("prompt_embeds data", data, "bytes or memoryview")
            _check_count("prompt_embeds token_bytes", token_bytes)


def root_hash(seed: str | None = None) -> bytes:
    """Return the parent hash of a sequence's first block.

    `seed` is the text of PYTHONHASHSEED in the engine's environment, or None if it is
    unset. Raises HashInputError for any other type: 0 and "0" give different hashes.
    """
    if seed is None:
        seed = DEFAULT_SEED
    _check_text("seed", seed)
    return hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()


def hash_blocks(
    tokens: Tokens,
    block_tokens: int,
    *,
    parent: bytes,
    extra: Sequence[ExtraKeys | None] | None = None,
) -> list[bytes]:
    """Return the hashes of all full blocks of `tokens`, chained to `parent`.

    `parent` is `root_hash()` for a prompt, or the hash of the block before `tokens`.
    `extra` has one entry per full block; None means that no block has extra keys. The tokens
    after the last full block are ignored. Raises HashInputError, which names the value and its
    type, for a value that CBOR would encode differently from the engine.
    """
    _check_count("block_tokens", block_tokens)
    _check_type("parent", parent, bytes)
    if len(parent) != HASH_BYTES:
        raise HashInputError(f"parent must be {HASH_BYTES} bytes, got {len(parent)}")
    ids = _token_array(tokens)
    blocks = len(ids) // block_tokens
    if extra is not None and len(extra) != blocks:
        raise HashInputError(f"extra has {len(extra)} entries for {blocks} blocks")

    if not blocks:
        return []
    sha256 = hashlib.sha256
    full = ids[: blocks * block_tokens].reshape(blocks, block_tokens)
    tails = chain.from_iterable(_encode_tails(full))
    hashes: list[bytes] = []
    for tail, keys in zip(tails, extra or repeat(None, blocks), strict=True):
        if keys is not None:
            tail = tail[: -len(_NULL)] + _encode_keys(keys)
        parent = sha256(_PARENT_HEAD + parent + tail).digest()
        hashes.append(parent)
    return hashes


def _encode_tails(ids: npt.NDArray[np.uint32]) -> Iterator[list[bytes]]:
    """Yield the canonical CBOR that follows the parent in each row's block, without extra keys.

    The array's head, each token and the null are written right-aligned into words of eight
    bytes; a mask then drops the unused bytes on the left of each word.
    Twice as fast as one cbor2 call per block (bench/hashing.py).
    """
    block_tokens = ids.shape[1]
    head = _array_head(block_tokens)
    rows = max(1, _TOKENS_AT_ONCE // block_tokens)
    for first in range(0, len(ids), rows):
        chunk = ids[first : first + rows]
        shape = (len(chunk), 1 + block_tokens + 1)
        longer = (chunk >= 24).view(np.uint8) + (chunk >= 1 << 8) + (chunk >= 1 << 16)
        words = np.empty(shape, ">u8")
        words[:, 0] = int.from_bytes(head, "big")
        words[:, 1:-1] = _TOKEN_HEADS.take(longer, mode="clip") + chunk
        words[:, -1] = int.from_bytes(_NULL, "big")
        masks = np.empty(shape, ">u8")
        masks[:, 0] = _mask(len(head))
        masks[:, 1:-1] = _TOKEN_MASKS.take(longer, mode="clip")
        masks[:, -1] = _mask(len(_NULL))
        kept = np.flatnonzero(masks.view(np.bool_))
        data = words.view(np.uint8).reshape(-1).take(kept).tobytes()
        # The last byte of each row is always kept; its position in `data` is the block's end.
        row_ends = np.arange(1, len(chunk) + 1) * masks.strides[0]
        ends = np.searchsorted(kept, row_ends).tolist()
        assert ends[-1] == len(data)
        yield [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _mask(count: int) -> int:
    """Return a big-endian word with 01 in its last `count` bytes."""
    return int.from_bytes(b"\x01" * count, "big")


# Indexed by how many of the limits 24, 2^8 and 2^16 the token is not below. The encodings are
# `b0`, `18 b0`, `19 b1 b0` and `1a b3 b2 b1 b0`.
_TOKEN_HEADS = np.array([0, 0x18 << 8, 0x19 << 16, 0x1A << 32], np.uint64)
_TOKEN_MASKS = np.array([_mask(1), _mask(2), _mask(3), _mask(5)], ">u8")


def _array_head(length: int) -> bytes:
    """Return the CBOR head of an array of `length` items.

    It encodes an array of zeros, which take one byte each, and cuts the zeros off.
    """
    return cbor2.dumps([0] * length)[:-length]


def _token_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Return `tokens` as 32-bit integers; raises HashInputError for an invalid token."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise HashInputError(
                f"tokens must be a one-dimensional array of integers, got {tokens.ndim} "
                f"dimensions of {tokens.dtype}"
            )
        if len(tokens) and (tokens.min() < 0 or tokens.max() > TOKEN_MAX):
            raise _token_error(tokens.tolist())
        return tokens.astype(np.uint32)
    if type(tokens) is not list and type(tokens) is not tuple:
        raise _wrong_type("tokens", tokens, "a list, a tuple or a numpy array")
    # Compare exact types: bool, numpy scalars and enums pass isinstance checks for int, but
    # cbor2 writes True as f5, not as 01, and cannot encode numpy scalars.
    if countOf(map(type, tokens), int) != len(tokens):
        raise _token_error(tokens)
    try:
        # array() checks the range and is the fastest way from a list to numpy.
        return np.asarray(array("I", tokens)).astype(np.uint32, copy=False)
    except OverflowError:
        raise _token_error(tokens) from None


def _token_error(tokens: Sequence[object]) -> HashInputError:
    for index, token in enumerate(tokens):
        if type(token) is not int:
            return _wrong_type(f"token {index}", token, "int")
        if not 0 <= token <= TOKEN_MAX:
            return HashInputError(f"token {index} is out of range 0..{TOKEN_MAX}: {token}")
    raise AssertionError("every token is sound")


def _encode_keys(keys: ExtraKeys) -> bytes:
    """Return the canonical CBOR of one block's extra keys; raises HashInputError."""
    if type(keys) is not tuple:
        raise _wrong_type("extra keys", keys, "tuple or None")
    if not keys:
        raise HashInputError("extra keys are (), which is not the engine's null; use None")
    for key in keys:
        if type(key) is tuple:
            for part in key:
                if type(part) is str:
                    _check_text("part of an extra key", part)
                elif type(part) is not bytes and type(part) is not int:
                    raise _wrong_type("part of an extra key", part, "str, bytes or int")
        elif type(key) is str:
            _check_text("extra key", key)
        elif type(key) is not bytes:
            raise _wrong_type("extra key", key, "str, bytes or tuple")
    return cbor2.dumps(keys, canonical=True)


def _multimodal_keys(
    items: Sequence[MultimodalItem], blocks: int, block_tokens: int, tagged: bool
) -> Iterator[ExtraKeys]:
    """Yield for each block the items that overlap it, by offset from the block's start.

    One pass, as in vLLM: an item that continues past a block ends the search for that block.
    So an item inside a longer item is found only after the longer item ends. After the end of
    the last item no block is searched.
    """
    end = items[-1].offset + items[-1].length if items else 0
    current = 0
    for start in range(0, blocks * block_tokens, block_tokens):
        stop = start + block_tokens
        keys: ExtraKeys = ()
        while start < end and current < len(items) and items[current].offset < stop:
            identifier, offset, length = items[current]
            if start < offset + length:
                place = offset - start
                keys += (("mm", identifier, place) if tagged else (identifier, place),)
                if stop < offset + length:
                    break
            current += 1
        yield keys


def _embeds_digests(
    embeds: PromptEmbeds | None, blocks: int, block_tokens: int
) -> Iterator[bytes | None]:
    """Yield the sha256 of each block's embeddings, or None for each block if there are none.

    A block past the end of the embeddings gets the sha256 of no bytes.
    """
    if embeds is None:
        yield from [None] * blocks
        return
    view = memoryview(embeds.data).cast("B")
    size = block_tokens * embeds.token_bytes
    for block in range(blocks):
        yield hashlib.sha256(view[block * size : (block + 1) * size]).digest()


def _check_type(name: str, value: object, wanted: type) -> None:
    if type(value) is not wanted:
        raise _wrong_type(name, value, wanted.__name__)


def _check_text(name: str, value: object) -> None:
    if type(value) is not str:
        raise _wrong_type(name, value, "str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise HashInputError(f"{name} has no UTF-8 form: {value!r:.80}") from None


def _check_count(name: str, value: object) -> None:
    if type(value) is not int:
        raise _wrong_type(name, value, "int")
    if value < 1:
        raise HashInputError(f"{name} must be at least 1, got {value}")


def _wrong_type(name: str, value: object, wanted: str) -> HashInputError:
    text = repr(value)
    if len(text) > 80:
        text = text[:77] + "..."
    return HashInputError(f"{name} must be {wanted}, got {type(value).__qualname__}: {text}")
