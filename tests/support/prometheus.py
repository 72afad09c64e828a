"""A reader of the Prometheus text format, stricter than Prometheus itself."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (-?[0-9][0-9.e+-]*)")
_LABEL = re.compile(rf'({_NAME})="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


@dataclass
class Family:
    """A metric as it was read; a sample's key is its suffix and its labels."""

    kind: str
    help: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def value(self, **labels: str) -> float:
        """The sample that has exactly these labels."""
        return self.samples["", tuple(sorted(labels.items()))]


def read(text: str) -> dict[str, Family]:
    """All families by name; asserts the format that scrapers rely on."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    name = ""
    # Not splitlines(), which also splits at other characters.
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, _, about = line.removeprefix("# HELP ").partition(" ")
            assert name not in families
            assert re.fullmatch(_NAME, name)
            assert about.endswith("."), line
            families[name] = Family("", about)
        elif line.startswith("# TYPE "):
            typed, kind = line.removeprefix("# TYPE ").split(" ")
            assert typed == name
            assert not families[name].kind
            assert kind in ("counter", "gauge", "histogram")
            assert (kind == "counter") == name.endswith("_total")
            families[name].kind = kind
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            suffix = match[1].removeprefix(name)
            histogram = families[name].kind == "histogram"
            assert match[1] == name + suffix
            assert suffix in (("_bucket", "_sum", "_count") if histogram else ("",))
            labels = _labels(match[2] or "")
            assert (suffix, labels) not in families[name].samples, line
            families[name].samples[suffix, labels] = float(match[3])
    for family in families.values():
        assert family.kind
        if family.kind == "histogram":
            _check_histogram(family)
    return families


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    found, end = [], 0
    while end < len(text):
        match = _LABEL.match(text, end)
        assert match is not None, text
        unescaped = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match[2])
        found.append((match[1], unescaped))
        end = match.end()
    assert len(dict(found)) == len(found)
    return tuple(sorted(found))


def _check_histogram(family: Family) -> None:
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for (suffix, labels), value in family.samples.items():
        if suffix == "_bucket":
            others = tuple(label for label in labels if label[0] != "le")
            bound = dict(labels)["le"]
            upper = math.inf if bound == "+Inf" else float(bound)
            buckets.setdefault(others, []).append((upper, value))
    for others, found in buckets.items():
        assert found == sorted(found), "a histogram's buckets are cumulative"
        assert found[-1] == (math.inf, family.samples["_count", others])
        assert ("_sum", others) in family.samples
