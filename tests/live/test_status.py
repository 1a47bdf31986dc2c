"""status: a daemon that runs, over HTTP and by its state, one that was stopped or killed, none; and what is drawn."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.cli.status import StatusSample, draw, from_text64
from indexd.findings import findings_of
from indexd.serve.daemon_status import summary_of
from indexd.storage.lock import DirectoryLock
from support.daemon import COMMAND, Daemon, environment, indexd
from support.serving import make_certificate
from support.small_log import SIZES
from support.status import MESSAGES, row_of, status, stopped, store

__all__ = ["stopped", "store"]

#: To the terminal: colours, places of the cursor.
ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator[Daemon]:
    """A daemon that has caught up and serves HTTP."""
    with Daemon(store, store.parent / "running", *SIZES, env={"INDEXD_HTTP": "127.0.0.1:0"}) as daemon:
        daemon.wait_caught_up()
        daemon.wait_state(lambda row: row["durableOffset"] == row["phyOffset"])
        yield daemon


# --- a daemon that runs


def test_it_is_asked_over_http(running: Daemon) -> None:
    state = running.state()
    row = row_of(running.data)
    assert row["asked"] == f"http://{state['http']}"
    assert (row["phase"], row["pid"], row["bootId"]) == ("running", running.pid, state["bootId"])
    for key in ("phyOffset", "durableOffset", "commitLogMaxOffset", "storeTimestamp", "messages"):
        assert row[key] == state[key], key
        assert isinstance(row[key], int)
    assert row["messages"] == MESSAGES
    assert row["outputs"][0]["phyOffset"] == row["phyOffset"]
    assert row["uncovered"] == row["findings"] == row["notes"] == []
    assert "created" in [event["name"] for event in row["events"]]


def test_what_is_drawn_is_plain_text_of_one_width(running: Daemon) -> None:
    drawn = status(running.data)
    assert drawn == drawn.replace(ESCAPE, "").replace("\r", "")
    assert max(map(len, drawn.splitlines())) <= 100
    assert all(line == line.rstrip() for line in drawn.splitlines())
    state = running.state()
    for text in (
        f"running  pid {running.pid}",
        f"asked http://{state['http']}",
        "0 B, 0 ms, 0 messages, caught up",
        f"durable to {state['durableOffset']}",
        f"covered   log bytes 0 to {state['phyOffset']}",
        f"{MESSAGES:,} messages",
        f"data      {running.data}",
        "key     ",
        "sparse  ",
        "last events",
    ):
        assert text in drawn, drawn
    ascii_only = status(running.data, PYTHONIOENCODING="ascii")
    assert ascii_only.isascii()


def test_watching_goes_on_until_somebody_stops_it(running: Daemon) -> None:
    for words in (["--watch", "0.1"], ["--json", "--watch", "0.1s"]):
        command = [COMMAND, "status", "--data", running.data, *words]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        ) as watching:
            assert watching.stdout is not None
            seen = [next(line for line in watching.stdout if "running" in line) for _ in range(3)]
            watching.send_signal(signal.SIGINT)
            rest, errors = watching.communicate(timeout=30)
        assert (watching.returncode, errors) == (130, "")
        if "--json" in words:
            assert [json.loads(line)["phase"] for line in seen] == ["running"] * 3
        else:
            assert ESCAPE not in "".join([*seen, rest])


def test_a_terminal_is_redrawn_in_place_and_keeps_the_last_look(running: Daemon) -> None:
    ours, theirs = pty.openpty()
    command = [COMMAND, "status", "--watch", "0.1", "--data", running.data]
    watching = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment())
    os.close(theirs)
    seen = b""
    with os.fdopen(ours, "rb", buffering=0) as screen:
        while seen.count(b"asked http") < 3:
            seen += screen.read(65536)
        watching.send_signal(signal.SIGINT)
        with suppress(OSError):  # nobody has the other end any more
            while part := screen.read(65536):
                seen += part
    assert watching.wait(30) == 130
    assert b"caught up" in seen.rpartition(b"\x1b[H\x1b[2J")[2]
    assert b"Traceback" not in seen


def test_an_address_that_is_given_is_asked_and_nothing_else(running: Daemon, tmp_path: Path) -> None:
    address = running.state()["http"]
    row = row_of(tmp_path / "none", "--http", address)
    assert (row["pid"], row["asked"]) == (running.pid, f"http://{address}")
    # The key elsewhere is where a daemon listens: it asks nobody there.
    assert "holds no index yet" in indexd("status", "--data", tmp_path, env={"INDEXD_HTTP": address}).stderr


def test_an_address_where_nobody_answers_or_somebody_else(running: Daemon, stopped: Path) -> None:
    row = row_of(stopped, "--http", "127.0.0.1:1", code=1)
    assert (row["phase"], row["asked"]) == ("unreachable", "http://127.0.0.1:1")
    assert row["findings"] == ["no answer from http://127.0.0.1:1: Connection refused"]
    drawn = status(stopped, "--http", "127.0.0.1:1", code=1)
    assert drawn.startswith("unreachable\n")
    assert "! no answer from http://127.0.0.1:1" in drawn
    for words, says in (
        (["--http", "off"], "nowhere to ask"),
        (["--http", "127.0.0.1:0"], "nowhere to ask"),
        (["--watch", "0.01"], "is not from 0.1 to 3600"),
        (["--ca", "/none/ca.pem"], "no certificates in /none/ca.pem"),
    ):
        done = indexd("status", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert says in done.stderr


def test_one_that_does_not_answer_is_a_finding_and_one_that_was_killed_another(store: Path, tmp_path: Path) -> None:
    with Daemon(store, tmp_path / "data", *SIZES, env={"INDEXD_HTTP": "127.0.0.1:0"}) as daemon:
        address = daemon.wait_caught_up()["http"]
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            row = row_of(daemon.data, code=1)
            assert time.monotonic() - began < 30
            drawn = status(daemon.data, code=1)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert row["asked"] == str(daemon.data / "state")
        assert row["findings"] == [f"HTTP at {address}: timed out"]
        assert (row["phase"], row["lastPhase"], row["messages"]) == ("unreachable", "running", MESSAGES)
        assert row["ageMilliseconds"] >= 5000
        assert "does not answer (figures are " in drawn.splitlines()[0]
        assert "running" not in drawn.splitlines()[0]
        assert row_of(daemon.data)["asked"] == f"http://{address}"
        daemon.kill()
        row = row_of(daemon.data, code=1)
    assert (row["phase"], row["lastShutdownClean"]) == ("crashed", False)
    crashed = "no daemon runs: it crashed or was killed; the next start recovers (the abort flag is there)"
    assert row["findings"] == [crashed]


def test_one_without_http_is_known_by_its_state(store: Path, tmp_path: Path) -> None:
    with Daemon(store, tmp_path / "data", *SIZES) as daemon:
        state = daemon.wait_caught_up()
        row = row_of(daemon.data)
        assert (row["asked"], row["phase"]) == (str(daemon.data / "state"), "running")
        assert row["phyOffset"] == state["phyOffset"]
        assert row["notes"] == ["it serves no HTTP, so this is what it wrote down last"]
        assert row["findings"] == row["events"] == []
        # A state that another process left is not believed: with none at all it is being opened.
        os.kill(daemon.pid, signal.SIGSTOP)
        (daemon.data / "state").write_text(json.dumps(state | {"pid": daemon.pid + 1}))
        assert row_of(daemon.data)["phase"] == "opening"
        (daemon.data / "state").write_text(json.dumps(state | {"writtenAt": state["writtenAt"] - 600_000}))
        assert "s ago" in row_of(daemon.data, code=1)["findings"][0]


def test_a_token_is_borne_and_a_wrong_one_said(store: Path, tmp_path: Path) -> None:
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("open-sesame\n")
    wrong.write_text("guess-again")
    env = {"INDEXD_HTTP": "127.0.0.1:0", "INDEXD_HTTP_TOKEN_FILE": str(token)}
    with Daemon(store, tmp_path / "data", *SIZES, env=env) as daemon:
        address = daemon.wait_caught_up()["http"]
        assert row_of(daemon.data, "--http-token-file", token)["asked"] == f"http://{address}"
        assert row_of(tmp_path, "--http", address, "--http-token-file", token)["pid"] == daemon.pid
        # Without it, its state says as much; that somebody has no right is no finding of the daemon's.
        row = row_of(daemon.data)
        assert (row["asked"], row["findings"]) == (str(daemon.data / "state"), [])
        assert row["notes"] == [f"HTTP at {address}: 401 Unauthorized"]
        # One that cannot be read is none; the key may be there for the daemon alone.
        assert row_of(daemon.data, INDEXD_HTTP_TOKEN_FILE=str(tmp_path / "none"))["notes"] == row["notes"]
        for words in ([], ["--http-token-file", wrong]):
            done = indexd("status", "--http", address, *words)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
            assert re.search(f"{address} wants another token: .*--http-token-file", done.stderr)


@pytest.mark.parametrize("content", [None, "-----BEGIN KEY-----\nsecret\n-----END KEY-----\n", "s\u00e9cret-secret"])
def test_a_file_without_a_token_is_one_line_that_does_not_show_it(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content, "utf-8")
    done = indexd("status", "--http", "127.0.0.1:1", "--http-token-file", file)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert ("cannot open" if content is None else "holds no token: 8 to 4096 printable") in done.stderr
    # Nobody was asked; openssl would write over the file.
    assert not [part for part in ("wants another", "openssl", "secret", "BEGIN", "cret-") if part in done.stderr]


def test_tls_with_the_daemons_own_certificate_or_one_that_vouches_for_it(store: Path, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "DNS:localhost")
    tls = {"INDEXD_HTTP_TLS_CERT": str(cert), "INDEXD_HTTP_TLS_KEY": str(key)}
    with Daemon(store, tmp_path / "data", *SIZES, env={"INDEXD_HTTP": "127.0.0.1:0", **tls}) as daemon:
        address = daemon.wait_caught_up()["http"]
        # As the daemon is configured: that certificate alone, whatever name it is asked by.
        assert row_of(daemon.data, **tls)["asked"] == f"https://{address}"
        port = address.rpartition(":")[2]
        assert row_of(tmp_path, "--http", f"localhost:{port}", "--ca", cert)["pid"] == daemon.pid
        for flags, says in ((["--ca", cert], "TLS: "), ([], "with --ca")):
            (finding,) = row_of(tmp_path, "--http", address, *flags, code=1)["findings"]
            assert says in finding
        assert row_of(daemon.data, code=1)["asked"] == str(daemon.data / "state")


# --- a daemon that was stopped or killed, one that is not that far yet, none at all


def test_one_that_was_stopped_also_without_its_log(stopped: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(stopped, data)
    # A state that is left over counts for nothing.
    (data / "state").write_text('{"pid": 1, "phase": "running", "phyOffset": 5}')
    row = row_of(data, code=1)
    assert (row["phase"], row["lastShutdownClean"], row["asked"]) == ("stopped", True, str(data / "frontier"))
    assert row["findings"] == ["no daemon runs: it was stopped"]
    files = len(list((data / "index").iterdir()))
    assert (row["messages"], row["caughtUp"], row["indexFiles"]) == (MESSAGES, True, files)
    assert "all of the log" in status(data, code=1)
    row = row_of(data, "--store", tmp_path / "none", code=1)
    assert "caughtUp" not in row
    (note,) = row["notes"]
    assert f"the log cannot be looked at: there is no commitlog at {tmp_path}/none/commitlog" in note
    drawn = status(data, "--store", tmp_path / "none", code=1)
    assert drawn.startswith("stopped\n")
    assert "all of the log" not in drawn, "where the log ends is not known"


def test_no_index_at_all(tmp_path: Path) -> None:
    for data in (tmp_path, tmp_path / "none"):
        done = indexd("status", "--data", data)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"{data} holds no index yet" in done.stderr
    (tmp_path / "frontier").write_text("{")
    assert indexd("status", "--data", tmp_path).returncode == 4


def test_a_recovery_is_drawn(tmp_path: Path) -> None:
    # What a recovering daemon writes down, with the lock held as it holds it.
    lock, pid = DirectoryLock(tmp_path / "lock"), os.getpid()
    lock.acquire()
    row = row_of(tmp_path, INDEXD_HTTP="off")
    assert (row["phase"], row["pid"], row["findings"]) == ("opening", pid, [])
    progress = {"step": "compare", "unit": "bytes", "done": 3 << 20, "total": 6 << 20}
    state = {"pid": pid, "phase": "recovering", "http": None, "recovering": progress}
    (tmp_path / "state").write_text(json.dumps(state | {"summary": summary_of(state)}))
    assert row_of(tmp_path)["recovering"] == progress
    drawn = status(tmp_path)
    assert drawn.startswith(f"recovering  pid {pid}\n")
    assert "Recovering, compare: 50 %" in drawn
    lock.release()


# --- what is drawn and worked out of a row

OFFSETS = st.integers(min_value=0, max_value=2**63 - 1)


@given(
    st.dictionaries(
        st.sampled_from(["commitLogMinOffset", "durableOffset", "readOffset", "commitLogMaxOffset"]), OFFSETS
    ),
    OFFSETS,
    st.lists(st.tuples(OFFSETS, OFFSETS, st.text()), max_size=3),
)
def test_any_row_can_be_drawn(row: dict[str, Any], built: int, gaps: list[tuple[int, int, str]]) -> None:
    row = row | {"phyOffset": built, "uncovered": gaps, "phase": "running"}
    look = StatusSample(row, "here\x1b[2J", 0.0, findings=["\x1b[31m" + why for _, _, why in gaps])
    lines = list(draw(look))
    assert sum(line.startswith("! ") for line in lines) == len(gaps)
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, []),
        ({"problems": {}, "corrupt": None, "uncovered": [], "stalled": {}, "broker": {"unsafe": []}}, []),
        (
            {"problems": {"build": "cannot write /d: full; free space"}},
            ["build waits: cannot write /d: full; free space"],
        ),
        ({"stalled": {"drain": 63.4}}, ["drain has not moved for 63 s"]),
        ({"corrupt": {"offset": 7, "reason": "bad magic"}}, ["bytes that are no frame, at 7: bad magic"]),
        ({"uncovered": [[0, 10, "expired"]], "commitLogMinOffset": 10}, []),
        (
            {"uncovered": [[0, 10, "expired"], [5, 30, "corrupt"], [40, 41, "a"]], "commitLogMinOffset": 10},
            ["21 bytes of the log are not covered: a, corrupt"],
        ),
        ({"broker": {"alive": False, "unsafe": ["it indexes"]}}, ["it indexes"]),
    ],
)
def test_what_needs_an_operator(row: dict[str, Any], expected: list[str]) -> None:
    found = findings_of(row)
    assert len(found) == len(expected)
    assert all(text in line for text, line in zip(expected, found, strict=True))


def test_texts_of_digits_are_numbers_again_but_names_are_not() -> None:
    answer = {
        "phyOffset": "9223372036854775807", "uncovered": [["0", "12", "no. 7"]], "pid": 7, "cluster": "2024",
        "newest": [{"name": "20261121132749727", "endPhyOffset": "-1"}], "names": ["20261121132749727"],
        "broker": {"maxOffset": "5", "alive": None, "why": "3"}, "diskUsedRatio": 0.5, "caughtUp": True, "version": "1",
    }  # fmt: skip
    assert from_text64(answer) == {
        **answer,
        "phyOffset": 2**63 - 1,
        "uncovered": [[0, 12, "no. 7"]],
        "newest": [{"name": "20261121132749727", "endPhyOffset": -1}],
        "broker": {"maxOffset": 5, "alive": None, "why": "3"},
    }
