"""Converts a table of the configuration to values of a struct, and reports all mistakes at once.

Each mistake names its key's path. This module knows the values of TOML and of the environment,
not the meaning of keys.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal, get_args, get_origin

import msgspec

from tierd.errors import ConfigError
from tierd.sizes import Size, parse_size

_SHOWN_CHARS_MAX: Final = 200
"""Maximum characters of a wrong value that a message quotes."""


def field_names(cls: type[msgspec.Struct]) -> list[str]:
    """Return the keys of a table."""
    return [field.encode_name for field in msgspec.structs.fields(cls)]


def values_of(
    table: Mapping[str, object],
    cls: type[msgspec.Struct],
    where: str,
    problems: list[str],
    without: Container[str] = (),
) -> dict[str, object]:
    """Return the values of `table` that are valid for the fields of `cls`.

    Appends to `problems` a message for each unknown key, wrong value and missing required key.
    Fields in `without` are skipped.
    """
    found: dict[str, object] = {}
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    for key in table:
        if key not in fields:
            problems.append(f"{where}{key} is not a key{_nearest(key, list(fields), where)}")
    for key, field in fields.items():
        if field.name in without:
            continue
        if key in table:
            try:
                found[field.name] = msgspec.convert(table[key], field.type, dec_hook=_decode_size)
            except msgspec.ValidationError as error:
                problems.append(_told(where + key, table[key], field.type, error))
        elif field.required:
            problems.append(f"{where}{key} is missing")
    return found


def from_text(kind: object, name: str, text: str) -> object:
    """Return the text of the environment variable `name` as a value of `kind`, not yet validated.

    Raises ConfigError if the text cannot be converted.
    """
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


def _nearest(key: str, known: Sequence[str], where: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {where}{near[0]}?" if near else f"; known: {', '.join(known)}"


def _told(path: str, value: object, kind: object, error: msgspec.ValidationError) -> str:
    """Return the message for a wrong value of the key at `path`."""
    message, _, place = str(error).partition(" - at `$")
    choices = list(_choices(kind))
    if choices and isinstance(value, str):
        return f"{path}: {value[:_SHOWN_CHARS_MAX]!r} is not one of {_listed(value, choices)}"
    return f"{path}{place.rstrip('`')}: {message}"


def _listed(value: str, choices: Sequence[str]) -> str:
    hint = ""
    if alike := [choice for choice in choices if choice.lower() == value.strip().lower()]:
        hint = f'; values are case-sensitive: write "{alike[0]}"'
    elif near := difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.5):
        hint = f'; did you mean "{near[0]}"?'
    return ", ".join(choices) + hint


def _choices(kind: object) -> Iterator[str]:
    """Yield the texts that a value of `kind` may have, if `kind` is an enum or Literal."""
    for part in _plain_types(kind):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            yield from (str(member.value) for member in part)
        elif get_origin(part) is Literal:
            yield from (choice for choice in get_args(part) if isinstance(choice, str))


def _plain_types(kind: object) -> Iterator[object]:
    """Yield `kind` and its parts: the item types of a list, the members of a union."""
    if get_origin(kind) is Literal:
        yield kind
        yield str
        return
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
        yield from _plain_types(kind)
        return
    yield get_origin(kind) or kind
    for part in get_args(kind):
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
