"""Prometheus itself: what it says of our metrics and rules, and alerts that fire for real daemons in real trouble."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx
import pytest

from indexd.storage.names import segment_name
from support.daemon import Daemon
from support.faults import held_until
from support.missing import need, requires
from support.mosquitto import free_port
from support.serving import wait_for
from support.small_log import SEGMENT_SIZE, SIZES, write_log

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
        self._address, self._directory = f"127.0.0.1:{free_port()}", directory

    def __enter__(self) -> Self:
        command = [
            "prometheus", f"--config.file={self._directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._directory / 'data'}", f"--web.listen-address={self._address}",
            "--log.level=warn",
        ]  # fmt: skip
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(self._is_ready)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # nobody reads its data again
        self._process.wait(10)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query, as soon as there are some; AssertionError for one that is none."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = self.ask("query", query=expr)["result"]
            return bool(found)

        wait_for(is_there)
        return found

    def ask(self, path: str, **parameters: str) -> Any:
        """Of its API; AssertionError where it refuses."""
        answer = fetch(f"http://{self._address}/api/v1/{path}", **parameters)
        assert answer.is_success, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._directory / "log").read_text("utf-8")
        with suppress(httpx.TransportError):
            return fetch(f"http://{self._address}/-/ready").is_success
        return False


CONFIG = Path(__file__).parents[2] / "config"
RULES = CONFIG / "prometheus" / "indexd.rules.yml"
SERVED = {"INDEXD_HTTP": "127.0.0.1:0", "INDEXD_NODE_ID": "broker-a", "INDEXD_CLUSTER": "TestCluster"}


class Watched(NamedTuple):
    """Daemons, of which one meets corrupt log and a third is in its recovery, and the Prometheus that scrapes them."""

    sound: Daemon
    torn: Daemon
    prometheus: Prometheus

    def state(self, alert: str, daemon: Daemon) -> str | None:
        """Pending, firing, or None."""
        alerts = self.prometheus.ask("alerts")["alerts"]
        states = {tuple(one["labels"][name] for name in ("alertname", "instance")): one["state"] for one in alerts}
        return states.get((alert, address(daemon)))


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
    }.items():
        (sample,) = watched.prometheus.query(expr)
        assert float(sample["value"][1]) == value, expr


def test_every_panel_of_the_dashboard_shows_something(watched: Watched) -> None:
    dashboard = json.loads((CONFIG / "grafana" / "indexd.json").read_text("utf-8"))
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    noted = [note["expr"] for note in dashboard["annotations"]["list"] if "expr" in note]
    for template in shown + noted:
        expr = template.replace("$__rate_interval", "10s").replace("$cluster", "Test.*").replace("$node_id", ".*")
        assert "$" not in expr
        if template in noted:
            watched.prometheus.ask("query", query=expr)  # or it is none that Prometheus can read
        else:
            watched.prometheus.query(expr)


def test_alerts_fire_for_the_daemon_they_are_about_and_end(watched: Watched) -> None:
    wait_for(lambda: watched.state("IndexdCorrupt", watched.torn) == "firing")
    assert watched.state("IndexdCorrupt", watched.sound) is None
    up = f'up{{instance="{address(watched.sound)}"}}'
    wait_for(lambda: watched.prometheus.query(up)[0]["value"][1] == "1")
    assert watched.state("IndexdDown", watched.sound) is None
    os.kill(watched.sound.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: watched.state("IndexdDown", watched.sound) == "firing")
        assert watched.state("IndexdDown", watched.torn) is None
    finally:
        os.kill(watched.sound.pid, signal.SIGCONT)
    wait_for(lambda: watched.state("IndexdDown", watched.sound) is None)
