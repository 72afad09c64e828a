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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from tierd.errors import ConfigError
from tierd.sizes import Size as Size
from tierd.sizes import size_text
from tierd.tables import field_names, from_text, values_of

DEFAULT_CONFIG = "/etc/tierd/tierd.toml"

DEFAULT_SOCKET = "/run/tierd/tierd.sock"

TIERS_MAX: Final = 8
"""Maximum storage tiers of one daemon: each takes a bit per block and a share of L2."""

LEASE_TTL_MS_MAX: Final = 600_000
"""Longest lease, enough for any load; slots whose leases are unknown after a crash wait as long."""


class WritePolicy(enum.Enum):
    """When blocks that a storage tier lacks are written to it."""

    WRITE_THROUGH = "write_through"
    """As soon as they are stored in L2."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When their predicted reuse is worth a write; see tierd.core.writes."""
    WRITE_BACK = "write_back"
    """When they are about to be evicted from L2."""


class Eviction(enum.Enum):
    """The order in which blocks are evicted from L2; see tierd.eviction."""

    HAZARD = "hazard"
    CREDIT = "credit"
    LRU = "lru"
    LFU = "lfu"
    S3FIFO = "s3fifo"
    ARC = "arc"


class PrefetchPolicy(enum.Enum):
    """How long a request waits for blocks of its prefix from storage tiers."""

    BEST_EFFORT = "best_effort"
    """Until the engine is ready to compute the request."""
    WAIT_COMPLETE = "wait_complete"
    """Until all blocks have arrived, at most timeout_max_ms."""
    TIMEOUT = "timeout"
    """Until a time that grows with the number of missing tokens, at most timeout_max_ms."""


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
        Meta(
            description="Numeric ids of the users that may connect; empty: root and the daemon's "
            "own user. The socket's file is open to all as soon as another user is named: the "
            "daemon has each client's id from the kernel."
        ),
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
    """Read and check the file; raises ConfigError with every mistake in it."""
    config, problems = read(path, environ)
    if problems:
        raise ConfigError(*problems)
    return config


def read(path: Path, environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Return the Config of a file, with defaults for wrong values, and all mistakes in the file.

    Raises ConfigError for a file that cannot be read or is not TOML.
    """
    config, problems = parse_all(decode(path), environ)
    return config, [f"{path}: {problem}" for problem in problems]


def decode(path: Path) -> dict[str, object]:
    """Return the file's tables, unchecked. Raises ConfigError if it is unreadable or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(raw: Mapping[str, object], environ: Mapping[str, str]) -> Config:
    """Return a checked Config from decoded TOML and the environment. Raises ConfigError."""
    config, problems = parse_all(raw, environ)
    if problems:
        raise ConfigError(*problems)
    return config


def parse_all(raw: Mapping[str, object], environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Return the Config from `raw` and the environment, and all mistakes in them.

    Wrong values are replaced by defaults. A Config with mistakes serves only to find further
    mistakes.
    """
    problems: list[str] = []
    found = _values(raw, Config, "", "TIERD_", environ, problems)
    found |= {name: _table(raw, name, environ, problems) for name in _TABLES}
    found["storage"] = _tiers(raw.get("storage", []), environ, problems)
    config = Config(**found)  # type: ignore[arg-type]  # each value has been converted
    if not problems:
        problems += _contradictions(config)
    problems += _unknown_variables(config, environ)
    return config, problems


def check_budget(tier: StorageConfig) -> None:
    """Raise ConfigError if a write limit is set that the tier's write policy ignores."""
    selective = tier.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    if (tier.write_bytes_per_s or tier.drive_writes_per_day) and not selective:
        raise ConfigError(
            f"storage ({tier.name}): write_bytes_per_s and drive_writes_per_day need "
            'write_policy = "write_through_selective"'
        )


def _contradictions(config: Config) -> Iterator[str]:
    """Yield mistakes that involve more than the type of one value."""
    names = [tier.name for tier in config.storage]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"two storage tiers are named {name!r}: set storage.name"
    if len(names) > TIERS_MAX:
        yield f"{len(names)} storage tiers are configured; the maximum is {TIERS_MAX}"
    for tier in config.storage:
        if tier.write_queue <= 0:
            yield f"storage ({tier.name}).write_queue must be more than 0"
        try:
            check_budget(tier)
        except ConfigError as error:
            yield str(error)
    if config.prefetch.bytes_in_flight <= 0:
        yield "prefetch.bytes_in_flight must be more than 0"
    if config.host.capacity <= 0:
        yield "host.capacity must be more than 0"
    elif not 0 < config.host.min_bytes <= config.host.capacity:
        most = size_text(config.host.capacity)
        yield f"host.min must be more than 0 and at most host.capacity ({most})"


_STORAGE_PREFIX: Final = "TIERD_STORAGE_"
_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    field.name: field.type
    for field in msgspec.structs.fields(Config)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
}
"""The file's tables by name, without [[storage]]."""

NOT_SCALARS: Final = (*_TABLES, "storage", "options", "overrides")
"""Fields of the configuration's structs that are not keys with a value."""

OTHER_VARIABLES: Final = frozenset(
    {
        "TIERD_CACHE",
        "TIERD_CHILD_LOG_FORMAT",
        "TIERD_CHILD_LOG_LEVEL",
        "TIERD_ENGINE_OVERLAY",
        "TIERD_ENGINE_PYTHON",
        "TIERD_GPU_ENGINE_PYTHON",
        "TIERD_RACE_ROUNDS",
        "TIERD_REQUIRE_SYSTEMD",
        "TIERD_SIM_SEED",
    }
)
"""Variables that are not keys: of tierd's own processes, of its build and its tests."""

_SERVICE_VARIABLE: Final = re.compile(
    r"TIERD_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in each pod next to a Service whose name begins with "tierd"."""

_T = TypeVar("_T", bound=msgspec.Struct)


def convert(raw: Mapping[str, object], cls: type[_T], where: str) -> _T:
    """Convert `raw` to `cls`; raises ConfigError with each wrong key's path below `where`."""
    problems: list[str] = []
    values = values_of(raw, cls, where, problems)
    if problems:
        raise ConfigError(*problems)
    return cls(**values)


def backend_options(tier: StorageConfig, cls: type[_T]) -> _T:
    """Return the checked options of a tier's type, with the environment's overrides.

    Raises ConfigError with the keys' paths.
    """
    values, problems = option_values(tier, cls)
    if problems:
        raise ConfigError(*problems)
    return cls(**values)


def option_values(
    tier: StorageConfig, cls: type[msgspec.Struct]
) -> tuple[dict[str, object], list[str]]:
    """Return the valid values among the options of a tier, and the mistakes in the others."""
    where = f"storage ({tier.name})."
    prefix = f"{_STORAGE_PREFIX}{_capitals(tier.name)}_"
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(cls)}
    problems: list[str] = []
    table = dict(tier.options)
    for key, text in tier.overrides.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, [*kinds, *field_names(StorageConfig)], 1, 0.5)
            hint = f"; did you mean {prefix}{near[0].upper()}?" if near else ""
            problems.append(f"{prefix}{key.upper()} in the environment is not a key{hint}")
        else:
            _set(table, key, kinds[key], prefix + key.upper(), text, problems)
    return values_of(table, cls, where, problems), problems


def variable(path: str) -> str:
    """Return the variable for a key, such as "host.capacity" or "storage.NAME.slow_ms"."""
    return "TIERD_" + "_".join(map(_capitals, path.split(".")))


def _capitals(name: str) -> str:
    """Return a name as part of a variable's name."""
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def _table(
    raw: Mapping[str, object], name: str, environ: Mapping[str, str], problems: list[str]
) -> msgspec.Struct:
    """Return the table `name` of the file with the environment's overrides."""
    cls, table = _TABLES[name], raw.get(name, {})
    if not isinstance(table, dict):
        problems.append(f"[{name}] must be a table")
        table = {}
    before = len(problems)
    values = _values(table, cls, f"{name}.", f"TIERD_{name.upper()}_", environ, problems)
    if cls is HostConfig and "capacity" not in values:
        missing = "host.capacity is missing"
        if missing in problems[before:]:
            hint = ': set the memory for KV blocks, as in capacity = "8GiB"'
            problems[problems.index(missing)] += hint
        # A value that causes no further mistakes.
        values["capacity"] = values.get("min") or Size(1)
    return cls(**values)


def _tiers(tables: object, environ: Mapping[str, str], problems: list[str]) -> list[StorageConfig]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        problems.append("storage must be written as [[storage]] tables")
        return []
    found = []
    common = [name for name in field_names(StorageConfig) if name not in NOT_SCALARS]
    for number, table in enumerate(tables):
        kind, name = table.get("type"), table.get("name", table.get("type"))
        if not isinstance(kind, str):
            problems.append('storage.type is missing: set the backend, as in type = "file"')
        elif not isinstance(name, str):
            problems.append(f"storage[{number}].name: Expected `str`, got {name!r}")
        else:
            own = {key: value for key, value in table.items() if key in common}
            options = {key: value for key, value in table.items() if key not in common}
            found.append((own | {"name": name}, options))
    overrides = _tier_overrides([str(own["name"]) for own, _ in found], environ, problems)
    tiers = []
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(StorageConfig)}
    for (own, options), variables in zip(found, overrides, strict=True):
        for key in [key for key in variables if key in common]:
            name, text = variables.pop(key)
            _set(own, key, kinds[key], name, text, problems)
        where = f"storage ({own['name']})."
        values = values_of(own, StorageConfig, where, problems)
        others = {key: text for key, (_, text) in variables.items()}
        tiers.append(StorageConfig(**values, options=options, overrides=others))  # type: ignore[arg-type]  # converted
    return tiers


def _tier_overrides(
    names: Sequence[str], environ: Mapping[str, str], problems: list[str]
) -> list[dict[str, tuple[str, str]]]:
    """Return for each tier its variables, by key: the variable's name and text."""
    found: list[dict[str, tuple[str, str]]] = [{} for _ in names]
    prefixes = {_tier_prefix(name): at for at, name in enumerate(names)}
    for name, text in environ.items():
        # With tiers "s3" and "s3_cold", TIERD_STORAGE_S3_COLD_BUCKET belongs to "s3_cold".
        prefix = max((p for p in prefixes if name.startswith(p)), key=len, default=None)
        if prefix is None:
            continue
        key = name.removeprefix(prefix)
        if key in ("TYPE", "NAME", *map(str.upper, NOT_SCALARS)):
            problems.append(f"{name} in the environment: this key can only be set in the file")
        else:
            found[prefixes[prefix]][key.lower()] = name, text
    return found


def _tier_prefix(name: str) -> str:
    return f"{_STORAGE_PREFIX}{_capitals(name)}_"


def _unknown_variables(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a mistake for each variable that looks like a key and would have no effect."""
    known = [variable(key) for key in field_names(Config) if key not in NOT_SCALARS]
    for name, cls in _TABLES.items():
        known += [variable(f"{name}.{key}") for key in field_names(cls)]
    prefixes = [_tier_prefix(tier.name) for tier in config.storage]
    for name in environ:
        if (
            not name.startswith("TIERD_")
            or name in known
            or name in OTHER_VARIABLES
            or name.startswith(tuple(prefixes))
            or _SERVICE_VARIABLE.fullmatch(name)
        ):
            continue
        if name.startswith(_STORAGE_PREFIX):
            names = ", ".join(prefixes) or "none, as there is no tier"
            hint = f"; the variables of tiers begin with: {names}"
        elif near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
            hint = f"; did you mean {near[0]}?"
        else:
            hint = "; `tierd config docs` lists all keys"
        yield f"{name} in the environment is not a key{hint}"


def _values(
    table: Mapping[str, object],
    cls: type[msgspec.Struct],
    where: str,
    prefix: str,
    environ: Mapping[str, str],
    problems: list[str],
) -> dict[str, object]:
    """Return the valid values of a table, with the environment's overrides."""
    found = dict(table)
    scalars = [field for field in msgspec.structs.fields(cls) if field.name not in NOT_SCALARS]
    for field in scalars:
        name = prefix + field.encode_name.upper()
        if name in environ:
            _set(found, field.encode_name, field.type, name, environ[name], problems)
    return values_of(found, cls, where, problems, without=NOT_SCALARS)


def _set(
    table: dict[str, object],
    key: str,
    kind: object,
    name: str,
    text: str,
    problems: list[str],
) -> None:
    """Override a key of a table with the text of the variable `name`."""
    try:
        table[key] = from_text(kind, name, text)
    except ConfigError as error:
        problems.append(str(error))
