"""The configuration: one TOML file, checked as a whole before anything starts.

A field is one line plus its description; the reference in README.md is generated
from here. Every key can be overridden by an environment variable: TIERD_ and the key's
path in capitals, as in TIERD_HOST_CAPACITY, and with a tier's name in the place of its
table, as in TIERD_STORAGE_FILE_DEADLINE_MS.
"""

from __future__ import annotations

import difflib
import enum
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar, get_args

import msgspec
from msgspec import Meta

from tierd.errors import ConfigError
from tierd.sizes import parse_size

DEFAULT_CONFIG = "/etc/tierd/tierd.toml"

DEFAULT_SOCKET = "/run/tierd/tierd.sock"

TIERS_MAX: Final = 8
"""Storage tiers of one daemon: each block has a bit for each, and each has its share of L2."""

LEASE_TTL_MS_MAX: Final = 600_000
"""Long enough for any load; after a crash slots whose leases nobody knows are kept as long."""


class Size(int):
    """Bytes, written in the file as a number or as text like "8GiB"."""


class WritePolicy(enum.Enum):
    """When a storage tier gets the blocks that it lacks."""

    WRITE_THROUGH = "write_through"
    """As soon as they are stored."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When they are worth it; see tierd.core.writes."""
    WRITE_BACK = "write_back"
    """When they are about to leave L2."""


class Eviction(enum.Enum):
    """Which block leaves L2 first; see tierd.eviction."""

    HAZARD = "hazard"
    CREDIT = "credit"
    LRU = "lru"
    LFU = "lfu"
    S3FIFO = "s3fifo"
    ARC = "arc"


class PrefetchPolicy(enum.Enum):
    """How long a request waits for what storage tiers have of its prefix."""

    BEST_EFFORT = "best_effort"
    """Until the engine is ready to compute it."""
    WAIT_COMPLETE = "wait_complete"
    """Until all is there, or the longest time is over."""
    TIMEOUT = "timeout"
    """Until a time that grows with what is missing, or the longest time, is over."""


class PrefetchConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Prefetch: how long requests wait for what storage tiers have, and for how much.

    All times start when the request arrives at the engine and cover everything. The
    connector's own deadline can only make them shorter.
    """

    policy: Annotated[
        PrefetchPolicy,
        Meta(
            description="timeout: as long as the next three keys say; wait_complete: until all is "
            "there, at most timeout_max_ms; best_effort: until the engine is ready."
        ),
    ] = PrefetchPolicy.TIMEOUT
    timeout_base_ms: Annotated[
        int, Meta(ge=0, le=600_000, description="Longest wait for a prefix, however short.")
    ] = 1000
    timeout_per_ki_ms: Annotated[
        int,
        Meta(ge=0, le=60_000, description="Added for every 1,024 tokens that L2 does not have."),
    ] = 250
    timeout_max_ms: Annotated[
        int, Meta(ge=0, le=600_000, description="No request waits longer, whatever the policy.")
    ] = 30_000
    min_tokens: Annotated[
        int,
        Meta(ge=0, description="Fewer tokens than these are computed rather than brought."),
    ] = 256
    break_even: Annotated[
        bool,
        Meta(
            description="Whether what the engine would compute sooner is left to it, by its own "
            "speed and the tier's; without it a load saves the engine's time and takes a user's."
        ),
    ] = True
    bytes_in_flight: Annotated[
        Size,
        Meta(
            description="Most bytes of host memory that all tiers together read into at once; a "
            "single batch that is more goes alone."
        ),
    ] = Size(256 << 20)


class HostConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The host tier (L2)."""

    capacity: Annotated[Size, Meta(description="Memory for KV blocks, a hard bound.")]
    min: Annotated[
        Size | None,
        Meta(
            description="What host memory keeps of its capacity when the machine, or the "
            "container, is short of memory; a quarter of capacity if absent."
        ),
    ] = None
    lease_ttl_ms: Annotated[
        int,
        Meta(
            ge=1000,
            le=LEASE_TTL_MS_MAX,
            description="How long an engine may use a block that it was promised; "
            "a crashed engine's blocks are held as long.",
        ),
    ] = 30_000
    eviction: Annotated[
        Eviction,
        Meta(
            description="Which block leaves first: hazard the one that promises the fewest hits, "
            "as learned from the requests so far; the others are well-known orders that learn "
            "nothing."
        ),
    ] = Eviction.HAZARD
    huge_pages: Annotated[
        bool,
        Meta(
            description="Ask for transparent huge pages where the kernel gives them to shared "
            "memory; the log says if it does not."
        ),
    ] = True
    numa_node: Annotated[
        str,
        Meta(
            pattern="^(auto|off|[0-9]{1,4})$",
            description="NUMA node that memory is taken from first; auto: that of the GPUs, if "
            "they share one.",
        ),
    ] = "auto"
    pin_share: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Share of capacity that engines may have kept for them: pins, and half of "
            "it for likely next uses and high priorities.",
        ),
    ] = 0.25
    pin_max_s: Annotated[
        int, Meta(ge=0, le=86_400, description="Nothing is kept longer than this after a hint.")
    ] = 3600

    @property
    def min_bytes(self) -> int:
        """What host memory has at least, in bytes."""
        return max(1, self.capacity // 4) if self.min is None else self.min


class CopyConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Copies that the daemon makes between engines' memory and L2 (`transfer = "cuda_ipc"`)."""

    bandwidth_max: Annotated[
        Size,
        Meta(
            description="Bytes per second of a device's copies, both ways together, so that other "
            "traffic keeps its share of the bus; loads go first. 0: no bound."
        ),
    ] = Size(0)
    job_timeout_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=600_000,
            description="A copy that takes longer has its device's copy process killed and started "
            "again.",
        ),
    ] = 10_000


class StorageConfig(msgspec.Struct, kw_only=True):
    """What every storage tier has; the other keys of its table belong to its type."""

    type: Annotated[str, Meta(description="Backend: an entry point of the group tierd.backends.")]
    name: Annotated[
        str, Meta(max_length=64, description="Name in status and metrics; the type if absent.")
    ] = ""
    deadline_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=60_000,
            description="Longest time of one batch of blocks; what takes longer is given up "
            "and opens the breaker.",
        ),
    ] = 2000
    slow_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=60_000,
            description="A batch that takes longer counts as a failure for the breaker.",
        ),
    ] = 1000
    probe_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="How often a tier whose breaker is open, or that could not be opened, "
            "is tried again.",
        ),
    ] = 2000
    read_batches: Annotated[
        int, Meta(ge=1, le=64, description="Batches read at once, of up to 32 blocks or 8 MiB.")
    ] = 4
    write_batches: Annotated[int, Meta(ge=1, le=64, description="Batches written at once.")] = 2
    write_queue: Annotated[
        Size,
        Meta(
            description="Most bytes that wait to be written, and stay in host memory meanwhile; "
            "beyond it a backup is skipped and counted.",
        ),
    ] = Size(1 << 30)
    write_policy: Annotated[
        WritePolicy,
        Meta(
            description="When blocks are written: write_through at once; write_through_selective "
            "those worth it, most of them when they are evicted from host memory; write_back all "
            "when they are evicted, or the daemon stops."
        ),
    ] = WritePolicy.WRITE_THROUGH_SELECTIVE
    write_uses: Annotated[
        int,
        Meta(
            ge=1,
            le=4,
            description="Distinct requests from which on write_through_selective writes a block "
            "that is sure to be used again before it is evicted.",
        ),
    ] = 2
    write_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Budget of write_through_selective: this share of the bytes that "
            "write_through would write.",
        ),
    ] = 0.58
    write_bytes_per_s: Annotated[
        Size, Meta(description="A further bound of write_through_selective; 0: none.")
    ] = Size(0)
    drive_writes_per_day: Annotated[
        float,
        Meta(
            ge=0,
            description="A further bound of write_through_selective: how often a day the tier's "
            "capacity may be written, for the life of an SSD; 0: no bound.",
        ),
    ] = 0.0
    fill_from_lower: Annotated[
        bool,
        Meta(description="Whether blocks that a tier below had are written into this one."),
    ] = True
    options: dict[str, object] = {}
    overrides: dict[str, str] = {}


class AdminConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server for metrics and health."""

    listen: Annotated[
        str,
        Meta(
            description="Where /metrics, /healthz, /readyz, /v1/status and /v1/hotset are served "
            'over HTTP: "127.0.0.1:9464", "[::1]:9464", or the path of a unix socket; empty: '
            "nowhere.",
        ),
    ] = ""
    allow_remote: Annotated[
        bool,
        Meta(
            description="Whether listen may be an address that other machines reach; who does "
            "reads all of it, without a password."
        ),
    ] = False


class HotsetConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The hot set in the state directory: which prefixes are worth having after a restart."""

    interval_s: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400,
            description="How often hotset.jsonl is written to the state directory, and at a stop; "
            "0: never.",
        ),
    ] = 300
    size: Annotated[
        Size | None,
        Meta(description="Most bytes of blocks that it names; host.capacity if absent."),
    ] = None


class LogFormat(enum.Enum):
    """How the log is written."""

    AUTO = "auto"
    """To the journal if stderr is the journal's, else as text."""
    TEXT = "text"
    JSON = "json"
    JOURNAL = "journal"


class LogLevel(enum.Enum):
    """What is left out of the log: all that matters less."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The log, of the daemon and of its processes."""

    format: Annotated[
        LogFormat,
        Meta(
            description="auto: fields of the journal under systemd, else text on stderr; text; "
            "json: an object a line on stderr; journal."
        ),
    ] = LogFormat.AUTO
    level: Annotated[
        LogLevel,
        Meta(
            description="What matters less than debug, info, warning or error is left out. After a "
            "reload the processes of tiers and devices that run already keep theirs."
        ),
    ] = LogLevel.INFO


class Config(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that `tierd serve` reads."""

    host: HostConfig
    socket: Annotated[
        str, Meta(min_length=1, description="Unix socket that engines connect to.")
    ] = DEFAULT_SOCKET
    allow_uids: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        Meta(description="Users that may connect; empty: root and the daemon's own user."),
    ] = []
    drain_timeout_ms: Annotated[
        int,
        Meta(ge=0, le=600_000, description="Longest time for pending backups after SIGTERM."),
    ] = 10_000
    state_dir: Annotated[
        str,
        Meta(
            description="Directory for the hot set, made if it is missing; if empty the one that "
            "systemd names ($STATE_DIRECTORY), else there is none."
        ),
    ] = ""
    admin: AdminConfig = msgspec.field(default_factory=AdminConfig)
    hotset: HotsetConfig = msgspec.field(default_factory=HotsetConfig)
    prefetch: PrefetchConfig = msgspec.field(default_factory=PrefetchConfig)
    copy: CopyConfig = msgspec.field(default_factory=CopyConfig)
    log: LogConfig = msgspec.field(default_factory=LogConfig)
    storage: list[StorageConfig] = []


def load(path: Path, environ: Mapping[str, str]) -> Config:
    """Read and check the file; raises ConfigError that names file, key and remedy."""
    raw = decode(path)
    try:
        return parse(raw, environ)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def decode(path: Path) -> dict[str, object]:
    """The file's tables, not checked. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(raw: dict[str, object], environ: Mapping[str, str]) -> Config:
    """A checked Config from decoded TOML and the environment's overrides."""
    _check_keys(raw, _field_names(Config), "")
    _override(raw, Config, "TIERD_", environ)
    host = _table(raw, "host", HostConfig, environ)
    _table(raw, "admin", AdminConfig, environ)
    _table(raw, "hotset", HotsetConfig, environ)
    _table(raw, "prefetch", PrefetchConfig, environ)
    _table(raw, "copy", CopyConfig, environ)
    _table(raw, "log", LogConfig, environ)
    tables = raw.get("storage", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ConfigError("storage must be written as [[storage]] tables")
    storage = [_split_storage(table) for table in tables]
    _override_storage(storage, environ)
    raw["storage"] = storage
    if "capacity" not in host:
        raise ConfigError('host.capacity is missing: say how much memory, as in capacity = "8GiB"')
    config = convert(raw, Config, "")
    names = [tier.name for tier in config.storage]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two storage tiers are named {name!r}: set storage.name")
    if len(names) > TIERS_MAX:
        raise ConfigError(f"{len(names)} storage tiers are configured; at most {TIERS_MAX} can be")
    for tier in config.storage:
        if tier.write_queue <= 0:
            raise ConfigError(f"storage ({tier.name}).write_queue must be more than 0")
        check_budget(tier)
    if config.prefetch.bytes_in_flight <= 0:
        raise ConfigError("prefetch.bytes_in_flight must be more than 0")
    if config.host.capacity <= 0:
        raise ConfigError("host.capacity must be more than 0")
    if not 0 < config.host.min_bytes <= config.host.capacity:
        raise ConfigError(
            f"host.min must be more than 0 and at most host.capacity ({config.host.capacity} bytes)"
        )
    return config


def check_budget(tier: StorageConfig) -> None:
    """Raise ConfigError if a bound of writes is set that would not bind."""
    selective = tier.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    if (tier.write_bytes_per_s or tier.drive_writes_per_day) and not selective:
        raise ConfigError(
            f"storage ({tier.name}): write_bytes_per_s and drive_writes_per_day bound only "
            'write_policy = "write_through_selective"'
        )


_STORAGE_PREFIX: Final = "TIERD_STORAGE_"
NOT_SCALARS: Final = (
    "host",
    "prefetch",
    "copy",
    "admin",
    "hotset",
    "log",
    "storage",
    "options",
    "overrides",
)
"""Fields of the configuration's structs that are not keys with a value."""

_T = TypeVar("_T")


def convert(raw: object, cls: type[_T], where: str) -> _T:
    """`raw` as a `cls`; raises ConfigError with the key's path below `where`."""
    try:
        return msgspec.convert(raw, cls, dec_hook=_decode_size)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        key = f"{where}{place.rstrip('`')}" if place else where.rstrip(".") or "the configuration"
        raise ConfigError(f"{key}: {message}") from error


_Options = TypeVar("_Options", bound=msgspec.Struct)


def backend_options(tier: StorageConfig, cls: type[_Options]) -> _Options:
    """The keys of a tier that belong to its type, the environment's included, checked.

    Raises ConfigError with the key's path.
    """
    where = f"storage ({tier.name})."
    prefix = f"{_STORAGE_PREFIX}{_capitals(tier.name)}_"
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(cls)}
    table = dict(tier.options)
    for key, text in tier.overrides.items():
        table[key] = _parse_text(kinds[key], prefix + key.upper(), text) if key in kinds else text
    _check_keys(table, list(kinds), where)
    return convert(table, cls, where)


def _table(
    raw: dict[str, object], name: str, cls: type[msgspec.Struct], environ: Mapping[str, str]
) -> dict[str, object]:
    """The table `name` of the file, made if missing, with the environment's overrides."""
    table = raw.setdefault(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{name}] must be a table")
    _check_keys(table, _field_names(cls), f"{name}.")
    _override(table, cls, f"TIERD_{name.upper()}_", environ)
    return table


def _split_storage(table: dict[str, object]) -> dict[str, object]:
    kind = table.get("type")
    if not isinstance(kind, str):
        raise ConfigError('storage.type is missing: say which backend, as in type = "file"')
    known = _field_names(StorageConfig)
    own = {key: value for key, value in table.items() if key in known and key not in NOT_SCALARS}
    own.setdefault("name", kind)
    return {**own, "options": {k: v for k, v in table.items() if k not in own}}


def _field_names(cls: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(cls)]


def _check_keys(table: Mapping[str, object], known: list[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; did you mean {where}{near[0]}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"{where}{key} is not a key{hint}")


def _override(
    table: dict[str, object], cls: type[msgspec.Struct], prefix: str, environ: Mapping[str, str]
) -> None:
    for field in msgspec.structs.fields(cls):
        name = prefix + field.encode_name.upper()
        if name in environ and field.encode_name not in NOT_SCALARS:
            table[field.encode_name] = _parse_text(field.type, name, environ[name])


def _override_storage(tables: list[dict[str, object]], environ: Mapping[str, str]) -> None:
    """Give each tier its variables; those that are no common key are its type's to check."""
    common = {name.upper(): name for name in _field_names(StorageConfig)}
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(StorageConfig)}
    prefixes = {f"{_STORAGE_PREFIX}{_capitals(str(t['name']))}_": t for t in tables}
    for name, text in environ.items():
        # With tiers "s3" and "s3_cold", TIERD_STORAGE_S3_COLD_BUCKET is the second one's.
        prefix = max((p for p in prefixes if name.startswith(p)), key=len, default=None)
        if prefix is None:
            continue
        table, key = prefixes[prefix], name.removeprefix(prefix)
        if key in ("TYPE", "NAME", *map(str.upper, NOT_SCALARS)):
            raise ConfigError(f"{name} in the environment: this key is not to be overridden")
        if key in common:
            table[common[key]] = _parse_text(kinds[common[key]], name, text)
        else:
            overrides = table.setdefault("overrides", {})
            assert isinstance(overrides, dict)
            overrides[key.lower()] = text


def variable(path: str) -> str:
    """The environment's variable for a key, such as "host.capacity" or "storage.NAME.slow_ms"."""
    return "TIERD_" + "_".join(map(_capitals, path.split(".")))


def _capitals(name: str) -> str:
    """A tier's name as a part of a variable's name."""
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def _parse_text(kind: object, name: str, text: str) -> object:
    """The variable `name`'s text as a value of `kind`, which is still to be checked."""
    kinds = set(_plain_types(kind))
    if str in kinds or Size in kinds:
        return text
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name}={text} in the environment is neither true nor false")
        return text.lower() == "true"
    parts = [part.strip() for part in text.split(",")] if list in kinds else [text]
    if int in kinds:
        try:
            numbers = [int(part) for part in parts if part]
        except ValueError as error:
            what = "a whole number" if list not in kinds else "a list of whole numbers"
            raise ConfigError(f"{name}={text} in the environment is not {what}") from error
        return numbers if list in kinds else numbers[0] if numbers else text
    if float in kinds:
        try:
            return float(text)
        except ValueError as error:
            raise ConfigError(f"{name}={text} in the environment is not a number") from error
    return parts if list in kinds else text


def _plain_types(kind: object) -> Iterator[object]:
    """`kind` and what it is made of: of a list its items too, of a union its members."""
    inner = get_args(kind)
    yield getattr(kind, "__origin__", kind)
    for part in inner:
        yield from _plain_types(part)


def _decode_size(cls: type, value: object) -> object:
    if cls is not Size:
        return value  # A backend's option, whose own class checks it.
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    try:
        return Size(parse_size(value))
    except ConfigError as error:
        raise ValueError(str(error)) from error  # msgspec adds the key's path to this one.
