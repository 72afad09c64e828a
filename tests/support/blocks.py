"""Self-identifying blocks: their bytes depend on namespace, rank and hash, so a mix-up shows."""

from __future__ import annotations

import hashlib

from tierd.types import FORMAT_VERSION, HASH_BYTES, Namespace

ROOT = hashlib.sha256(b"test root").digest()


def namespace(block_bytes: int = 4096, **changes: object) -> Namespace:
    """A namespace for tests, with the given fields changed."""
    fields: dict[str, object] = {
        "model": "test-model",
        "weights": "rev-1",
        "kv_dtype": "float32",
        "block_tokens": 16,
        "block_bytes": block_bytes,
        "layout": "LBHNC",
        "groups": ("full:4x2x64",),
        "platform": "test",
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "cp_rank": 0,
        "cp_size": 1,
        "hash_scheme": "opaque-test",
        "hash_root": ROOT,
        "format_version": FORMAT_VERSION,
    }
    return Namespace.from_fields({**fields, **changes})


def chain(count: int, tag: object = 0) -> tuple[list[bytes], list[bytes]]:
    """Hashes and parents of a chain of `count` blocks."""
    hashes: list[bytes] = []
    parents: list[bytes] = []
    parent = ROOT
    for i in range(count):
        parents.append(parent)
        parent = hashlib.sha256(parent + f"{tag}/{i}".encode()).digest()
        hashes.append(parent)
    assert all(len(h) == HASH_BYTES for h in hashes)
    return hashes, parents


def payload(space: Namespace, block_hash: bytes) -> bytes:
    """The right bytes for a block."""
    return hashlib.shake_128(space.digest + block_hash).digest(space.block_bytes)
