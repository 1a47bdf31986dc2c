"""schemathesis against the OpenAPI of a real daemon: every route, with parameters that are valid and that are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from support.daemon import Daemon
from support.small_log import SIZES, write_log

#: For each route; of the daemon that lets everybody in only the plainest.
_EXAMPLES = {True: 4, False: 1}
_SECONDS = 300
#: A stream that never ends.
_LIVE = "/api/v1/live"
_SETTINGS = """\
[checks.negative_data_rejection]
expected-statuses = [400, 401, 404, 405, 409, 413, 422]
"""
_ROUTES = {
    *("/livez", "/readyz", "/metrics", _LIVE, "/api/v1/status", "/api/v1/events", "/api/v1/coverage"),
    *("/api/v1/index-files", "/api/v1/topics"),
    *(f"/api/v1/messages/{rest}" for rest in ("by-key", "by-unique-key", "by-queue-offset", "by-time", "{where}")),
}


@pytest.mark.parametrize("has_token", [False, True], ids=["open", "token"])
def test_every_route_does_what_its_openapi_says(tmp_path: Path, *, has_token: bool) -> None:
    end = write_log(tmp_path / "store", 1500)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    env = {"INDEXD_HTTP": "127.0.0.1:0"} | ({"INDEXD_HTTP_TOKEN_FILE": str(token)} if has_token else {})
    headers = {"authorization": f"Bearer {token.read_text().strip()}"} if has_token else {}
    with Daemon(tmp_path / "store", tmp_path / "data", *SIZES, env=env) as daemon:
        daemon.wait_caught_up(end)
        url = f"http://{daemon.wait_event('listening')['http']}"
        schema = httpx.get(f"{url}/openapi.json", headers=headers).json()
        assert set(schema["paths"]) == _ROUTES
        for path, methods in schema["paths"].items():
            assert set(methods) == {"get"}, path
            assert methods["get"]["summary"], path
            assert methods["get"]["description"], path
            for parameter in methods["get"].get("parameters", ()):
                assert parameter.get("description"), (path, parameter["name"])
        settings = _SETTINGS
        if has_token:  # so that it knows when it leaves the token out
            settings += f'[auth.openapi.token]\nbearer = "{token.read_text().strip()}"\n'
        (tmp_path / "schemathesis.toml").write_text(settings)
        said = _fuzz(schema, url, tmp_path, _EXAMPLES[has_token])
        assert httpx.get(f"{url}/livez").status_code == 200
        assert daemon.terminate() == 0
        assert not [line for line in daemon.events() if line["level"] in ("warning", "error", "critical")], said


def _fuzz(schema: object, url: str, work: Path, examples: int) -> str:
    (work / "openapi.json").write_text(json.dumps(schema))
    words = ["run", "openapi.json", "--url", url, "--checks", "all", "--max-examples", str(examples)]
    words += ["--exclude-path", _LIVE, "--no-color", "--generation-database", "none"]
    done = subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), *words],
        cwd=work,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
