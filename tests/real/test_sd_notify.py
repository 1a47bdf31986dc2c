"""A real daemon tells a real datagram socket how it goes, and stops feeding the watchdog as soon as it stalls."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.daemon import Daemon
from support.missing import need
from support.service_manager import ServiceManager
from support.small_log import SIZES, Growing, write_log

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_a_quiet_log_is_looked_at_and_feeds_the_watchdog(tmp_path: Path, manager: ServiceManager) -> None:
    write_log(tmp_path / "store", 100)
    with daemon(tmp_path, manager) as running:
        running.wait_caught_up()
        assert manager.pings_within(2 * WATCHDOG) >= 4


def test_a_stopped_process_feeds_nobody(tmp_path: Path, manager: ServiceManager) -> None:
    write_log(tmp_path / "store", 100)
    with daemon(tmp_path, manager) as running:
        running.wait_caught_up()
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
            quiet_after(manager, WATCHDOG * 2)
            assert manager.pings_within(1.5 * WATCHDOG) == 0


def test_a_drain_that_hangs_starves_the_watchdog(tmp_path: Path, manager: ServiceManager) -> None:
    """The log is read on; what was read is not built."""
    with Growing(tmp_path / "store", 1), daemon(tmp_path, manager) as running:
        running.wait_for(manager.seen("READY"), "READY")
        running.wait_state(lambda row: row.get("messages", 0) > 0)
        with delayed(running, "pwrite64"):
            quiet_after(manager, WATCHDOG * 3)
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


def quiet_after(manager: ServiceManager, seconds: float) -> None:
    """Let the pings run out that were due when the stall began."""
    manager.pings_within(seconds)
