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
"""Largest number of offloaded adapters: each has a namespace per rank, and an attachment."""

LORA_CHARS_MAX = 256
"""Longest name of an adapter, and longest revision."""


class Transfer(enum.Enum):
    """Which process copies between the engine's pages and the daemon's slots, and how."""

    AUTO = "auto"
    """CUDA_IPC for KV on a GPU, SHM for KV in host memory."""

    CUDA_IPC = "cuda_ipc"
    """The daemon copies; it opens the engine's GPU memory."""

    SHM = "shm"
    """The engine's worker copies, in a separate thread."""

    HOST_IPC = "host_ipc"
    """The daemon copies; it maps the memory of a CPU engine. For tests and CPU nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the connector. Each field is a key of the extra config."""

    socket: str = DEFAULT_SOCKET
    """The daemon's unix socket. The environment variable TIERD_SOCKET changes the default."""

    prefetch_deadline_ms: int = DEFAULT_DEADLINE_MS
    """Longest wait of a request, in ms, while its prefix is read from storage to host memory."""

    weights: str | None = None
    """Name of the model's weights. Needed where tierd cannot identify them, or where copies of the
    same files on several nodes should share KV. Two different weights must never have one name."""

    draft_weights: str | None = None
    """Name of a draft model's own weights, with the rules of `weights`."""

    transfer: Transfer = Transfer.AUTO
    """How blocks are copied: `auto`, `cuda_ipc`, `shm` or `host_ipc`. If the chosen way is not
    possible, the worker copies (`shm`) and logs a warning."""

    layerwise: bool = False
    """Whether a request starts to compute once the first layers of its prefix are loaded; each
    later layer waits for its part of the load. It helps with long prefixes on a GPU, and replaces
    full CUDA graphs with piecewise ones. It has an effect only where the daemon copies."""

    loras: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters whose requests are offloaded: a map from name to revision. The revision must
    change whenever the adapter's weights do. Requests with any other adapter are not offloaded."""

    trust_media_uuids: bool = False
    """Whether requests with images, videos or audio are offloaded. A client may give such media a
    UUID, which vLLM uses as their identity: a client that reuses a UUID for another image can cause
    wrong answers for other clients. Set it to true only if all clients are trusted."""


def parse(given: Mapping[str, object]) -> Options:
    """Read the settings from the extra config. Raises ConfigError with the key and the remedy."""
    known = [f.name for f in fields(Options)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"kv_connector_extra_config has no key {key!r}; {hint}")
    socket = given.get("socket", os.environ.get("TIERD_SOCKET", DEFAULT_SOCKET))
    if not isinstance(socket, str) or not socket:
        raise ConfigError(
            f"kv_connector_extra_config 'socket' is {socket!r:.80}; it must be the path of a Unix "
            "socket"
        )
    deadline_ms = given.get("prefetch_deadline_ms", DEFAULT_DEADLINE_MS)
    if type(deadline_ms) is not int or not 0 <= deadline_ms <= DEADLINE_MS_MAX:
        raise ConfigError(
            f"kv_connector_extra_config 'prefetch_deadline_ms' is {deadline_ms!r:.80}; it must be "
            f"an integer from 0 to {DEADLINE_MS_MAX}"
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
            f"kv_connector_extra_config 'loras' is {loras!r:.80}; it must map each adapter's name "
            f'to a revision, as in {{"NAME": "REVISION"}}: at most {LORAS_MAX} adapters, each text '
            f"of 1 to {LORA_CHARS_MAX} characters, and no '=' in a name"
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
        raise ConfigError(
            f"kv_connector_extra_config {key!r} is {value!r:.80}; it must be a non-empty string"
        )
    return value


def _flag(given: Mapping[str, object], key: str) -> bool:
    value = given.get(key, False)
    if type(value) is not bool:
        raise ConfigError(
            f"kv_connector_extra_config {key!r} is {value!r:.80}; it must be true or false"
        )
    return value


def _are_loras(given: object) -> TypeGuard[dict[str, str]]:
    if not isinstance(given, dict) or len(given) > LORAS_MAX:
        return False
    texts = [text for pair in given.items() for text in pair]
    if any(not isinstance(text, str) or not 0 < len(text) <= LORA_CHARS_MAX for text in texts):
        return False
    return not any("=" in name for name in given)
