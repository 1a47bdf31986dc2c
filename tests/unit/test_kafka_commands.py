"""indexd kafka check and rebuild: words, JSON, exit codes, and the lock of a broker that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from indexd.errors import BusyError
from indexd.kafka.check import check
from indexd.kafka.format import lock_log_directory, refuse_while_locked
from indexd.storage.disk import Disk
from support.daemon import indexd_here
from support.kafka_records import batch, name, write_segment

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def log_directory(tmp_path: Path) -> Path:
    """Two partitions; the lock file of a broker that does not run."""
    for topic in ("one-0", "two-5"):
        for base in (0, 30):
            write_segment(
                tmp_path / topic, base, [batch(base + i, base + i, 1000 + i, bytes(39)) for i in range(30)], 300
            )
    (tmp_path / ".lock").write_bytes(b"")
    return tmp_path


@contextmanager
def broker(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


def indexd(*args: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    done = indexd_here("kafka", *args)
    return done.returncode, done.stdout, done.stderr


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_check_of_what_is_whole(log_directory: Path) -> None:
    code, out, err = indexd("check", log_directory)
    assert (code, err) == (0, "")
    assert out.startswith(f"{log_directory}: 2 partitions, 4 segments, 120 batches, 60 index entries, 11.7 KiB in ")
    assert out.endswith(" s: no findings\n")
    code, out, err = indexd("check", "--json", log_directory / "one-0")
    (summary,) = rows(out)
    assert (code, summary["kind"], summary["findings"], summary["segments"]) == (0, "summary", 0, 2)


def test_check_of_what_is_not(log_directory: Path) -> None:
    (log_directory / "one-0" / name(0, ".index")).write_bytes(bytes(range(80)))
    (log_directory / "two-5" / name(30, ".timeindex")).unlink()
    code, out, _ = indexd("check", log_directory)
    assert code == 1
    assert f"one-0/{name(0, '.index')} byte 8: entry 1 (offset 134810123, position 202182159): " in out
    assert f"two-5/{name(30, '.timeindex')} byte 0: there is no TimeIndex beside the log" in out
    assert out.endswith("11 findings\n")
    code, out, _ = indexd("check", "--json", log_directory, "--interval", 400)
    kinds = [row["kind"] for row in rows(out)]
    assert (code, kinds.count("finding"), kinds.count("note"), kinds[-1]) == (1, 11, 7, "summary")
    assert rows(out)[-1]["counts"] == {"position_behind_log": 10, "time_index_missing": 1}


def test_rebuild(log_directory: Path, tmp_path: Path) -> None:
    path = log_directory / "one-0" / name(0, ".index")
    whole = path.read_bytes()
    path.unlink()
    code, out, _ = indexd("rebuild", log_directory, "--interval", "300", "--out", tmp_path / "out")
    assert code == 0
    assert f"2 partitions, 4 segments, 4 of them written in {tmp_path / 'out'}, " in out
    assert not path.exists()
    code, out, _ = indexd("rebuild", log_directory, "--interval", "300", "--json")
    assert [row.get("changed") for row in rows(out)] == [True, False, False, False, 1]
    assert (code, path.read_bytes()) == (0, whole)
    assert indexd("check", log_directory)[0] == 0
    log = path.with_suffix(".log")
    log.write_bytes(log.read_bytes()[:-1])
    code, out, _ = indexd("rebuild", log_directory / "one-0", "--interval", "300")
    assert code == 1
    assert f"{name(0, '.log')} byte 2900: built up to here; the 99 bytes behind" in out
    assert out.endswith(" 1 problem\n")


def test_what_is_asked_wrongly(log_directory: Path) -> None:
    for args in (
        (),
        ("check",),
        ("mend", log_directory),
        ("check", log_directory / "nothing"),
        ("check", log_directory / "one-0" / name(0, ".log")),
        ("rebuild", log_directory, "--interval", "many"),
        ("rebuild", log_directory, "--interval", "-1"),
        ("rebuild", log_directory, "--interval", "0", "--max-index-size", "16"),
        ("rebuild", log_directory, "--out", log_directory),
    ):
        code, out, err = indexd(*args)
        assert (code, out, err.count("\n")) == (2, "", 1), args


@pytest.mark.parametrize("place", [".", "one-0", "link", "sub/link"])
def test_a_broker_runs(log_directory: Path, place: str) -> None:
    (log_directory / "sub").mkdir()
    (log_directory / "link").symlink_to("one-0")
    (log_directory / "sub" / "link").symlink_to(log_directory / "one-0")
    with broker(log_directory / ".lock") as process:
        for command in (("check",), ("rebuild",), ("rebuild", "--out", log_directory / "out")):
            code, out, err = indexd(*command, log_directory / place)
            assert (code, out) == (5, "")
            assert f"/.lock is locked by process {process.pid}; stop the broker first" in err
    assert not (log_directory / "out").exists()
    assert indexd("check", log_directory / place)[0] == 0


def test_a_broker_that_is_started_while_the_check_runs(log_directory: Path) -> None:
    class StartsOne(Disk):
        def open_read(self, path: Path) -> Any:
            if path.name == name(30, ".log"):
                running.append(holder.__enter__())
            return super().open_read(path)

    running: list[Any] = []
    holder = broker(log_directory / ".lock")
    try:
        with pytest.raises(BusyError):
            check(log_directory / "one-0", StartsOne())
    finally:
        holder.__exit__(None, None, None)


def test_a_broker_cannot_start_while_files_are_changed_but_can_while_they_are_read(log_directory: Path) -> None:
    def may_start() -> bool:
        script = HOLDER.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB")
        command = [sys.executable, "-c", script, str(log_directory / ".lock")]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0

    with lock_log_directory(Disk(), log_directory / "one-0"):
        assert not may_start()
    assert may_start()
    refuse_while_locked(Disk(), log_directory)
    assert may_start()


def test_no_lock_file_is_made(log_directory: Path) -> None:
    (log_directory / ".lock").unlink()
    assert indexd("check", log_directory)[0] == 0
    assert indexd("rebuild", log_directory)[0] == 0
    assert not (log_directory / ".lock").exists()


def test_a_check_writes_nothing(log_directory: Path) -> None:
    class ReadsOnly(Disk):
        def open_write(self, path: Path, *, create: bool = False) -> NoReturn:
            raise AssertionError(path)

        rename = unlink = make_dir = write_atomically = open_write  # type: ignore[assignment]  # none of them returns

    before = {path: path.stat().st_mtime_ns for path in log_directory.rglob("*")}
    assert not check(log_directory, ReadsOnly()).findings
    assert {path: path.stat().st_mtime_ns for path in log_directory.rglob("*")} == before
