"""Target: the directory that an export writes, whole or not at all, and what a killed export left there.

::

    TARGET/topic=A/day=2026-08-01/part-*.parquet   (or without partitions TARGET/part-*.parquet)
    TARGET/_manifest.json     what was exported, and which files hold it: they and no others count
    TARGET/_SUCCESS           empty; there when nothing was left half done
    TARGET/_temporary/JOB/    files of tasks, journal.json; on a file system also _temporary/lock

Readers pass over names that begin with ``_``. On a file system the tasks write below ``_temporary``, under names that
no reader takes for Parquet. The driver checks their sizes, writes the journal, renames, and replaces the manifest: from
then on the export has happened. Behind a URI nothing can be renamed: the tasks write where the files will stay, under
names that hold the job and the attempt.

A crash leaves ``_temporary/JOB``. Whoever exports next goes by the manifest: if it names the job, the rest is done (old
files of an overwrite are removed); if not, every file of the job is removed. Until then a crash between the first
rename and the manifest shows some files of the new export beside the old ones, without ``_SUCCESS``, and one behind it
the old ones of an overwrite beside the new. Only one export may write a target at a time; a lock sees to it on a file
system.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from indexd.config.units import RemotePath
from indexd.errors import CorruptDataError, UnsafeStoreError
from indexd.spark.export.outputs import TEMPORARY, LocalFiles, TargetFiles
from indexd.spark.export.parquet import Part
from indexd.spark.export.remote_outputs import RemoteFiles

MANIFEST = "_manifest.json"
SUCCESS = "_SUCCESS"
_JOURNAL = "journal.json"
_VERSION = 1
# The names that exports give their files: none leads upwards, or to what is not theirs.
_NAME = re.compile(r"(?:(?:topic|day)=[^/\x00]+/)*part-[^/\x00]+\.parquet")
_ELSEWHERE = "nothing was touched; export to another directory"


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The last message that was read: its physical offset, size in bytes, and the CRC-32 of its first 64 KiB."""

    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Export:
    """One export as the manifest keeps it: what was asked for, the log's bytes that were read, the files.

    ``last_message`` is None where no export of the store has met one. ``expired_bytes`` of log between the export
    before and this one are in neither.
    """

    job: str
    store: str
    begin_offset: int
    end_offset: int
    selection: dict[str, Any]
    rows: int
    written_at: str
    files: tuple[tuple[str, int, int], ...]
    last_message: LastMessage | None = None
    expired_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a target holds: the files' layout, which is one for all, and its exports, oldest first."""

    schema_version: int
    columns: tuple[str, ...]
    partition_by: tuple[str, ...]
    exports: tuple[Export, ...] = field(default=())

    @property
    def names(self) -> set[str]:
        """The files of all exports."""
        return {name for export in self.exports for name, _, _ in export.files}

    def with_export(self, export: Export) -> Manifest:
        """This and one more."""
        return replace(self, exports=(*self.exports, export))

    def to_json(self) -> bytes:
        """As it is written."""
        return (json.dumps({"format": _VERSION} | asdict(self), ensure_ascii=False, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, path: Path) -> Manifest:
        """CorruptDataError when it is none, or names files that no export can have written."""
        try:
            found = json.loads(data)
            if found.pop("format") != _VERSION:
                raise ValueError("it is of another version")
            exports = tuple(_export(dict(row)) for row in found.pop("exports"))
            return cls(
                schema_version=int(found["schema_version"]),
                columns=tuple(found["columns"]),
                partition_by=tuple(found["partition_by"]),
                exports=exports,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptDataError(f"{path / MANIFEST} is no manifest of an export: {error}", _ELSEWHERE) from None


def _export(row: dict[str, Any]) -> Export:
    # ValueError and TypeError for what no export has written.
    row["files"] = tuple((_checked(name), int(rows), int(size)) for name, rows, size in row["files"])
    row["begin_offset"], row["end_offset"] = int(row["begin_offset"]), int(row["end_offset"])
    if row.get("last_message") is not None:
        last = row["last_message"]
        row["last_message"] = LastMessage(int(last["offset"]), int(last["size"]), int(last["crc"]))
    return Export(**row)


def _checked(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"it names {name!r:.200}, which no export writes")
    return name


class Target:
    """One export into ``path``, by the driver: ``opened``, tasks write, ``commit``. Raises DiskError, BusyError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = uuid.uuid4().hex[:12]
        self._files = target_files(path)
        #: The manifest as it was found; None where there is none.
        self.manifest: Manifest | None = None

    def __repr__(self) -> str:
        return f"Target({self.path}, job={self.job})"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Alone in it and rid of what killed exports left; behind it nothing is there but what was committed."""
        with self._files.locked():
            self._settle(self._left_jobs())
            try:
                yield
            finally:
                self._settle([self.job])

    def begin(self) -> None:
        """Tasks may write from now on."""
        self._journal({})

    def foreign_file(self) -> str | None:
        """A file that no export made, if there is one; readers would take it for one of the export."""
        known = self.manifest.names if self.manifest else set()
        for name in self._files.below(""):
            if name not in known and not name.startswith(("_", ".")):
                return name
        return None

    def commit(self, parts: Sequence[Part], manifest: Manifest) -> None:
        """Make ``manifest`` what the target holds, of which ``parts`` are new; files that it does not name go."""
        moves = {self._files.written_name(self.job, part.name): part.name for part in parts}
        for part in parts:
            self._check(self._files.written_name(self.job, part.name), part.size)
        removed = sorted((self.manifest.names if self.manifest else set()) - manifest.names)
        self._journal({"files": sorted(moves.values()), "removed": removed})
        self._files.remove([SUCCESS])
        self._files.move(moves)
        self._files.write(MANIFEST, manifest.to_json())
        self._files.remove(removed)

    def _check(self, written: str, size: int) -> None:
        found = self._files.size(written)
        if found != size:
            what = "is not there" if found is None else f"has {found} bytes instead of {size}"
            raise UnsafeStoreError(
                f"{self.path / written}, which a task has written, {what}",
                "workers and driver have to see one file system: give a shared directory or a URI as --to",
            )

    def _journal(self, what: dict[str, list[str]]) -> None:
        self._files.write(f"{TEMPORARY}/{self.job}/{_JOURNAL}", json.dumps(what).encode())

    def _left_jobs(self) -> list[str]:
        if self._files.leads_out(TEMPORARY):
            raise self._outside(TEMPORARY)
        below = (name.split("/") for name in self._files.below(TEMPORARY))
        return sorted({parts[1] for parts in below if len(parts) > 2})

    def _settle(self, jobs: Sequence[str]) -> None:
        # By the manifest that is there: a job that it names is finished, any other undone.
        data = self._files.read(MANIFEST)
        self.manifest = None if data is None else Manifest.from_json(data, self.path)
        known = self.manifest.names if self.manifest else set()
        done = {export.job for export in self.manifest.exports} if self.manifest else set()
        journals = [self._left(job, "removed" if job in done else "files") for job in jobs]
        self._check_inside({*known, *(name for names in journals for name in names)})
        self._check_inside([name for job in jobs for name in self._files.below(f"{TEMPORARY}/{job}")])
        for job, names in zip(jobs, journals, strict=True):
            self._files.remove(sorted(names - known))
            self._files.drop(job, known)
        if self.manifest is not None and self._files.size(SUCCESS) is None:
            self._files.write(SUCCESS, b"")

    def _left(self, job: str, key: str) -> set[str]:
        # The names that a job's journal has under the key; CorruptDataError if they are no export's.
        name = f"{TEMPORARY}/{job}/{_JOURNAL}"
        try:
            journal = json.loads(self._files.read(name) or b"{}")
        except ValueError:  # torn, so nothing was renamed yet
            return set()
        try:
            return {_checked(found) for found in journal.get(key, ())}
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptDataError(f"{self.path / name} is no journal of an export: {error}", _ELSEWHERE) from None

    def _check_inside(self, names: Collection[str]) -> None:
        # One name a directory tells.
        for name in {name.rpartition("/")[0]: name for name in names}.values():
            if self._files.leads_out(name):
                raise self._outside(name)

    def _outside(self, name: str) -> CorruptDataError:
        return CorruptDataError(f"{self.path / name} leads out of {self.path}", _ELSEWHERE)


def target_files(path: Path) -> TargetFiles:
    """By what kind of path it is."""
    return RemoteFiles(path) if isinstance(path, RemotePath) else LocalFiles(path)
