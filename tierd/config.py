"""The configuration: one TOML file, checked as a whole before anything starts.

A field is one line plus its description; the reference in README.md is generated
from here. Every scalar can be overridden by an environment variable, TIERD_ and the
key's path in capitals.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import msgspec
from msgspec import Meta

from tierd.errors import ConfigError
from tierd.sizes import parse_size

DEFAULT_SOCKET = "/run/tierd/tierd.sock"


class Size(int):
    """Bytes, written in the file as a number or as text like "8GiB"."""


class HostConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The host tier (L2)."""

    capacity: Annotated[Size, Meta(description="Memory for KV blocks, a hard bound.")]
    lease_ttl_ms: Annotated[
        int,
        Meta(
            ge=1000,
            le=600_000,
            description="How long an engine may use a block that it was promised; "
            "a crashed engine's blocks are held as long.",
        ),
    ] = 30_000


class StorageConfig(msgspec.Struct, kw_only=True):
    """What every storage tier has; the other keys of its table belong to its type."""

    type: Annotated[str, Meta(description="Backend: an entry point of the group tierd.backends.")]
    name: Annotated[str, Meta(description="Name in status and metrics; the type if absent.")] = ""
    options: dict[str, object] = {}


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
    storage: list[StorageConfig] = []


def load(path: Path, environ: Mapping[str, str]) -> Config:
    """Read and check the file; raises ConfigError that names file, key and remedy."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return parse(raw, environ)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(raw: dict[str, object], environ: Mapping[str, str]) -> Config:
    """A checked Config from decoded TOML and the environment's overrides."""
    _check_keys(raw, _field_names(Config), "")
    host = raw.setdefault("host", {})
    if not isinstance(host, dict):
        raise ConfigError("[host] must be a table")
    _check_keys(host, _field_names(HostConfig), "host.")
    _override(raw, Config, "TIERD_", environ)
    _override(host, HostConfig, "TIERD_HOST_", environ)
    tables = raw.get("storage", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ConfigError("storage must be written as [[storage]] tables")
    raw["storage"] = [_split_storage(table) for table in tables]
    if "capacity" not in host:
        raise ConfigError('host.capacity is missing: say how much memory, as in capacity = "8GiB"')
    config = convert(raw, Config, "")
    names = [tier.name for tier in config.storage]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two storage tiers are named {name!r}: set storage.name")
    if config.host.capacity <= 0:
        raise ConfigError("host.capacity must be more than 0")
    return config


_T = TypeVar("_T")


def convert(raw: object, cls: type[_T], where: str) -> _T:
    """`raw` as a `cls`; raises ConfigError with the key's path below `where`."""
    try:
        return msgspec.convert(raw, cls, dec_hook=_decode_size)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        key = f"{where}{place.rstrip('`')}" if place else where.rstrip(".") or "the configuration"
        raise ConfigError(f"{key}: {message}") from error


def check_options(table: Mapping[str, object], options: type[msgspec.Struct], where: str) -> None:
    """Raise ConfigError if `table` has a key that `options` has not."""
    _check_keys(table, _field_names(options), where)


def _split_storage(table: dict[str, object]) -> dict[str, object]:
    kind = table.get("type")
    if not isinstance(kind, str):
        raise ConfigError('storage.type is missing: say which backend, as in type = "file"')
    own = {key: value for key, value in table.items() if key in ("type", "name")}
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
        text = environ.get(prefix + field.encode_name.upper())
        if text is None or field.encode_name in ("host", "storage"):
            continue
        try:
            if field.encode_name == "allow_uids":
                table[field.encode_name] = [int(uid) for uid in text.split(",") if uid.strip()]
            elif get_args(field.type)[:1] == (int,):
                table[field.encode_name] = int(text)
            else:
                table[field.encode_name] = text
        except ValueError as error:
            raise ConfigError(
                f"{prefix}{field.encode_name.upper()}={text} in the environment "
                "is not a whole number"
            ) from error


def _decode_size(cls: type, value: object) -> object:
    if cls is not Size:
        return value  # A backend's option, whose own class checks it.
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    try:
        return Size(parse_size(value))
    except ConfigError as error:
        raise ValueError(str(error)) from error  # msgspec adds the key's path to this one.


def reference() -> str:
    """The configuration reference, as Markdown table rows, for README.md."""
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for prefix, cls in (("", Config), ("host.", HostConfig), ("storage.", StorageConfig)):
        for field in msgspec.structs.fields(cls):
            if field.name in ("host", "storage", "options"):
                continue
            rows.append(_reference_row(prefix, field))
    return "\n".join(rows)


def options_reference(kind: str, cls: type[msgspec.Struct]) -> str:
    """Table rows for the keys of one backend type."""
    return "\n".join(_reference_row(f"storage ({kind}).", f) for f in msgspec.structs.fields(cls))


def _reference_row(prefix: str, field: msgspec.structs.FieldInfo) -> str:
    kind = msgspec.inspect.type_info(field.type)
    about = ""
    if isinstance(kind, msgspec.inspect.Metadata):
        about = str((kind.extra_json_schema or {}).get("description", ""))
    if field.default is not msgspec.NODEFAULT:
        default = f"`{field.default!r}`".replace("'", '"')
    elif field.default_factory is not msgspec.NODEFAULT:
        default = f"`{field.default_factory()!r}`"
    else:
        default = "required"
    return f"| `{prefix}{field.encode_name}` | {default} | {about} |"
