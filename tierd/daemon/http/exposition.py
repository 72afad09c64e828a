"""The Prometheus text format, and metrics that are read out of a status.

Pure, and without a word on what tierd counts: metrics.py has the table.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Part = Mapping[str, object]
"""A map in a status."""

Labels = tuple[tuple[str, str], ...]

Places = Callable[[Part], Iterable[tuple[Labels, Part]]]
"""Finds the parts of a status that have the same fields, with the labels that tell them apart."""


class MetricKind(enum.Enum):
    """Types of the text format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSample(NamedTuple):
    """One line: `suffix` follows the metric's name."""

    labels: Labels
    value: float
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """Its samples are what `read` finds in a status. What ends in `_total` is a counter."""

    name: str
    help: str
    read: Callable[[Part], Iterable[MetricSample]]
    histogram: bool = False

    @property
    def kind(self) -> MetricKind:
        """Its type."""
        if self.histogram:
            return MetricKind.HISTOGRAM
        return MetricKind.COUNTER if self.name.endswith("_total") else MetricKind.GAUGE


@dataclass(frozen=True, slots=True)
class Fields:
    """Reads numbers at `paths`, each with its labels, in every part that `places` finds.

    A counter that is not there has not counted yet and is 0; a gauge has no sample.
    """

    places: Places
    paths: Mapping[str, Labels]
    counter: bool

    def __call__(self, status: Part) -> Iterator[MetricSample]:
        for labels, part in self.places(status):
            for path, more in self.paths.items():
                value = number_at(part, path)
                if value is None and self.counter:
                    value = 0
                if value is not None:
                    yield MetricSample((*labels, *more), value)


def number_at(part: Part, path: str) -> float | None:
    """The number at a path such as "host.blocks", None if there is none."""
    found: object = part
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if isinstance(found, int | float) else None


def exposition(metrics: Sequence[Metric], status: Part) -> str:
    """The text format, version 0.0.4, of what `metrics` find in a status."""
    lines: list[str] = []
    for metric in metrics:
        about = metric.help.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {metric.name} {about}")
        lines.append(f"# TYPE {metric.name} {metric.kind.value}")
        lines += [
            f"{metric.name}{sample.suffix}{_written(sample.labels)} {_text(sample.value)}"
            for sample in metric.read(status)
        ]
    return "\n".join([*lines, ""])


def _written(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
