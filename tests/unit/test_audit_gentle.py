"""An audit takes no more than it may: the rate, the page cache, the priority; and it can be ended at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexd.audit import AuditOptions, audit_here, load_kernels
from indexd.audit.gentle import Pace, PacedDisk, lower_priority, paced, piece_size
from indexd.audit.report import AuditReport
from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for, index_log
from support.daemon import COMMAND, compile_kernels, environment, indexd_here
from support.page_cache import PAGE, Watched, forget, in_use, resident
from support.small_log import SEGMENT_SIZE, Growing, write_log

LAYOUT = IndexLayout(500, 2000)
#: So that a task reads much more than the plan does.
WIDE = IndexLayout(100_000, 2000)
LARGE_SEGMENT = 4 << 20
VOLATILE = ("seconds", "bytesRead", "resumedTasks", "manner")


def run(config: Config, **options: Any) -> AuditReport:
    return audit_here(config, Disk(), AuditOptions(samples=0, **options), lambda *_: None)


# --- the rate ---


def test_a_pace_over_all_threads() -> None:
    now = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    pace = Pace(1000, lambda: now, sleep)
    pace.wait(0)
    assert slept == []
    for _ in range(10):
        pace.wait(500)
    assert now == pytest.approx(5.0)
    # What was not used is not saved up, but for a moment.
    now += 60
    pace.wait(1000)
    assert slept[-1] == pytest.approx(0.9)

    real = Pace(1 << 20)
    began = time.monotonic()
    threads = [threading.Thread(target=lambda: [real.wait(8192) for _ in range(16)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.4


def test_every_file_is_read_at_the_pace_and_as_it_is(tmp_path: Path) -> None:
    asked: list[int] = []
    pace = Pace(400_000, sleep=lambda _: None)
    wait = pace.wait
    pace.wait = lambda size: (asked.append(size), wait(size))[1]  # type: ignore[method-assign]
    disk = PacedDisk(Disk(), pace)
    data = os.urandom(300_000)
    (tmp_path / "file").write_bytes(data)
    assert (disk.list_dir(tmp_path), disk.list_dirs(tmp_path)) == ([("file", 300_000)], [])
    assert disk.exists(tmp_path / "file")
    assert asked == []
    with disk.open_read(tmp_path / "file") as file:
        assert file.pread(10, 299_995) == data[299_995:]
        buffer = bytearray(400_000)
        assert file.pread_into(buffer, 0) == 300_000
        assert bytes(buffer[:300_000]) == data
        assert (file.size(), file.stamp(), file.next_data(7)) == (300_000, disk.stamp(tmp_path / "file"), 7)
        assert file.fileno() > 0
    assert asked[0] == 10
    assert max(asked) <= 100_000  # a quarter of a second's worth: a wait is never longer
    assert disk.read(tmp_path / "file") == data


def test_the_key_is_honoured(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 2000)
    config = config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE)
    index_log(config)
    load_kernels(config)
    assert paced(disk := Disk(), config) is disk
    free = run(config)
    began = time.monotonic()
    slow = run(config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE, read_rate_max="1MiB"))
    assert time.monotonic() - began > free.bytes_read / (1 << 20) - 0.2
    assert (slow.audit, slow.manner) == (free.audit, ("at most 1MiB a second",))
    assert free.manner == ()


def test_tasks_that_are_kept_are_minutes_of_reading(tmp_path: Path) -> None:
    def size(**keys: Any) -> int:
        return piece_size(config_for(tmp_path, IndexLayout(5_000_000, 20_000_000), 1 << 30, **keys))

    file = 40 + 4 * 5_000_000 + 20 * 20_000_000
    assert size() == 16 << 30
    assert size(read_rate_max="50MiB") == 6000 << 20
    assert size(read_rate_max="1MiB") == 8 * file


def test_a_broker_that_writes_faster_than_it_may_be_read(tmp_path: Path) -> None:
    with Growing(tmp_path / "store", 3) as log:
        wait_for(lambda: len(list((tmp_path / "store" / "commitlog").iterdir())) > 2)
        config = config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE, read_rate_max="200KiB", read_bytes=65536)
        began = time.monotonic()
        found = run(config)
        assert time.monotonic() - began < 30
        assert log.stop() > found.audit.log_end
    assert found.audit.log_end >= found.plan.log_end
    assert found.audit.tail is not None


# --- the page cache ---


def test_pages_that_were_not_there_are_given_back_and_others_stay(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk_path / "store"
    with CommitLogWriter(store / "commitlog", LARGE_SEGMENT) as writer:
        number = 0
        while writer.max_offset < 60 << 20:
            writer.append(FrameSpec("T", os.urandom(900), {"UNIQ_KEY": f"{number:032X}"}, store_timestamp=number + 1))
            number += 1
    layout = IndexLayout(250_000, 13_000)
    config = config_for(store, layout, LARGE_SEGMENT)
    index_log(config, "4.7")
    segments, files = (sorted((store / name).iterdir()) for name in ("commitlog", "index"))
    assert len(segments) >= 15
    assert len(files) == 5
    for path in (*segments, *files):
        forget(path)
    used = (segments[4], files[1])
    watched = Watched(monkeypatch)
    with in_use(used[0]), in_use(used[1]):  # as by the broker
        assert run(config).is_sound
        assert not any(0 in resident(path) for path in used)
    read = [path for path in (*segments[:-3], *files[:-1]) if path not in used]
    # The plan looks at some messages and entries of each file.
    sizes = {path.name: PAGE * sum(resident(path)) for path in read}
    assert sum(sizes.values()) < len(files) << 20, sizes
    assert all(sum(watched.asked(path)) > 0.7 * len(watched.asked(path)) for path in read)
    # The newest segments and the newest index file are the broker's and its consumers': they are left as they come.
    for path in (*used, *segments[-2:], files[-1]):
        assert 1 not in watched.asked(path)


# --- the priority ---

_PRIORITIES = """
import ctypes, os, threading
from indexd.audit.gentle import lower_priority
print(lower_priority())
number = {"x86_64": 252, "aarch64": 31}[os.uname().machine]
def show(): print(os.nice(0), ctypes.CDLL(None).syscall(number, 1, 0) >> 13)
show()
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""


def test_the_lowest_priority_is_that_of_all_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _PRIORITIES], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["at the lowest priority of CPU and disk", "19 3", "19 3"]
    assert callable(lower_priority)


# --- an end at any moment ---


def wait_for(holds: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Interrupted:
    """``indexd audit --resume`` at a low rate over a store of many tasks, in a process of its own."""

    def __init__(self, tmp_path: Path) -> None:
        compile_kernels()
        store = tmp_path / "store"
        write_log(store, 4000)
        index_log(config_for(store, WIDE, SEGMENT_SIZE))
        sorted((store / "index").iterdir())[3].unlink()
        self.kept = tmp_path / "kept"
        self.words = [
            *(str(COMMAND), "audit", "--json", "--store", str(store), "--segment-size", str(SEGMENT_SIZE)),
            *("--hash-slot-num", str(WIDE.hash_slot_num), "--index-num", str(WIDE.index_num)),
        ]

    def start(self, *more: str) -> subprocess.Popen[str]:
        words = [*self.words, "--samples", "9", "--resume", str(self.kept), *more]
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
        )

    def rows(self, *more: str) -> list[dict[str, Any]]:
        done = indexd_here(*self.words[1:], "--samples", 9, *more)
        assert (done.returncode, done.stderr) == (1, "")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def lines(self) -> int:
        return self.kept.read_bytes().count(b"\n") if self.kept.exists() else 0


def test_killed_and_interrupted_it_goes_on_and_says_the_same(tmp_path: Path) -> None:
    audit = Interrupted(tmp_path)
    with audit.start("--read-rate-max", "3MiB") as killed:
        wait_for(lambda: audit.lines() >= 3)
        killed.kill()
        killed.communicate()
    lines = audit.lines()
    with audit.start("--read-rate-max", "3MiB") as stopped:
        wait_for(lambda: audit.lines() > lines)
        busy = indexd_here(*audit.words[1:], "--samples", 9, "--resume", audit.kept)
        stopped.send_signal(signal.SIGINT)
        _, words = stopped.communicate(timeout=60)
    assert (busy.returncode, busy.stdout) == (5, "")
    assert "is in use by another audit; wait for its end" in busy.stderr
    assert stopped.returncode == 130
    kept = audit.lines() - 1
    assert words.startswith(f"indexd: interrupted; {audit.kept} keeps {kept} of ")
    assert words.endswith(": the same command goes on with the rest\n")
    wanted, found = audit.rows(), audit.rows("--resume", str(audit.kept))
    assert found[-1]["resumedTasks"] == kept >= 3
    assert found[-1]["manner"] == []
    for rows in (wanted, found):
        for key in VOLATILE:
            rows[-1].pop(key)
    assert found == wanted
