"""The connector's own settings: `kv_connector_extra_config` of vLLM's --kv-transfer-config."""

from __future__ import annotations

import difflib
import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeGuard

from tierd.errors import ConfigError

DEFAULT_SOCKET = "/run/tierd/tierd.sock"
DEFAULT_DEADLINE_MS = 2000
DEADLINE_MS_MAX = 600_000

LORAS_MAX = 32
"""Adapters that are offloaded: each has a namespace a rank, and an attachment."""

LORA_CHARS_MAX = 256
"""Of an adapter's name, and of its revision."""


class Transfer(enum.Enum):
    """Who copies between the engine's pages and the daemon's slots, and how it gets at them."""

    AUTO = "auto"
    """CUDA_IPC for KV on a GPU, SHM for KV in host memory."""

    CUDA_IPC = "cuda_ipc"
    """The daemon, which opens the engine's GPU memory."""

    SHM = "shm"
    """The engine's worker, in a thread of its own."""

    HOST_IPC = "host_ipc"
    """The daemon, which maps the memory of an engine on CPUs. For tests and CPU nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Each field is a key of the extra config, documented below it."""

    socket: str = DEFAULT_SOCKET
    """The daemon's unix socket. The environment variable TIERD_SOCKET changes the default."""

    prefetch_deadline_ms: int = DEFAULT_DEADLINE_MS
    """How long a request may wait for its prefix to be brought from storage into host memory."""

    weights: str | None = None
    """Names the model's weights where tierd cannot identify them, or where copies of the
    same files on several nodes are to share KV. Two different weights must never be given
    one name."""

    draft_weights: str | None = None
    """The same for a drafting model that has weights of its own."""

    transfer: Transfer = Transfer.AUTO
    """Who copies: `auto`, `cuda_ipc`, `shm` or `host_ipc`. What cannot be had becomes `shm`,
    which the log says."""

    layerwise: bool = False
    """Whether a request starts to compute once the first layers of its prefix are loaded; each
    layer then waits for its own. It pays for long prefixes on a GPU, and takes the place of
    full CUDA graphs by piecewise ones. Only where the daemon copies."""

    loras: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters whose requests are offloaded, by name, each with a revision of its weights.
    The revision must change whenever they do. Requests with any other adapter are left alone."""

    trust_media_uuids: bool = False
    """Whether requests with images, videos or audio are offloaded. A client may name them by a
    UUID, which vLLM takes for their identity: whoever may send requests could then have others
    answered from another image's KV. Say true if nobody can, or nobody would."""


def parse(given: Mapping[str, object]) -> Options:
    """Settings from the extra config. Raises ConfigError that names the key and the remedy."""
    known = [f.name for f in fields(Options)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"kv_connector_extra_config has no key {key!r}; {hint}")
    socket = given.get("socket", os.environ.get("TIERD_SOCKET", DEFAULT_SOCKET))
    if not isinstance(socket, str) or not socket:
        raise ConfigError("kv_connector_extra_config 'socket' must be the path of a unix socket")
    deadline_ms = given.get("prefetch_deadline_ms", DEFAULT_DEADLINE_MS)
    if type(deadline_ms) is not int or not 0 <= deadline_ms <= DEADLINE_MS_MAX:
        raise ConfigError(
            "kv_connector_extra_config 'prefetch_deadline_ms' must be an integer from 0 to "
            f"{DEADLINE_MS_MAX}"
        )
    weights, draft_weights = (_name(given, key) for key in ("weights", "draft_weights"))
    transfer = given.get("transfer", Transfer.AUTO.value)
    if transfer not in [choice.value for choice in Transfer]:
        choices = ", ".join(repr(choice.value) for choice in Transfer)
        raise ConfigError(
            f"kv_connector_extra_config 'transfer' is {transfer!r}; it must be one of {choices}"
        )
    layerwise, trust_media_uuids = (_flag(given, key) for key in ("layerwise", "trust_media_uuids"))
    loras = given.get("loras", {})
    if not _are_loras(loras):
        raise ConfigError(
            "kv_connector_extra_config 'loras' must name a revision for each adapter, as in "
            f'{{"NAME": "REVISION"}}: at most {LORAS_MAX}, none empty or longer than '
            f"{LORA_CHARS_MAX} characters, and no name with '='"
        )
    return Options(
        socket=socket,
        prefetch_deadline_ms=deadline_ms,
        weights=weights,
        draft_weights=draft_weights,
        transfer=Transfer(transfer),
        layerwise=layerwise,
        loras=loras,
        trust_media_uuids=trust_media_uuids,
    )


def _name(given: Mapping[str, object], key: str) -> str | None:
    value = given.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"kv_connector_extra_config {key!r} must be a non-empty string")
    return value


def _flag(given: Mapping[str, object], key: str) -> bool:
    value = given.get(key, False)
    if type(value) is not bool:
        raise ConfigError(f"kv_connector_extra_config {key!r} must be true or false")
    return value


def _are_loras(given: object) -> TypeGuard[dict[str, str]]:
    if not isinstance(given, dict) or len(given) > LORAS_MAX:
        return False
    texts = [text for pair in given.items() for text in pair]
    if any(not isinstance(text, str) or not 0 < len(text) <= LORA_CHARS_MAX for text in texts):
        return False
    return not any("=" in name for name in given)
