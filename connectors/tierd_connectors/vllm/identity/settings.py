"""Converts an engine's configs and environment to plain values that processes can compare.

The values are part of the namespace's fingerprint. They must be equal in all processes of engines
with equal settings, and differ if a setting that changes KV differs. The text of an object does not
do: it holds an address, or omits parts that matter. A setting without a plain value is refused by
name.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Collection, Mapping
from pathlib import PurePath
from types import FunctionType

from tierd_connectors.vllm.identity import variables
from tierd_connectors.vllm.identity.fields import CONFIGS, REFUSED, VERDICTS, Verdict, is_neutral

VOLATILE_KEYS = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})
"""Keys of a model's configuration that name its origin, and do not change its KV."""

_DEPTH_MAX = 32
"""Deepest nesting of a value. Configs have a few levels; a value that holds itself has no end."""

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


_Found = list[tuple[str, Plain]]


class SettingError(ValueError):
    """A setting cannot be part of the namespace; the message names it and says why."""


def settings_of(config: object) -> dict[str, Plain]:
    """Return the non-default settings of a VllmConfig that change KV, by path.

    Raises SettingError.
    """
    return dict(_walk(config, ""))


def variables_of(environ: Mapping[str, str], known: Collection[str]) -> dict[str, Plain]:
    """Return the variables that are set and change KV. Raises SettingError.

    `known` are the variables that the running vLLM reads. Others have no effect on it, such as the
    addresses that Kubernetes sets for a service named vllm.
    """
    found: dict[str, Plain] = {}
    for name in sorted(environ):
        match variables.VERDICTS.get(name):
            case Verdict.IN:
                found[name] = environ[name]
            case Verdict.REFUSED:
                raise SettingError(f"{name} is set: {variables.REFUSED[name]}")
            case None if name in known:
                raise SettingError(
                    f"{name} is set, which this tierd does not know and which may change KV: "
                    "unset it"
                )
    return found


def plain(value: object, path: str, depth: int = 0) -> Plain:
    """Return the value without object identity or insertion order. Raises SettingError."""
    if depth > _DEPTH_MAX:
        raise SettingError(f"{path} is nested more than {_DEPTH_MAX} levels deep")
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        # A subclass, such as a resolved revision, becomes the plain text that it equals.
        return str.__str__(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {
            _key(key, path): plain(item, f"{path}.{key}", depth + 1)
            for key, item in value.items()
            if key not in VOLATILE_KEYS
        }
    if isinstance(value, list | tuple):
        return [plain(item, path, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, path, depth + 1) for item in value), key=text_of)
    return _plain_object(value, path, depth)


def text_of(value: Plain) -> str:
    """Return the canonical text of a plain value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _plain_object(value: object, path: str, depth: int) -> Plain:
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    to_dict = getattr(value, "to_dict", None)
    if to_dict is not None:
        # Before fields: a model's config is a dataclass that has attributes besides its fields.
        return {"": _name(kind), **_mapping(to_dict(), path, depth)}
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)} | vars(value).keys()
        return {name: plain(getattr(value, name), f"{path}.{name}", depth + 1) for name in names}
    if isinstance(value, FunctionType) and value.__module__.startswith("vllm."):
        return f"{value.__module__}:{value.__qualname__}"
    raise SettingError(f"{path} is a {_name(kind)}, whose value other processes cannot compare")


def _walk(config: object, path: str) -> _Found:
    kind = type(config).__name__
    found: _Found = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]  # a config of vLLM's
        name, value = field.name, getattr(config, field.name, None)
        here = f"{path}{name}"
        verdict = VERDICTS.get((kind, name))
        if type(value).__name__ in CONFIGS and verdict is not Verdict.REFUSED:
            within = _walk(value, f"{here}.")
            # In a FREE config only refused or unknown settings matter.
            if verdict is Verdict.IN:
                found += [(here, "on"), *within] if field.default is None else within
        elif _counts(config, field, value, verdict):
            found += _changed(f"{kind}.{name}", here, value, verdict)
    return found


def _counts(
    config: object, field: dataclasses.Field[object], value: object, verdict: Verdict | None
) -> bool:
    if field.name == "hf_text_config" and value is getattr(config, "hf_config", None):
        return False
    # vLLM's version determines the effect of a default, and it is in the namespace. So a default
    # is safe even for an unknown field.
    return verdict is not Verdict.FREE and not _is_default(field, value)


def _changed(field: str, path: str, value: object, verdict: Verdict | None) -> _Found:
    if verdict is None:
        raise SettingError(
            f"{path} is set, which this tierd does not know and which may change KV: leave it at "
            "its default"
        )
    if verdict is Verdict.IN:
        return [(path, plain(value, path))]
    if not is_neutral(value):
        raise SettingError(f"{path} is set: {REFUSED[field]}")
    return []


def _is_default(field: dataclasses.Field[object], value: object) -> bool:
    default, factory = field.default, field.default_factory
    if type(default).__name__ == "FieldInfo":
        # pydantic's FieldInfo as the default of a dataclass field.
        factory = getattr(default, "default_factory", None) or dataclasses.MISSING
        default = getattr(default, "default", dataclasses.MISSING)
    if factory is not dataclasses.MISSING:
        default = factory()
    return type(value) is type(default) and value == default


def _mapping(value: object, path: str, depth: int) -> dict[str, Plain]:
    found = plain(value, path, depth + 1)
    if not isinstance(found, dict):
        raise SettingError(f"{path}.to_dict() does not return a mapping")
    return found


def _key(key: object, path: str) -> str:
    if isinstance(key, str) and not isinstance(key, enum.Enum):
        return str.__str__(key)
    return text_of(plain(key, path))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
