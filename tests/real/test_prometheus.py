"""Prometheus itself: what it says of our metrics and rules, and alerts that fire for real daemons in real trouble."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from indexd.storage.names import segment_name
from support.daemon import Daemon
from support.faults import held_until
from support.missing import need, requires
from support.small_log import SEGMENT_SIZE, SIZES, write_log

_START_SECONDS = 30.0
_PAUSE = 0.1


pytestmark = requires(lambda: (need("prometheus"), need("promtool")))


def promtool(*args: object, text: str | None = None, directory: Path | None = None) -> str:
    """All that it says; AssertionError with that when it is not content. ``text`` is its standard input."""
    done = subprocess.run(
        ["promtool", *map(str, args)], input=text or "", capture_output=True, text=True, cwd=directory, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def fetch(url: str, **parameters: str) -> httpx.Response:
    """A page on this machine, past any proxy."""
    return httpx.get(url, params=parameters, timeout=10, trust_env=False)


class Prometheus:
    """Runs in a ``with`` block. Job ``indexd`` has the ``targets``; ``rules`` is the text of a rule file."""

    def __init__(self, directory: Path, targets: list[str], rules: str) -> None:
        directory.mkdir(parents=True)
        (directory / "rules.yml").write_text(rules, "utf-8")
        job = {"job_name": "indexd", "static_configs": [{"targets": targets}]}
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [job],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config), "utf-8")  # JSON is YAML
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"Prometheus({self._address})"

    def __enter__(self) -> Self:
        command = [
            "prometheus", f"--config.file={self._directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._directory / 'data'}", f"--web.listen-address={self._address}",
            "--log.level=warn",
        ]  # fmt: skip
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self.wait_for(self._is_ready, "to be ready", _START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # nobody reads its data again
            self._process.wait(10)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query; AssertionError for an expression that is none."""
        answer = fetch(f"http://{self._address}/api/v1/query", query=expr)
        assert answer.is_success, f"{expr}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def alerts(self) -> dict[tuple[str, str], str]:
        """(alert, instance) -> pending or firing."""
        alerts = fetch(f"http://{self._address}/api/v1/alerts").json()["data"]["alerts"]
        return {(alert["labels"]["alertname"], alert["labels"]["instance"]): alert["state"] for alert in alerts}

    def wait_for(self, holds: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
        """Until that holds; AssertionError with the log when it does not in time."""
        deadline = time.monotonic() + timeout
        while not holds():
            assert self._process is not None
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what} of {self}: {(self._directory / 'log').read_text('utf-8')}")
            time.sleep(_PAUSE)

    def _is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return fetch(f"http://{self._address}/-/ready").is_success
        return False


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


def test_promtool_is_content_with_the_metrics(watched: Watched) -> None:
    answer = fetch(f"http://{address(watched.sound)}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert promtool("check", "metrics", text=answer.text) == ""
    assert 'cluster="TestCluster",node_id="broker-a",node_type="indexer"' in answer.text


def test_promtool_is_content_with_rules_and_example() -> None:
    promtool("check", "rules", RULES)
    promtool("check", "config", CONFIG / "prometheus" / "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "indexd.rules.test.yml", directory=RULES.parent)


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


def test_the_alert_for_corrupt_log_fires_for_the_one_that_met_it(watched: Watched) -> None:
    watched.prometheus.wait_for(lambda: watched.state("IndexdCorrupt", watched.torn) == "firing", "the alert")
    assert watched.state("IndexdCorrupt", watched.sound) is None


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
