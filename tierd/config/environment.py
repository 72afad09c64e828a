"""Variables of the environment: which key each overrides, and which are none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from tierd.config.schema import Config
from tierd.errors import ConfigError
from tierd.tables import field_names, from_text

STORAGE_PREFIX: Final = "TIERD_STORAGE_"

TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    field.name: field.type
    for field in msgspec.structs.fields(Config)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
}
"""The file's tables by name, without [[storage]]."""

NOT_SCALARS: Final = (*TABLES, "storage", "options", "overrides")
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


def variable(path: str) -> str:
    """Return the variable for a key, such as "host.capacity" or "storage.NAME.slow_ms"."""
    return "TIERD_" + "_".join(map(capitals, path.split(".")))


def capitals(name: str) -> str:
    """Return a name as part of a variable's name."""
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def tier_overrides(
    names: Sequence[str], environ: Mapping[str, str], problems: list[str]
) -> list[dict[str, tuple[str, str]]]:
    """Return for each tier its variables, by key: the variable's name and text."""
    found: list[dict[str, tuple[str, str]]] = [{} for _ in names]
    prefixes = {tier_prefix(name): at for at, name in enumerate(names)}
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


def tier_prefix(name: str) -> str:
    return f"{STORAGE_PREFIX}{capitals(name)}_"


def unknown_variables(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a mistake for each variable that looks like a key and would have no effect."""
    known = [variable(key) for key in field_names(Config) if key not in NOT_SCALARS]
    for name, cls in TABLES.items():
        known += [variable(f"{name}.{key}") for key in field_names(cls)]
    prefixes = [tier_prefix(tier.name) for tier in config.storage]
    for name in environ:
        if (
            not name.startswith("TIERD_")
            or name in known
            or name in OTHER_VARIABLES
            or name.startswith(tuple(prefixes))
            or _SERVICE_VARIABLE.fullmatch(name)
        ):
            continue
        if name.startswith(STORAGE_PREFIX):
            names = ", ".join(prefixes) or "none, as there is no tier"
            hint = f"; the variables of tiers begin with: {names}"
        elif near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
            hint = f"; did you mean {near[0]}?"
        else:
            hint = "; `tierd config docs` lists all keys"
        yield f"{name} in the environment is not a key{hint}"


def set_key(
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
