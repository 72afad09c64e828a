"""The backends that `[[storage]]` tables name, found among what is installed."""

from __future__ import annotations

import importlib.metadata
import re

import msgspec

from tierd.backend import Backend
from tierd.config import StorageConfig, backend_options, option_values
from tierd.errors import ConfigError
from tierd.storage.worker.backend import WorkerBackend


def backend_class(entry: StorageConfig) -> type[Backend]:
    """The class that is the tier's type. Raises ConfigError if none is installed."""
    found = importlib.metadata.entry_points(group="tierd.backends")
    if entry.type not in found.names:
        raise ConfigError(
            f"storage.type {entry.type!r} is unknown; installed: {', '.join(sorted(found.names))}"
        )
    cls: type[Backend] = found[entry.type].load()
    return cls


def options_of(entry: StorageConfig) -> msgspec.Struct:
    """The options of the tier's type, the environment's included. Raises ConfigError."""
    return backend_options(entry, backend_class(entry).Options)


def make_backend(entry: StorageConfig) -> Backend:
    """The tier's backend, not opened: it has checked its options. Raises ConfigError with all that
    is wrong with them."""
    cls = backend_class(entry)
    values, problems = option_values(entry, cls.Options)
    wrong = {*entry.options, *entry.overrides} - {*values}
    try:
        options = cls.Options(**values)
        backend = WorkerBackend(cls, options) if cls.in_worker else cls.from_options(options)
    except TypeError:
        # A key is missing, as `problems` say.
        if not problems:
            raise
    except ConfigError as error:
        # The others have defaults in place of wrong keys, which what is said of those is about.
        told = [each for each in error.problems if wrong.isdisjoint(re.findall(r"\w+", each))]
        problems += [f"storage ({entry.name}): {each}" for each in told]
    if problems:
        raise ConfigError(*problems)
    return backend
