"""What a real daemon shows over HTTP from before its recovery to its last flush, whatever happens to it meanwhile."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from typing import TYPE_CHECKING, Any

from support.daemon import Daemon, index_files
from support.faults import held_until
from support.service_manager import ServiceManager
from support.small_log import SIZES, write_log
from support.status import row_of
from support.status import status as drawn

if TYPE_CHECKING:
    from pathlib import Path

ANY_PORT = {"INDEXD_HTTP": "127.0.0.1:0"}


def address_of(daemon: Daemon) -> str:
    """Where it listens: it says so before it opens anything."""
    return str(daemon.wait_event("listening")["http"])


def status(address: str, path: str = "/api/v1/status") -> Any:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        return json.load(answer)


def test_it_is_seen_from_before_the_recovery_to_the_stop(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 20_000)
    with Daemon(store, data, *SIZES, env=ANY_PORT) as first:
        first.wait_durable(end)
        assert status(address_of(first))["lastShutdownClean"] is True
        first.kill()
    gate = tmp_path / "gate"
    with Daemon(store, data, *SIZES, env=ANY_PORT, tracer=held_until(gate)) as daemon:
        address, phases = address_of(daemon), []

        def look() -> dict[str, Any] | None:
            row = status(address)
            if row["phase"] not in phases:
                phases.append(row["phase"])
            return row if row["phase"] == "running" else None

        daemon.wait_event("starting")
        assert look() is None
        assert phases == ["opening"]
        gate.touch()
        row = daemon.wait_for(look, "running")
        assert phases in (["opening", "running"], ["opening", "recovering", "running"])
        assert row["lastShutdownClean"] is False
        assert row["lastRecovery"]["event"] == "recovered"
        assert int(row["recoveryRemainingBytes"]) == 0
        daemon.wait_durable(end)
        state = daemon.state()
        assert state["http"] == address
        assert state["outputs"][0]["entries"] > 0
        kinds = {event["kind"] for event in status(address, "/api/v1/events")["events"]}
        assert "recover" in kinds
        assert daemon.terminate() == 0


def test_compiling_is_said_at_the_first_start_and_never_again(tmp_path: Path) -> None:
    store, data, cache = tmp_path / "store", tmp_path / "data", tmp_path / "cache"
    write_log(store, 100)
    cache.mkdir()
    with ServiceManager(tmp_path.name) as manager:
        env = {"NUMBA_CACHE_DIR": str(cache), "INDEXD_HTTP": "off", **manager.environment}
        with Daemon(store, data, *SIZES, env=env, tracer=held_until(tmp_path / "none")) as first:
            assert first.wait_event("compiling")["hint"].startswith("once")
            first.wait_for(lambda: (data / "state").exists() or None, "what it writes down")
            row = row_of(data)
            assert (row["phase"], row["compiling"], row["findings"]) == ("opening", True, [])
            assert "Opening: compiling, once" in drawn(data)
            first.wait_for(manager.seen("STATUS", lambda text: text.startswith("compiling, once")), "systemd is told")
            first.kill()
        (cache / "index_0").mkdir()
        (cache / "index_0" / "kernel.nbi").touch()  # as the first start leaves it
        with Daemon(store, data, *SIZES, env=env | ANY_PORT, tracer=held_until(tmp_path / "none")) as second:
            second.wait_event("starting")
            assert status(address_of(second))["compiling"] is False
            second.kill()
            assert not second.events("compiling")


def test_a_disturbed_daemon_opens_again_under_the_same_address(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 5000)
    with Daemon(store, data, *SIZES, env=ANY_PORT) as daemon:
        address = address_of(daemon)
        daemon.wait_durable(end)
        before = status(address)
        index_files(data)[0].unlink()
        daemon.wait_event("disturbed")

        def look() -> dict[str, Any] | None:
            row = status(address)
            assert row["phase"] in ("running", "opening", "recovering")
            return row if row["recoveries"] == 2 and row["phase"] == "running" else None

        row = daemon.wait_for(look, "the second opening")
        assert row["bootId"] == before["bootId"]
        assert int(row["lastEvent"]) > int(before["lastEvent"])
        daemon.wait_caught_up(end)
        names = [event["name"] for event in status(address, "/api/v1/events")["events"]]
        assert names.index("disturbed") < len(names) - 1
        assert daemon.terminate() == 0


def test_a_hup_changes_limits_and_says_what_needs_a_restart(tmp_path: Path) -> None:
    """Also one that comes while it is opened: it is followed as soon as it runs."""
    store, data, config = tmp_path / "store", tmp_path / "data", tmp_path / "indexd.toml"
    end = write_log(store, 5000)
    config.write_text("[limits]\nread_rate_max = 1000\n")
    gate = tmp_path / "gate"
    with Daemon(store, data, "-c", config, *SIZES, env=ANY_PORT, tracer=held_until(gate)) as daemon:
        daemon.wait_event("starting")
        config.write_text("[limits]\nread_rate_max = 1000\n[node]\nbroker_check_interval = 1\n")
        os.kill(daemon.pid, signal.SIGHUP)
        assert not daemon.events("running")
        gate.touch()
        event = daemon.wait_event("reloaded")
        assert event["changed"] == ["broker_check_interval"]
        daemon.wait_event("running")
        config.write_text("[http]\nhttp_queries_max = 3\n[mqtt]\nmqtt_interval = 3\n[node]\ncluster = 'c'\n")
        os.kill(daemon.pid, signal.SIGHUP)
        event = daemon.wait_for(lambda: next(iter(daemon.events("reloaded")[1:]), None), "the second")
        assert event["changed"] == ["broker_check_interval", "read_rate_max"]
        assert event["needs_restart"] == ["cluster", "http_queries_max", "mqtt_interval"]
        config.write_text("[reader]\nretry_max_seconds = -1\n")
        os.kill(daemon.pid, signal.SIGHUP)
        assert "retry_max_seconds" in daemon.wait_event("reload_refused")["problem"]
        # 1000 bytes a second would take more than ten minutes: what it waited for under the old bound is over.
        daemon.wait_caught_up(end)
        assert daemon.terminate() == 0
