"""What a log line becomes for the journal, and that a journald that is stuck holds nobody up."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from indexd.config import LogConfig
from indexd.service.log import configure_log, is_journal_stream, render_journal

if TYPE_CHECKING:
    from pathlib import Path


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
