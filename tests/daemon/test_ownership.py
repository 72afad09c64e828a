"""Who may change what: state has one owner, and everybody else asks it.

What the core shows is read-only by its types, so mypy sees who writes to it under another name;
this sees it without types, and whoever uses the core's private names.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.core.hints import Hints
from tierd.core.host import HostTier
from tierd.core.l2.evictions import Evictions
from tierd.core.l2.finding import BlockFinder
from tierd.core.l2.leases import Leases
from tierd.core.l2.reservations import Reservations
from tierd.core.l2.room import Room
from tierd.core.l2.segments import Segments
from tierd.core.l2.slots import Slots
from tierd.core.l2.space import Space
from tierd.core.l2.storing import Storing
from tierd.core.l2.tier_bits import TierBits
from tierd.daemon.node import Node

ROOT = Path(__file__).parents[2] / "tierd"
CLASSES = (
    Evictions,
    BlockFinder,
    Hints,
    HostTier,
    Leases,
    Reservations,
    Room,
    Segments,
    Slots,
    Space,
    Storing,
    TierBits,
)

CORE = frozenset({"host", "_host", "space", "_space", "lease", "reservation", "hints"})
"""What variables and attributes are called that hold objects of the core."""

VALUES = frozenset({"epoch", "lease_ttl_ns", "spawn"})
"""Attributes of a node that a session may use besides its methods: plain values, and the function
that runs a task."""

MUTATORS = frozenset(
    f"{name}"
    for kind in (list, dict, set)
    for name in dir(kind)
    if not name.startswith("_") and not hasattr(frozenset if kind is set else tuple, name)
) - {"copy", "get", "items", "keys", "values"}

PRIVATE = frozenset(
    name
    for each in CLASSES
    for name in (*getattr(each, "__slots__", ()), *vars(each))
    if name.startswith("_") and not name.startswith("__")
)


def path_of(node: ast.expr) -> list[str]:
    """The names on the way to an expression: `a.b[0].c()` is a, b, c."""
    if isinstance(node, ast.Attribute):
        return [*path_of(node.value), node.attr]
    if isinstance(node, ast.Subscript):
        return [*path_of(node.value), "[]"]
    if isinstance(node, ast.Call):
        return path_of(node.func)
    return [node.id] if isinstance(node, ast.Name) else []


def trespasses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where the core's state is changed, or its private names are used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript):
            *way, last = path_of(node)
            changed = isinstance(node.ctx, ast.Store | ast.Del) and CORE.intersection(way)
            private = last in PRIVATE and way != ["self"]
            if changed or private:
                yield node.lineno, ".".join((*way, last))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            *way, last = path_of(node.func)
            if last in MUTATORS and CORE.intersection(way):
                yield node.lineno, ".".join((*way, last))


def reached_through(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Attributes of a node's attribute, as in `self._node.host.release`."""
    for each in ast.walk(tree):
        match each:
            case ast.Attribute(ast.Attribute(holder, part), name) if is_node(holder):
                yield each.lineno, f"{part}.{name}"


def parts_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Attributes of a node that are neither its methods nor plain values."""
    allowed = VALUES.union(vars(Node))
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and is_node(each.value) and each.attr not in allowed:
            yield each.lineno, each.attr


def is_node(expression: ast.expr) -> bool:
    name = getattr(expression, "attr", getattr(expression, "id", ""))
    return name in ("node", "_node")


def parsed(folder: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield f"{path.relative_to(ROOT)}", ast.parse(path.read_text())


def test_only_the_core_changes_what_it_owns() -> None:
    """An invariant of the core would be everybody's to keep."""
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in ROOT.rglob("*.py")
        if "core" not in path.relative_to(ROOT).parts
        for line, text in trespasses(ast.parse(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "space.sessions += 1",
        "space.checksums[slot] = digest",
        "batch.space.items[block_hash] = 3",
        "self._memory.host.hints.quota_bytes = 0",
        "del host.leases[7]",
        "lease.sources = b''",
        "reservation.parents[0] = parent",
        "space.unverified.pop(slot)",
        "self._host.spaces.clear()",
        "for space.used_s in range(9): pass",
        "warming.space._free",
        "memory.host._room.move(space, pairs, effects)",
        "space._hold(slots)",
        "anything._evicting",
    ],
)
def test_a_change_from_outside_is_seen(text: str) -> None:
    """A check that sees nothing would hold for any code."""
    assert list(trespasses(ast.parse(text)))


def test_what_the_core_has_is_private_or_read_only() -> None:
    """An attribute that anybody can set would be one that anybody does."""
    for each in CLASSES:
        if each is Hints:  # Made once, and asked by name.
            continue
        assert not hasattr(each, "__dict__") or "__slots__" in vars(each), each
        for name in vars(each)["__slots__"]:
            final = f"self.{name}: Final = " in inspect.getsource(each)
            assert name.startswith("_") or final, f"{each.__name__}.{name}"
    space = object.__new__(Space)
    for name in ("items", "refs", "free", "sessions", "ended", "live", "checksums"):
        with pytest.raises(AttributeError):
            setattr(space, name, None)


@pytest.mark.parametrize("folder", ["daemon/session", "daemon/http"])
def test_no_call_reaches_through_the_node(folder: str) -> None:
    """A session that knows the node's parts changes with each of them."""
    found = {
        f"{name}:{line}": text
        for name, tree in parsed(folder)
        for line, text in reached_through(tree)
    }
    assert found == {}


def test_sessions_use_only_methods_and_plain_values_of_the_node() -> None:
    """A part held in a variable, as in `flushes = node.flushes`, is reached through as well."""
    found = {
        f"{name}:{line}": text
        for name, tree in parsed("daemon/session")
        for line, text in parts_used(tree)
    }
    assert found == {}


@pytest.mark.parametrize(
    "text", ["node.host.release(1)", "self._node.tiers[0]; self._node.prefetch.policy"]
)
def test_reaching_through_a_node_is_detected(text: str) -> None:
    """A check that detects nothing passes for any code."""
    assert list(reached_through(ast.parse(text)))


@pytest.mark.parametrize("text", ["flushes = self._node.flushes", "len(node.tiers)"])
def test_use_of_a_part_of_the_node_is_detected(text: str) -> None:
    """A check that detects nothing passes for any code."""
    assert list(parts_used(ast.parse(text)))
