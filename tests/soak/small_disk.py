"""A file system of few MiB for the data directory, so that it can be filled without harm to anybody else."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

SIZE = 64 << 20
_FILLER = "filler"
_SECONDS = 30
_CHUNKS = (1 << 20, 4096)


class SmallDisk:
    """A tmpfs mounted at ``root``; where that may not be done, a plain directory, and ``why_not`` says why."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.why_not: str | None = None
        self._is_mounted = False
        root.mkdir(parents=True)
        self._mount()

    def renew(self) -> None:
        """Everything in it goes."""
        if self._is_mounted:
            self.unmount()
            self._mount()
        else:
            shutil.rmtree(self.root)
            self.root.mkdir()

    def fill(self) -> None:
        """Until nothing more can be written; only where it is a file system of its own."""
        assert self._is_mounted
        with (self.root / _FILLER).open("ab", buffering=0) as file:
            for size in _CHUNKS:
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        """Give back what ``fill`` took."""
        (self.root / _FILLER).unlink(missing_ok=True)

    def unmount(self) -> None:
        """If it is mounted; what was in it is gone."""
        if not self._is_mounted:
            return
        self._is_mounted = False
        # Whoever still looks into it must not keep it mounted for ever: then it goes with its last user.
        if subprocess.run(["umount", self.root], capture_output=True, timeout=_SECONDS, check=False).returncode:
            subprocess.run(["umount", "--lazy", self.root], capture_output=True, timeout=_SECONDS, check=False)

    def _mount(self) -> None:
        if os.geteuid() != 0:
            self.why_not = "only root can mount a small file system to be filled"
            return
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "indexd-soak", str(self.root)]
        try:
            # Before the call: a signal may come between the mount and the note of it.
            self._is_mounted = True
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except FileNotFoundError:
            done = subprocess.CompletedProcess(command, errno.ENOENT, "", "there is no mount command")
        if done.returncode:
            self._is_mounted = False
            self.why_not = f"no small file system can be mounted: {' '.join(done.stderr.split())}"
