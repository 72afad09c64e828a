"""Generates the tables and charts of the pages, from the code and from bench/results.

`make tables` rewrites them between their marks; a test checks that they are up to date. A mark is a
line such as `<!-- table: metrics -->`, and the table ends at `<!-- /table -->`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pages import measured
from pages.chart import hits_chart, restart_chart
from tierd.backend import Backend
from tierd.cli.main import COMMANDS
from tierd.daemon.http.exposition import Fields, Metric
from tierd.daemon.http.metrics import METRICS
from tierd.reference import options_reference, reference
from tierd_backends.file import FileBackend
from tierd_backends.redis import RedisBackend
from tierd_backends.s3 import S3Backend

ROOT: Final = Path(__file__).parent.parent
KINDS: Final[dict[str, type[Backend]]] = {
    "file": FileBackend,
    "redis": RedisBackend,
    "s3": S3Backend,
}
CHARTS: Final[Mapping[str, Callable[[], str]]] = {
    "docs/images/hits.svg": hits_chart,
    "docs/images/restart.svg": restart_chart,
}

_MARK: Final = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)

_NAMED: Final = ("namespace", "model")
LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "tierd_build_info": ("version",),
    "tierd_copy_seconds_total": ("direction",),
    "tierd_events_total": ("event",),
    "tierd_namespace_blocks": _NAMED,
    "tierd_namespace_bytes": _NAMED,
    "tierd_namespace_loaded_bytes_total": _NAMED,
    "tierd_namespace_loaded_tokens_total": _NAMED,
    "tierd_namespace_requested_tokens_total": _NAMED,
    "tierd_tier_breaker_state": ("tier", "direction", "state"),
    "tierd_tier_call_duration_seconds": ("tier", "operation"),
    "tierd_tier_events_total": ("tier", "event"),
    "tierd_tier_state": ("tier", "state"),
}
"""Labels of metrics that compute their samples; a test compares them with a daemon's."""


def pages() -> list[Path]:
    """Every page that may contain a table."""
    top = (ROOT / "README.md", ROOT / "ARCHITECTURE.md")
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def rows(head: Sequence[str], body: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table, as lines."""
    ruler = ["---"] * len(head)
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ruler, *body)]


def labels_of(metric: Metric) -> tuple[str, ...]:
    """The labels of a metric's samples, in order."""
    if not isinstance(metric.read, Fields):
        return LABELS.get(metric.name, ())
    place = {"_tiers": ["tier"], "_devices": ["device"]}.get(metric.read.places.__name__, [])
    more = [name for name, _ in next(iter(metric.read.paths.values()))]
    return (*place, *more)


def _config() -> list[str]:
    tables = [options_reference(kind, cls.Options) for kind, cls in KINDS.items()]
    return "\n".join([reference(), *tables]).splitlines()


def _metrics() -> list[str]:
    body = []
    for metric in METRICS:
        labels = ", ".join(f"`{name}`" for name in labels_of(metric))
        body.append((f"`{metric.name}`", metric.kind.value, labels, metric.help))
    return rows(("metric", "type", "labels", "meaning"), body)


def _commands() -> list[str]:
    return rows(("command", "does"), [(f"`tierd {name}`", what) for name, what in COMMANDS.items()])


def _layers() -> list[str]:
    """The import contract of all packages in pyproject.toml, top layer first."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    [layers] = [
        contract["layers"]
        for contract in tool["importlinter"]["contracts"]
        if contract["name"] == "Dependencies point down"
    ]
    return [
        f"{number}. " + ", ".join(f"`{part.strip()}`" for part in layer.split("|"))
        for number, layer in enumerate(layers, 1)
    ]


def _measured(make: Callable[[], measured.Table]) -> list[str]:
    return rows(*make())


TABLES: Final[Mapping[str, Callable[[], list[str]]]] = {
    "config": _config,
    "metrics": _metrics,
    "commands": _commands,
    "layers": _layers,
    **{name: partial(_measured, make) for name, make in measured.TABLES.items()},
}


def filled(text: str) -> str:
    """A page's text with each of its tables regenerated."""

    def table(found: re.Match[str]) -> str:
        return found[1] + "\n" + "\n".join(TABLES[found[2]]()) + "\n\n" + found[3]

    return _MARK.sub(table, text)


def main() -> None:
    """Rewrite every table and chart."""
    for page in pages():
        page.write_text(filled(page.read_text()))
    for name, chart in CHARTS.items():
        (ROOT / name).write_text(chart())


if __name__ == "__main__":
    main()
