"""State has one owner: other code calls the owner's methods and never changes it directly.

The core exposes its state through read-only types, so mypy finds writes to it under any name. These
tests also find writes in untyped code, and uses of the core's private names.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.core.evictions import Evictions
from tierd.core.finding import BlockFinder
from tierd.core.hints import Hints
from tierd.core.host import HostTier
from tierd.core.leases import Leases
from tierd.core.reservations import Reservations
from tierd.core.room import Room
from tierd.core.segments import Segments
from tierd.core.slots import Slots
from tierd.core.space import Space
from tierd.core.storing import Storing
from tierd.core.tier_bits import TierBits

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
"""Names of variables and attributes that hold objects of the core."""

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
    """Return the names along an expression: `a.b[0].c()` gives a, b, c."""
    if isinstance(node, ast.Attribute):
        return [*path_of(node.value), node.attr]
    if isinstance(node, ast.Subscript):
        return [*path_of(node.value), "[]"]
    if isinstance(node, ast.Call):
        return path_of(node.func)
    return [node.id] if isinstance(node, ast.Name) else []


def find_violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Find where the core's state is changed, or its private names are used."""
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
    """Find accesses to attributes of a node's parts, as in `self._node.host.release`."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Attribute):
            inner = each.value.value
            name = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
            if name in ("node", "_node"):
                yield each.lineno, f"{each.value.attr}.{each.attr}"


def test_only_the_core_changes_its_state() -> None:
    """Every module would have to preserve the core's invariants."""
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in ROOT.rglob("*.py")
        if "core" not in path.relative_to(ROOT).parts
        for line, text in find_violations(ast.parse(path.read_text()))
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
def test_state_change_outside_the_core_is_detected(text: str) -> None:
    """A check that finds nothing would pass for any code."""
    assert list(find_violations(ast.parse(text)))


def test_core_attributes_are_private_or_read_only() -> None:
    """Attributes that any module can set will be set by some."""
    for each in CLASSES:
        if each is Hints:  # Created once, and asked by name.
            continue
        assert not hasattr(each, "__dict__") or "__slots__" in vars(each), each
        for name in vars(each)["__slots__"]:
            final = f"self.{name}: Final = " in inspect.getsource(each)
            assert name.startswith("_") or final, f"{each.__name__}.{name}"
    space = object.__new__(Space)
    for name in ("items", "refs", "free", "sessions", "ended", "live", "checksums"):
        with pytest.raises(AttributeError):
            setattr(space, name, None)


def test_sessions_use_the_node_and_not_its_parts() -> None:
    """A session that knows the node's parts would have to change with each of them."""
    texts = [path.read_text() for path in (ROOT / "daemon").rglob("*.py")]
    [text] = [text for text in texts if "\nclass Session:\n" in text]
    assert list(reached_through(ast.parse(text))) == []


@pytest.mark.parametrize(
    "text", ["node.host.release(1)", "self._node.tiers[0]; self._node.prefetch.policy"]
)
def test_access_through_a_node_is_detected(text: str) -> None:
    """A check that finds nothing would pass for any code."""
    assert list(reached_through(ast.parse(text)))
