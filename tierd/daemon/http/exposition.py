"""The Prometheus text format, and metrics that are read from a status document.

Pure, and independent of the metrics themselves, whose table is in metrics.py.
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
"""Finds the parts of a status with the same fields, and the labels that distinguish them."""


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
    """A metric whose samples `read` finds in a status. A name in `_total` is a counter's."""

    name: str
    help: str
    read: Callable[[Part], Iterable[MetricSample]]
    histogram: bool = False

    @property
    def kind(self) -> MetricKind:
        """The metric's type."""
        if self.histogram:
            return MetricKind.HISTOGRAM
        return MetricKind.COUNTER if self.name.endswith("_total") else MetricKind.GAUGE


@dataclass(frozen=True, slots=True)
class Fields:
    """Reads the number at each of `paths`, with its labels, in each part that `places` finds.

    A missing counter has not counted yet and is 0; a missing gauge has no sample.
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
    """Return the number at a path such as "host.blocks"; None if there is none."""
    found: object = part
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if isinstance(found, int | float) else None


def exposition(metrics: Sequence[Metric], status: Part) -> str:
    """Return the samples that `metrics` find in a status, in the text format 0.0.4."""
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
