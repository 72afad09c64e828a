"""PromQL over a few snapshots of a daemon's metrics: enough for the rules in ops/.

It has no extrapolation and no staleness: a rate is the difference of two snapshots divided by the
length of the range.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Final, NamedTuple

import promql_parser as promql

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Scrape = Mapping[str, Vector]
"""Samples by name and labels."""

_ARITHMETIC: Final[dict[str, Callable[[float, float], float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else (math.nan if a == 0 else math.copysign(math.inf, a)),
}
_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_GROUPS: Final[dict[str, Callable[[list[float]], float]]] = {"sum": sum, "max": max, "min": min}


class Selector(NamedTuple):
    """A series selector of an expression."""

    name: str
    matchers: list[promql.Matcher]


def selectors(expr: promql.Expr) -> list[Selector]:
    """All selectors of an expression."""
    found: list[Selector] = []

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            assert node.name is not None
            found.append(Selector(node.name, node.matchers.matchers))
        elif isinstance(node, promql.MatrixSelector):
            visit(node.vector_selector)

    promql.walk(expr, visit)
    return found


def grouped(expr: promql.Expr) -> set[str]:
    """Labels that an expression groups or matches by."""
    found: set[str] = set()

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None:
            if node.modifier.matching is not None:
                found.update(node.modifier.matching.labels)
            found.update(node.modifier.group_labels or ())

    promql.walk(expr, visit)
    return found


def matches(labels: Labels, matchers: list[promql.Matcher]) -> bool:
    """Whether a series is selected."""
    own = dict(labels)
    for matcher in matchers:
        value = own.get(matcher.name, "")
        is_pattern = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
        fits = bool(re.fullmatch(matcher.value, value)) if is_pattern else value == matcher.value
        if fits == (matcher.op in (promql.MatchOp.NotEqual, promql.MatchOp.NotRe)):
            return False
    return True


class World:
    """Snapshots by their age in seconds; each is valid until a younger one."""

    def __init__(self, snapshots: Mapping[float, Scrape], recorded: Mapping[str, str]) -> None:
        """`recorded` has the expressions of recording rules."""
        self._snapshots = dict(sorted(snapshots.items()))
        self._recorded = {name: promql.parse(text) for name, text in recorded.items()}

    def query(self, text: str) -> Vector:
        """The series that an expression yields now."""
        found = self._eval(promql.parse(text), 0.0)
        assert isinstance(found, dict)
        return found

    def _at(self, age_s: float) -> Scrape:
        return self._snapshots[max(age for age in self._snapshots if age <= age_s)]

    def _select(self, selector: promql.VectorSelector, age_s: float) -> Vector:
        age_s += (selector.offset or timedelta()).total_seconds()
        assert selector.name is not None
        if selector.name in self._recorded:
            series = self._eval(self._recorded[selector.name], age_s)
            assert isinstance(series, dict)
        else:
            series = self._at(age_s).get(selector.name, {})
        return {k: v for k, v in series.items() if matches(k, selector.matchers.matchers)}

    def _eval(self, expr: promql.Expr, age_s: float) -> Vector | float:
        match expr:
            case promql.NumberLiteral():
                return expr.val
            case promql.ParenExpr():
                return self._eval(expr.expr, age_s)
            case promql.VectorSelector():
                return self._select(expr, age_s)
            case promql.Call():
                return self._call(expr, age_s)
            case promql.AggregateExpr():
                return self._aggregate(expr, age_s)
            case promql.BinaryExpr():
                return self._binary(expr, age_s)
        raise NotImplementedError(str(expr))

    def _call(self, call: promql.Call, age_s: float) -> Vector:
        (matrix,) = call.args
        assert isinstance(matrix, promql.MatrixSelector)
        seconds = matrix.range.total_seconds()
        now = self._select(matrix.vector_selector, age_s)
        before = self._select(matrix.vector_selector, age_s + seconds)
        if call.func.name == "resets":
            ages = [age_s, *(age for age in self._snapshots if age_s < age <= age_s + seconds)]
            values = [self._select(matrix.vector_selector, age) for age in ages]
            return {key: sum(a[key] < b[key] for a, b in pairwise(values)) for key in now}
        grown = {key: value - before[key] for key, value in now.items() if key in before}
        if call.func.name == "rate":
            return {key: value / seconds for key, value in grown.items()}
        assert call.func.name == "increase", call.func.name
        return grown

    def _aggregate(self, expr: promql.AggregateExpr, age_s: float) -> Vector:
        series = self._eval(expr.expr, age_s)
        assert isinstance(series, dict)
        named, keep = frozenset[str](), True
        if expr.modifier is not None:
            named = frozenset(expr.modifier.labels)
            keep = expr.modifier.type == promql.AggModifierType.By
        groups: dict[Labels, list[float]] = {}
        for labels, value in series.items():
            key = frozenset(pair for pair in labels if (pair[0] in named) == keep)
            groups.setdefault(key, []).append(value)
        return {key: _GROUPS[str(expr.op)](values) for key, values in groups.items()}

    def _binary(self, expr: promql.BinaryExpr, age_s: float) -> Vector | float:
        op, left, right = str(expr.op), self._eval(expr.lhs, age_s), self._eval(expr.rhs, age_s)
        if isinstance(right, float) and isinstance(left, float):
            return _ARITHMETIC[op](left, right)
        if isinstance(left, float):
            assert isinstance(right, dict)
            return {key: _ARITHMETIC[op](left, value) for key, value in right.items()}
        pairs = dict.fromkeys(left, right) if isinstance(right, float) else None
        if pairs is None:
            assert isinstance(right, dict)
            matching = expr.modifier.matching if expr.modifier is not None else None
            by_key = {_key(labels, matching): value for labels, value in right.items()}
            assert len(by_key) == len(right) or op in ("and", "or", "unless"), "many to one"
            if op == "or":
                present = {_key(labels, matching) for labels in left}
                more = {k: v for k, v in right.items() if _key(k, matching) not in present}
                return {**left, **more}
            here = {k: by_key[_key(k, matching)] for k in left if _key(k, matching) in by_key}
            if op == "and":
                return {key: left[key] for key in here}
            if op == "unless":
                return {key: value for key, value in left.items() if key not in here}
            pairs = here
        if op in _COMPARISONS:
            return {k: left[k] for k, value in pairs.items() if _COMPARISONS[op](left[k], value)}
        return {key: _ARITHMETIC[op](left[key], value) for key, value in pairs.items()}


def _key(labels: Labels, matching: promql.LabelModifier | None) -> Labels:
    if matching is None:
        return labels
    keep = matching.type == promql.LabelModifierType.Include
    return frozenset(pair for pair in labels if (pair[0] in matching.labels) == keep)
