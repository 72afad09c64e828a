"""The keys of the configuration: each is a field, its bounds and its description."""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tierd.sizes import Size as Size

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
    """When their predicted reuse is worth a write; see tierd.core.l3.writes."""
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
            description="How long a request waits for blocks in storage tiers. timeout: "
            "timeout_base_ms plus timeout_per_ki_ms for every 1,024 missing tokens; "
            "wait_complete: until all blocks have arrived; best_effort: until the "
            "engine could compute the request. Never longer than timeout_max_ms."
        ),
    ] = PrefetchPolicy.TIMEOUT
    timeout_base_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=600_000,
            description="Waiting time that the policy timeout grants to every request, however "
            "short the missing prefix.",
        ),
    ] = 1000
    timeout_per_ki_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=60_000,
            description="Waiting time that the policy timeout adds for every 1,024 tokens missing "
            "in host memory.",
        ),
    ] = 250
    timeout_max_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=600_000,
            description="Upper bound of a request's waiting time for storage tiers, whatever the "
            "policy.",
        ),
    ] = 30_000
    min_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Smallest number of missing tokens to fetch from storage tiers; the engine "
            "computes fewer than these.",
        ),
    ] = 256
    break_even: Annotated[
        bool,
        Meta(
            description="Skip loads from storage tiers that are slower than recomputing, by the "
            "measured speeds of engine and tier; false: always load."
        ),
    ] = True
    bytes_in_flight: Annotated[
        Size,
        Meta(
            description="Upper bound of the bytes that all tiers together read into host memory at "
            "once; a larger single batch is read alone."
        ),
    ] = Size(256 << 20)


class HostConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The host tier (L2)."""

    capacity: Annotated[
        Size, Meta(description='Upper bound of the host memory for KV blocks, such as "64GiB".')
    ]
    min: Annotated[
        Size | None,
        Meta(
            description="Lower bound of host memory while the machine or the container is short of "
            "memory; a quarter of host.capacity if absent."
        ),
    ] = None
    lease_ttl_ms: Annotated[
        int,
        Meta(
            ge=1000,
            le=LEASE_TTL_MS_MAX,
            description="How long an engine may use blocks that it has leased; blocks of a crashed "
            "engine stay that long.",
        ),
    ] = 30_000
    eviction: Annotated[
        Eviction,
        Meta(
            description="Order in which blocks leave host memory. hazard: the lowest expected hit "
            "rate first, learned from the requests; credit, lru, lfu, s3fifo and arc do "
            "not learn."
        ),
    ] = Eviction.HAZARD
    huge_pages: Annotated[
        bool,
        Meta(
            description="Use transparent huge pages if the kernel offers them for shared memory; "
            "the log says if it does not."
        ),
    ] = True
    numa_node: Annotated[
        str,
        Meta(
            pattern="^(auto|off|[0-9]{1,4})$",
            description="NUMA node whose memory is used first: a number, auto (the node of the "
            "GPUs, if they share one) or off.",
        ),
    ] = "auto"
    pin_share: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Share of host.capacity that hints may keep for requests: all of it for "
            "pin_s, half of it for next_use_s and priority.",
        ),
    ] = 0.25
    pin_max_s: Annotated[
        int,
        Meta(ge=0, le=86_400, description="Longest time that a hint keeps blocks in host memory."),
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
            description="Upper bound of the bytes per second that the daemon copies to and from a "
            "device, so that other traffic keeps its share of the bus; loads go first. "
            "0: no bound."
        ),
    ] = Size(0)
    job_timeout_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=600_000,
            description="Longest time of one copy. If it takes longer, the copy process of that "
            "device is killed and started again.",
        ),
    ] = 10_000


class StorageConfig(msgspec.Struct, kw_only=True):
    """What every storage tier has; the other keys of its table belong to its type."""

    type: Annotated[
        str,
        Meta(
            description="Backend of the tier: file, redis, s3, or another entry point of the group "
            "tierd.backends."
        ),
    ]
    name: Annotated[
        str,
        Meta(
            max_length=64,
            description="Name of the tier in status, metrics and log; the type if empty.",
        ),
    ] = ""
    deadline_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=60_000,
            description="Longest time of one batch of blocks. A batch that takes longer is "
            "cancelled and opens the breaker.",
        ),
    ] = 2000
    slow_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=60_000,
            description="A batch that takes longer than this counts as a failure for the breaker.",
        ),
    ] = 1000
    probe_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="Interval of attempts to use a tier again whose breaker is open or that "
            "could not be opened.",
        ),
    ] = 2000
    read_batches: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of batches read at once; a batch has up to 32 blocks or 8 MiB.",
        ),
    ] = 4
    write_batches: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of batches written at once; a batch has up to 32 blocks or 8 MiB.",
        ),
    ] = 2
    write_queue: Annotated[
        Size,
        Meta(
            description="Upper bound of the bytes that wait in host memory to be written to this "
            "tier; further backups are skipped and counted.",
        ),
    ] = Size(1 << 30)
    write_policy: Annotated[
        WritePolicy,
        Meta(
            description="When blocks are written to this tier. write_through: as soon as they are "
            "stored; write_through_selective: the blocks most likely to be reused, "
            "within a write budget; write_back: when they are evicted from host memory "
            "or the daemon stops."
        ),
    ] = WritePolicy.WRITE_THROUGH_SELECTIVE
    write_uses: Annotated[
        int,
        Meta(
            ge=1,
            le=4,
            description="Number of distinct requests after which write_through_selective treats a "
            "block as sure to be reused.",
        ),
    ] = 2
    write_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Write budget of write_through_selective, as a share of the bytes that "
            "write_through would write.",
        ),
    ] = 0.58
    write_bytes_per_s: Annotated[
        Size,
        Meta(
            description="Upper bound of the bytes per second that write_through_selective writes; "
            "0: no bound."
        ),
    ] = Size(0)
    drive_writes_per_day: Annotated[
        float,
        Meta(
            ge=0,
            description="Upper bound of the writes of write_through_selective, in capacities of "
            "this tier per day, to protect an SSD; 0: no bound.",
        ),
    ] = 0.0
    fill_from_lower: Annotated[
        bool,
        Meta(description="Write blocks found in a tier below into this tier."),
    ] = True
    options: dict[str, object] = {}
    overrides: dict[str, str] = {}


class AdminConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server for metrics and health."""

    listen: Annotated[
        str,
        Meta(
            description='Address of the HTTP server for metrics and health: "127.0.0.1:9464", '
            '"[::1]:9464" or the path of a unix socket. Empty: no server.',
        ),
    ] = ""
    allow_remote: Annotated[
        bool,
        Meta(
            description="Permit an admin.listen address that other machines can reach. The server "
            "has no password, so these machines can read everything it shows."
        ),
    ] = False


class HotsetConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The hot set in the state directory: which prefixes are worth having after a restart."""

    interval_s: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400,
            description="Interval at which hotset.jsonl is written to the state directory; it is "
            "also written at a stop. 0: never.",
        ),
    ] = 300
    size: Annotated[
        Size | None,
        Meta(
            description="Upper bound of the bytes of the blocks that hotset.jsonl lists; "
            "host.capacity if absent."
        ),
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
            description="Format of the log. auto: fields of the journal under systemd, otherwise "
            "text on stderr; text; json: one object per line on stderr; journal."
        ),
    ] = LogFormat.AUTO
    level: Annotated[
        LogLevel,
        Meta(
            description="Least important level that is logged: debug, info, warning or error. A "
            "reload does not change it for running processes of tiers and devices."
        ),
    ] = LogLevel.INFO


class Config(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that `tierd serve` reads."""

    host: HostConfig
    socket: Annotated[
        str, Meta(min_length=1, description="Path of the unix socket that engines connect to.")
    ] = DEFAULT_SOCKET
    allow_uids: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        Meta(
            description="Numeric ids of the users that may connect; empty: root and the daemon's "
            "own user. Once another user is listed the socket's file is open to all, "
            "and the daemon checks each client's user id with the kernel."
        ),
    ] = []
    drain_timeout_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=600_000,
            description="Longest time that the daemon writes pending backups after SIGTERM. It "
            "writes the hot set meanwhile, for at most 20 s, so a stop can take that long.",
        ),
    ] = 10_000
    state_dir: Annotated[
        str,
        Meta(
            description="Directory for the hot set and for the memory of flushes; created if "
            "missing. Empty: the directory that systemd names ($STATE_DIRECTORY), or "
            "none."
        ),
    ] = ""
    admin: AdminConfig = msgspec.field(default_factory=AdminConfig)
    hotset: HotsetConfig = msgspec.field(default_factory=HotsetConfig)
    prefetch: PrefetchConfig = msgspec.field(default_factory=PrefetchConfig)
    copy: CopyConfig = msgspec.field(default_factory=CopyConfig)
    log: LogConfig = msgspec.field(default_factory=LogConfig)
    storage: list[StorageConfig] = []
