"""Finds and creates the installed backends that `[[storage]]` tables name."""

from __future__ import annotations

import importlib.metadata
import re

import msgspec

from tierd.backend import Backend
from tierd.config import StorageConfig, backend_options, option_values
from tierd.errors import ConfigError
from tierd.storage.worker.backend import WorkerBackend


def backend_class(entry: StorageConfig) -> type[Backend]:
    """Return the class of the tier's type. Raises ConfigError if none is installed."""
    found = importlib.metadata.entry_points(group="tierd.backends")
    if entry.type not in found.names:
        raise ConfigError(
            f"storage.type {entry.type!r} is unknown; installed: {', '.join(sorted(found.names))}"
        )
    cls: type[Backend] = found[entry.type].load()
    return cls


def options_of(entry: StorageConfig) -> msgspec.Struct:
    """Return the tier's options, with the environment's overrides. Raises ConfigError."""
    return backend_options(entry, backend_class(entry).Options)


def make_backend(entry: StorageConfig) -> Backend:
    """Create the tier's backend, not opened, with checked options.

    Raises ConfigError with every problem of the options.
    """
    cls = backend_class(entry)
    values, problems = option_values(entry, cls.Options)
    wrong = {*entry.options, *entry.overrides} - {*values}
    try:
        options = cls.Options(**values)
        backend = WorkerBackend(cls, options) if cls.in_worker else cls.from_options(options)
    except TypeError:
        # A key is missing; `problems` has it.
        if not problems:
            raise
    except ConfigError as error:
        # Wrong keys were replaced by defaults, so problems that name those keys mean nothing.
        valid = [each for each in error.problems if wrong.isdisjoint(re.findall(r"\w+", each))]
        problems += [f"storage ({entry.name}): {each}" for each in valid]
    if problems:
        raise ConfigError(*problems)
    return backend
