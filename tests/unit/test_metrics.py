"""Metrics for Prometheus; alert rules, dashboard and runbook name what is exported; the documents are current."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from indexd.serve.daemon_status import RESULTS, STAGES, STATES, Histogram
from indexd.serve.metrics import FAMILIES, HISTOGRAMS, PREFIX, IndexerCollector, exposed, render
from support.docs import METRICS, PAGE, QUERY_PAGE, configuration, metrics, questions

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
NODE = {"cluster": "DefaultCluster", "node_type": "indexer", "node_id": "broker-a"}
IDENTITY = {"cluster": "DefaultCluster", "nodeId": "broker-a", "version": "1.2.3", "mode": "offload", "flavour": "5.4"}
KEY = {
    "output": "key", "phyOffset": 900, "durableOffset": 800, "behindBytes": 100, "behindMilliseconds": 1500,
    "behindMessages": 7, "files": 3, "entries": 41, "bytes": 1_260_000_120, "fillRatio": 0.25,
}  # fmt: skip
QUEUES = {**KEY, "output": "cq", "durableOffset": 700, "files": 12, "fillRatio": None}
ROW: dict[str, Any] = {
    **IDENTITY,
    "phase": "running",
    "broker": {
        "alive": True, "pid": 7, "how": "lock", "indexing": False, "maxOffset": 2**40, "checkedAt": 1_700_000_000_500,
        "unsafe": ["it writes an index too"],
    },
    "lastEvent": 17,
    "mqtt": {"connected": False, "dropped": 4, "published": 9, "waiting": 0},
    "remoting": {
        "upstream": {"links": 2, "forwarded": 90, "failed": 5, "dropped": 1},
        "address": "127.0.0.1:10976", "connections": 3, "connectionsTotal": 12,
        "refused": {"allow": 1, "full": 0, "tls": 2}, "closed": {"bytes": 4, "idle": 5},
        "requests": {"QUERY_MESSAGE": {"ok": 70, "empty": 2}, "other": {"refused": 1}},
        "receivedBytes": 9000, "sentBytes": 80_000,
    },
    "beginOffset": 0, "phyOffset": 900, "durableOffset": 800, "readOffset": 950,
    "commitLogMinOffset": 0, "commitLogMaxOffset": 2**53 - 1,
    "caughtUp": False, "dispatchBehindBytes": 100, "dispatchBehindMilliseconds": 1500, "dispatchBehindMessages": 7,
    "messages": 1000, "indexEntries": 41, "drains": 5, "flushes": 2, "rollOvers": 1, "readBytesTotal": 950,
    "scrub": {"bytes": 420, "damaged": 1, "endedAt": 1_700_000_000_000},
    "readMessages": 1000, "expiredFiles": 0, "stalled": {"read": 31.5}, "storeTimestamp": 1_700_000_000_250,
    "queries": {**dict.fromkeys(RESULTS, 0), "found": 3}, "recoveries": 1, "recoveryRemainingFiles": 0,
    "lastRecovery": {"event": "opened", "seconds": 1.25, "droppedEntries": 12},
    "queueRows": 7, "queueBytes": 512, "queueOldestMilliseconds": 250,
    "outputs": [KEY, QUEUES],
    "consumeQueues": 8, "leftOutMessages": 0, "diskUsedRatio": 0.5, "diskUsedMax": 0.7,
    "uncoveredBytes": 64, "skippedBytes": 64, "corruptRecords": 1, "corruptBytes": 64, "expiredBytes": 0,
    "corrupt": {"offset": 950, "reason": "magic"}, "lastShutdownClean": True, "recoveryRemainingBytes": 0,
    "problems": {"build": "no space"},
}  # fmt: skip


def board_of(row: dict[str, Any]) -> Any:
    return SimpleNamespace(
        row=lambda: row,
        drain_seconds=Histogram(),
        flush_seconds=Histogram(),
        query_seconds=Histogram(),
    )


def values(row: dict[str, Any], accept: str = "") -> dict[tuple[str, ...], float]:
    """(name without prefix, values of the labels that are not the node's) -> value, of a whole answer."""
    body, _ = render(board_of(row), accept)
    return dict(read(body.decode()))


def read(text: str) -> Iterator[tuple[tuple[str, ...], float]]:
    for family in parse_text(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                assert sample.labels.items() >= NODE.items()
                own = [value for name, value in sorted(sample.labels.items()) if name not in NODE]
                yield (sample.name.removeprefix(PREFIX), *own), sample.value


def test_the_figures_of_a_row() -> None:
    found = values(ROW)
    expected = {
        ("dispatch_behind_bytes",): 100,
        ("dispatch_behind_seconds",): 1.5,
        ("dispatch_behind_messages",): 7,
        ("output_behind_seconds", "key"): 1.5,
        ("output_durable_offset", "cq"): 700,
        ("output_fill_ratio", "key"): 0.25,
        ("output_bytes", "key"): 1_260_000_120,
        ("caught_up",): 0,
        ("commitlog_max_offset",): 2**53 - 1,
        ("durable_offset",): 800,
        ("read_bytes_total",): 950,
        ("roll_overs_total",): 1,
        ("queue_oldest_seconds",): 0.25,
        ("degraded", "build"): 1,
        ("degraded", "flush"): 0,
        ("degraded", "read"): 0,
        ("stalled_seconds", "read"): 31.5,
        ("stalled_seconds", "flush"): 0,
        ("queries_total", "found"): 3,
        ("queries_total", "error"): 0,
        ("last_recovery_seconds",): 1.25,
        ("last_recovery_dropped_entries",): 12,
        ("stopped_at_corrupt",): 1,
        ("corrupt_records_total",): 1,
        ("recovery_state", "running"): 1,
        ("recovery_state", "recovering"): 0,
        ("recovery_remaining_bytes",): 0,
        ("last_shutdown_clean",): 1,
        ("broker_alive",): 1,
        ("broker_indexing",): 0,
        ("broker_max_offset",): 2**40,
        ("broker_checked_timestamp_seconds",): 1_700_000_000.5,
        ("broker_unsafe",): 1,
        ("mqtt_connected",): 0,
        ("mqtt_dropped_total",): 4,
        ("remoting_open_connections",): 3,
        ("remoting_accepted_connections_total",): 12,
        ("remoting_refused_connections_total", "tls"): 2,
        ("remoting_closed_connections_total", "bytes"): 4,
        ("remoting_requests_total", "QUERY_MESSAGE", "ok"): 70,
        ("remoting_requests_total", "other", "refused"): 1,
        ("remoting_received_bytes_total",): 9000,
        ("remoting_sent_bytes_total",): 80_000,
        ("remoting_upstream_links",): 2,
        ("remoting_upstream_forwarded_requests_total",): 90,
        ("remoting_upstream_failed_requests_total",): 5,
        ("remoting_upstream_dropped_requests_total",): 1,
        ("node_info", "5.4", "offload"): 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert ("output_fill_ratio", "cq") not in found  # null: it has none


def test_while_it_recovers_nothing_is_made_up() -> None:
    recovering = {"step": "replay", "done": 3, "total": 4}
    found = values({**IDENTITY, "phase": "recovering", "recovering": recovering, "broker": {}, "lastEvent": 1})
    assert found["recovery_state", "recovering"] == 1
    assert found["recovery_done_ratio", "replay"] == 0.75
    started = {"drain_seconds", "flush_seconds", "query_seconds"}  # real zeros, and nothing else is
    rest = {name for name, *_ in found if not any(name.startswith(word) for word in started)}
    assert rest == {"build_info", "node_info", "recovery_state", "recovery_done_ratio", "events_total"}


def test_histograms() -> None:
    board = board_of(ROW)
    for seconds in (0.001, 0.002, 0.3, 99):
        board.flush_seconds.observe(seconds)
    found = dict(read(render(board, "")[0].decode()))
    assert found["flush_seconds_bucket", "0.001"] == 1
    assert found["flush_seconds_bucket", "0.5"] == 3
    assert found["flush_seconds_bucket", "30.0"] == 3
    assert found["flush_seconds_bucket", "+Inf"] == found["flush_seconds_count",] == 4
    assert math.isclose(found["flush_seconds_sum",], 99.303)
    assert found["drain_seconds_count",] == 0


def test_openmetrics_where_it_is_asked_for() -> None:
    body, content_type = render(board_of(ROW), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    kinds = {family.name: family.type for family in parse_openmetrics(body.decode())}
    expected = {PREFIX + "read_bytes": "counter", PREFIX + "build": "info", "process_cpu_seconds": "counter"}
    assert kinds.items() >= expected.items()
    assert dict(read(render(board_of(ROW), None)[0].decode())).keys() >= {("built_offset",)}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_no_created_series_and_nobody_elses(accept: str) -> None:
    other = prometheus_client.Counter("somebody_elses", "in the registry of the process")
    text = render(board_of(ROW), accept)[0].decode()
    prometheus_client.REGISTRY.unregister(other)
    assert not [word for word in ("_created", "somebody_elses", "topic=") if word in text]


def test_each_name_stands_once_and_has_help() -> None:
    assert len(HELP) == len(FAMILIES) + len(HISTOGRAMS)
    collected = {metric.name: metric.documentation for metric in IndexerCollector(board_of(ROW)).collect()}
    assert collected.items() <= HELP.items()
    for name, words in HELP.items():
        assert words.endswith("."), name


@pytest.mark.parametrize("name", sorted(ROW.keys() - {"cluster", "nodeId", "flavour"}))
def test_what_is_not_known_has_no_sample_and_the_rest_stays(name: str) -> None:
    whole = values(ROW)
    for row in (ROW | {name: None}, {key: value for key, value in ROW.items() if key != name}):
        found = values(row).items()
        assert {key for key, value in found if value != whole.get(key)} <= {("stopped_at_corrupt",)}


# --- alert rules and dashboard

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
HELP = {PREFIX + family.name: family.help for family in FAMILIES}
HELP |= {PREFIX + name: words for name, words in HISTOGRAMS.items()}
#: The names of samples in PromQL.
EXPORTED = {exposed(family) for family in FAMILIES}
EXPORTED |= {PREFIX + name + ending for name in HISTOGRAMS for ending in ("_bucket", "_sum", "_count")}


def dashboard_expressions() -> list[str]:
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    found += [note["expr"] for note in DASHBOARD["annotations"]["list"] if "expr" in note]
    return found + [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]


EXPRESSIONS = [rule["expr"] for rule in RULES] + dashboard_expressions()


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_names_and_labels_are_those_that_are_exported(expr: str) -> None:
    names = set(re.findall(rf"\b(?:{PREFIX}\w+|process_\w+|up(?=\{{))", expr))
    assert names
    assert names <= EXPORTED | OTHERS
    for label, known in (("state", STATES), ("stage", STAGES)):
        for values in re.findall(rf'{label}=~?"([^"]*)"', expr):
            assert set(values.split("|")) <= set(known)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_all_that_somebody_needs_at_night_and_is_tried_both_ways(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("Indexd")
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert re.search(r"\{\{ \$labels\.(node_id|instance) \}\}", notes["summary"])
    assert notes["description"].endswith(".")
    assert notes["runbook_url"] == f"docs/alerts.md#{rule['alert'].lower()}"
    section = re.search(rf"^#+ {rule['alert']}\n(.+?)(?=^#|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert all(part in section[1] for part in ("**It means:**", "**Look at:**", "**Do:**"))
    tried = [check for case in CASES for check in case["alert_rule_test"] if check["alertname"] == rule["alert"]]
    assert {bool(check["exp_alerts"]) for check in tried} == {True, False}


def test_panels_are_whole() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all('$cluster"' in to["expr"] and '$node_id"' in to["expr"] for to in panel["targets"])
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "cluster", "node_id"]


DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_page_of_settings_is_current() -> None:
    assert PAGE.read_text("utf-8") == configuration(), "run scripts/docs"
    page = QUERY_PAGE.read_text("utf-8")
    assert "| `query-key` | `-k`, `--key` | `key` |" in page
    assert page == questions(page), "run scripts/docs"


def test_the_tables_of_figures_are_current() -> None:
    page = METRICS.read_text("utf-8")
    assert page == metrics(page), "run scripts/docs"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_what_is_read_first_stays_short(name: str) -> None:
    assert (ROOT / name).stat().st_size <= 12 * 1024


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in DOCUMENTS:
        for path, anchor in LINK.findall(page.read_text("utf-8")):
            target = page.parent / path if path else page
            is_page = target.suffix == ".md"
            if not target.exists() or (anchor and is_page and anchor not in anchors(target)):
                broken.append(f"{page.name}: {path}#{anchor}")
    assert broken == []


def test_every_page_stands_in_the_readme() -> None:
    words = (ROOT / "README.md").read_text("utf-8") + (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in words] == []
