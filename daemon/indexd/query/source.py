"""QueryIndex: one data directory as queries read it, found from DATA alone, and what stands there at one moment.

A daemon that runs makes new index files between two frontiers and removes old ones, so every query looks anew. Without
one, and after a crash, only what the frontier names counts. What has not changed since the last look is kept.
The queue that a query asks about is found here too.

Coverage says which part of the log an answer speaks for, and why an exact answer is empty: how far an index stands, by
the word of the daemon that runs, else by its frontier, and what the log holds behind that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from indexd.commitlog.decoder import Decoded, DecoderOptions, Message
from indexd.commitlog.format import BLANK_SIZE, Corrupt, EndOfFile, NotYetWritten, Reason
from indexd.commitlog.lookup import Cached, LogView
from indexd.config import Config, flag_name
from indexd.config.model import StoreConfig
from indexd.consumequeue.format import QueueMark, is_topic_name, queue_directory
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import CorruptDataError, DiskError, MissingOk, UnsafeStoreError, UsageError
from indexd.flush.frontier import Frontier, Uncovered, read_frontier
from indexd.index.format import FLAVOURS, FileMark, Flavour, IndexLayout
from indexd.index.reader import IndexFileReader
from indexd.storage.disk import Disk, DiskFile, Stamp
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles, is_index_name

ABSENT = "absent"
NOT_YET_INDEXED = "not yet indexed"
EXPIRED = "expired"
UNREADABLE = "unreadable"
CUT_OFF = "cut off"
NEVER_INDEXED = "never indexed"
BEFORE_BEGIN = "before the index begins"
LEFT_OUT = "left out"
ABSENT_BEFORE = "absent before the cursor"
BEHIND_LAST = "behind the last message"
LOG_ENDS = "the log ends before it by now"
REWRITTEN = "the log was written since, and not behind it: it may have been cut"
MOVED = "the queue lacks messages, or has others in their places"


class Behind(NamedTuple):
    """What the log holds behind an index, at ``phy_offset``: a message, or for a ``reason`` bytes that are no frame."""

    phy_offset: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Coverage:
    """Every message of log bytes ``[begin, end)`` is in the index, but for those of ``uncovered``.

    ``log_begin`` is where the log begins now, None without a segment; ``behind`` what it holds behind ``end``, None for
    nothing; ``daemon_pid`` is who keeps the index up to date, None if no one does. ``is_cut_off``: the answer was ended
    before all that is covered had been looked at.
    """

    begin: int
    end: int
    log_begin: int | None
    behind: Behind | None = None
    uncovered: tuple[Uncovered, ...] = ()
    daemon_pid: int | None = None
    is_cut_off: bool = False

    @property
    def starts_late(self) -> bool:
        """Whether the log has messages from before the index begins."""
        return self.log_begin is not None and self.log_begin < self.begin

    @property
    def complete(self) -> bool:
        """Whether an answer speaks for every message that is still in the log; ``gaps_in_words`` says why not."""
        return not (self.behind or self.uncovered or self.starts_late or self.is_cut_off)

    @property
    def passed_over(self) -> tuple[Uncovered, ...]:
        """The uncovered ranges that a scan of the log leaves out; one that was written anew is read as it is now."""
        return tuple(gap for gap in self.uncovered if gap.reason != REWRITTEN)

    def up_to(self, before: int) -> Coverage:
        """The same for messages before that physical offset alone."""
        begin = self.begin if self.log_begin is None or self.log_begin < before else min(self.begin, self.log_begin)
        met = tuple(gap for gap in self.uncovered if gap.begin < before)
        behind = self.behind if before > self.end else None
        return replace(self, begin=begin, end=min(self.end, before), behind=behind, uncovered=met)

    def to_json(self) -> dict[str, Any]:
        """The ``coverage`` member of an answer; ``why`` where it is not complete."""
        why = why_not_complete(self)
        return {
            "begin": self.begin,
            "end": self.end,
            "logBegin": self.log_begin,
            "complete": self.complete,
            **({} if why is None else {"why": why}),
            "uncovered": [[gap.begin, gap.end, gap.reason] for gap in self.uncovered],
            "daemonPid": self.daemon_pid,
        }


def make_coverage(
    frontier: Frontier, state: dict[str, Any], pid: int | None, log: LogView
) -> tuple[Coverage, int | None]:
    """The coverage by the word of the daemon ``pid`` that runs, else by the frontier; and how far its queues are.

    None for the latter: by their marks. Only those uncovered ranges count that hold log which is still there. Where the
    daemon does not say that it stands at bytes that are no frame, the log itself is looked at.
    """
    begin, end, uncovered = frontier.begin_offset, frontier.phy_offset, frontier.uncovered
    published, behind, stale_head = None, None, frontier.stale_head
    if state.get("pid") == pid and "phyOffset" in state:
        begin, end = state.get("beginOffset", begin), state["phyOffset"]
        uncovered = tuple(Uncovered(*row) for row in state.get("uncovered", uncovered))
        published, stale_head = min(end, state.get("filledOffset", end)), bytes.fromhex(state.get("staleHead") or "")
        corrupt = state.get("corrupt")
        behind = None if corrupt is None else Behind(corrupt["offset"], corrupt["reason"])
    first = max(begin, log.begin or 0)
    met = tuple(gap for gap in uncovered if gap.end > first and gap.begin < end)
    return Coverage(begin, end, log.begin, behind or find_behind(log, end, stale_head), met, pid), published


def find_behind(log: LogView, end: int, stale_head: bytes | None = None) -> Behind | None:
    """What may be a message at ``end`` or behind it; None when the log ends there, be it in zeros that are not used.

    It does where ``stale_head`` still stands there: nothing was written since the broker named that end.
    """
    if stale_head and log.read(end, end + len(stale_head)) == stale_head:
        return None
    zeros = blank = None
    for segment in log.segments:
        if segment.end <= end:
            continue
        at = max(end, segment.base)
        found = log.at(at)
        if isinstance(found, EndOfFile) and zeros is None:
            blank = at
        if found is None or blank == at:
            continue
        if not isinstance(found, NotYetWritten) or found.needed:
            return (
                Behind(at, _why_no_message(log, at, found))
                if zeros is None
                else Behind(zeros, Reason.ZEROS_BEFORE_END.text)
            )
        if zeros is None:
            zeros, written = at, log.written_end(at)
            if written > at:
                return Behind(at, f"zeros before bytes that are written, up to {written}")
    if blank is not None and log.written_end(blank + BLANK_SIZE) > blank + BLANK_SIZE:
        return Behind(blank, Reason.BLANK_BEFORE_FRAMES.text)
    return None


def _why_no_message(log: LogView, phy_offset: int, found: Decoded) -> str | None:
    if isinstance(found, Message):  # by its lengths alone so far
        framed = log.frame(phy_offset, log.options.frame_size_max)
        return framed.reason if isinstance(framed, Corrupt) else None
    return found.reason if isinstance(found, Corrupt) else Reason.CUT_OFF.text


def why_empty(coverage: Coverage, *, expired: int, unreadable: int) -> str:
    """What an answer without hits leaves open, ``absent`` if nothing; several reasons are joined by ``; ``."""
    reasons = [EXPIRED] * bool(expired) + [UNREADABLE] * bool(unreadable)
    return "; ".join(reasons + gaps_in_words(coverage)) or ABSENT


def gaps_in_words(coverage: Coverage) -> list[str]:
    """Why an answer is not complete, nothing if it is."""
    words, behind = [CUT_OFF] if coverage.is_cut_off else [], coverage.behind
    if behind is not None and behind.reason is not None:
        words.append(f"not known behind offset {behind.phy_offset}: {behind.reason}")
    elif behind is not None:
        words.append(f"{NOT_YET_INDEXED}: the log from physical offset {coverage.end} on")
    if coverage.starts_late:
        words.append(f"{BEFORE_BEGIN}: that is at {coverage.begin}, the log begins at {coverage.log_begin}")
    if coverage.uncovered:
        size = sum(gap.end - gap.begin for gap in coverage.uncovered)
        reasons = sorted({gap.reason for gap in coverage.uncovered})
        words.append(f"{LEFT_OUT}: {size} bytes of the log ({', '.join(reasons)})")
    return words


def why_not_complete(coverage: Coverage) -> str | None:
    """The same in one line; None for one that is complete."""
    return "; ".join(gaps_in_words(coverage)) or None


def expired_in_words(coverage: Coverage) -> str | None:
    """What cannot be found in the log any more, whatever the index says; None while the log is there from its begin.

    No gap of the index: an answer speaks for the log as it is.
    """
    if not coverage.log_begin:
        return None
    return f"the log begins at physical offset {coverage.log_begin}: what was before has expired"


def read_state(disk: Disk, path: Path) -> dict[str, Any]:
    """DATA/state. A hint only: whatever cannot be read says nothing."""
    try:
        row = json.loads(disk.read(path))
    except (DiskError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


T = TypeVar("T")
_FRAME_SIZE_MAX = 64 << 20
#: Index files that one index keeps open.
OPEN_FILES_MAX = 64


@dataclass(frozen=True, slots=True)
class IndexSnapshot:
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
        self._state = Cached(disk, [self.files.state], lambda: read_state(disk, self.files.state))
        self._names = Cached(disk, [self.files.index], self._list)
        #: By base, the largest store time of a sealed segment; sealed files change when files come or go.
        self.largest_times: Cached[dict[int, int]] = Cached(disk, [self.files.sparse], dict)
        self._open: dict[str, OpenIndexFile] = {}
        #: Grows whenever index files are opened or closed.
        self.files_opened = 0
        self._opened_at = (0, 0)
        self._queues: dict[tuple[str, int], QueueMark] = {}
        self._queues_of: tuple[QueueMark, ...] | None = None
        #: So old a look may be to be given out once more, in seconds.
        self.look_seconds = 0.0
        self._looked: IndexSnapshot | None = None
        self._looked_at = 0.0

    def look(self) -> IndexSnapshot:
        """What stands now, or stood ``look_seconds`` ago."""
        at = time.monotonic()
        if self._looked is None or at - self._looked_at >= self.look_seconds:
            self._looked = None
            self._looked, self._looked_at = self._look(), at
        return self._looked

    def _look(self) -> IndexSnapshot:
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
        coverage = self._with_rewritten(coverage, (self._state if is_told else self._frontier).seen)
        unclean = pid is None and self.disk.exists(self.files.abort)
        flavour = FLAVOURS[frontier.flavour]
        moved = {(row[0], row[1]): row[2] for row in state.get("consumeQueuesMoved") or () if is_told}
        return IndexSnapshot(frontier.layout, flavour, tuple(files), unclean, coverage, frontier, published, moved)

    def _with_rewritten(self, coverage: Coverage, known_since: Sequence[Stamp] | None) -> Coverage:
        # A broker may cut its log where it was read before: then it ends there, or was written later than what is
        # known of it, though nothing new stands behind the index.
        segments = [segment for segment in self.log.segments if segment.base < coverage.end]
        if not segments:  # all of it has expired
            return coverage
        begin, reason = segments[-1].end, LOG_ENDS
        if begin >= coverage.end and coverage.behind is None and known_since is not None:
            with MissingOk():
                if self.disk.stamp(segments[-1].path).mtime_ns > known_since[0].mtime_ns:
                    begin, reason = max(segments[-1].base, coverage.begin), REWRITTEN
        if begin >= coverage.end:
            return coverage
        return replace(coverage, uncovered=(*coverage.uncovered, Uncovered(begin, coverage.end, reason)))

    def newest_first(self, look: IndexSnapshot) -> Iterator[OpenIndexFile]:
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

    def queue_mark(self, look: IndexSnapshot, topic: str, queue_id: int) -> QueueMark | None:
        """What the frontier says of a queue."""
        if look.frontier.queues is not self._queues_of:
            self._queues_of = look.frontier.queues
            self._queues = {(mark.topic, mark.queue_id): mark for mark in look.frontier.queues or ()}
        return self._queues.get((topic, queue_id))

    def coverage_of_queue(self, look: IndexSnapshot, topic: str, queue_id: int) -> Coverage:
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
    frontier = Cached(disk, [files.frontier], lambda: known_frontier(disk, files))
    check_as_built(config, frontier.get())
    with open_log(disk, config, frontier.get()) as log:  # a query opens its files again
        _check_same_store(config, frontier.get(), log)
    return QueryIndex(disk, config, log, frontier)


def check_as_built(config: Config, frontier: Frontier) -> None:
    """UsageError if the data directory was built with other settings than were given."""
    data = config.store.data
    for key, built, given in (
        ("flavour", frontier.flavour, config.index.flavour),
        ("hash_slot_num", frontier.layout.hash_slot_num, config.index.hash_slot_num),
        ("index_num", frontier.layout.index_num, config.index.index_num),
    ):
        if config.is_given(key) and built != given:
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


def store_as_built(config: Config, frontier: Frontier) -> StoreConfig:
    """Where the log is, and the size of its files: as given, else as the frontier knows it."""
    known: dict[str, object] = {} if config.is_given("segment_size") else {"segment_size": frontier.segment_size}
    if config.store.store is None and not config.store.commit_log_paths:
        known["commit_log_paths"] = tuple(Path(path) for path in frontier.commit_log_paths)
    return config.store.model_copy(update=known)


def open_log(disk: Disk, config: Config, frontier: Frontier | None) -> LogView:
    """The log that was given, or else the one that the frontier names."""
    store = config.store if frontier is None else store_as_built(config, frontier)
    if not store.commit_log_directories:
        raise UsageError(f"{config.store.data} names no store", "give the broker's storePathRootDir as --store")
    options = DecoderOptions(
        store.delay_levels_ms, max(_FRAME_SIZE_MAX, 2 * config.reader.max_message_size), check_crc=False
    )
    return LogView(disk, store.commit_log_directories, store.segment_size, options)


def known_frontier(disk: Disk, files: DataFiles) -> Frontier:
    """The frontier; UsageError if the directory has none yet."""
    frontier = read_frontier(disk, files.frontier)
    if frontier is None:
        if disk.exists(files.index) and any(is_index_name(name) for name, _ in disk.list_dir(files.index)):
            raise CorruptDataError(f"{files.data} has index files, but no frontier that says what they hold")
        if (pid := owner_pid(files.lock)) is not None:
            raise UsageError(f"{files.data} holds no index yet: pid {pid} makes it", "see how far it is: indexd status")
        raise UsageError(f"{files.data} holds no index yet", f"run indexd --store DIR --data {files.data} first")
    if frontier.flavour not in FLAVOURS:
        raise CorruptDataError(f"{files.frontier} names a flavour {frontier.flavour!r} that there is not")
    return frontier


NO_QUEUE = "no such queue"
NO_FOLDER = "a topic of that name has no ConsumeQueue: no folder can be named so"


def open_queue(index: QueryIndex, look: IndexSnapshot, topic: str, queue_id: int) -> ConsumeQueueReader | None:
    """The queue; None if there is none. UsageError without any queue."""
    queues = look.frontier.queues_mark
    if queues is None:
        raise UsageError(
            f"{index.files.data} holds no ConsumeQueues", "run the daemon with consume_queue = true to have them built"
        )
    root, size, mark = index.files.consumequeue, queues.file_size, index.queue_mark(look, topic, queue_id)
    if mark is not None:
        return ConsumeQueueReader.of_mark(index.disk, root, mark, size, look.published)
    if look.published is None or not is_topic_name(topic):
        return None
    return ConsumeQueueReader.of_new(index.disk, root, topic, queue_id, size, look.published)


def with_queue(
    index: QueryIndex, topic: str, queue_id: int, answer: Callable[[IndexSnapshot, ConsumeQueueReader | None], T]
) -> T:
    """What ``answer`` makes of a queue, its minimum corrected to where the log begins; None where there is none.

    The queue's oldest file may be removed between two calls, which a second look knows. CorruptDataError where a file
    is still missing then.
    """
    for _ in range(2):
        look = index.look()
        with MissingOk(), open_queue(index, look, topic, queue_id) or nullcontext() as queue:
            if queue is not None:
                queue.correct_min_offset(look.coverage.log_begin or 0)
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


def why_no_queue(index: QueryIndex, look: IndexSnapshot, topic: str) -> str:
    """Why a topic has no such queue, as far as can be told."""
    if not is_topic_name(topic):
        return NO_FOLDER
    batches = Path(look.frontier.store) / "batchconsumequeue" / topic
    if look.frontier.store and index.disk.exists(batches):
        return "a queue of batches (BatchConsumeQueue), which is not built"
    reasons, queues = [NO_QUEUE], look.frontier.queues_mark
    if queues is not None and queues.limit is not None:
        reasons.append(f"queues were left out when there were {queues.limit} (queues_max)")
    return "; ".join(reasons + gaps_in_words(look.queue_coverage))
