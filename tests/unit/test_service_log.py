"""What reaches a service manager's socket and the journal, and that neither can hold the daemon up."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

import pytest

from indexd.config import LogConfig
from indexd.service import log as service_log
from indexd.service.log import Notifier, configure_log, is_journal_stream, render_journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Manager = tuple[socket.socket, str]
    Make = Callable[..., Notifier]


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket and how NOTIFY_SOCKET names it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.settimeout(5)
        if request.param == "path":
            name = str(tmp_path / "notify")
            bound.bind(name)
        else:
            name = f"@indexd-{os.getpid()}-{tmp_path.name}"
            bound.bind("\0" + name[1:])
        yield bound, name


def heard(bound: socket.socket) -> list[list[str]]:
    """The lines of each datagram that has come."""
    found = []
    bound.setblocking(False)
    while True:
        try:
            found.append(bound.recv(65536).decode().split("\n"))
        except BlockingIOError:
            return found


@pytest.fixture
def notifier() -> Iterator[Callable[..., Notifier]]:
    """Makes notifiers of an environment; closed at the end."""
    with ExitStack() as stack:

        def make(name: str | None = None, **environ: str) -> Notifier:
            given = environ if name is None else {"NOTIFY_SOCKET": name, **environ}
            return stack.enter_context(closing(Notifier.from_environment(given)))

        yield make


def test_the_life_of_a_unit(manager: Manager, notifier: Make) -> None:
    bound, name = manager
    told = notifier(name, WATCHDOG_USEC="4000000", WATCHDOG_PID=str(os.getpid()))
    assert told.watchdog_seconds == 4.0
    told.status("recovering: slots, 1 of 3")
    told.extend(30)
    told.ready("12 bytes behind")
    told.reloading()
    told.ready("12 bytes behind")
    told.stopping()
    lines = heard(bound)
    assert lines[:3] == [
        ["STATUS=recovering: slots, 1 of 3"],
        ["EXTEND_TIMEOUT_USEC=30000000", "WATCHDOG=1"],
        ["READY=1", "WATCHDOG=1", "STATUS=12 bytes behind"],
    ]
    assert lines[3][0] == "RELOADING=1"
    key, usec = lines[3][1].split("=")
    assert key == "MONOTONIC_USEC"
    assert 0 <= time.monotonic() - int(usec) / 1e6 < 5
    assert lines[4][0] == "READY=1"
    assert lines[5][0] == "STOPPING=1"
    assert len(lines) == 6


def test_pings_come_often_enough_and_not_at_every_pass(
    manager: Manager, notifier: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, name = manager
    told = notifier(name, WATCHDOG_USEC="400000")
    for pass_ in range(500):
        monkeypatch.setattr(service_log.time, "monotonic", lambda now=pass_ / 1000: 100 + now)
        told.watchdog()
    pings = heard(bound)
    assert 3 <= len(pings) <= 6, pings
    assert all(lines == ["WATCHDOG=1"] for lines in pings)


def test_a_status_is_sent_once_and_stays_one_line(manager: Manager, notifier: Make) -> None:
    bound, name = manager
    told = notifier(name)
    for _ in range(3):
        told.status("a\nREADY=1\n  b")
    told.status("é" * 5000)
    lines = heard(bound)
    assert lines[0] == ["STATUS=a READY=1 b"]
    assert len(lines) == 2
    assert len("\n".join(lines[1]).encode()) <= 4096


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": ""},
        {"NOTIFY_SOCKET": "@"},
        {"NOTIFY_SOCKET": "relative"},
        {"NOTIFY_SOCKET": "vsock:2:1234"},
        {"NOTIFY_SOCKET": "/nobody/listens/here"},
        {"NOTIFY_SOCKET": "/" + "long" * 100},
        {"NOTIFY_SOCKET": "@" + "long" * 100},
        {"NOTIFY_SOCKET": "/dev/null"},
    ],
)
def test_without_a_manager_nothing_happens(environ: dict[str, str], notifier: Make) -> None:
    told = notifier(**environ, WATCHDOG_USEC="1")
    told.status("a")
    told.extend(1)
    told.ready("b")
    told.watchdog()
    told.reloading()
    told.stopping()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "٣"}, None),
    ],
)
def test_who_is_watched(manager: Manager, notifier: Make, environ: dict[str, str], seconds: float | None) -> None:
    bound, name = manager
    told = notifier(name, **environ)
    assert told.watchdog_seconds == seconds
    told.watchdog()
    assert heard(bound) == ([] if seconds is None else [["WATCHDOG=1"]])


def test_a_manager_that_does_not_read_holds_nobody_up_and_hears_of_ready_later(
    manager: Manager, notifier: Make
) -> None:
    bound, name = manager
    told = notifier(name, WATCHDOG_USEC="1000")
    thread = threading.Thread(target=lambda: [told.status(f"line {number}") for number in range(5000)])
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "a full socket made it wait"
    told.ready("tailing")
    assert not any("READY=1" in lines for lines in heard(bound))
    told.watchdog()
    assert heard(bound) == [["READY=1", "WATCHDOG=1"]]


def test_a_line_with_all_its_fields() -> None:
    row: dict[str, Any] = {"event": "degraded", "level": "error", "timestamp": "now", "stage": "build"}
    row |= {"problem": "no space left; free some", "names": ["a", "b"], "seconds": 2.5, "exception": "a\nb"}
    first, *trace = render_journal(None, "error", row).split("\n")
    assert first == r'<3>degraded stage=build problem="no space left; free some" names="[\"a\", \"b\"]" seconds=2.5'
    assert trace == ["<3>a", "<3>b"]


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3), ("critical", 2)]
)
def test_priorities_are_those_of_syslog(level: str, priority: int) -> None:
    assert render_journal(None, level, {"event": "running", "level": level}) == f"<{priority}>running"


def test_who_standard_error_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        found = os.fstat(stream.fileno())
        assert is_journal_stream({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not is_journal_stream({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"})
        assert not is_journal_stream({})
        monkeypatch.setattr(sys, "stderr", None)
        assert not is_journal_stream({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        monkeypatch.undo()


def test_auto_means_the_journal_where_it_is_one_and_one_that_reads_nothing_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = os.fdopen(os.dup(ours.fileno()), "w")
    with ours, theirs:
        monkeypatch.setattr(sys, "stderr", stream)
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        log = configure_log(LogConfig())

        def say() -> None:
            for number in range(5000):
                log.warning("rolled", text=str(number) * 100)

        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "it waited"
        assert theirs.recv(100).startswith(b"<4>rolled text=")
        monkeypatch.undo()
        configure_log(LogConfig(log_level="error"))
    with suppress(BrokenPipeError):
        stream.close()
