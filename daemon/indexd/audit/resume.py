"""Keeps finished tasks of an audit in a file, so that one that was interrupted goes on where it was.

The file holds a line of JSON a task, behind a first line that says of which audit they are, how finely its log was cut
and which keys were drawn: a log that has grown meanwhile would be cut otherwise. A task counts as long as all that it
was made from is as it was: its range of the log and the segments, the index files and their headers. The range at the
end of the log is always read again. A last line that is cut off was being written by a process that was killed.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from indexd import __version__
from indexd.audit.live import is_live
from indexd.audit.match import FIRST_DIFFERENCE, counts_from, ends_before
from indexd.audit.part import Part
from indexd.audit.plan import NEVER, AuditPlan, AuditTask
from indexd.audit.queues.ground import FOLDER
from indexd.audit.samples.draw import Sample
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.config.units import printable
from indexd.errors import BusyError, DiskError, UsageError
from indexd.storage.disk import Disk, DiskFile, OutputDisk, Stamp
from indexd.storage.lock import try_exclusive

_FORMAT, _VERSION = "indexd audit", 2
_SIZE_MAX = 4 << 30
_HINT = "give another FILE to --resume, or remove it"
_SAMPLES = TypeAdapter(tuple[Sample, ...])


class ResumeFile:
    """The file at ``path``: made if there is none, locked, and read; then ``begin``, ``get``, ``keep`` and ``close``.

    ``asked`` are the options of this audit. ``piece_size`` and ``samples`` are those of the run before, None in a new
    file. Raises UsageError for a file that is damaged, foreign, of a later version, of another store or of an audit
    with other options; BusyError while another audit has it.
    """

    def __init__(self, disk: Disk, path: Path, config: Config, asked: dict[str, Any]) -> None:
        self._disk, self._config, self._path = disk, config, path.resolve()
        self._of = _audit_of(config) | asked
        self._tasks: list[AuditTask] = []
        self._digests: dict[int, str | None] = {}
        self._lines: dict[str, Any] = {}
        self.piece_size: int | None = None
        self.samples: tuple[Sample, ...] | None = None
        self._file = self._open()
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def begin(self, plan: AuditPlan, samples: tuple[Sample, ...]) -> None:
        """Take this plan; how it was cut and what was drawn is written down in a new file."""
        inputs = _Inputs(self._disk, self._config, plan.folder)
        self._tasks = plan.tasks
        self._digests = {id(task): inputs.digest(task) for task in plan.tasks}
        if self.samples is None:
            self._append(
                {"format": _FORMAT, "version": _VERSION, "of": self._of, "piece": plan.piece_size}
                | {"samples": _SAMPLES.dump_python(samples, mode="json")}
            )

    def get(self, task: AuditTask) -> Part | None:
        """What the task came to in an earlier run, if that still holds. Raises UsageError for what is no part."""
        digest = self._digests.get(id(task))
        if digest is None or digest not in self._lines:
            return None
        try:
            part = _parts().validate_python(self._lines[digest])
        except ValidationError:
            raise UsageError(f"{self._path} is damaged: what it holds of a task is none", _HINT) from None
        return part if _is_judged_alike(task, part) else None

    def keep(self, task: AuditTask, part: Part) -> None:
        """Write it down, durably, unless what it was made from has changed meanwhile."""
        digest = self._digests.get(id(task))
        if digest is not None and digest == _Inputs(self._disk, self._config, task.folder).digest(task):
            self._append({"task": digest, "part": _parts().dump_python(part, mode="json")})
            self._lines[digest] = None

    def words(self) -> list[str]:
        """The line about what Ctrl-C leaves; none before anything was begun."""
        if not self._tasks:
            return []
        done = sum(digest in self._lines for digest in self._digests.values())
        return [
            f"interrupted; {printable(str(self._path))} keeps {done} of {len(self._tasks)} tasks: "
            "the same command goes on with the rest"
        ]

    def close(self) -> None:
        """Close the file, which stays: it can be removed when nobody needs it."""
        self._file.close()

    def _open(self) -> DiskFile:
        path, disk = self._path, OutputDisk()
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is no plain file", _HINT)
        try:
            file = disk.open_write(path, create=not path.exists())
        except DiskError as error:
            raise UsageError(str(error), _HINT) from error
        if not try_exclusive(file.fileno()):
            file.close()
            raise BusyError(f"{path} is in use by another audit", "wait for its end, or give another FILE to --resume")
        return file

    def _read(self) -> None:
        size = self._file.size()
        data = self._file.pread(size, 0) if size <= _SIZE_MAX else b""
        if len(data) < size:
            raise UsageError(f"{self._path} does not hold what an audit keeps: it is too large", _HINT)
        at = 0
        for raw in data.splitlines(keepends=True):
            try:
                line = json.loads(raw)
            except ValueError:
                line = None
            if at == 0 and raw.endswith(b"\n"):
                self._read_head(line)
            elif at == 0 and not raw.startswith(b'{"format": "'[: len(raw)]):
                raise UsageError(f"{self._path} does not hold what an audit keeps", _HINT)
            elif at + len(raw) == size and (line is None or not raw.endswith(b"\n")):
                break
            elif not isinstance(line, dict) or not isinstance(line.get("task"), str):
                raise UsageError(f"{self._path} is damaged at byte {at}", _HINT)
            else:
                self._lines[line["task"]] = line.get("part", ())
            at += len(raw)
        self._file.truncate(at)

    def _read_head(self, line: Any) -> None:
        path = self._path
        if not isinstance(line, dict) or line.get("format") != _FORMAT or not isinstance(line.get("version"), int):
            raise UsageError(f"{path} does not hold what an audit keeps", _HINT)
        if line["version"] != _VERSION:
            raise UsageError(f"{path} was made by another version of indexd", f"{_HINT}; or use that indexd")
        try:
            was = dict(line["of"])
            self.piece_size, self.samples = int(line["piece"]), _SAMPLES.validate_python(line["samples"])
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"{path} is damaged at byte 0", _HINT) from None
        for key in sorted({*was, *self._of}):
            here, there = self._of.get(key), was.get(key)
            if here != there:
                raise UsageError(f"{path} is of another audit: {key} was {there}, and is {here} now", _HINT)

    def _append(self, line: dict[str, Any]) -> None:
        self._file.pwrite(json.dumps(line).encode() + b"\n", self._file.size())
        self._file.fsync()


@lru_cache(1)
def _parts() -> TypeAdapter[Part]:
    return TypeAdapter(Part)


def _audit_of(config: Config) -> dict[str, Any]:
    store = config.store
    return {
        "indexd": __version__,
        "store": str(store.store),
        "commitLog": [str(path) for path in store.commit_log_directories],
        "segmentSize": store.segment_size,
        "hashSlotNum": config.index.hash_slot_num,
        "indexNum": config.index.index_num,
        "maxMessageSize": config.reader.max_message_size,
        "verifyCrc": config.reader.verify_crc,
        "delayLevels": list(store.delay_levels_ms),
        "consumeQueueFileSize": store.consume_queue_file_size,
    }


def _is_judged_alike(task: AuditTask, part: Part) -> bool:
    # The ends of other files, by which a file's first entry was judged, may be others now.
    wrong = {file for file, what in part.notes.counts if what == FIRST_DIFFERENCE}
    return all(
        counts_from(stored, begin, ends_before(task, name)) == (f"index/{name}" not in wrong)
        for name, stored, begin in part.first_times
    )


class _Inputs:
    # The files that tasks are made from, as they stand now.

    def __init__(self, disk: Disk, config: Config, folder: Path) -> None:
        self._disk, store = disk, config.store
        self._store = store.store
        self._stamps: dict[Path, Stamp] = {}
        for directory in (*store.commit_log_directories, folder):
            with suppress(DiskError):
                self._stamps |= {directory / name: stamp for name, stamp in disk.stamps(directory).items()}
        self._log = list_segments(disk, store.commit_log_directories, store.segment_size)
        self._queues: str | None = None

    def digest(self, task: AuditTask) -> str | None:
        """Of all that its part depends on; None for one that is always done again, or whose files are gone."""
        segments = [one for one in self._log.segments if one.base < task.end and one.end > task.aligned]
        paths = [task.folder / file.name for file in task.files]
        paths += [segment.path for segment in segments] if task.begin < task.end else []
        if task.end == NEVER or not all(path in self._stamps for path in paths):
            return None
        inputs = [
            *(task.begin, task.end, task.aligned, task.flavour, str(task.folder), task.files, task.owned, task.samples),
            # How many entries of a file have expired is what its owner counts.
            task.log_begin if any(f.begin < task.log_begin for f in task.files if f.name in task.owned) else None,
            # Where a broker may have put entries since: any other file, and what it has open.
            (task.names, task.growing) if task.is_tail else None,
            [(str(path), self._stamps[path]) for path in paths],
            self._queue_files(task),
        ]
        return hashlib.sha256(repr(inputs).encode()).hexdigest()

    def _queue_files(self, task: AuditTask) -> object:
        # Of a broker at work they grow all the time: then the files that there were count, as those of the log do.
        if task.queues is None or self._store is None:
            return None
        if is_live(self._disk, self._store):
            return [(one.topic, one.queue_id, [file.offset for file in one.files]) for one in task.queues.queues]
        if self._queues is None:
            self._queues = self._queue_stamps(self._store / FOLDER)
        return self._queues

    def _queue_stamps(self, folder: Path) -> str:
        digest = hashlib.sha256()
        with suppress(DiskError):
            for topic in self._disk.list_dirs(folder):
                for queue in self._disk.list_dirs(folder / topic):
                    stamps = self._disk.stamps(folder / topic / queue)
                    digest.update(repr((topic, queue, sorted(stamps.items()))).encode())
        return digest.hexdigest()
