"""Finished tasks of an audit kept in a file, so that one that was interrupted goes on where it was.

A part counts as long as all that it was made from is as it was: the stretch and its segments, the index files and their
headers, what the other files say that it is judged by. The stretch at the end of the log is always read again. How the
log was cut and which keys were drawn is kept, too: a log that has grown meanwhile would be cut otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from indexd import __version__
from indexd.audit.kept.lines import LineFile
from indexd.audit.kept.plain import from_plain, to_plain
from indexd.audit.live import is_live
from indexd.audit.match import FIRST_DIFFERENCE, counts_from, ends_before
from indexd.audit.part import Part
from indexd.audit.plan import NEVER, AuditPlan, AuditTask
from indexd.audit.queues.ground import FOLDER
from indexd.audit.samples.draw import Sample
from indexd.commitlog.segments import Segment, list_segments
from indexd.config import Config
from indexd.config.load import check_outside
from indexd.config.units import printable
from indexd.errors import DiskError, UnsafeStoreError, UsageError
from indexd.storage.disk import Disk, OutputDisk, Stamp

_FORMAT = "indexd audit"
_VERSION = 1
# What no longer counts is left out of the file when there is more of it than this, and than of the rest: bytes.
_STALE_MAX = 1 << 20
_HINT = "give another FILE to --resume, or remove it"


class KeptParts:
    """The file at ``path``: made if there is none, locked, and read; then ``begin``, ``get`` and ``keep``, ``close``.

    ``asked`` are the options of this audit. Raises UsageError for a file that is damaged, foreign, of a later version,
    of another store or of an audit with other options; BusyError while another audit has it.
    """

    def __init__(self, disk: Disk, path: Path, config: Config, asked: dict[str, Any]) -> None:
        try:
            check_outside(config, path, "--resume")
        except UnsafeStoreError as error:
            raise UsageError(str(error), error.hint) from None
        self._disk, self._config = disk, config
        self._of = _audit_of(config) | asked
        #: Where the part of a task stands, by the digest of what it was made from: position and bytes.
        self._places: dict[str, tuple[int, int]] = {}
        self._head: tuple[int, int] | None = None
        self._grounds: _Grounds | None = None
        # By the tasks' ids: what a task knows of the queues may be much.
        self._digests: dict[int, str] = {}
        self._tasks: list[AuditTask] = []
        #: How finely the log was cut, in bytes, and which keys were drawn; None in a new file.
        self.piece_size: int | None = None
        self.samples: tuple[Sample, ...] | None = None
        self._file = LineFile(OutputDisk(), path)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"KeptParts({self._file.path}, {len(self._places)} parts)"

    def begin(self, plan: AuditPlan, samples: tuple[Sample, ...]) -> None:
        """This is the plan that counts; how it was cut and what was drawn is written down for those who come later."""
        self._grounds = grounds = _Grounds(self._disk, self._config)
        grounds.list_all(plan.folder)
        self._tasks = plan.tasks
        self._digests = {id(task): digest for task in plan.tasks if (digest := grounds.digest(task)) is not None}
        grounds.forget()
        if self._head is None:
            head = {"format": _FORMAT, "version": _VERSION, "of": self._of, "piece": plan.piece_size}
            self._file.append(head | {"samples": to_plain(samples)})
        else:
            self._leave_out_stale()

    def get(self, task: AuditTask) -> Part | None:
        """What the task came to in an earlier run, if that still holds. Raises UsageError for what is no part."""
        place = self._places.get(self._digests.get(id(task), ""))
        if place is None:
            return None
        try:
            part: Part = from_plain(Part, self._file.again(*place)["part"])
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{self._file.path} is damaged: {error}", _HINT) from None
        return part if _is_judged_alike(task, part) else None

    def keep(self, task: AuditTask, part: Part) -> None:
        """Write it down, durably; not what is read again anyway, and not where the ground has moved meanwhile."""
        digest = self._digests.get(id(task))
        if digest is not None and self._grounds is not None and digest == self._grounds.digest(task):
            self._file.append({"task": digest, "part": to_plain(part)})
            self._places[digest] = (0, 0)

    def words(self) -> list[str]:
        """The line about what Ctrl-C leaves; none before anything was begun."""
        if not self._tasks:
            return []
        done = sum(digest in self._places for digest in self._digests.values())
        return [
            f"interrupted; {printable(str(self._file.path))} keeps {done} of {len(self._tasks)} tasks: "
            "the same command goes on with the rest"
        ]

    def close(self) -> None:
        """Let go of the file, which stays: it can be removed when nobody needs it."""
        self._file.close()

    def _read(self) -> None:
        for position, size, line in self._file.read():
            if self._head is None:
                self._read_head(line)
                self._head = (position, size)
            elif not isinstance(line, dict) or not isinstance(line.get("task"), str):
                raise UsageError(f"{self._file.path} is damaged at byte {position}", _HINT)
            else:
                self._places[line["task"]] = (position, size)

    def _read_head(self, line: Any) -> None:
        path = self._file.path
        if not isinstance(line, dict) or line.get("format") != _FORMAT or not isinstance(line.get("version"), int):
            raise UsageError(f"{path} does not hold what an audit keeps", _HINT)
        if line["version"] > _VERSION:
            raise UsageError(f"{path} was made by a later indexd", f"{_HINT}; or use that indexd")
        was = line.get("of")
        if not isinstance(was, dict):
            raise UsageError(f"{path} is damaged at byte 0", _HINT)
        for key in sorted({*was, *self._of}):
            here, there = self._of.get(key), was.get(key)
            if here != there:
                raise UsageError(f"{path} is of another audit: {key} was {there}, and is {here} now", _HINT)
        try:
            self.piece_size = from_plain(int, line.get("piece"))
            self.samples = from_plain(tuple[Sample, ...], line.get("samples"))
        except ValueError as error:
            raise UsageError(f"{path} is damaged at byte 0: {error}", _HINT) from None

    def _leave_out_stale(self) -> None:
        assert self._head is not None
        wanted = set(self._digests.values())
        live = {digest: place for digest, place in self._places.items() if digest in wanted}
        stale = sum(size for _, size in self._places.values()) - sum(size for _, size in live.values())
        if stale > max(_STALE_MAX, sum(size for _, size in live.values())):
            moved = self._file.keep_only([self._head, *live.values()])
            live = dict(zip(live, moved[1:], strict=True))
        self._places = live


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


class _Grounds:
    """What tasks are made from, as it stands at each call. What was listed is believed until it is forgotten."""

    def __init__(self, disk: Disk, config: Config) -> None:
        self._disk, self._config = disk, config
        self._stamps: dict[Path, Stamp] = {}
        self._queues: str | None = None
        self._is_live: bool | None = None

    def list_all(self, folder: Path) -> None:
        """Segments and index files at once: behind a URI each one is a request."""
        for directory in (*self._config.store.commit_log_directories, folder):
            with suppress(DiskError):
                self._stamps |= {directory / name: stamp for name, stamp in self._disk.stamps(directory).items()}

    def forget(self) -> None:
        """Look at each file again from now on."""
        self._stamps = {}

    def digest(self, task: AuditTask) -> str | None:
        """Of all that its part depends on; None for one that is always done again, or whose ground is gone."""
        if task.end == NEVER:
            return None
        try:
            ground = [
                *(task.begin, task.end, task.aligned, task.flavour, str(task.folder)),
                # How many entries of a file have expired is what its owner counts.
                task.log_begin if any(f.begin < task.log_begin for f in task.files if f.name in task.owned) else None,
                [[to_plain(file), self._stamp(task.folder / file.name)] for file in task.files],
                to_plain(task.owned),
                # Where a broker may have put entries since: any other file, and what it has open.
                [list(task.names), to_plain(task.growing)] if task.is_tail else None,
                list(task.samples),
                self._queue_files(task),
                [[segment.base, self._stamp(segment.path)] for segment in self._segments(task)],
            ]
        except DiskError as error:
            if not error.is_missing:
                raise
            return None
        return hashlib.sha256(json.dumps(ground).encode()).hexdigest()

    def _segments(self, task: AuditTask) -> Sequence[Segment]:
        if task.begin >= task.end:
            return ()
        store = self._config.store
        log = list_segments(self._disk, store.commit_log_directories, store.segment_size)
        return [one for one in log.segments if one.base < task.end and one.end > task.aligned]

    def _stamp(self, path: Path) -> list[int]:
        stamp = self._stamps.get(path) or self._disk.stamp(path)
        return [stamp.size, stamp.mtime_ns, stamp.inode]

    def _queue_files(self, task: AuditTask) -> Any:
        # Of a broker at work they grow all the time: then the files that there were count, as those of the log do.
        store = self._config.store.store
        if task.queues is None or store is None:
            return None
        if self._is_live is None:
            self._is_live = is_live(self._disk, store)
        if self._is_live:
            queues = task.queues.queues
            return [[queue.topic, queue.queue_id, [file.offset for file in queue.files]] for queue in queues]
        if self._queues is None:
            self._queues = self._queue_stamps(store / FOLDER)
        return self._queues

    def _queue_stamps(self, folder: Path) -> str:
        digest = hashlib.sha256()
        with suppress(DiskError):
            for topic in self._disk.list_dirs(folder):
                for queue in self._disk.list_dirs(folder / topic):
                    for name, stamp in self._disk.stamps(folder / topic / queue).items():
                        line = [topic, queue, name, stamp.size, stamp.mtime_ns, stamp.inode]
                        digest.update(json.dumps(line).encode())
        return digest.hexdigest()
