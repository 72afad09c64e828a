"""Names in the documents, the alert rules and the dashboard exist: log lines, metrics, counters,
sections, variables, settings and files."""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.page_texts import PAGES, ROOT, SITE, anchors, prose, text
from tests.support.systemd_machine import build_wheel
from tierd.backend import Backend
from tierd.config import OTHER_VARIABLES
from tierd.daemon.http import metrics
from tierd.reference import keys, options
from tierd_backends.file import FileBackend
from tierd_backends.redis import RedisBackend
from tierd_backends.s3 import S3Backend

RULES, BOARD = "ops/prometheus/tierd.rules.yml", "ops/grafana/tierd.json"


@cache
def sources() -> list[Path]:
    folders = ("tierd", "backends", "connectors")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def code() -> str:
    return "\n".join(path.read_text() for path in sources())


@cache
def constants() -> str:
    """All strings of the code, one per line; a tab stands for a placeholder."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\t" for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    filled = re.compile(r"%[-.\d]*[sdfgr]|\{\w*\}")
    return "\n".join(filled.sub("\t", each.replace("\n", " ")) for each in found)


def pieces(quote: str) -> Iterator[str]:
    """Constant parts of a quoted line: without "...", numbers, and words in capitals."""
    for part in re.split(r"\.\.\.|\b[A-Z]+\b|\b[\d.,]+\b(?: [kMGT]?i?B)?", " ".join(quote.split())):
        piece = part.strip(" ,:;()")
        if len(piece) > 3:
            yield piece


PROSE = frozenset({"You are a helpful...", "Time to first token", "none found"})
"""Quotations that are not log lines of tierd."""

QUOTING = tuple(
    page
    for page in ("README.md", *SITE)
    if not page.startswith("docs/architecture/")
    and page not in ("docs/backend.md", "docs/benchmarks.md", "docs/comparison.md")
    and page != "docs/configuration.md"
)
"""Pages that quote log lines of tierd. test_runbook.py runs the runbook's commands."""


def quotes(page: str) -> list[str]:
    """The log lines that a page quotes, outside of indented commands."""
    plain = re.sub(r"^    \S.*$", "", prose(page), flags=re.MULTILINE)
    quoted = re.findall(r'"([^"\n|`{}]+(?:\n[^"\n|`{}]+)?)"', plain)
    spans = [span for part in re.split(r"\n\n|\n[*|]", plain) for span in part.split("`")[1::2]]
    lines = [span for span in spans if "..." in span]
    said = [" ".join(each.split()) for each in [*quoted, *lines]]
    return [each for each in said if " " in each and each not in PROSE and each[0] not in "-{"]


def test_pages_quote() -> None:
    """The quotations would no longer be found, and so not be compared."""
    assert sum(len(quotes(page)) for page in QUOTING) > 10


@pytest.mark.parametrize("page", QUOTING)
def test_quoted_log_lines_exist(page: str) -> None:
    """An operator would search the log for a line that tierd no longer writes."""
    for quote in quotes(page):
        for piece in pieces(quote):
            assert piece in constants(), quote


def test_quoted_words_of_explain_exist() -> None:
    """The table that explains the output of `tierd explain` would be outdated."""
    table = re.search(r"\| it says \| it means \|\n\|.*\n((?:\|.*\n)+)", text("docs/diagnosis.md"))
    assert table is not None
    for row in table[1].splitlines():
        head, _, rest = row.split("|")[1].strip().partition(": ")
        for part in (rest or head).split(", "):
            for piece in pieces(part):
                assert piece.removeprefix("k of n ") in constants(), row


METRICS = frozenset(metric.name for metric in metrics.METRICS) | {
    f"{metric.name}_{part}" for metric in metrics.METRICS for part in ("bucket", "sum", "count")
}
PACKAGES = frozenset(
    {"tierd_backends", "tierd_connectors", "tierd_hotset", "tierd_sqlite", "tierd_"}
)


@pytest.mark.parametrize("name", [*PAGES, RULES, BOARD])
def test_named_metrics_exist(name: str) -> None:
    """A panel or an alert would use a metric that is not exposed."""
    named = set(re.findall(r"(?<![\w:])tierd_[a-z0-9_]*", text(name))) - PACKAGES
    assert named <= METRICS | recorded()


def recorded() -> set[str]:
    """Metrics that the rules record (names with colons) and that vLLM exposes for the connector."""
    return set(re.findall(r"record: (\S+)", text(RULES)))


FOREIGN = frozenset({"head_dim", "hidden_size", "num_hidden_layers", "num_key_value_heads"})
"""Keys of a model's config.json."""


@pytest.mark.parametrize("page", PAGES)
def test_named_counters_and_fields_exist(page: str) -> None:
    """A reader would search a status for a field that it does not have."""
    benches = {path.stem for path in (ROOT / "bench" / "results").glob("*.json")}
    words = set(re.findall(r"\w+", code())) | FOREIGN | benches
    made = [
        re.compile(each.rpartition(".")[2].replace("\t", r"\w+"))
        for each in constants().splitlines()
        if re.fullmatch(r"[\w.]*_?\t_?[\w.]*", each) and "_" in each
    ]
    for name in set(re.findall(r"`(?:\w+\.)*([a-z]+(?:_[a-z0-9]+)+)`", text(page))):
        known = name in words or any(each.fullmatch(name) for each in made)
        assert known or name.startswith("tierd_"), name


@pytest.mark.parametrize("page", PAGES)
def test_named_files_and_sections_exist(page: str) -> None:
    """A link would be dead."""
    plain = prose(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", plain):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            whole = (ROOT / page).parent / name if name else ROOT / page
            assert whole.exists(), target
            assert not anchor or anchor in anchors(str(whole)), target
    for name in re.findall(r"`((?:[\w.-]+/)*[\w.*-]+\.py)`", plain):
        assert list(ROOT.glob(name)), name
    # `make` fills build/: whether a file is there yet depends on what ran before.
    folders = "|".join(p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "build")
    for name in re.findall(rf"`((?:{folders})/[\w./*-]*)`", plain):
        assert list(ROOT.glob(name)), name


@pytest.mark.parametrize("name", [*PAGES, RULES, BOARD])
def test_quoted_sections_exist(name: str) -> None:
    """An alert would name a section that does not exist."""
    found = re.findall(r'"([^"]+)" in ((?:\w+/)*\w+\.md)', text(name))
    for title, page in found:
        assert title in re.findall(r"^#+ (.+)$", text(page), re.MULTILINE), title
    assert found or name != RULES


VARIABLE = re.compile(r"(?<![\w/])(?:TIERD|VLLM)_[A-Z0-9_]*[A-Z0-9]")


@pytest.mark.parametrize("name", [*PAGES, RULES])
def test_named_variables_exist(name: str) -> None:
    """An operator would set a variable that has no effect."""
    tiers: dict[str, type[Backend]] = {"FILE": FileBackend, "REDIS": RedisBackend, "S3": S3Backend}
    known = {"TIERD_" + key.path.replace(".", "_").upper() for key in keys()}
    for tier, cls in tiers.items():
        for key in [*options(tier.lower(), cls.Options), *keys()]:
            known.add(f"TIERD_STORAGE_{tier}_{key.path.rpartition('.')[2].upper()}")
    listings = (ROOT / "tests" / "data" / "vllm_fields").glob("*.json")
    for listing in listings:
        known |= set(json.loads(listing.read_text()).get("variables", ()))
    # Fields of the journal.
    known |= {f"TIERD_{field}" for field in ("TIER", "SESSION", "CLIENT", "PROCESS")}
    known |= OTHER_VARIABLES
    assert set(VARIABLE.findall(text(name))) <= known


def test_cache_reset_names_its_requirement() -> None:
    """The documented call would be a 404, since only a development server answers it."""
    plain = " ".join(text("docs/vllm.md").split())
    assert "VLLM_SERVER_DEV_MODE=1" in plain[plain.index("/reset_prefix_cache") :][:300]


@pytest.mark.slow
def test_the_wheel_has_dashboard_rules_and_documents(tmp_path: Path) -> None:
    """An installation from a package index would lack alerts and pages."""
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        names = {name.partition(".data/data/")[2]: name for name in wheel.namelist()}
        held = {name: wheel.read(whole).decode() for name, whole in names.items() if name}
    pictures = [str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "images").iterdir()]
    pages = [*PAGES, *pictures, "CHANGELOG.md"]
    expected = {f"share/doc/tierd/{page}": text(page) for page in pages}
    expected |= {f"share/tierd/{name.removeprefix('ops/')}": text(name) for name in (RULES, BOARD)}
    assert held == expected
    assert "/opt/tierd/share/tierd/grafana/tierd.json" in text("docs/metrics.md")
