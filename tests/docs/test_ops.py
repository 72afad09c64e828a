"""Rules and dashboard in ops/: their metrics exist, and alerts fire when they should."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from tests.support import blocks
from tests.support.admin import ADMIN, metrics, port_of
from tests.support.daemon_process import DaemonProcess
from tests.support.promql import Labels, Scrape, Vector, World, grouped, matches, selectors
from tests.support.tiers.scene import table
from tierd.cli.main import COMMANDS

OPS = Path(__file__).parents[2] / "ops"
RUNBOOK = OPS.parent / "docs" / "runbook.md"
RULES = yaml.safe_load((OPS / "prometheus" / "tierd.rules.yml").read_text())
BOARD = json.loads((OPS / "grafana" / "tierd.json").read_text())

EACH = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in EACH if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in EACH if "record" in rule}

TARGET = {"job": "tierd", "instance": "node:9464"}
"""Labels that Prometheus adds to all scraped samples."""

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    """The metrics of a daemon with a tier, after it has stored and loaded blocks."""
    directory = tmp_path_factory.mktemp("tierd")
    file = {"path": str(directory / "store"), "capacity": "64MiB", "reserve_free": "0"}
    with DaemonProcess(directory, capacity="16MiB", storage=table("file", file) + ADMIN) as daemon:
        client, space = daemon.client(), blocks.namespace()
        hashes, parents = blocks.chain(8)
        payloads = [blocks.payload(space, block_hash) for block_hash in hashes]
        handle = client.register(space)
        client.put(handle, list(zip(hashes, parents, payloads, strict=True)))
        client.get(handle, hashes, 1000)
        daemon.wait_backed_up()
        client.close()
        found: dict[str, Vector] = {"up": {frozenset(TARGET.items()): 1.0}}
        for name, family in metrics(port_of(daemon)).items():
            for (suffix, labels), value in family.samples.items():
                key = frozenset({**dict(labels), **TARGET}.items())
                found.setdefault(name + suffix, {})[key] = value
    return found


def changed(scrape: Scrape, changes: Mapping[str, float]) -> Scrape:
    """A copy with other values, by selectors such as `a{b="c"}`; every selector must match."""
    made = {name: dict(series) for name, series in scrape.items()}
    for text, value in changes.items():
        (selector,) = selectors(promql.parse(text))
        keys = [key for key in made[selector.name] if matches(key, selector.matchers)]
        assert keys, text
        made[selector.name].update(dict.fromkeys(keys, value))
    return made


ASKED = "tierd_requested_tokens_total"
SAVED = "tierd_saved_tokens_total"
BEFORE = {ASKED: 0.0, SAVED: 0.0, 'tierd_tier_written_blocks_total{outcome="stored"}': 0.0}
HEALTHY = {
    ASKED: 3.6e6,
    SAVED: 2.4e6,
    'tierd_tier_written_blocks_total{outcome="stored"}': 90_000.0,
    "tierd_uptime_seconds": 1e6,
}
"""Increase of each counter within any range of an expression."""

TROUBLE: dict[str, dict[str, float]] = {
    "TierdDown": {"up": 0},
    "TierdNotReady": {"tierd_ready": 0},
    "TierdInternalErrors": {"tierd_internal_errors_total": 1},
    "TierdHitRatioCollapsed": {SAVED: 1e6},
    "TierdTierUnavailable": {
        'tierd_tier_state{state="ready"}': 0,
        'tierd_tier_state{state="unavailable"}': 1,
    },
    "TierdBreakerOpen": {
        'tierd_tier_breaker_state{direction="read",state="closed"}': 0,
        'tierd_tier_breaker_state{direction="read",state="stalled"}': 1,
    },
    "TierdBreakerFlaps": {'tierd_tier_breaker_opened_total{direction="write"}': 11},
    "TierdBackupsSkipped": {'tierd_tier_skipped_blocks_total{reason="dropped"}': 9000},
    "TierdTierFull": {'tierd_tier_skipped_blocks_total{reason="no_space"}': 100},
    "TierdMemoryPressure": {"tierd_host_limit_bytes": 14 << 20},
    "TierdCorruptBlocks": {'tierd_tier_read_blocks_total{outcome="corrupt"}': 1},
    "TierdRottenMemory": {"tierd_rotten_blocks_total": 1},
    "TierdAdoptionLost": {
        "tierd_adoption_dropped_segments_total": 3,
        "tierd_uptime_seconds": 800,
    },
    "TierdReloadRefused": {'tierd_reloads_total{outcome="refused"}': 1},
    "TierdTierClientRestarts": {"tierd_tier_worker_restarts_total": 3},
    "TierdWrongAnswers": {"tierd_tier_wrong_answers_total": 1},
    "TierdCopyProcessRestarts": {"tierd_copy_process_starts_total": 3},
    "TierdCopiesRefused": {"tierd_copy_attach_refused_total": 1},
    "TierdAnswersLate": {"tierd_answers_late_total": 100},
}
"""The trouble that each alert reports."""


def firing(world: World) -> dict[str, Vector]:
    found = {name: world.query(rule["expr"]) for name, rule in ALERTS.items()}
    return {name: series for name, series in found.items() if series}


def world(exposed: Scrape, trouble: Mapping[str, float]) -> World:
    """A healthy day, then this trouble."""
    before, well = changed(exposed, BEFORE), changed(exposed, HEALTHY)
    now = changed(well, trouble)
    return World({0.0: now, 1.0: before, DAY_S: well, DAY_S + 1: before}, RECORDED)


@pytest.mark.slow
def test_no_alert_fires_on_a_healthy_daemon(exposed: Scrape) -> None:
    """A false alert would wake the on-call engineer, and the next alert would be ignored."""
    assert firing(world(exposed, {})) == {}
    idle = World({0.0: changed(exposed, BEFORE)}, RECORDED)
    assert firing(idle) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_fires(exposed: Scrape, name: str) -> None:
    """The trouble would go unreported."""
    if name == "TierdRestarts":
        snapshots = {
            age: changed(exposed, {"tierd_uptime_seconds": age}) for age in (0.0, 900.0, 1800.0)
        }
        assert firing(World(snapshots, RECORDED)) == {}
        snapshots[2700.0] = changed(exposed, {"tierd_uptime_seconds": 2700})
        found = firing(World(snapshots, RECORDED))
    else:
        found = firing(world(exposed, TROUBLE[name]))
    assert set(found) == {name}
    for said in ALERTS[name]["annotations"].values():
        for label in re.findall(r"\$labels\.(\w+)", said):
            assert all(label in dict(key) for key in found[name]), label


def test_every_alert_has_a_first_command_and_a_runbook_section() -> None:
    """At three in the morning a name and a number are not enough."""
    assert set(TROUBLE) <= set(ALERTS)
    sections = runbook_sections()
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert "instance" in rule["annotations"]["summary"]
        first = re.search(r"First: `([\w-]+) ([^`]+)`", rule["annotations"]["description"])
        assert first is not None, name
        assert first[1] in ("tierd", "systemctl", "journalctl", "cat", "nvidia-smi"), name
        assert first[1] != "tierd" or first[2].split()[0] in COMMANDS, name
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/runbook.md"
        assert re.search(rf"\b{name}\b", sections[anchor]), f"{name} is not in {anchor}"
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}


def test_the_runbook_names_only_alerts_that_exist() -> None:
    """A reader would search Prometheus for an alert that it does not have."""
    named = re.findall(r"\bTierd[A-Z]\w+", "".join(runbook_sections().values()))
    assert set(named) == set(ALERTS)


def runbook_sections() -> dict[str, str]:
    """The text below each heading of the runbook, by the heading's anchor."""
    parts = re.split(r"^#+ (.+)\n", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    return {
        title.lower().replace(" ", "-"): body
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }


# --- the dashboard ----------------------------------------------------------------------


def panels() -> list[dict]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def targets() -> list[dict]:
    return [target for panel in panels() for target in panel["targets"]]


def filled_in(text: str) -> str:
    """An expression in which Grafana's variables, which the parser does not know, are filled in."""
    return text.replace("$__rate_interval", "5m").replace("$__range", "3h")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [*(rule["expr"] for rule in EACH), *(target["expr"] for target in targets())]
)
def test_queried_metrics_exist(exposed: Scrape, text: str) -> None:
    """After a metric is renamed, a panel would stay empty and an alert silent."""
    expr = promql.parse(filled_in(text))
    labels: set[str] = set()
    for selector in selectors(expr):
        if selector.name in RECORDED:
            labels.update(TARGET)
            continue
        series = exposed[selector.name]
        known = {pair for key in series for pair in key}
        labels.update(name for name, _ in known)
        for matcher in selector.matchers:
            assert matcher.name in {name for name, _ in known}
            if matcher.value != "$instance":
                for value in matcher.value.split("|"):
                    assert (matcher.name, value) in known, matcher
    assert grouped(expr) <= labels


def test_the_dashboard_can_be_imported() -> None:
    """It would use another data source, show one node only, or overlay its panels."""
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == [
        "datasource",
        "instance",
    ]
    assert BOARD["id"] is None
    identities = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(identities)) == len(identities)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
    for target in targets():
        assert target["datasource"]["uid"] == "${datasource}"
        text = target["expr"]
        for selector in selectors(promql.parse(filled_in(text))):
            named = {(matcher.name, matcher.value) for matcher in selector.matchers}
            assert ("instance", "$instance") in named, text
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        kept = {label for by in re.findall(r"by \(([\w, ]+)\)", text) for label in by.split(", ")}
        assert shown <= (kept or {"instance"}), text


# --- the evaluator --------------------------------------------------------------------


def series(**labels: str) -> Labels:
    return frozenset(labels.items())


def test_promql_evaluator() -> None:
    """Alerts would be tested by an evaluator that is always true."""
    old: Scrape = {"a_total": {series(x="1"): 5.0, series(x="2"): 0.0}}
    now: Scrape = {
        "a_total": {series(x="1"): 65.0, series(x="2"): 0.0},
        "b": {series(x="2"): 4.0, series(x="3", y="z"): 8.0},
    }
    world = World({0: now, 30: old}, {"r": "sum(a_total)"})
    one, two = series(x="1"), series(x="2")
    for text, expected in {
        "rate(a_total[1m])": {one: 1.0, two: 0.0},
        "increase(a_total[1m]) > 0": {one: 60.0},
        "a_total offset 1m": {one: 5.0, two: 0.0},
        "a_total - a_total": {one: 0.0, two: 0.0},
        "a_total * on (x) b": {two: 0.0},
        "a_total and b": {two: 0.0},
        "a_total unless b": {one: 65.0},
        "a_total or b": {one: 65.0, two: 0.0, series(x="3", y="z"): 8.0},
        'b{x=~"2|4"}': {two: 4.0},
        'b{y!="z"}': {two: 4.0},
        'b{x!~"2|4"}': {series(x="3", y="z"): 8.0},
        "sum without (x) (b)": {series(): 4.0, series(y="z"): 8.0},
        "max by (y) (b)": {series(): 4.0, series(y="z"): 8.0},
        "r offset 1m": {series(): 5.0},
        "2 * (r / 65 == 1)": {series(): 2.0},
        "a_total / a_total > 0": {one: 1.0},
        "resets(a_total[1m])": {one: 0, two: 0},
    }.items():
        assert world.query(text) == expected, text
