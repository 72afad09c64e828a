"""Lists what can be set in a vLLM: the fields of its configs and its environment variables.

    list_fields.py            print the listing of the vLLM that this Python imports, as JSON

The table in `tierd_connectors.vllm.identity.fields` has a verdict for each; tests compare it with
the listings in tests/data/vllm_fields, one a version, so that no vLLM need be installed for that.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import re
import sys
import typing
from pathlib import Path

_READ = re.compile(r"""os\.(?:environ\.get\(|getenv\(|environ\[)\s*["'](VLLM_[A-Z0-9_]+)["']""")


def configs() -> dict[str, list[str]]:
    """The fields of every config class that a VllmConfig can hold, by the class's name."""
    package = importlib.import_module("vllm.config")
    names: dict[str, object] = {}
    for module in pkgutil.iter_modules(package.__path__):
        names.update(vars(importlib.import_module(f"vllm.config.{module.name}")))
    found: dict[str, list[str]] = {}
    waiting: list[object] = [package.VllmConfig]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            continue
        if kind.__name__ in found or not kind.__module__.startswith("vllm.config"):
            continue
        found[kind.__name__] = sorted(field.name for field in dataclasses.fields(kind))
        hints = typing.get_type_hints(kind, localns=_Missing(names))
        waiting += [hints[name] for name in found[kind.__name__]]
    return dict(sorted(found.items()))


def variables() -> list[str]:
    """Environment variables that vLLM knows, or reads by name somewhere else in its code."""
    envs = importlib.import_module("vllm.envs")
    known = set(envs.environment_variables)
    for file in Path(str(envs.__file__)).parent.rglob("*.py"):
        known |= set(_READ.findall(file.read_text(encoding="utf-8")))
    return sorted(known)


class _Missing(dict[str, object]):
    """Names of types, and None for those that are only there for type checkers."""

    def __missing__(self, name: str) -> object:
        return None if name not in dir(__builtins__) else vars(__builtins__)[name]


def main() -> None:
    """Print the listing, and nothing else: vLLM logs to standard output."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    version = ".".join(importlib.import_module("vllm").__version__.split("+")[0].split(".")[:3])
    json.dump(
        {"version": version, "configs": configs(), "variables": variables()},
        sys.stdout,
        indent=1,
        sort_keys=True,
    )
    print()


if __name__ == "__main__":
    main()
