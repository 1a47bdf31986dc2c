"""Alert rules and dashboard name what is exported; every alert is tried both ways and has a section in the runbook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from indexd.serve.metrics import PREFIX, IndexerCollector
from indexd.serve.status import STAGES, STATES

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "config" / "prometheus"
RUNBOOK = (ROOT / "docs" / "alerts.md").read_text("utf-8")
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "indexd.rules.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
CASES = yaml.safe_load((PROMETHEUS / "indexd.rules.test.yml").read_text("utf-8"))["tests"]
DASHBOARD = json.loads((ROOT / "config" / "grafana" / "indexd.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
#: Of Prometheus itself and of its client's collectors.
OTHERS = {"up", "process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"}
DESCRIBED = list(IndexerCollector(None).describe())  # type: ignore[arg-type]  # describing needs no board


def exposed(metric: Any) -> list[str]:
    """The names of its samples in PromQL."""
    endings = {"counter": ["_total"], "info": ["_info"], "histogram": ["_bucket", "_sum", "_count"]}
    return [metric.name + ending for ending in endings.get(metric.type, [""])]


EXPORTED = {name for metric in DESCRIBED for name in exposed(metric)}


def dashboard_expressions() -> list[str]:
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    found += [note["expr"] for note in DASHBOARD["annotations"]["list"] if "expr" in note]
    return found + [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]


EXPRESSIONS = [rule["expr"] for rule in RULES] + dashboard_expressions()


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_names_are_those_that_are_exported(expr: str) -> None:
    names = set(re.findall(rf"\b(?:{PREFIX}\w+|process_\w+|up(?=\{{))", expr))
    assert names
    assert names <= EXPORTED | OTHERS


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_values_of_labels_are_ones_that_occur(expr: str) -> None:
    for values in re.findall(r'state=~?"([^"]*)"', expr):
        assert set(values.split("|")) <= set(STATES)
    for values in re.findall(r'stage=~?"([^"]*)"', expr):
        assert set(values.split("|")) <= set(STAGES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_all_that_somebody_needs_at_night(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("Indexd")
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert re.search(r"\{\{ \$labels\.(node_id|instance) \}\}", notes["summary"])
    assert notes["description"].endswith(".")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_runbook_stands_where_the_alert_points(rule: dict[str, Any]) -> None:
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert path == "docs/alerts.md"
    assert anchor == rule["alert"].lower()
    section = re.search(rf"^#+ {rule['alert']}\n(.+?)(?=^#|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert section is not None
    for part in ("**It means:**", "**Look at:**", "**Do:**"):
        assert part in section[1]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_tried_for_firing_and_for_silence(rule: dict[str, Any]) -> None:
    tried = [
        bool(check["exp_alerts"])
        for case in CASES
        for check in case["alert_rule_test"]
        if check["alertname"] == rule["alert"]
    ]
    assert set(tried) == {True, False}


def test_no_case_is_for_an_alert_that_is_gone() -> None:
    names = {check["alertname"] for case in CASES for check in case["alert_rule_test"]}
    assert names == {rule["alert"] for rule in RULES}


def test_panels_are_whole_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert '$cluster"' in target["expr"]
            assert '$node_id"' in target["expr"]


def test_the_dashboard_has_its_variables() -> None:
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "cluster", "node_id"]
