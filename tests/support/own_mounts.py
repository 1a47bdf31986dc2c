"""Mounts that only one test and its daemons see, and that go with the process that holds them, however a test ends.

::

    with OwnMounts() as mounts:
        data = mounts.tmpfs(tmp_path / "data", size=2 << 20)     # the path by which this process sees it
        with Daemon(store, data, *SIZES, tracer=mounts.words) as daemon:
            fill(data)

The holder has a mount namespace of its own; the daemons enter it, this process looks through ``/proc/PID/root``.
Without root it is a user namespace as well; what a kernel refuses there is missing (support.missing).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Self

import pytest

from support.missing import missing, need, need_root

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
