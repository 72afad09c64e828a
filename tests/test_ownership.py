"""Who may change what: state has one owner, and everybody else asks it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DAEMON = ROOT / "tierd" / "daemon"


def reached_through(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Attributes of what a node's attribute is, as in `self._node.host.release`."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Attribute):
            inner = each.value.value
            name = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
            if name in ("node", "_node"):
                yield each.lineno, f"{each.value.attr}.{each.attr}"


def test_sessions_call_the_node_and_never_what_it_is_made_of() -> None:
    """A session that knows the parts would have to be changed with each of them."""
    [path] = DAEMON.rglob("server.py")
    assert list(reached_through(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "text", ["node.host.release(1)", "self._node.tiers[0]; self._node.prefetch.policy"]
)
def test_reaching_through_a_node_is_seen(text: str) -> None:
    """A check that sees nothing would hold for any code."""
    assert list(reached_through(ast.parse(text)))
