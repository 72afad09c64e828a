"""Values that every layer shares: block identity and what a namespace is.

A key is (namespace digest, block hash). Everything besides the tokens that
decides what a block's bytes mean is in the namespace, and every field is
required: a default here would be a wrong byte later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import cbor2

from tierd.errors import NamespaceError

HASH_BYTES = 32
"""Length of a block hash (sha256), of a parent hash and of a hash root."""

DIGEST_BYTES = 16
"""Length of a namespace digest; 2^64 namespaces before a collision is likely."""

EPOCH_BYTES = 8
"""Length of an epoch, a big-endian integer: a flush of a storage tier raises it."""

SCOPE_BYTES = DIGEST_BYTES + EPOCH_BYTES
"""Length of a scope, which is all that storage tiers see of a namespace: its digest and the epoch
that it has in the tier. Blocks of an older epoch are barred for good."""

CHECKSUM_BYTES = 16
"""Length of an xxh3-128 checksum."""

NEVER = 0xFFFF_FFFF
"""The age, in seconds, of the last use of a block of which no use is known."""

PAGE_BYTES = 4096
"""Slots are multiples of this and aligned to it, so that O_DIRECT can fill them."""

FORMAT_VERSION = 2
"""Version of the stored block format; part of every namespace."""

BLOCK_BYTES_MAX = 1 << 30
"""Largest block that a namespace may declare: above it a slot would not fit any segment."""

GROUPS_MAX = 64
"""KV cache groups in a namespace; hybrid models have a handful."""

HASH_SCHEMES = frozenset({"vllm-sha256-cbor-tagged", "vllm-sha256-cbor-untagged", "sglang-sha256"})
"""Reproducible hash schemes; `opaque-NAME` is accepted as well for other engines."""


class BlockKey(NamedTuple):
    """Identity of a block: namespace digest and block hash.

    In a storage tier `namespace` is a scope: the daemon adds the epoch, and takes it off again.
    """

    namespace: bytes
    block_hash: bytes


def slot_bytes_for(block_bytes: int) -> int:
    """Bytes of the slot that holds a block of `block_bytes`: rounded up to PAGE_BYTES."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that decides what a block's bytes mean.

    Two engines share blocks only if all fields are equal. Every field is required.

    `weights` is a fingerprint or a revision of the weights, not a display name. `block_bytes` is
    the size of one rank's block of `block_tokens` tokens, all layers together. `layout` names
    the physical order of a block's bytes. `groups` holds one string for each KV cache group,
    which names the specification of its layers. `platform` separates devices whose kernels
    write different bytes. `tp`, `pp` and `cp` are tensor, pipeline and context parallelism.
    `hash_scheme` says how the engine computes block hashes (HASH_SCHEMES or `opaque-NAME`), and
    `hash_root` is the 32-byte parent of a first block's hash.

    >>> namespace = Namespace(
    ...     model="meta-llama/Llama-3.1-8B",
    ...     weights="sha256:4f2a9c",
    ...     kv_dtype="bfloat16",
    ...     block_tokens=16,
    ...     block_bytes=2 * 32 * 8 * 128 * 2 * 16,  # K and V, layers, heads, size, bytes, tokens
    ...     layout="layers-kv-tokens-heads",
    ...     groups=("full:32x8x128",),
    ...     platform="cuda-sm90",
    ...     tp_rank=0,
    ...     tp_size=1,
    ...     pp_rank=0,
    ...     pp_size=1,
    ...     cp_rank=0,
    ...     cp_size=1,
    ...     hash_scheme="opaque-my-engine",
    ...     hash_root=hashlib.sha256(b"my-engine, seed 0").digest(),
    ...     format_version=FORMAT_VERSION,
    ... )
    >>> namespace.validate()
    >>> namespace.slot_bytes // 1024
    2048
    >>> len(namespace.digest)
    16
    """

    model: str
    weights: str
    kv_dtype: str
    block_tokens: int
    block_bytes: int
    layout: str
    groups: tuple[str, ...]
    platform: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    hash_scheme: str
    hash_root: bytes
    format_version: int

    @classmethod
    def from_fields(cls, given: Mapping[str, object]) -> Namespace:
        """Build from a decoded map; raises NamespaceError that names the field at fault."""
        known = {f.name for f in fields(cls)}
        for name in sorted(known - given.keys()):
            raise NamespaceError(f"namespace field {name!r} is missing")
        for name in sorted(given.keys() - known, key=str):
            raise NamespaceError(f"namespace field {name!r} is unknown")
        values = dict(given)
        groups = values["groups"]
        if isinstance(groups, list):
            values["groups"] = tuple(groups)
        namespace = cls(**values)  # type: ignore[arg-type]  # validate() checks every type
        namespace.validate()
        return namespace

    @property
    def family(self) -> tuple[object, ...]:
        """Fields shared by namespaces whose blocks have the same hashes: an engine's ranks."""
        return (
            self.model,
            self.weights,
            self.kv_dtype,
            self.block_tokens,
            self.platform,
            self.tp_size,
            self.pp_size,
            self.cp_size,
            self.hash_scheme,
            self.hash_root,
        )

    def validate(self) -> None:
        """Raise NamespaceError for the first field of a wrong type or range."""
        for name in ("model", "weights", "kv_dtype", "layout", "platform", "hash_scheme"):
            value = getattr(self, name)
            if type(value) is not str or not value or len(value) > 4096:
                raise NamespaceError(f"namespace field {name!r} must be a non-empty string")
        counts = ("block_tokens", "block_bytes", "tp_size", "pp_size", "cp_size")
        ranks = ("tp_rank", "pp_rank", "cp_rank", "format_version")
        for name in counts + ranks:
            value = getattr(self, name)
            if type(value) is not int:
                raise NamespaceError(f"namespace field {name!r} must be an integer")
            if value < (1 if name in counts else 0) or value >= 1 << 31:
                raise NamespaceError(f"namespace field {name!r} is out of range: {value}")
        for axis in ("tp", "pp", "cp"):
            if getattr(self, f"{axis}_rank") >= getattr(self, f"{axis}_size"):
                raise NamespaceError(f"namespace field '{axis}_rank' is not below '{axis}_size'")
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise NamespaceError(f"namespace field 'block_bytes' exceeds {BLOCK_BYTES_MAX}")
        if type(self.groups) is not tuple or not 1 <= len(self.groups) <= GROUPS_MAX:
            raise NamespaceError(f"namespace field 'groups' must be a list of 1 to {GROUPS_MAX}")
        for group in self.groups:
            if type(group) is not str or len(group) > 1 << 14:
                raise NamespaceError("namespace field 'groups' must be a list of strings")
        if type(self.hash_root) is not bytes or len(self.hash_root) != HASH_BYTES:
            raise NamespaceError(f"namespace field 'hash_root' must be {HASH_BYTES} bytes")
        if self.hash_scheme not in HASH_SCHEMES and not self.hash_scheme.startswith("opaque-"):
            raise NamespaceError(
                f"namespace field 'hash_scheme' is {self.hash_scheme!r}; reproducible schemes are "
                f"{', '.join(sorted(HASH_SCHEMES))} (start vLLM with "
                "--prefix-caching-hash-algo sha256_cbor)"
            )
        if self.format_version != FORMAT_VERSION:
            raise NamespaceError(
                f"namespace field 'format_version' is {self.format_version}, "
                f"this tierd stores version {FORMAT_VERSION}"
            )

    def to_fields(self) -> dict[str, object]:
        """The fields as a map that MessagePack and canonical CBOR encode."""
        out: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["groups"] = list(self.groups)
        return out

    @property
    def digest(self) -> bytes:
        """DIGEST_BYTES that prefix every key: sha256 of the canonical CBOR of the fields."""
        encoded = cbor2.dumps(self.to_fields(), canonical=True)
        return hashlib.sha256(encoded).digest()[:DIGEST_BYTES]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of this namespace."""
        return slot_bytes_for(self.block_bytes)
