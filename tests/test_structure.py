"""Budgets of the code's size and structure, so that a newcomer can find their way.

Each budget lists its present exceptions with a reason. A new exception needs a new entry, which a
review sees. An entry that is no longer an exception fails too, so the lists only shrink.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "tierd": ROOT / "tierd",
    "tierd_backends": ROOT / "backends/tierd_backends",
    "tierd_connectors": ROOT / "connectors/tierd_connectors",
}

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
CLASS_ATTRIBUTES_MAX = 15
MODULE_IMPORTS_MAX = 15
FOLDER_FILES_MAX = 15

MESSAGES = ("tierd/wire/messages.py", "tierd/device/frames.py", "tierd/storage/worker/wire.py")
"""Tables of messages: files that name a message as the other end of the wire does."""


def files() -> Iterator[tuple[str, Path]]:
    """Each module as `PACKAGE/...`, and its path."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield f"{package}/{path.relative_to(folder)}", path


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def long_files() -> Mapping[str, int]:
    sizes = {name: len(path.read_text().splitlines()) for name, path in files()}
    return {name: size for name, size in sizes.items() if size > FILE_LINES_MAX}


def long_functions() -> Mapping[str, int]:
    found = {}
    for name, path in files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                size = node.end_lineno - node.lineno + 1
                if size > FUNCTION_LINES_MAX:
                    found[f"{name}:{node.name}"] = size
    return found


def wide_classes() -> Mapping[str, int]:
    found = {}
    for name, path in files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                count = len(attributes(node))
                if count > CLASS_ATTRIBUTES_MAX:
                    found[f"{name}:{node.name}"] = count
    return found


def attributes(node: ast.ClassDef) -> set[str]:
    """Names of instance attributes: declared in the body, or set by a method."""
    declared = {
        entry.target.id
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }
    set_by_methods = {
        entry.attr
        for entry in ast.walk(node)
        if isinstance(entry, ast.Attribute)
        and isinstance(entry.ctx, ast.Store)
        and isinstance(entry.value, ast.Name)
        and entry.value.id == "self"
    }
    return declared | set_by_methods


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Modules of this project that a module imports, and the names."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.partition(".")[0] in PACKAGES:
                yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES:
                    yield alias.name, []


def wide_modules() -> Mapping[str, int]:
    counts = {name: len({module for module, _ in imports(path)}) for name, path in files()}
    return {name: count for name, count in counts.items() if count > MODULE_IMPORTS_MAX}


def full_folders() -> Mapping[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name, path in files():
        if path.name != "__init__.py":
            counts[name.rpartition("/")[0]] += 1
    return {name: count for name, count in counts.items() if count > FOLDER_FILES_MAX}


def ambiguous_classes() -> Mapping[str, int]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in files():
        if name in MESSAGES:
            continue
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    return {name: len(found) for name, found in places.items() if len(found) > 1}


def private_imports() -> Mapping[str, int]:
    """Names with an underscore that a module of another package imports."""
    found: dict[str, int] = defaultdict(int)
    for name, path in files():
        folder = (
            module_of(name) if path.name == "__init__.py" else module_of(name).rpartition(".")[0]
        )
        for module, names in imports(path):
            for imported in (*module.split("."), *names):
                if imported.startswith("_") and not imported.startswith("__"):
                    home = module.rpartition("._")[0] if "._" in module else module
                    if not f"{folder}.".startswith(f"{home}."):
                        found[f"{name}: {module}"] += 1
    return found


FILES: Final = {
    "tierd/wire/messages.py": "the table of messages",
    "tierd/daemon/http/metrics.py": "the table of metrics",
    "tierd/device/cuda.py": "calls of CUDA; a split should wait until they have run on a GPU",
}

FUNCTIONS: Final = {
    "tierd/cli/replay.py:add_parser": "a table of options",
    "tierd/cli/warm/command.py:add_parser": "a table of options",
    "tierd/daemon/node.py:__init__": "it composes the daemon and does nothing else",
}

CLASSES: Final = {
    "tierd/cli/top/sample.py:StatusSample": "a record: the fields of a status",
    "tierd/config/schema.py:StorageConfig": "a record: the keys of a table",
    "tierd/types.py:Namespace": "a record: everything that decides the meaning of a block's bytes",
    "tierd_backends/s3/options.py:S3Options": "a record: the keys of a table",
    "tierd/core/l2/slots.py:Slots": "a table: one attribute per column",
    "tierd/daemon/node.py:Node": "it composes the daemon",
    "tierd/testing/simulation/world.py:World": "the state of a world and of its checks",
    "tierd/testing/simulation/incarnation.py:DaemonIncarnation": "composes a simulated daemon",
}

MODULES: Final = {
    "tierd/core/host.py": "the facade of the core",
    "tierd/daemon/node.py": "it composes the daemon",
    "tierd/testing/simulation/incarnation.py": "it composes the daemon for a simulation",
    "tierd_connectors/vllm/connector.py": "it composes the connector",
}

FOLDERS: Final[Mapping[str, str]] = {}

Budget = tuple[Callable[[], Mapping[str, int]], Mapping[str, str]]
BUDGETS: Final[Mapping[str, Budget]] = {
    f"files of {FILE_LINES_MAX} lines": (long_files, FILES),
    f"functions of {FUNCTION_LINES_MAX} lines": (long_functions, FUNCTIONS),
    f"classes with {CLASS_ATTRIBUTES_MAX} attributes": (wide_classes, CLASSES),
    f"modules with {MODULE_IMPORTS_MAX} imports of this project": (wide_modules, MODULES),
    f"folders of {FOLDER_FILES_MAX} files": (full_folders, FOLDERS),
    "public class names with two meanings": (ambiguous_classes, {}),
    "private names outside of their package": (private_imports, {}),
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets_are_kept_except_for_listed_reasons(budget: str) -> None:
    find, exceptions = BUDGETS[budget]
    found = find()
    new = {name: size for name, size in found.items() if name not in exceptions}
    assert not new, f"new exceptions to the budget: {budget}"
    over = sorted(set(exceptions) - set(found))
    assert not over, f"no longer exceptions to the budget, remove them from the list: {budget}"
    assert all(exceptions.values()), "an exception lacks its reason"
