"""What a daemon under a fault must not do, and how faults come to it that need no mount.

``check_calm`` is the answer to "no storm, no spin": a daemon that waits writes few lines, makes no files and sleeps.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from support.daemon import Daemon, assert_same_index, index_files, indexd_here
from support.missing import missing, need
from support.small_log import SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: It looks again every second, so that a test sees several tries; a flush that failed is tried at the next interval.
RETRY = {"INDEXD_RETRY_MAX_SECONDS": "1", "INDEXD_FLUSH_INTERVAL": "0.5"}
DISK_FAILED = 70
UNSAFE = 3
_DATA_NAMES = {"index", "consumequeue", "sparse", "checkpoint", "frontier", "state", "abort", "starts", "lock"}
_DATA_NAMES |= {"filler", "lost+found"}
_LINES_A_SECOND = 5.0
_CPU_SHARE = 0.3
_TICKS = os.sysconf("SC_CLK_TCK")


def end_line(daemon: Daemon) -> str:
    """The one line with which a process says why it ended; there is exactly one, and no traceback."""
    text = daemon.log.read_text("utf-8")
    assert "Traceback" not in text, text
    plain = [line for line in text.splitlines() if not line.startswith("{")]
    assert len(plain) == 1, text
    assert plain[0].startswith("indexd: ")
    return plain[0]


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def all_files(data: Path) -> list[str]:
    """Every file of a data directory, by its path in it."""
    return sorted(str(path.relative_to(data)) for path in data.rglob("*") if path.is_file())


def check_calm(daemon: Daemon, seconds: float = 1.2) -> None:
    """While it waits for somebody to mend the fault it neither spins nor floods log or disk."""
    before, began = daemon.events(), cpu_seconds(daemon.pid)
    files = _count_files(daemon.data)
    time.sleep(seconds)
    lines = daemon.events()[len(before) :]
    assert len(lines) <= _LINES_A_SECOND * seconds, lines
    used = cpu_seconds(daemon.pid) - began
    assert used <= _CPU_SHARE * seconds, used
    # A temporary file each of checkpoint, frontier and state, and an index file that is just being tried.
    assert _count_files(daemon.data) <= files + 4
    assert not daemon.events("disturbed")


def _count_files(data: Path) -> int:
    # Without those of queues and segments: where only the flush has to wait, building goes on and makes them.
    return sum(not path.startswith(("consumequeue/", "sparse/")) for path in all_files(data))


def degraded(daemon: Daemon, *words: str, stage: str | None = None) -> str:
    """Wait until a stage has to wait for a reason with one of ``words`` in it; the line."""

    def look() -> str | None:
        lines = (row["problem"] for row in daemon.events("degraded") if stage in (None, row["stage"]))
        return next((line for line in lines if any(word in line for word in words)), None)

    return daemon.wait_for(look, f"degraded ({words})")


def still_degraded(daemon: Daemon) -> set[str]:
    """The stages that have not said ``healed`` after their last ``degraded``."""
    last = {row["stage"]: row["event"] for row in daemon.events() if row["event"] in ("degraded", "healed")}
    return {stage for stage, event in last.items() if event == "degraded"}


def check_whole(daemon: Daemon, end: int, *flags: str) -> None:
    """It catches up without a restart, stops cleanly, and leaves what an undisturbed build makes, and nothing else."""
    daemon.wait_caught_up(end)
    daemon.wait_durable(end)
    daemon.wait_for(lambda: not still_degraded(daemon) or None, "every stage to heal", timeout=10)
    daemon.wait_state(lambda row: not row["problems"])
    assert daemon.terminate() == 0
    check_directory(daemon.store, daemon.data, *flags)


def check_directory(store: Path, data: Path, *flags: str) -> None:
    """What stands in a directory after a clean stop is an undisturbed build, to the byte and to the file."""
    whole = data.with_name("undisturbed")
    words = ("--store", store, "--data", data.with_name("unused"), "--out", whole, *(flags or SIZES))
    done = indexd_here("rebuild", *words)
    assert done.returncode == 0, done.stderr
    assert_same_index(data, whole)
    assert {path.name for path in data.iterdir()} <= _DATA_NAMES, all_files(data)
    assert len(list((data / "index").iterdir())) == len(index_files(data)), all_files(data)


def run_again(store: Path, data: Path, end: int, *flags: str, tracer: Sequence[str] = ()) -> Daemon:
    """The next start after an end with the abort flag left: it recovers, and all is whole. The daemon, ended."""
    assert (data / "abort").exists()
    with Daemon(store, data, *(flags or SIZES), tracer=tracer) as daemon:
        daemon.wait_event("recovered")
        check_whole(daemon, end, *flags)
    return daemon


def under_permissions() -> tuple[str, ...]:
    """Words before a command that take from root what lets it pass by the bits of a file; nothing for other users."""
    if os.geteuid() != 0:
        return ()
    return (need("setpriv"), "--bounding-set", "-dac_override,-dac_read_search")


@contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    """Give a file or folder other permissions for a while."""
    before = path.stat().st_mode
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


@contextmanager
def no_descriptors(pid: int, spare: int = 0) -> Iterator[None]:
    """Let a process open ``spare`` more files at once, and give it its old limit back at the end."""
    used = set.union(*({int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()} for _ in range(5)))
    free = next(number for number in range(4096) if number not in used)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + spare, limits[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextmanager
def failing_calls(pid: int, calls: str, error: str = "EIO", *, path: Path | None = None) -> Iterator[None]:
    """Let these system calls of a running process fail, as a disk that dies does; of one file, or of all."""
    words = [need("strace"), "-f", "-q", "-o", "/dev/null", "-p", str(pid)]
    words += [] if path is None else ["-P", str(path)]
    tracer = subprocess.Popen([*words, "-e", f"trace={calls}", "-e", f"inject={calls}:error={error}"])
    try:
        status = Path(f"/proc/{pid}/status")
        deadline = time.monotonic() + 30
        while "TracerPid:\t0\n" in status.read_text("ascii"):
            if tracer.poll() is not None:
                missing("strace may not trace a process of the same user here; run this test as root")
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield
    finally:
        tracer.terminate()
        tracer.wait(30)
