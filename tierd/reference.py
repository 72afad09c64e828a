"""The configuration's keys, and the source of each value.

The reference in docs/configuration.md, `tierd config docs` and `tierd config show` are made from
here.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from tierd.config import (
    NOT_SCALARS,
    AdminConfig,
    Config,
    CopyConfig,
    HostConfig,
    HotsetConfig,
    LogConfig,
    PrefetchConfig,
    Size,
    StorageConfig,
    variable,
)
from tierd.sizes import size_text

TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "": Config,
    "host": HostConfig,
    "prefetch": PrefetchConfig,
    "copy": CopyConfig,
    "hotset": HotsetConfig,
    "admin": AdminConfig,
    "log": LogConfig,
}
"""The file's tables in the order of the reference, in which [[storage]] follows them."""

_SECRET: Final = re.compile(r"pass|secret|token|credential|auth|(^|_)key$")
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@]*@")


class Key(NamedTuple):
    """A key of the configuration, as the reference lists it."""

    path: str
    default: str
    """As the file would have it, "absent" if it has none; empty if the key is required."""
    about: str


def keys() -> Iterator[Key]:
    """Yield all keys except the options of backend types."""
    for table, cls in TABLES.items():
        yield from _described(f"{table}." if table else "", cls)
    yield from _described("storage.", StorageConfig)


def options(kind: str, cls: type[msgspec.Struct]) -> Iterator[Key]:
    """Yield the options of one backend type."""
    yield from _described(f"storage ({kind}).", cls)


def reference() -> str:
    """The configuration reference, as Markdown table rows, for docs/configuration.md."""
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *map(_row, keys())])


def options_reference(kind: str, cls: type[msgspec.Struct]) -> str:
    """Return Markdown table rows for the options of one backend type."""
    return "\n".join(map(_row, options(kind, cls)))


def origins(raw: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the source of each value that is not a default: "file" or an environment variable.

    Keys look like "host.capacity" and "storage (file).deadline_ms". `raw` and `environ` must have
    been validated.
    """
    found = {}
    for name, cls in TABLES.items():
        table = raw.get(name, {}) if name else raw
        fields = [field.name for field in msgspec.structs.fields(cls)]
        for key in (key for key in fields if key not in NOT_SCALARS):
            path = f"{name}.{key}" if name else key
            if variable(path) in environ:
                found[path] = variable(path)
            elif isinstance(table, Mapping) and key in table:
                found[path] = "file"
    tables = raw.get("storage", [])
    assert isinstance(tables, list), "it has been checked"
    for table in tables:
        name = table.get("name", table["type"])
        found |= {f"storage ({name}).{key}": "file" for key in table}
        prefix = variable(f"storage.{name}") + "_"
        for variable_name in (text for text in environ if text.startswith(prefix)):
            key = variable_name.removeprefix(prefix).lower()
            found[f"storage ({name}).{key}"] = variable_name
    return found


def shown(key: str, value: object) -> object:
    """Return a value as plain data, as the file would have it, with possible secrets masked.

    `key` is the last part of the value's path.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Size):
        return size_text(value)
    if isinstance(value, str):
        if value and _SECRET.search(key) and not key.endswith("_file"):
            return "(not shown)"
        return _CREDENTIALS.sub("***@", value)
    if isinstance(value, list | tuple):
        return [shown(key, part) for part in value]
    return value


def _described(prefix: str, cls: type[msgspec.Struct]) -> Iterator[Key]:
    for field in msgspec.structs.fields(cls):
        if field.name in NOT_SCALARS and not prefix.startswith("storage ("):
            continue
        kind = msgspec.inspect.type_info(field.type)
        about = ""
        if isinstance(kind, msgspec.inspect.Metadata):
            about = str((kind.extra_json_schema or {}).get("description", ""))
        default = ""
        if field.default is not msgspec.NODEFAULT:
            default = _written(field.default)
        elif field.default_factory is not msgspec.NODEFAULT:
            default = f"{field.default_factory()!r}"
        yield Key(prefix + field.encode_name, default, about)


def _written(default: object) -> str:
    if default is None:
        return "absent"
    plain = default.value if isinstance(default, enum.Enum) else default
    if isinstance(plain, Size) and plain:
        plain = size_text(plain)
    return json.dumps(plain) if isinstance(plain, bool | str) else repr(plain)


def _row(key: Key) -> str:
    default = f"`{key.default}`" if key.default else "required"
    return f"| `{key.path}` | {default} | {key.about} |"
