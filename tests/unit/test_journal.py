"""What a log line becomes as an entry of journald, and that a journald that is gone or stuck holds nobody up."""

from __future__ import annotations

import io
import json
import os
import select
import socket
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.config import LogConfig
from indexd.service import log as log_module
from indexd.service.log import Journal, configure_log, encode_entry, field_name, is_journal_stream, render_journal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def decode_entry(data: bytes) -> dict[str, str]:
    """As journald reads a datagram."""
    fields, rest = {}, data
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, has_value, value = line.partition(b"=")
        if not has_value:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields[name.decode()] = value.decode()
    return fields


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket in journald's place, at ``tmp_path/socket``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "socket"))
        bound.settimeout(5)
        yield bound


def entry(bound: socket.socket) -> dict[str, str]:
    return decode_entry(bound.recv(1 << 20))


def test_a_line_with_all_its_fields(tmp_path: Path, journald: socket.socket) -> None:
    with closing(Journal(tmp_path / "socket")) as journal:
        row = {"event": "degraded", "level": "error", "timestamp": "now", "stage": "build", "retry_seconds": 2.5}
        row |= {"problem": "no space left; free some", "names": ["a", "b"], "message": "mine", "exception": "a\nb"}
        journal.error(**render_journal(None, "error", row))
    assert entry(journald) == {
        "MESSAGE": 'degraded stage=build retry_seconds=2.5 problem="no space left; free some" '
        r'names="[\"a\", \"b\"]" message=mine',
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "indexd",
        "EVENT": "degraded",
        "STAGE": "build",
        "RETRY_SECONDS": "2.5",
        "PROBLEM": "no space left; free some",
        "NAMES": '["a", "b"]',
        "INDEXD_MESSAGE": "mine",
        "EXCEPTION": "a\nb",
    }


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3), ("critical", 2)]
)
def test_priorities_are_those_of_syslog(level: str, priority: int) -> None:
    assert render_journal(None, level, {"event": "running", "level": level})["priority"] == priority


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("phy_offset", "PHY_OFFSET"),
        ("indexingWhy", "INDEXING_WHY"),
        ("_pid", "INDEXD__PID"),
        ("2nd", "INDEXD_2ND"),
        ("größe", "GR_SSE"),
        ("unit", "INDEXD_UNIT"),
        ("priority", "INDEXD_PRIORITY"),
        ("code_line", "INDEXD_CODE_LINE"),
        ("", "INDEXD_"),
        ("x" * 100, "X" * 64),
    ],
)
def test_names_are_ones_that_journald_takes(key: str, name: str) -> None:
    assert field_name(key) == name


@given(st.dictionaries(st.text().map(field_name), st.text()))
def test_every_value_comes_back(fields: dict[str, str]) -> None:
    assert decode_entry(encode_entry(fields)) == {
        name: value.encode("utf-8", "replace").decode() for name, value in fields.items()
    }


def test_without_journald_the_line_has_its_priority_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with closing(Journal(tmp_path / "nobody")) as journal:
        journal.error(**render_journal(None, "error", {"event": "degraded", "stage": "build"}))
    assert errors.getvalue() == "<3>degraded stage=build\n"


def test_a_journald_that_reads_nothing_holds_nobody_up(
    tmp_path: Path, journald: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with closing(Journal(tmp_path / "socket")) as journal:
        for number in range(5000):
            journal.info(**render_journal(None, "info", {"event": "rolled", "text": str(number) * 100}))
        while len(journald.recv(1 << 20)) and entry_waits(journald):
            pass
        journal.info(**render_journal(None, "info", {"event": "running"}))
        assert entry(journald)["EVENT"] == "running"
    assert errors.getvalue() == "", "it leads to journald as well"


def entry_waits(bound: socket.socket) -> bool:
    return bool(select.select([bound], [], [], 0)[0])


def test_a_line_that_no_datagram_holds_goes_to_standard_error(
    tmp_path: Path, journald: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with closing(Journal(tmp_path / "socket")) as journal:
        journal.info(**render_journal(None, "info", {"event": "big", "text": "x" * (1 << 20)}))
    assert errors.getvalue().startswith("<6>big text=xxx")


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


def test_auto_means_the_journal_where_it_is_one(
    tmp_path: Path, journald: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as stream, closing(Journal(tmp_path / "socket")) as journal:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(log_module, "_journal", lambda *_: journal)
        tapped: list[dict[str, Any]] = []

        def tap(_: object, __: str, row: Any) -> Any:
            tapped.append(dict(row))
            return row

        configure_log(LogConfig(), tap).warning("left_out", reason="why")
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        configure_log(LogConfig(), tap).warning("left_out", reason="why")
        monkeypatch.undo()
    assert json.loads((tmp_path / "log").read_text())["event"] == "left_out"
    assert entry(journald) | {"MESSAGE": ""} == {
        "MESSAGE": "", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "indexd", "EVENT": "left_out", "REASON": "why",
    }  # fmt: skip
    assert [row["event"] for row in tapped] == ["left_out", "left_out"]
