"""OUT.building: where a rebuild on Spark makes everything, beside its target, until it is renamed at the end.

::

    OUT.building/lock        as that of a data directory: one rebuild at a time
    OUT.building/job         a word that executors have to find there
    OUT.building/runs/       what stage one makes; kept when a job fails, for one that resumes
    OUT.building/attempts/   what stage two makes, a directory an attempt
    OUT.building/...         a data directory, once it is committed; manifest.json is its last file
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from indexd.errors import DiskError
from indexd.spark.rebuild.stage_one import left_runs
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles, building_of

MANIFEST = "manifest.json"


class JobDirectory:
    """One rebuild's, from ``open`` to ``finish`` or ``abandon``, locked between. Raises DiskError, BusyError."""

    def __init__(self, disk: Disk, out: Path) -> None:
        self._disk = disk
        self.out = out.resolve()
        self.path = building_of(out)
        self.files = DataFiles(self.path)
        self.runs = self.path / "runs"
        self.attempts = self.path / "attempts"
        self.token_file = self.path / "job"
        self.token = uuid.uuid4().hex
        self._lock = DirectoryLock(self.files.lock)

    def __repr__(self) -> str:
        return f"JobDirectory({self.path})"

    def open(self, *, resume: bool) -> None:
        """Take the lock and leave nothing of an earlier rebuild, but its runs to one that resumes."""
        self._disk.make_dir(self.path)
        self._lock.acquire()
        try:
            kept = {self.files.lock, self.runs} if resume else {self.files.lock}
            for path in sorted(self.path.iterdir()):
                if path not in kept:
                    self._remove(path)
            for directory in (self.runs, self.attempts):
                self._disk.make_dir(directory)
            self._disk.write_atomically(self.token_file, self.token.encode())
        except BaseException:
            self._lock.release()
            raise

    def finish(self, manifest: dict[str, Any]) -> None:
        """All is committed and durable below ``path``: write the manifest, and give the directory its name."""
        for path in (self.runs, self.attempts, self.token_file):
            self._remove(path)
        self._disk.write_atomically(self.path / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
        self._disk.unlink(self.files.lock)
        if self._disk.exists(self.out):
            self._disk.remove_dir(self.out)
        self._disk.rename(self.path, self.out)
        self._disk.sync_dir(self.out.parent)
        self._lock.release()

    def abandon(self) -> bool:
        """The job failed: leave what can be resumed and nothing else. What cannot be removed stays for the next one.

        Whether there is anything to be resumed.
        """
        kept = False
        try:
            # First, so that a task that starts only now ends at once.
            self._disk.unlink(self.token_file)
            kept = any(left_runs(self._disk, self.runs))
            if kept:
                self._remove(self.attempts)
            else:
                self._disk.remove_tree(self.path)
        except (DiskError, OSError):
            pass
        finally:
            self._lock.release()
        return kept

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            self._disk.remove_tree(path)
        else:
            self._disk.unlink(path)


def attempt_of(directory: Path) -> Path:
    """A name beside ``directory`` that no other attempt has."""
    return directory.with_name(f"{directory.name}.{uuid.uuid4().hex[:12]}")
