"""Budgets of the code's size and structure, so that a newcomer can find their way.

Each budget has the exceptions of today with a reason. A new one is a new entry, which a review
sees; an entry that is no exception any more fails as well, so the lists only shrink.
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
"""Tables of messages: they may be long, and name a message as the other end does."""


def files() -> Iterator[tuple[str, Path]]:
    """Each module's path, as `PACKAGE/...`, and where it lies."""
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
    """Of an instance: declared in the body, or set by a method."""
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
    """Names with an underscore that another package's module uses."""
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
    "tierd/device/cuda.py": "the calls of CUDA, not to be split before they have run on a GPU",
    "tierd/daemon/copies/copying.py": "rules of copies and their bookkeeping: two ideas",
    "tierd/daemon/session/server.py": "the session and the listener: two ideas",
    "tierd/hotset.py": "what is worth having and the file format: two ideas",
    "tierd_backends/file/backend.py": "options, opening, reading and writing",
    "tierd_backends/redis/backend.py": "opening, reading and writing",
    "tierd_backends/s3/backend.py": "opening, reading, writing and counting",
    "tierd_backends/s3/bucket.py": "requests and their retries",
    "tierd_connectors/vllm/connector.py": "the interface of vLLM, whose methods it must have",
    "tierd_connectors/vllm/scheduler.py": "lookups, stores and releases of requests",
}

FUNCTIONS: Final = {
    "tierd/cli/replay.py:add_parser": "a table of options",
    "tierd/cli/warm/command.py:add_parser": "a table of options",
    "tierd/daemon/node.py:__init__": "it composes the daemon and does nothing else",
}

CLASSES: Final = {
    "tierd/cli/top/sample.py:StatusSample": "a record: the fields of a status",
    "tierd/config/schema.py:StorageConfig": "a record: the keys of a table",
    "tierd/types.py:Namespace": "a record: what decides what a block's bytes mean",
    "tierd_backends/s3/options.py:S3Options": "a record: the keys of a table",
    "tierd_connectors/vllm/scheduler.py:_Tracked": "a record: what is known of a request",
    "tierd/core/l2/slots.py:Slots": "a table: a column each",
    "tierd/daemon/node.py:Node": "it composes the daemon",
    "tierd/testing/simulation/world.py:World": "the state of a world and of its checks",
    "tierd/testing/simulation/incarnation.py:DaemonIncarnation": "composes a simulated daemon",
    "tierd/cli/warm/run.py:Warmer": "one more than the budget",
    "tierd/client/connection.py:DaemonConnection": "the socket and the calls that wait: two ideas",
    "tierd/daemon/copies/copy_process.py:CopyProcess": "one more than the budget",
    "tierd/daemon/l2/memory.py:HostMemory": "one more than the budget",
    "tierd/daemon/l3/write_queue.py:WriteQueue": "what waits and what a stop leaves: two ideas",
    "tierd/daemon/session/server.py:Session": "handlers of several kinds of messages",
    "tierd/device/lane.py:CopyLane": "batches, their memory and their thread",
    "tierd/storage/circuit.py:Circuit": "one more than the budget",
    "tierd_backends/file/space.py:DiskSpace": "the shelves and the free space: two ideas",
    "tierd_backends/redis/backend.py:RedisBackend": "composes the tier",
    "tierd_backends/s3/backend.py:S3Backend": "composes the tier",
    "tierd_connectors/vllm/connector.py:TierdConnector": "composes the connector",
    "tierd_connectors/vllm/scheduler.py:SchedulerSide": "composes the scheduler's part",
    "tierd_connectors/vllm/worker/mover.py:Mover": "one more than the budget",
}

MODULES: Final = {
    "tierd/core/host.py": "the facade of the core",
    "tierd/daemon/lifecycle/serve.py": "it starts and stops all parts",
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
    "one meaning of a public class name": (ambiguous_classes, {}),
    "no private name outside of its package": (private_imports, {}),
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_exceeds_a_budget_is_an_exception_with_a_reason(budget: str) -> None:
    find, exceptions = BUDGETS[budget]
    found = find()
    new = {name: size for name, size in found.items() if name not in exceptions}
    assert not new, f"beyond the budget of {budget}"
    over = sorted(set(exceptions) - set(found))
    assert not over, f"no exception of {budget} any more: take them off the list"
    assert all(exceptions.values()), "a reason each"
