"""What a daemon under a fault must not do, and how faults come to it that need no mount.

``check_calm`` is the answer to "no storm, no spin": a daemon that waits writes few lines, makes no files and sleeps.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from unittest import mock

import pytest

from indexd.cli.main import main
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from support.beside_log import assert_beside, write
from support.commitlog_writer import FrameSpec
from support.daemon import Daemon, assert_same_index, index_files, indexd_here, rebuild
from support.missing import missing, need, need_root
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE, SIZES, write_log

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
    rebuild(store, whole, *(flags or SIZES))
    assert_same_index(data, whole)
    assert {path.name for path in data.iterdir()} <= _DATA_NAMES, all_files(data)
    assert len(list((data / "index").iterdir())) == len(index_files(data)), all_files(data)


class Place:
    """A store, a data directory, and daemons for them; ``env`` and ``tracer`` are theirs."""

    def __init__(
        self, root: Path, data: Path | None = None, tracer: Sequence[str] = (), env: dict[str, str] = RETRY
    ) -> None:
        self.store, self.data, self.tracer, self.env = root / "store", data or root / "data", tracer, env
        self.end = 0

    @property
    def words(self) -> tuple[object, ...]:
        """Of a command on both, with the sizes of ``small_log``."""
        return ("--store", self.store, "--data", self.data, *SIZES)

    def recover(self) -> None:
        """Catch up with the log, and stop."""
        done = indexd_here("--recover", *self.words)
        assert done.returncode == 0, done.stderr

    def log(self, what: int | list[FrameSpec] = 3000) -> None:
        """Append so many messages, or these."""
        if isinstance(what, int):
            self.end = write_log(self.store, what, seed=4 if self.end else 1, start_offset=self.end)
        else:
            self.end = write(self.store, what, SEGMENT_SIZE)

    def daemon(self, *flags: str) -> Daemon:
        """With the sizes of ``small_log``, or others."""
        return Daemon(self.store, self.data, *(flags or SIZES), env=self.env, tracer=self.tracer)

    @contextmanager
    def running(self, what: int | list[FrameSpec] = 1000, *flags: str) -> Iterator[Daemon]:
        """A daemon that has made a log durable."""
        self.log(what)
        with self.daemon(*flags) as daemon:
            daemon.wait_durable(self.end)
            yield daemon

    def fails(self, words: str) -> None:
        """A daemon that ends at once with one line."""
        with self.daemon() as daemon:
            assert daemon.wait() == DISK_FAILED
            assert words in end_line(daemon)

    def mended(self, daemon: Daemon, *flags: str) -> None:
        """It goes on by itself: all outputs are whole then."""
        check_whole(daemon, self.end, *flags)
        if not flags:
            assert_beside(self.data, self.store, SEGMENT_SIZE, QUEUE_FILE_SIZE)

    def starts_well(self) -> None:
        """It recovers if need be, catches up, stops, and all is whole."""
        with self.daemon() as daemon:
            check_whole(daemon, self.end)

    def run_again(self) -> None:
        """The same after an end with the abort flag left, and it says that it recovered."""
        assert (self.data / "abort").exists()
        with self.daemon() as daemon:
            daemon.wait_event("recovered")
            check_whole(daemon, self.end)


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


PAGE = 4096
_AS_ROOT = "run this test as root, and not in a container without the right to mount"
_CHUNKS = (256 * PAGE, 16 * PAGE, PAGE)


class OwnMounts:
    """A mount namespace; for use in a ``with`` block. ``words`` before a command make it run inside."""

    def __init__(self) -> None:
        rights = [] if os.geteuid() == 0 else ["-Ur"]
        # Ends with its standard input, so with this process at the latest; the mounts go with it.
        command = [need("unshare"), *rights, "-m", "--propagation", "private", "sh", "-c", "echo; cat"]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"\n":
            _, errors = self._holder.communicate()
            missing(f"no mount namespace can be made here, {errors.decode().strip()}; {_AS_ROOT}")
        enter = ["-m"] if not rights else ["-U", "-m", "--preserve-credentials"]
        self.words = (need("nsenter"), "-t", str(self._holder.pid), *enter)
        self._root = Path(f"/proc/{self._holder.pid}/root")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.communicate(timeout=30)

    def run(self, *words: object) -> None:
        """Run a command inside, which must end well."""
        done = self._ask(*words)
        if done.returncode:
            pytest.fail(f"{' '.join(map(str, words))}: {done.stderr.strip()}", pytrace=False)

    def _mount(self, *words: object) -> None:
        done = self._ask("mount", *words)
        if done.returncode:
            missing(f"mount {' '.join(map(str, words))} is refused here, {done.stderr.strip()}; {_AS_ROOT}")

    def _ask(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [*self.words, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    def tmpfs(self, path: Path, size: int) -> Path:
        """An empty file system of ``size`` bytes in memory."""
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", path)
        return self._seen(path)

    def ext4(self, path: Path, size: int) -> Path:
        """An ext4 of ``size`` bytes on a loop device, which only root may make."""
        need_root("mount an ext4")
        path.mkdir()
        image = path.with_name(path.name + ".img")
        with image.open("wb") as file:
            file.truncate(size)
        # Nothing is kept back for root: full is full.
        subprocess.run([need("mkfs.ext4"), "-q", "-m", "0", "-b", str(PAGE), image], check=True)
        self.mount_image(path)
        return self._seen(path)

    def mount_image(self, path: Path) -> None:
        """Mount what ``ext4`` has made, again."""
        self._mount("-o", "loop", path.with_name(path.name + ".img"), path)

    def read_only(self, path: Path) -> Path:
        """Lay the directory over itself, read-only: a remount is refused while a file is open for writing."""
        if not path.is_mount():
            path.mkdir(exist_ok=True)
        self._mount("--bind", path, path)
        self._mount("-o", "remount,bind,ro", path)
        return self._seen(path)

    def unmount(self, path: Path) -> None:
        """Take the topmost mount off ``path``."""
        self.run("umount", path)

    def _seen(self, path: Path) -> Path:
        return self._root / path.relative_to("/")


def fill(directory: Path, leave_pages: int = 0) -> Path:
    """Fill a file system up to the last ``leave_pages`` pages; the file that has to go for the space to come back."""
    filler = directory / "filler"
    with filler.open("wb") as file:
        size = 0
        for chunk in _CHUNKS:
            try:
                while True:
                    os.posix_fallocate(file.fileno(), size, chunk)
                    size += chunk
            except OSError:
                continue
        file.truncate(size)
        os.fsync(file.fileno())
        os.ftruncate(file.fileno(), size - leave_pages * PAGE)
    return filler


_PAUSE = 0.01


def held_until(gate: Path, phase: str = "opening") -> tuple[str, ...]:
    """Words before a daemon's command: it waits until ``gate`` exists, in its phase ``opening``, before recovery, or in
    ``recovering``, with something of a step still to do."""
    run = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from support import faults; faults.run()"
    )
    return (sys.executable, "-P", "-c", run, phase, str(gate))


def _run(phase: str, gate: Path, words: list[str]) -> None:
    prepare_compiler()
    # These load numba.
    from indexd.recovery.open import load_kernels
    from indexd.serve.daemon_status import DaemonStatus
    from indexd.service import start

    recovering = DaemonStatus.recovering

    def wait() -> None:
        while not gate.exists():
            time.sleep(_PAUSE)  # signals are taken meanwhile, as they are by an opening that takes long

    def wait_and_load(config: Config) -> None:
        if phase == "opening":
            wait()
        load_kernels(config)

    def recover_and_wait(board: DaemonStatus, step: str, done: int, total: int) -> None:
        recovering(board, step, done, total)
        if phase == "recovering" and total:
            wait()

    with (
        mock.patch.object(start, "load_kernels", wait_and_load),
        mock.patch.object(DaemonStatus, "recovering", recover_and_wait),
    ):
        main(words)


def run() -> None:
    """What ``held_until`` starts: behind the gate comes the command itself, which is what runs here already."""
    _run(sys.argv[1], Path(sys.argv[2]), sys.argv[4:])
