"""The installed units under a real systemd, and what the daemon tells a service manager's socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.missing import need
from support.own_systemd import INSTALL, STORE, OwnSystemd, ServiceManager, install, write
from support.small_log import SIZES, Growing, write_log

DATA = "/var/lib/indexd"
# Holds the lock as a broker does, on byte 0 for the whole life of its process.
_BROKER = (
    "import fcntl, struct, sys, time; file = open(sys.argv[1], 'r+b'); "
    "fcntl.fcntl(file, fcntl.F_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 1, 0)); time.sleep(600)"
)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[OwnSystemd]:
    """A machine with a store of 2000 messages and indexd installed beside it."""
    with OwnSystemd(tmp_path) as started:
        write_log(started.shared / "store", 2000)
        install(started)
        yield started


def state(machine: OwnSystemd, data: str = DATA) -> dict[str, Any]:
    """What DATA/state says."""
    text = machine.wait_for(lambda: machine.run("cat", f"{data}/state", ok=False).stdout or None, f"{data}/state")
    row: dict[str, Any] = json.loads(text)
    return row


def main_pid(machine: OwnSystemd) -> int:
    return int(machine.show("indexd")["MainPID"])


def test_it_starts_tells_reloads_and_stops(machine: OwnSystemd) -> None:
    machine.run("systemctl", "start", "indexd")
    shown = machine.show("indexd")
    assert (shown["ActiveState"], shown["SubState"], shown["User"]) == ("active", "running", "indexd")
    assert "behind" in shown["StatusText"]
    assert shown["WatchdogUSec"] == "2min"
    assert shown["WatchdogTimestampMonotonic"] != "0"
    machine.wait_for(lambda: state(machine).get("caughtUp") or None, "catching up")
    # The log goes on where journald is started again meanwhile.
    machine.run("systemctl", "restart", "systemd-journald")
    machine.run("systemctl", "reload", "indexd")
    machine.wait_for(lambda: machine.journal("EVENT=reloaded") or None, "the reload")
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "active" or None, "the end of the reload")
    assert machine.show("indexd")["NRestarts"] == "0"
    machine.run("systemctl", "stop", "indexd")
    shown = machine.show("indexd")
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]) == ("inactive", "success", "0")
    names = machine.run("ls", DATA).stdout.split()
    assert "abort" not in names
    assert {"index", "frontier", "checkpoint"} <= set(names)


def test_the_journal_has_priorities(machine: OwnSystemd) -> None:
    machine.run("systemctl", "start", "indexd")
    (running,) = machine.journal("_SYSTEMD_UNIT=indexd.service", "EVENT=running")
    assert running["PRIORITY"] == "6"
    assert running["SYSLOG_IDENTIFIER"] == "indexd"
    assert running["MESSAGE"].startswith("running phy_offset=")
    assert not machine.journal("_SYSTEMD_UNIT=indexd.service", "PRIORITY=3"), machine.log()
    (machine.shared / "store").rename(machine.shared / "away")
    degraded = machine.wait_for(lambda: machine.journal("EVENT=degraded") or None, "degraded")
    assert {row["PRIORITY"] for row in degraded} == {"3"}
    assert degraded[0]["MESSAGE"].startswith(("degraded stage=read", "degraded stage=build"))
    assert "commitlog" in degraded[0]["MESSAGE"]
    assert machine.run("journalctl", "--no-pager", "-u", "indexd", "-p", "err").stdout.count("degraded")


def test_a_process_that_hangs_is_ended_and_started_again(machine: OwnSystemd) -> None:
    write(machine, "/etc/systemd/system/indexd.service.d/watchdog.conf", "[Service]\nWatchdogSec=2\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "indexd")
    pid, begun = main_pid(machine), int(machine.show("indexd")["WatchdogTimestampMonotonic"])
    fed = "WatchdogTimestampMonotonic"
    machine.wait_for(lambda: int(machine.show("indexd")[fed]) > begun + 4_000_000 or None, "twice the watchdog's time")
    assert main_pid(machine) == pid, "a healthy one was ended"
    machine.signal(pid, signal.SIGSTOP)
    machine.wait_for(lambda: machine.show("indexd")["NRestarts"] != "0" or None, "a restart")
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "active" or None, "the next process")
    assert main_pid(machine) != pid
    assert "Watchdog timeout" in machine.run("journalctl", "--no-pager", "-u", "indexd").stdout  # behind a long trace
    machine.wait_for(lambda: machine.journal("EVENT=recovered") or None, "its recovery")


def test_a_killed_one_is_started_again_and_loses_nothing(machine: OwnSystemd) -> None:
    machine.run("systemctl", "start", "indexd")
    machine.signal(main_pid(machine), signal.SIGKILL)
    machine.wait_for(lambda: machine.journal("EVENT=recovered") or None, "recovery")
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "active" or None, "the next process")
    machine.wait_for(lambda: state(machine).get("messages") == 2000 or None, "all messages")


@pytest.mark.parametrize(("status", "line"), [(2, "did you mean"), (3, "the store /srv/shared/store")])
def test_what_another_start_would_not_mend_is_not_started_again(machine: OwnSystemd, status: int, line: str) -> None:
    if status == 2:
        write(machine, "/etc/indexd/indexd.toml", '[store]\nstor = "/srv"\n')
    else:
        (machine.shared / "store").rename(machine.shared / "away")
    assert machine.run("systemctl", "start", "indexd", ok=False).returncode != 0
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "failed" or None, "its end")
    shown = machine.show("indexd")
    assert (shown["ActiveState"], shown["ExecMainStatus"], shown["NRestarts"]) == ("failed", str(status), "0")
    # The reason is one line, and an error for the journal.
    (said,) = machine.journal("_SYSTEMD_UNIT=indexd.service", "PRIORITY=3", "_TRANSPORT=stdout")
    assert said["MESSAGE"].startswith("indexd: ")
    assert line in said["MESSAGE"]


def test_a_directory_that_somebody_holds_is_tried_again(machine: OwnSystemd) -> None:
    machine.run("systemctl", "start", "indexd")
    machine.run("systemctl", "stop", "indexd")
    machine.run("systemd-run", "--unit=holder", "flock", f"{DATA}/lock", "sleep", "600")
    machine.wait_for(
        lambda: machine.run("flock", "-n", f"{DATA}/lock", "true", ok=False).returncode or None, "the lock"
    )
    assert machine.run("systemctl", "start", "indexd", ok=False).returncode != 0
    machine.run("systemctl", "stop", "holder")
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "active" or None, "its turn")


def test_it_can_write_nothing_but_its_data_and_sees_the_broker(machine: OwnSystemd) -> None:
    (machine.shared / "store/lock").write_bytes(b"lock")
    machine.run("systemd-run", "--unit=broker", sys.executable, "-c", _BROKER, STORE / "lock")
    broker = int(machine.show("broker")["MainPID"])
    machine.run("systemctl", "start", "indexd")
    pid = main_pid(machine)
    status = dict(line.split(":\t", 1) for line in machine.run("cat", f"/proc/{pid}/status").stdout.splitlines())
    assert status["CapEff"] == status["CapBnd"] == "0" * 16
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert machine.run("cat", f"/proc/{pid}/oom_score_adj").stdout == "500\n"
    assert machine.run("ps", "-o", "ni=,user=", "-p", pid).stdout.split() == ["5", "indexd"]
    inside = ("nsenter", "-t", pid, "-m", "-r")
    for path in (STORE / "abort", STORE / "commitlog/x", "/etc/x", "/opt/indexd/x", "/usr/x", "/root/x", "/home/x"):
        refused = machine.run(*inside, "touch", path, ok=False)
        assert "Read-only file system" in refused.stderr, (path, refused)
    machine.run(*inside, "touch", f"{DATA}/x")
    found = machine.wait_for(lambda: state(machine)["broker"] or None, "a look at the broker")
    assert (found["alive"], found["pid"]) == (True, broker)


def test_instances_have_their_own_data(machine: OwnSystemd) -> None:
    install(machine, instance="a")
    machine.run("systemctl", "start", "indexd", "indexd@a")
    machine.wait_for(lambda: state(machine, f"{DATA}/a").get("caughtUp") or None, "the instance")
    assert state(machine)["pid"] != state(machine, f"{DATA}/a")["pid"]


def test_it_serves_from_its_sandbox(machine: OwnSystemd) -> None:
    install(machine, env={"INDEXD_HTTP": "127.0.0.1:9577"})
    machine.run("systemctl", "start", "indexd")
    for path in ("livez", "readyz", "metrics", "api/v1/status"):
        words = (
            sys.executable,
            "-c",
            f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:9577/{path}').status)",
        )
        done = machine.wait_for(lambda words=words: _ended(machine.run(*words, ok=False)), path)
        assert done == "200\n"


def test_an_address_that_comes_late_is_waited_for_and_indexing_goes_on(machine: OwnSystemd) -> None:
    address = "192.0.2.7"
    install(machine, env={"INDEXD_HTTP": f"{address}:9577"})
    machine.run("systemctl", "start", "indexd")
    machine.wait_for(lambda: state(machine).get("caughtUp") or None, "catching up")
    assert state(machine)["http"] is None
    machine.run(need("ip"), "link", "set", "lo", "up")
    machine.run(need("ip"), "address", "add", f"{address}/32", "dev", "lo")
    machine.wait_for(lambda: state(machine)["http"], "listening")
    assert machine.show("indexd")["NRestarts"] == "0"


def test_all_of_it_goes_again_and_data_only_when_told(machine: OwnSystemd) -> None:
    machine.run("systemctl", "enable", "--now", "indexd")
    machine.run("sh", "-c", "echo '# mine' >> /etc/indexd/indexd.toml")
    said = machine.run(INSTALL, "--uninstall").stdout
    machine.run("test", "!", "-L", "/usr/local/bin/indexd")
    assert "kept     /etc/indexd/indexd.toml" in said
    assert machine.run("systemctl", "is-active", "indexd", ok=False).stdout == "inactive\n"
    assert machine.run("systemctl", "list-unit-files", "--no-legend", "indexd*", ok=False).stdout == ""
    machine.run("test", "-f", f"{DATA}/frontier")
    machine.run("id", "indexd")
    machine.run(INSTALL, "--uninstall", "--purge")
    found = machine.run("find", "/etc", "/opt", "/usr/local", "/var/lib", "-name", "indexd*").stdout
    assert found == ""
    assert machine.run("id", "indexd", ok=False).returncode != 0
    assert machine.run(INSTALL, "--uninstall").returncode == 0


def _ended(done: subprocess.CompletedProcess[str]) -> str | None:
    return done.stdout if done.returncode == 0 else None


WATCHDOG = 2.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    """A service manager that wants to hear of it every two seconds."""
    with ServiceManager(tmp_path.name, WATCHDOG) as opened:
        yield opened


def daemon(tmp_path: Path, manager: ServiceManager, **env: str) -> Daemon:
    return Daemon(tmp_path / "store", tmp_path / "data", *SIZES, env={**manager.environment, **env})


@contextmanager
def delayed(daemon: Daemon, calls: str, path: Path | None = None) -> Iterator[None]:
    """A disk that does not answer: these system calls hang, on one file or all, for as long as this lasts."""
    words = [need("strace"), "-f", "-q", "-o", "/dev/null", "-p", str(daemon.pid)]
    words += [] if path is None else ["-P", str(path)]
    tracer = subprocess.Popen([*words, "-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=600s"])
    try:
        status = Path(f"/proc/{daemon.pid}/status")
        daemon.wait_for(lambda: "TracerPid:\t0\n" not in status.read_text("ascii") or None, "strace")
        yield
    finally:
        tracer.kill()
        tracer.wait(30)


def test_ready_comes_with_tailing_and_stopping_with_the_signal(tmp_path: Path, manager: ServiceManager) -> None:
    with Growing(tmp_path / "store", 1), daemon(tmp_path, manager) as running:
        running.wait_for(manager.seen("READY"), "READY")
        # Tailing, not caught up: the data was opened before, and the first look at the log is over.
        assert running.events("created")
        assert running.events("running")
        assert not manager.heard("STOPPING")
        running.wait_for(manager.seen("STATUS", lambda text: "behind" in text), "a lag in the status")
        running.wait_for(lambda: len(manager.heard("WATCHDOG")) >= 3 or None, "pings")
        assert running.terminate() == 0
    manager.listen()
    order = [key for _, fields in manager.messages for key in fields if key in ("READY", "STOPPING")]
    assert order == ["READY", "STOPPING"]
    gaps = [later[0] - earlier[0] for earlier, later in zip(manager.messages, manager.messages[1:], strict=False)]
    assert max(gaps) < WATCHDOG * 5, "nothing was heard for long"


def test_recovery_asks_for_time_and_says_how_far_it_is(tmp_path: Path, manager: ServiceManager) -> None:
    write_log(tmp_path / "store", 40_000)
    with daemon(tmp_path, manager) as first:
        first.wait_caught_up()
        first.kill()
    manager.heard("READY")
    manager.messages.clear()
    with daemon(tmp_path, manager) as again:
        again.wait_for(manager.seen("READY"), "READY")
        assert again.events("recovered")
    before = []
    for _, fields in manager.messages:
        if "READY" in fields:
            break
        before.append(fields)
    extended = [int(fields["EXTEND_TIMEOUT_USEC"]) for fields in before if "EXTEND_TIMEOUT_USEC" in fields]
    assert extended, manager.messages
    assert max(extended) >= 60_000_000


def test_a_quiet_log_feeds_the_watchdog_and_a_stopped_process_feeds_nobody(
    tmp_path: Path, manager: ServiceManager
) -> None:
    write_log(tmp_path / "store", 100)
    with daemon(tmp_path, manager) as running:
        running.wait_caught_up()
        assert manager.pings_within(2 * WATCHDOG) >= 4
        os.kill(running.pid, signal.SIGSTOP)
        manager.pings_within(0.2)
        assert manager.pings_within(1.5 * WATCHDOG) == 0
        os.kill(running.pid, signal.SIGCONT)
        running.wait_for(lambda: manager.pings_within(WATCHDOG) or None, "pings again")


def test_a_read_that_hangs_starves_the_watchdog(tmp_path: Path, manager: ServiceManager) -> None:
    """The event loop is alive, and so is the process: only the tail loop stands."""
    write_log(tmp_path / "store", 100)
    (segment,) = (tmp_path / "store/commitlog").iterdir()
    with daemon(tmp_path, manager) as running:
        running.wait_caught_up()
        with delayed(running, "pread64", segment):
            manager.pings_within(WATCHDOG * 2)  # those that were due when it began
            assert manager.pings_within(1.5 * WATCHDOG) == 0


def test_a_drain_that_hangs_starves_the_watchdog(tmp_path: Path, manager: ServiceManager) -> None:
    """The log is read on; what was read is not built."""
    with Growing(tmp_path / "store", 1), daemon(tmp_path, manager) as running:
        running.wait_for(manager.seen("READY"), "READY")
        running.wait_state(lambda row: row.get("messages", 0) > 0)
        with delayed(running, "pwrite64"):
            manager.pings_within(WATCHDOG * 3)  # those that were due when it began
            assert manager.pings_within(1.5 * WATCHDOG) == 0


def test_a_store_that_is_gone_is_waited_for_and_no_stall(tmp_path: Path, manager: ServiceManager) -> None:
    write_log(tmp_path / "store", 100)
    with daemon(tmp_path, manager, INDEXD_RETRY_MAX_SECONDS="1") as running:
        running.wait_caught_up()
        (tmp_path / "store").rename(tmp_path / "away")
        running.wait_for(lambda: running.events("degraded") or None, "degraded")
        assert manager.pings_within(3 * WATCHDOG) >= 3
        running.wait_for(manager.seen("STATUS", lambda text: "waiting" in text), "the reason in the status")
        (tmp_path / "away").rename(tmp_path / "store")
        running.wait_for(lambda: running.events("healed") or None, "healed")


def test_reload_is_announced_and_ends(tmp_path: Path, manager: ServiceManager) -> None:
    write_log(tmp_path / "store", 100)
    with daemon(tmp_path, manager) as running:
        running.wait_for(manager.seen("READY"), "READY")
        os.kill(running.pid, signal.SIGHUP)
        running.wait_for(manager.seen("RELOADING"), "RELOADING", timeout=10)
        running.wait_for(lambda: len(manager.heard("READY")) == 2 or None, "READY after it")
        assert abs(int(manager.heard("MONOTONIC_USEC")[0]) / 1e6 - time.monotonic()) < 30
