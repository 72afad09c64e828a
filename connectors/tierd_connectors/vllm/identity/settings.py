"""From an engine's configs and environment to plain values that two processes agree on.

What comes out is a part of the namespace's fingerprint, so it must be the same in every process
of engines that are set alike, and differ where a setting differs that changes KV. Objects have
no such value by themselves: their text holds an address, or leaves out what matters. What cannot
be put into plain values is refused, by name.
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
"""Keys of a model's configuration that say where it came from, not what it means."""

_DEPTH_MAX = 32
"""Configs nest a handful of levels; a value that holds itself would never end."""

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


_Found = list[tuple[str, Plain]]


class SettingError(ValueError):
    """A setting has no place in the namespace; the message names it, and says why."""


def settings_of(config: object) -> dict[str, Plain]:
    """The settings of a VllmConfig that change KV and are not at their default, by path.

    Raises SettingError.
    """
    return dict(_walk(config, ""))


def variables_of(environ: Mapping[str, str], known: Collection[str]) -> dict[str, Plain]:
    """The variables that are set and change KV. Raises SettingError.

    `known` are those that the running vLLM knows: others have no effect on it, such as the
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
                    f"{name} is set, which this tierd does not know: it may change KV; unset it"
                )
    return found


def plain(value: object, path: str, depth: int = 0) -> Plain:
    """A value without identity, order of insertion or address. Raises SettingError."""
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
        # A subclass, such as a resolved revision, becomes the text that it is equal to.
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
    """The one text of a plain value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _plain_object(value: object, path: str, depth: int) -> Plain:
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    to_dict = getattr(value, "to_dict", None)
    if to_dict is not None:
        # Before fields: a model's config is a dataclass that also has attributes beside them.
        return {"": _name(kind), **_mapping(to_dict(), path, depth)}
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)} | vars(value).keys()
        return {name: plain(getattr(value, name), f"{path}.{name}", depth + 1) for name in names}
    if isinstance(value, FunctionType) and value.__module__.startswith("vllm."):
        return f"{value.__module__}:{value.__qualname__}"
    raise SettingError(
        f"{path} is a {_name(kind)}, which has no value that another process could compare"
    )


def _walk(config: object, path: str) -> _Found:
    kind = type(config).__name__
    found: _Found = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]  # a config of vLLM's
        name, value = field.name, getattr(config, field.name, None)
        here = f"{path}{name}"
        verdict = VERDICTS.get((kind, name))
        if type(value).__name__ in CONFIGS and verdict is not Verdict.REFUSED:
            within = _walk(value, f"{here}.")
            # Of a FREE config only what is refused or unknown matters.
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
    # At its default a field is what this version of vLLM, which is in the namespace, does by
    # itself: that holds for one that nobody here knows, too.
    return verdict is not Verdict.FREE and not _is_default(field, value)


def _changed(field: str, path: str, value: object, verdict: Verdict | None) -> _Found:
    if verdict is None:
        raise SettingError(
            f"{path} is set, which this tierd does not know: it may change KV; leave it at its "
            "default"
        )
    if verdict is Verdict.IN:
        return [(path, plain(value, path))]
    if not is_neutral(value):
        raise SettingError(f"{path} is set: {REFUSED[field]}")
    return []


def _is_default(field: dataclasses.Field[object], value: object) -> bool:
    default, factory = field.default, field.default_factory
    if type(default).__name__ == "FieldInfo":
        # pydantic's, as the default of a dataclass.
        factory = getattr(default, "default_factory", None) or dataclasses.MISSING
        default = getattr(default, "default", dataclasses.MISSING)
    if factory is not dataclasses.MISSING:
        default = factory()
    return type(value) is type(default) and value == default


def _mapping(value: object, path: str, depth: int) -> dict[str, Plain]:
    found = plain(value, path, depth + 1)
    if not isinstance(found, dict):
        raise SettingError(f"{path} does not describe itself by a mapping")
    return found


def _key(key: object, path: str) -> str:
    if isinstance(key, str) and not isinstance(key, enum.Enum):
        return str.__str__(key)
    return text_of(plain(key, path))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
