"""Prometheus itself: what it says of our metrics and rules, and alerts that fire for real daemons in real trouble."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from indexd.storage.names import segment_name
from support.daemon import Daemon
from support.faults import held_until
from support.prometheus import Prometheus, fetch, promtool, requires_prometheus
from support.small_log import SEGMENT_SIZE, SIZES, write_log

CONFIG = Path(__file__).parents[2] / "config"
RULES = CONFIG / "prometheus" / "indexd.rules.yml"
SERVED = {"INDEXD_HTTP": "127.0.0.1:0", "INDEXD_NODE_ID": "broker-a", "INDEXD_CLUSTER": "TestCluster"}


@dataclass
class Watched:
    """Daemons, of which one meets corrupt log and a third is in its recovery, and the Prometheus that scrapes them."""

    sound: Daemon
    torn: Daemon
    prometheus: Prometheus

    def state(self, alert: str, daemon: Daemon) -> str | None:
        """Pending, firing, or None."""
        return self.prometheus.alerts().get((alert, address(daemon)))


def address(daemon: Daemon) -> str:
    return str(daemon.state()["http"])


def quick_rules() -> str:
    """Ours, with each ``for`` so short that a test can wait for it."""
    text, count = re.subn(r"^(\s+for:) \d+m$", r"\1 1s", RULES.read_text("utf-8"), flags=re.MULTILINE)
    assert count == text.count("- alert:")
    return text


@contextmanager
def recovering(work: Path) -> Iterator[str]:
    """The address of a daemon that was killed, and whose next start stands still in its recovery."""
    store, data = work / "held", work / "held-data"
    end = write_log(store, 3000)
    with Daemon(store, data, *SIZES) as first:
        first.wait_durable(end)
        first.kill()
    with Daemon(store, data, *SIZES, env=SERVED, tracer=held_until(work / "gate", "recovering")) as daemon:
        yield str(daemon.wait_event("listening")["http"])
        daemon.kill()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    work = tmp_path_factory.mktemp("prometheus")
    for name in ("sound", "torn"):
        write_log(work / name, 3000)
    with (work / "torn" / "commitlog" / segment_name(0)).open("r+b") as segment:
        os.pwrite(segment.fileno(), b"\xff" * 64, SEGMENT_SIZE // 2)
    with (
        Daemon(work / "sound", work / "data", *SIZES, env=SERVED) as sound,
        Daemon(work / "torn", work / "torn-data", *SIZES, env=SERVED) as torn,
        recovering(work) as held,
    ):
        sound.wait_caught_up()
        torn.wait_state(lambda row: bool(row["corrupt"]))
        with Prometheus(work / "server", [address(sound), address(torn), held], quick_rules()) as prometheus:
            yield Watched(sound, torn, prometheus)


@requires_prometheus
def test_promtool_is_content_with_the_metrics(watched: Watched) -> None:
    text, content_type = fetch(f"http://{address(watched.sound)}/metrics")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert promtool("check", "metrics", text=text) == ""
    assert 'cluster="TestCluster",node_id="broker-a",node_type="indexer"' in text


@requires_prometheus
def test_openmetrics_for_who_asks_for_it(watched: Watched) -> None:
    accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
    text, content_type = fetch(f"http://{address(watched.sound)}/metrics", accept)
    assert content_type.startswith("application/openmetrics-text")
    assert len(list(parse_openmetrics(text))) > 40


@requires_prometheus
def test_promtool_is_content_with_rules_and_example() -> None:
    promtool("check", "rules", RULES)
    promtool("check", "config", CONFIG / "prometheus" / "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "indexd.rules.test.yml", directory=RULES.parent)


@requires_prometheus
def test_the_figures_are_the_daemons(watched: Watched) -> None:
    instance = f'instance="{address(watched.sound)}"'
    offset = watched.sound.state()["phyOffset"]
    for expr, value in {
        f"indexd_built_offset{{{instance}}}": offset,
        f"indexd_dispatch_behind_bytes{{{instance}}}": 0,
        f'indexd_recovery_state{{{instance}, state="running"}}': 1,
        f'indexd_output_durable_offset{{{instance}, output="key"}}': offset,
        f"indexd_stopped_at_corrupt{{{instance}}}": 0,
        f"rate(indexd_flush_seconds_count{{{instance}}}[10s])": None,
    }.items():
        watched.prometheus.wait_for(lambda expr=expr: bool(watched.prometheus.query(expr)), expr)
        (sample,) = watched.prometheus.query(expr)
        assert value is None or float(sample["value"][1]) == value, expr


@requires_prometheus
def test_every_panel_of_the_dashboard_shows_something(watched: Watched) -> None:
    dashboard = json.loads((CONFIG / "grafana" / "indexd.json").read_text("utf-8"))
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    noted = [note["expr"] for note in dashboard["annotations"]["list"] if "expr" in note]
    for template in shown + noted:
        expr = template.replace("$__rate_interval", "10s").replace("$cluster", "Test.*").replace("$node_id", ".*")
        assert "$" not in expr
        if template in noted:
            watched.prometheus.query(expr)  # or it is none that Prometheus can read
        else:
            watched.prometheus.wait_for(lambda expr=expr: bool(watched.prometheus.query(expr)), expr)


@requires_prometheus
def test_the_alert_for_corrupt_log_fires_for_the_one_that_met_it(watched: Watched) -> None:
    watched.prometheus.wait_for(lambda: watched.state("IndexdCorrupt", watched.torn) == "firing", "the alert")
    assert watched.state("IndexdCorrupt", watched.sound) is None


@requires_prometheus
def test_the_alert_fires_when_the_daemon_is_stopped_and_ends_when_it_goes_on(watched: Watched) -> None:
    up = f'up{{instance="{address(watched.sound)}"}}'
    watched.prometheus.wait_for(lambda: [row["value"][1] for row in watched.prometheus.query(up)] == ["1"], "a scrape")
    assert watched.state("IndexdDown", watched.sound) is None
    os.kill(watched.sound.pid, signal.SIGSTOP)
    try:
        watched.prometheus.wait_for(lambda: watched.state("IndexdDown", watched.sound) == "firing", "the alert")
        assert watched.state("IndexdDown", watched.torn) is None
    finally:
        os.kill(watched.sound.pid, signal.SIGCONT)
    watched.prometheus.wait_for(lambda: watched.state("IndexdDown", watched.sound) is None, "the alert to end")
