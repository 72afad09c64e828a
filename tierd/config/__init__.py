"""The configuration: one TOML file, checked as a whole before anything starts.

A field is one line plus its description; the reference in docs/configuration.md is
generated from here. Every key can be overridden by an environment variable: TIERD_ and the key's
path in capitals, as in TIERD_HOST_CAPACITY, and with a tier's name in the place of its
table, as in TIERD_STORAGE_FILE_DEADLINE_MS.
"""

from tierd.config.environment import NOT_SCALARS, OTHER_VARIABLES, variable
from tierd.config.reading import (
    backend_options,
    check_budget,
    convert,
    decode,
    load,
    option_values,
    parse,
    read,
)
from tierd.config.schema import (
    DEFAULT_CONFIG,
    DEFAULT_SOCKET,
    LEASE_TTL_MS_MAX,
    TIERS_MAX,
    AdminConfig,
    Config,
    CopyConfig,
    Eviction,
    HostConfig,
    HotsetConfig,
    LogConfig,
    LogFormat,
    LogLevel,
    PrefetchConfig,
    PrefetchPolicy,
    StorageConfig,
    WritePolicy,
)
from tierd.sizes import Size

__all__ = [
    "DEFAULT_CONFIG",
    "DEFAULT_SOCKET",
    "LEASE_TTL_MS_MAX",
    "NOT_SCALARS",
    "OTHER_VARIABLES",
    "TIERS_MAX",
    "AdminConfig",
    "Config",
    "CopyConfig",
    "Eviction",
    "HostConfig",
    "HotsetConfig",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "PrefetchConfig",
    "PrefetchPolicy",
    "Size",
    "StorageConfig",
    "WritePolicy",
    "backend_options",
    "check_budget",
    "convert",
    "decode",
    "load",
    "option_values",
    "parse",
    "read",
    "variable",
]
