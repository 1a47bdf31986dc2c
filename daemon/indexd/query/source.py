"""QueryIndex: one data directory as queries read it, found from DATA alone, and what stands there at one moment.

A daemon that runs makes new index files between two frontiers and removes old ones, so every query looks anew. Without
one, and after a crash, only what the frontier names counts. What has not changed since the last look is kept.
The queue that a query asks about is found here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from indexd.commitlog.decoder import DecoderOptions
from indexd.commitlog.lookup import Cached, LogView
from indexd.config import Config, flag_name
from indexd.consumequeue.format import QueueMark, is_topic_name, queue_directory
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import CorruptDataError, MissingOk, UnsafeStoreError, UsageError
from indexd.flush.frontier import Frontier, Uncovered, read_frontier
from indexd.index.format import FLAVOURS, FileMark, Flavour, IndexLayout
from indexd.index.reader import IndexFileReader
from indexd.query.coverage import (
    LOG_ENDS,
    MOVED,
    REWRITTEN,
    Behind,
    Coverage,
    gaps_in_words,
    make_coverage,
    read_state,
)
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles, is_index_name

T = TypeVar("T")
_DEFAULT = "default"
_FRAME_SIZE_MAX = 64 << 20
#: Index files that one index keeps open.
OPEN_FILES_MAX = 64


@dataclass(frozen=True, slots=True)
class Look:
    """The index at one moment. ``files`` oldest first, with what the frontier says of each, None for newer files.

    ``is_unclean``: the daemon ended without a stop, so an open file holds for sure only what its mark says.
    ``published``: a running daemon's word that every output holds what stands before this physical offset.
    """

    layout: IndexLayout
    flavour: Flavour
    files: tuple[tuple[str, FileMark | None], ...]
    is_unclean: bool
    coverage: Coverage
    frontier: Frontier
    published: int | None
    #: From where on in the log the messages of a queue stand elsewhere than they say, as a running daemon knows it.
    moved: dict[tuple[str, int], int]

    @property
    def queue_coverage(self) -> Coverage:
        """The coverage of ConsumeQueues and sparse indexes, which may be built after the key index."""
        filled = self.frontier.filled_offset if self.published is None else self.published
        if filled >= self.coverage.end:
            return self.coverage
        return replace(self.coverage, end=filled, behind=self.coverage.behind or Behind(filled))


class OpenIndexFile(NamedTuple):
    """One index file of a look; of a full one the mark's header is known to be the file's."""

    reader: IndexFileReader
    mark: FileMark | None


class QueryIndex:
    """One data directory and the log it belongs to; ``close`` it after use. Raises IndexdError of every kind."""

    def __init__(self, disk: Disk, config: Config, log: LogView, frontier: Cached[Frontier]) -> None:
        self.config = config
        self.log = log
        self.disk = disk
        self.files = DataFiles(config.store.data)
        self._frontier = frontier
        self._state = Cached(disk, self.files.state, lambda: read_state(disk, self.files.state))
        self._names = Cached(disk, self.files.index, self._list)
        #: By base, the largest store time of a sealed segment; sealed files change when files come or go.
        self.largest_times: Cached[dict[int, int]] = Cached(disk, self.files.sparse, dict)
        self._open: dict[str, OpenIndexFile] = {}
        #: Grows whenever index files are opened or closed.
        self.files_opened = 0
        self._opened_at = (0, 0)
        self._queues: dict[tuple[str, int], QueueMark] = {}
        self._queues_of: tuple[QueueMark, ...] | None = None
        #: So old a look may be to be given out once more, in seconds.
        self.look_seconds = 0.0
        self._looked: Look | None = None
        self._looked_at = 0.0

    def look(self) -> Look:
        """What stands now, or stood ``look_seconds`` ago."""
        at = time.monotonic()
        if self._looked is None or at - self._looked_at >= self.look_seconds:
            self._looked = None
            self._looked, self._looked_at = self._look(), at
        return self._looked

    def _look(self) -> Look:
        # The state is read before the files are listed: they hold at least what it covers.
        self.log.begin_query()
        pid = owner_pid(self.files.lock)
        frontier = self._frontier.get()
        state = self._state.get() if pid else {}
        files: list[tuple[str, FileMark | None]] = [(mark.name, mark) for mark in frontier.index]
        names = self._names.get() if pid is not None or files else []
        made = self._frontier.times_made, self._names.times_made
        if made != self._opened_at:
            self._close_files()  # one of them may be another now
            self._opened_at = made
        if pid is not None:
            last = files[-1][0] if files else ""
            newer = [(name, size) for name, size in names if name > last]
            size_wanted = frontier.layout.file_size
            files.extend((name, None) for name, size in newer if size == size_wanted)
            if any(size != size_wanted for _, size in newer):
                self._names.forget()  # it grows, and its directory does not tell
        coverage, published = make_coverage(frontier, state, pid, self.log)
        is_told = pid is not None and state.get("pid") == pid
        coverage = self._with_rewritten(coverage, self.files.state if is_told else self.files.frontier)
        unclean = pid is None and self.disk.exists(self.files.abort)
        flavour = FLAVOURS[frontier.flavour]
        moved = {(row[0], row[1]): row[2] for row in state.get("consumeQueuesMoved") or () if is_told}
        return Look(frontier.layout, flavour, tuple(files), unclean, coverage, frontier, published, moved)

    def _with_rewritten(self, coverage: Coverage, known_since: Path) -> Coverage:
        # A broker may cut its log where it was read before: then it ends there, or was written later than what is
        # known of it, though nothing new stands behind the index.
        segments = [segment for segment in self.log.segments if segment.base < coverage.end]
        if not segments:  # all of it has expired
            return coverage
        begin, reason = segments[-1].end, LOG_ENDS
        if begin >= coverage.end and coverage.behind is None:
            with MissingOk():
                written, known = (self.disk.stamp(path).mtime_ns for path in (segments[-1].path, known_since))
                if written > known:
                    begin, reason = max(segments[-1].base, coverage.begin), REWRITTEN
        if begin >= coverage.end:
            return coverage
        return replace(coverage, uncovered=(*coverage.uncovered, Uncovered(begin, coverage.end, reason)))

    def newest_first(self, look: Look) -> Iterator[OpenIndexFile]:
        """Each index file of ``look``, good until the next look; those that expired meanwhile are left out."""
        for name, mark in reversed(look.files):
            self.log.check()
            found = self._open.get(name)
            if found is None:
                file = None
                with MissingOk():
                    file = self.disk.open_read(self.files.index / name)
                if file is None:
                    # The daemon removes a file once the log begins behind its last entry; any other loss is damage.
                    self.log.refresh()
                    if mark is not None and mark.header.end_phy_offset >= (self.log.begin or 0):
                        raise CorruptDataError(f"index file {self.files.index / name} is missing")
                    continue
                found = self._keep(name, mark, file, look.layout)
            found.reader.check_size()
            yield found

    def queue_mark(self, look: Look, topic: str, queue_id: int) -> QueueMark | None:
        """What the frontier says of a queue."""
        if look.frontier.queues is not self._queues_of:
            self._queues_of = look.frontier.queues
            self._queues = {(mark.topic, mark.queue_id): mark for mark in look.frontier.queues or ()}
        return self._queues.get((topic, queue_id))

    def coverage_of_queue(self, look: Look, topic: str, queue_id: int) -> Coverage:
        """The coverage of one ConsumeQueue, without the messages whose units do not stand where they say themselves."""
        coverage, mark = look.queue_coverage, self.queue_mark(look, topic, queue_id)
        begin = look.moved.get((topic, queue_id), -1 if mark is None else mark.moved_from)
        if begin < 0 or begin >= coverage.end:
            return coverage
        moved = Uncovered(max(begin, coverage.log_begin or 0), coverage.end, MOVED)
        return replace(coverage, uncovered=(*coverage.uncovered, moved))

    def close(self) -> None:
        """Close every file."""
        self._close_files()
        self.log.close()

    def _keep(self, name: str, mark: FileMark | None, file: DiskFile, layout: IndexLayout) -> OpenIndexFile:
        try:
            reader = IndexFileReader(file, layout)
            if mark is not None and mark.full and reader.header() != mark.header:
                raise CorruptDataError(f"the header of index file {file.path} is not what the frontier says")
        except BaseException:
            file.close()
            raise
        self.files_opened += 1
        if len(self._open) >= OPEN_FILES_MAX:
            self._open.pop(next(iter(self._open))).reader.file.close()
        found = self._open[name] = OpenIndexFile(reader, mark)
        return found

    def _close_files(self) -> None:
        self.files_opened += 1
        for found in self._open.values():
            found.reader.file.close()
        self._open.clear()

    def _list(self) -> list[tuple[str, int]]:
        with MissingOk():
            return [(name, size) for name, size in self.disk.list_dir(self.files.index) if is_index_name(name)]
        return []


def open_index(disk: Disk, config: Config) -> QueryIndex:
    """The index in DATA; UsageError if there is none, or if it was built with other settings than were given.

    UnsafeStoreError if the log is another one.
    """
    files = DataFiles(config.store.data)
    frontier = Cached(disk, files.frontier, lambda: known_frontier(disk, files))
    check_as_built(config, frontier.get())
    log = open_log(disk, config, frontier.get())
    try:
        _check_same_store(config, frontier.get(), log)
    except BaseException:
        log.close()
        raise
    return QueryIndex(disk, config, log, frontier)


def check_as_built(config: Config, frontier: Frontier) -> None:
    """UsageError if the data directory was built with other settings than were given."""
    data = config.store.data
    for key, built, given in (
        ("flavour", frontier.flavour, config.index.flavour),
        ("hash_slot_num", frontier.layout.hash_slot_num, config.index.hash_slot_num),
        ("index_num", frontier.layout.index_num, config.index.index_num),
    ):
        if config.provenance.get(key, _DEFAULT) != _DEFAULT and built != given:
            raise UsageError(
                f"{flag_name(key)} {given} (from {config.provenance[key]}), but {data} was built with {built}",
                f"leave {flag_name(key)} out: the data directory knows it",
            )


def _check_same_store(config: Config, frontier: Frontier, log: LogView) -> None:
    # One frame that stands where it was noted is enough: the rest may have been rewritten since.
    points = [point for point in frontier.evidence if log.is_inside(point.phy_offset)]
    if not points or any(log.holds(point) for point in reversed(points)):
        return
    store = config.store.store or config.store.commit_log_paths or frontier.store
    raise UnsafeStoreError(
        f"{store} is not the store that {config.store.data} was built from: "
        f"none of the {len(points)} messages that were noted is where it was",
        "give the right --store, or leave it out: the data directory knows it",
    )


def open_log(disk: Disk, config: Config, frontier: Frontier | None) -> LogView:
    """The log that was given, or else the one that the frontier names."""
    directories = config.store.commit_log_directories
    segment_size = config.store.segment_size
    if frontier is not None:
        if config.store.store is None and not config.store.commit_log_paths:
            directories = tuple(Path(path) for path in frontier.commit_log_paths)
        if config.provenance.get("segment_size", _DEFAULT) == _DEFAULT:
            segment_size = frontier.segment_size
    if not directories:
        raise UsageError(f"{config.store.data} names no store", "give the broker's storePathRootDir as --store")
    options = DecoderOptions(
        config.store.delay_levels_ms, max(_FRAME_SIZE_MAX, 2 * config.reader.max_message_size), check_crc=False
    )
    return LogView(disk, directories, segment_size, options)


def known_frontier(disk: Disk, files: DataFiles) -> Frontier:
    """The frontier; UsageError if the directory has none yet."""
    frontier = read_frontier(disk, files.frontier)
    if frontier is None:
        if disk.exists(files.index) and any(is_index_name(name) for name, _ in disk.list_dir(files.index)):
            raise CorruptDataError(f"{files.data} has index files, but no frontier that says what they hold")
        raise UsageError(f"{files.data} holds no index yet", f"run indexd --store DIR --data {files.data} first")
    if frontier.flavour not in FLAVOURS:
        raise CorruptDataError(f"{files.frontier} names a flavour {frontier.flavour!r} that there is not")
    return frontier


NO_QUEUE = "no such queue"
BATCH_QUEUE = "a queue of batches (BatchConsumeQueue), which is not built"
NO_FOLDER = "a topic of that name has no ConsumeQueue: no folder can be named so"
_BATCH_FOLDER = "batchconsumequeue"


def open_queue(index: QueryIndex, look: Look, topic: str, queue_id: int) -> ConsumeQueueReader | None:
    """The queue, its minimum corrected to where the log begins; None if there is none. UsageError without any queue."""
    frontier = look.frontier
    if frontier.queues is None:
        raise UsageError(
            f"{index.files.data} holds no ConsumeQueues", "run the daemon with consume_queue = true to have them built"
        )
    root, size, mark = index.files.consumequeue, frontier.queue_file_size, index.queue_mark(look, topic, queue_id)
    queue: ConsumeQueueReader | None = None
    if mark is not None:
        queue = ConsumeQueueReader.of_mark(index.disk, root, mark, size, look.published)
    elif look.published is not None and is_topic_name(topic):
        queue = ConsumeQueueReader.of_new(index.disk, root, topic, queue_id, size, look.published)
    if queue is not None:
        try:
            queue.correct_min_offset(look.coverage.log_begin or 0)
        except BaseException:
            queue.close()
            raise
    return queue


def with_queue(
    index: QueryIndex, topic: str, queue_id: int, answer: Callable[[Look, ConsumeQueueReader | None], T]
) -> T:
    """What ``answer`` makes of a queue, None where there is none.

    The queue's oldest file may be removed between two calls, which a second look knows. CorruptDataError where a file
    is still missing then.
    """
    for _ in range(2):
        look = index.look()
        with MissingOk(), open_queue(index, look, topic, queue_id) or nullcontext() as queue:
            return answer(look, queue)
    raise CorruptDataError(f"a file of {queue_directory(index.files.consumequeue, topic, queue_id)} is missing")


def topics_of(index: QueryIndex) -> list[str] | None:
    """Every topic with a ConsumeQueue, in order; None where no ConsumeQueues are built."""
    marks = index.look().frontier.queues
    if marks is None:
        return None
    folders: Sequence[str] = ()
    with MissingOk():
        folders = index.disk.list_dirs(index.files.consumequeue)
    return sorted({mark.topic for mark in marks} | {name for name in folders if is_topic_name(name)})


def why_no_queue(index: QueryIndex, look: Look, topic: str) -> str:
    """Why a topic has no such queue, as far as can be told."""
    if not is_topic_name(topic):
        return NO_FOLDER
    batches = Path(look.frontier.store) / _BATCH_FOLDER / topic
    if look.frontier.store and index.disk.exists(batches):
        return BATCH_QUEUE
    reasons, limit = [NO_QUEUE], look.frontier.queues_limit
    if limit is not None:
        reasons.append(f"queues were left out when there were {limit} (queues_max)")
    return "; ".join(reasons + gaps_in_words(look.queue_coverage))
