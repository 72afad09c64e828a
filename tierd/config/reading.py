"""From the file and the environment to a checked configuration."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from tierd.config.environment import (
    NOT_SCALARS,
    STORAGE_PREFIX,
    TABLES,
    capitals,
    set_key,
    tier_overrides,
    unknown_variables,
)
from tierd.config.schema import TIERS_MAX, Config, HostConfig, StorageConfig, WritePolicy
from tierd.errors import ConfigError
from tierd.sizes import Size as Size
from tierd.sizes import size_text
from tierd.tables import field_names, values_of


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
    found |= {name: _table(raw, name, environ, problems) for name in TABLES}
    found["storage"] = _tiers(raw.get("storage", []), environ, problems)
    config = Config(**found)  # type: ignore[arg-type]  # each value has been converted
    if not problems:
        problems += _contradictions(config)
    problems += unknown_variables(config, environ)
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
    prefix = f"{STORAGE_PREFIX}{capitals(tier.name)}_"
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(cls)}
    problems: list[str] = []
    table = dict(tier.options)
    for key, text in tier.overrides.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, [*kinds, *field_names(StorageConfig)], 1, 0.5)
            hint = f"; did you mean {prefix}{near[0].upper()}?" if near else ""
            problems.append(f"{prefix}{key.upper()} in the environment is not a key{hint}")
        else:
            set_key(table, key, kinds[key], prefix + key.upper(), text, problems)
    return values_of(table, cls, where, problems), problems


def _table(
    raw: Mapping[str, object], name: str, environ: Mapping[str, str], problems: list[str]
) -> msgspec.Struct:
    """Return the table `name` of the file with the environment's overrides."""
    cls, table = TABLES[name], raw.get(name, {})
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
    overrides = tier_overrides([str(own["name"]) for own, _ in found], environ, problems)
    tiers = []
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(StorageConfig)}
    for (own, options), variables in zip(found, overrides, strict=True):
        for key in [key for key in variables if key in common]:
            name, text = variables.pop(key)
            set_key(own, key, kinds[key], name, text, problems)
        where = f"storage ({own['name']})."
        values = values_of(own, StorageConfig, where, problems)
        others = {key: text for key, (_, text) in variables.items()}
        tiers.append(StorageConfig(**values, options=options, overrides=others))  # type: ignore[arg-type]  # converted
    return tiers


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
            set_key(found, field.encode_name, field.type, name, environ[name], problems)
    return values_of(found, cls, where, problems, without=NOT_SCALARS)
