"""A real Prometheus on loopback that scrapes real daemons each second, and promtool.

A test that uses them is marked by ``requires_prometheus``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from support.missing import need, requires

_START_SECONDS = 30.0
_PAUSE = 0.1
# A proxy of the machine is nothing for loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


#: Marks a test that needs ``prometheus`` and ``promtool``.
requires_prometheus = requires(lambda: (need("prometheus"), need("promtool")))


def promtool(*args: object, text: str | None = None, directory: Path | None = None) -> str:
    """All that it says; AssertionError with that when it is not content. ``text`` is its standard input."""
    done = subprocess.run(
        ["promtool", *map(str, args)], input=text or "", capture_output=True, text=True, cwd=directory, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def fetch(url: str, headers: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Body and content type of a page on this machine."""
    with _OPENER.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=10) as answer:
        return answer.read().decode(), answer.headers["content-type"]


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
        try:
            body, _ = fetch(f"http://{self._address}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from None
        found: list[dict[str, Any]] = json.loads(body)["data"]["result"]
        return found

    def alerts(self) -> dict[tuple[str, str], str]:
        """(alert, instance) -> pending or firing."""
        body, _ = fetch(f"http://{self._address}/api/v1/alerts")
        return {
            (alert["labels"]["alertname"], alert["labels"]["instance"]): alert["state"]
            for alert in json.loads(body)["data"]["alerts"]
        }

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
        try:
            return bool(fetch(f"http://{self._address}/-/ready"))
        except OSError:
            return False
