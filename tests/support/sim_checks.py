"""What a simulation's answers and a cleanly stopped directory are held against."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.commitlog.lookup import FrameReader
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.consumequeue.format import QueueMark
from indexd.flush.frontier import Frontier, StoreCheckpoint, read_frontier
from indexd.index.format import HEADER_SIZE, FileMark, IndexHeader, IndexLayout
from indexd.query import Answer, KeyQuery
from indexd.query.source import ABSENT
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.naive import (
    NaiveConsumeQueueStore,
    NaiveIndexFile,
    NaiveIndexService,
    NaiveMessage,
    QueueMessage,
    exact_oracle,
    naive_frames,
    split_keys,
)
from support.queues import packed_entries
from support.sim_disk import SimDisk
from support.small_log import BASE_TIME, messages

if TYPE_CHECKING:
    from support.simulation import World

_MILLIS_PER_MESSAGE = 400
_MOST = 10_000


class UnsyncedWriter(CommitLogWriter):
    """A writer that does not sync: what a crash leaves of the log itself is not asked here."""

    def flush(self) -> None:
        return


class SimLog:
    """``history`` holds what an index of the whole log covers: expired messages too, but none that were cut off."""

    def __init__(
        self, directory: Path, segment_size: int, seed: int, *, rewrites: bool = False, prop_crc: bool = False
    ) -> None:
        self.directory = directory
        self.segment_size = segment_size
        self.history: list[NaiveMessage] = []
        #: Counted up with each rewrite: what was known of the old log holds no more.
        self.edition = 0
        self._specs = _rising(messages(seed)) if rewrites else messages(seed)
        self._prop_crc = prop_crc
        self._writer = UnsyncedWriter(directory, segment_size, prop_crc=prop_crc)
        self._parsed = 0

    def __repr__(self) -> str:
        return f"SimLog([{self.begin}, {self.end}), {len(self.history)} messages, edition {self.edition})"

    @property
    def begin(self) -> int:
        """The first physical offset that is still there."""
        return min(int(path.name) for path in self.directory.iterdir())

    @property
    def end(self) -> int:
        """The offset behind the last message."""
        return self._writer.max_offset

    def append(self, count: int) -> None:
        """Write so many messages, or a few more.

        What follows the end must not be a frame of an older and longer log, or nobody could tell where this one ends.
        """
        begin = self.end
        for _ in range(count):
            self._writer.append(next(self._specs))
        *_, last = naive_frames(self.directory, self.segment_size, start=begin)
        while self.edition and last.phy_offset + last.size > self.end:
            self._writer.append(next(self._specs))
            *_, last = naive_frames(self.directory, self.segment_size, start=begin)
        self._read_history()

    def roll(self) -> None:
        """Write until the next segment has begun."""
        base = self.end - self.end % self.segment_size
        while self.end < base + self.segment_size:
            self._writer.append(next(self._specs))
        self._read_history()

    def expire(self, before: int) -> int:
        """Delete the segments that end at or before ``before``, never the one being written; how many."""
        last = self.end - self.end % self.segment_size
        last = min(last, before - self.segment_size + 1)
        old = [path for path in self.directory.iterdir() if int(path.name) < last]
        for path in old:
            path.unlink()
        return len(old)

    def rewrite(self, rand: random.Random, most: int) -> int | None:
        """Cut at most ``most`` messages off the end, as a broker that lost them, and write others; where it was cut.

        None when there is nothing to cut.
        """
        kept = [message for message in self.history if message.phy_offset >= self.begin]
        if len(kept) < 2:
            return None
        cut = kept[-rand.randint(1, min(most, len(kept) - 1))].phy_offset
        self.cut(cut)
        self.append(1)
        return cut

    def cut(self, offset: int) -> None:
        """Go on writing at ``offset``, a message's: the bytes behind it stay in its segment, later segments go."""
        self._writer.close(clean=False)
        for path in self.directory.iterdir():
            if int(path.name) > offset:
                path.unlink()
        self.history = [message for message in self.history if message.phy_offset < offset]
        self._writer = UnsyncedWriter(self.directory, self.segment_size, start_offset=offset, prop_crc=self._prop_crc)
        self._parsed = offset
        self.edition += 1

    def write(self, *specs: FrameSpec) -> None:
        """Write just these messages."""
        for spec in specs:
            self._writer.append(spec)
        self._read_history()

    def close(self) -> None:
        """Close the segment, as a broker that was killed."""
        self._writer.close(clean=False)

    def _read_history(self) -> None:
        # From the bytes, by the naive decoder: the oracle shares nothing with the writer either.
        for message in naive_frames(self.directory, self.segment_size, start=self._parsed):
            if message.phy_offset >= self.end:
                break
            self.history.append(message)
            self._parsed = message.phy_offset + message.size


def _rising(specs: Iterator[FrameSpec]) -> Iterator[FrameSpec]:
    # A broker's clock: after a cut the new messages are younger than those that they overwrite.
    for number, spec in enumerate(specs):
        yield replace(spec, store_timestamp=BASE_TIME + _MILLIS_PER_MESSAGE * number)


Gaps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """One index file of the undisturbed build."""

    header: IndexHeader
    data: bytes
    full: bool


class Oracle:
    """Knows the log alone. What was built is kept: a crash at every operation asks for few offsets again and again."""

    def __init__(self, log: SimLog, layout: IndexLayout, flavour: str) -> None:
        self._log, self._layout, self._flavour = log, layout, flavour
        #: By edition of the log, begin and gaps: what was built up to where, and its files that are full.
        self._builds: dict[tuple[int, int, Gaps], tuple[NaiveIndexService, int, list[Expected]]] = {}

    def messages(self, begin: int, end: int, gaps: Gaps) -> list[NaiveMessage]:
        """Those of log bytes ``[begin, end)`` that lie in none of ``gaps``."""
        return [
            message
            for message in self._log.history
            if begin <= message.phy_offset < end and not any(first <= message.phy_offset < last for first, last in gaps)
        ]

    def files(self, begin: int, end: int, gaps: Gaps) -> list[Expected]:
        """The files after exactly these messages."""
        empty = NaiveIndexService(self._layout.hash_slot_num, self._layout.index_num, self._flavour)
        new, key = (empty, begin, list[Expected]()), (self._log.edition, begin, gaps)
        service, built, done = self._builds.get(key, new)
        if built > end:
            service, built, done = new
        for message in self.messages(built, end, gaps):
            service.build_index(message)
        done += [_expected(file) for file in service.files[len(done) : -1]]
        self._builds[key] = service, end, done
        return [*done, *map(_expected, service.files[-1:])]


def _expected(file: NaiveIndexFile) -> Expected:
    data = file.to_bytes(flushed=True)
    return Expected(IndexHeader.unpack(data), data, file.is_write_full())


def compare(wanted: list[Expected], found: list[tuple[FileMark, bytes]], log_begin: int) -> str | None:
    """How ``found`` differs from ``wanted``, None if not at all; oldest files of expired messages only may be gone.

    An index count of 0 and 1 both say that a file is empty. An empty last file may be missing: it is made at the next
    message.
    """
    missing = len(wanted) - len(found)
    if missing > 0 and wanted[-1].header.entries == 0 and not (found and found[-1][0].header.entries == 0):
        wanted, missing = wanted[:-1], missing - 1
    expired, left = wanted[: max(missing, 0)], wanted[max(missing, 0) :]
    if len(left) != len(found) or any(not one.full or one.header.end_phy_offset >= log_begin for one in expired):
        return f"{len(found)} files of {len(wanted)}"
    for (mark, data), one in zip(found, left, strict=True):
        header, wanted_headers = IndexHeader.unpack(data), [one.header]
        # When the last entry that a roll-back left is of an expired message, nobody knows the millisecond any more.
        if one.header.end_phy_offset < log_begin and 0 <= one.header.end_timestamp - header.end_timestamp < 1000:
            wanted_headers.append(replace(one.header, end_timestamp=header.end_timestamp))
        if header not in wanted_headers or mark.header not in wanted_headers:
            return f"{mark.name} has {header}, marked {mark.header}, not {one.header}"
        if data[HEADER_SIZE:] != one.data[HEADER_SIZE:] or (mark.full and not one.full):
            return f"{mark.name} differs behind its header, or is marked full too early"
    return None


def naive_queues(
    messages: list[NaiveMessage], file_units: int, gaps: Gaps, anew: tuple[int, ...]
) -> NaiveConsumeQueueStore:
    """The ConsumeQueues after exactly these messages; behind what expired they begin anew."""
    store = NaiveConsumeQueueStore(file_units)
    ends = sorted({*(end for _, end in gaps), *anew}, reverse=True)
    for message in messages:
        while ends and message.phy_offset >= ends[-1]:
            ends.pop()
            store.queues.clear()
        store.put(QueueMessage.of(message))
    return store


def check_beside(world: World, end: int, stood: Frontier) -> None:
    """Queues and sparse indexes are those of an undisturbed build of the log up to ``end``."""
    queues, sparse = stood.queues, stood.sparse
    assert queues is not None
    assert sparse is not None
    messages = world.oracle.messages(world.begin, end, world.gaps)
    _check_queues(world, messages, queues)
    segments: dict[int, list[NaiveMessage]] = defaultdict(list)
    for message in messages:
        segments[message.phy_offset - message.phy_offset % world.shape.segment_size].append(message)
    named = [segment.base for segment in sparse.segments]
    lost = [base for base in segments if base not in named and base + world.shape.segment_size > world.log.begin]
    assert not lost, f"segments {lost} are not there; {world}"
    assert set(named) <= set(segments), f"segments {named} of {sorted(segments)}; {world}"
    for base in named:
        rows = [(one.phy_offset, one.size, one.store_timestamp) for one in segments[base]]
        pair = packed_entries(rows, base, world.shape.sparse_interval, is_sealed=base != named[-1])
        for suffix, wanted in zip((".index", ".timeindex"), pair, strict=True):
            found = world.disk.peek(world.data / "sparse" / f"{base:020d}{suffix}")
            length = len(found) if base == named[-1] else 0
            assert found == wanted.ljust(length, b"\0"), f"{base}{suffix} is not what the log comes to; {world}"


def _check_queues(world: World, messages: list[NaiveMessage], marks: tuple[QueueMark, ...]) -> None:
    wanted = naive_queues(messages, world.shape.queue_units, world.gaps, world.anew).queues
    for mark in marks:
        name, queue = f"queue {mark.topic}/{mark.queue_id}", wanted.pop(mark[:2], None)
        assert queue is not None, f"{name} is of no message; {world}"
        # Where all of it has expired nobody knows where the last one ended.
        end = mark.max_phy_offset if mark.max_offset > mark.first_offset else queue.max_phy_offset
        assert (mark.max_offset, end) == (queue.end, queue.max_phy_offset), f"{mark}; {world}"
        before = queue.units[: mark.first_offset - queue.first]
        assert all(phy < world.log.begin for phy, _, _ in before), f"{name} begins at unit {mark.first_offset}; {world}"
        for file, data in queue.files().items():
            path = world.data / "consumequeue" / mark.topic / str(mark.queue_id) / file
            assert int(file) < mark.first_offset * 20 or world.disk.peek(path) == data, f"{name}, {file}; {world}"
    lost = [name for name, queue in wanted.items() if any(phy >= world.log.begin for phy, _, _ in queue.units)]
    assert not lost, f"queues {lost} are not there; {world}"


def has_lost_refill(world: World) -> bool:
    """Whether queues were being filled again, and what they had not come to has expired."""
    path, refill_offset = world.data / "frontier", None
    if world.disk.is_there(path):
        with suppress(ValueError):  # torn, where the code is made wrong on purpose: nothing of it is believed
            refill_offset = json.loads(world.disk.peek(path))["refillOffset"]
    return refill_offset is not None and refill_offset < world.log.begin


def _walk(disk: SimDisk, path: Path) -> list[str]:
    below = [f"{name}/{file}" for name in disk.list_dirs(path) for file in _walk(disk, path / name)]
    return [*(name for name, _ in disk.list_dir(path)), *below]


def draw_query(rand: random.Random, log: SimLog) -> KeyQuery:
    """A key of a message of the log, or one that is nowhere; of any kind, now and then of a narrow time."""
    if not log.history or rand.random() < 0.1:
        return KeyQuery("TopicTest", f"order-{rand.randrange(4000)}", _MOST)
    message = rand.choice(log.history)
    kinds = [("K", key) for key in split_keys(message.keys)]
    kinds += [("U", message.uniq_key)] if message.uniq_key else []
    kinds += [("T", message.tags)] if message.tags else []
    word, key = rand.choice(kinds or [("K", "Aa")])
    kind = None if word != "T" and rand.random() < 0.5 else word
    if rand.random() < 0.3:
        time = message.store_timestamp
        return KeyQuery(message.topic, key, _MOST, time - rand.randrange(5000), time + rand.randrange(5000), kind)
    return KeyQuery(message.topic, key, _MOST, index_type=kind)


def check_answer(answer: Answer, log: SimLog, gaps: Gaps, flavour: str) -> None:
    """All that the coverage promises, nothing that the log does not hold, nothing twice; ``absent`` is absent."""
    query, coverage = answer.query, answer.coverage
    rows = [one.row() for one in log.history if one.topic == query.topic and one.phy_offset >= log.begin]
    there = exact_oracle(rows, query.topic, query.key, query.begin, query.end, query.index_type, flavour)
    promised = {
        offset
        for offset in there
        if coverage.begin <= offset < coverage.end and not any(first <= offset < last for first, last in gaps)
    }
    found = [hit.phy_offset for hit in answer.hits]
    assert promised <= set(found) <= there, (
        f"{query} finds {found}, not {sorted(promised)}, {sorted(there)}; {coverage}"
    )
    assert len(found) == len(set(found)), f"{query} finds {found}"
    assert answer.why != ABSENT or not there, f"{query} is said to be absent, and stands at {sorted(there)}; {coverage}"
    assert answer.truncated is None, f"{query} was cut off: {answer.truncated}"


def check_stopped(world: World) -> None:
    """What a clean stop leaves: the files of the frontier and no other, the checkpoint, no flag, no state."""
    disk, files = world.disk, DataFiles(world.data)
    frontier = read_frontier(disk, files.frontier)
    assert frontier is not None
    world.check_files(frontier.phy_offset, frontier.index)
    check_beside(world, frontier.phy_offset, frontier)
    assert frontier.sparse is not None
    size = world.shape.queue_units
    wanted = {"checkpoint", "frontier", *(f"index/{mark.name}" for mark in frontier.index)}
    wanted |= {
        f"consumequeue/{mark.topic}/{mark.queue_id}/{begin * 20:020d}"
        for mark in frontier.queues or ()
        for begin in range(mark.first_offset // size * size, mark.max_offset, size)
    }
    wanted |= {f"sparse/{name}" for segment in frontier.sparse.segments for name, _ in segment.files}
    found = set(_walk(disk, world.data))
    assert found == wanted, f"too many: {sorted(found - wanted)}, missing: {sorted(wanted - found)}; {world}"
    covered = world.oracle.messages(frontier.begin_offset, frontier.phy_offset, world.gaps)
    assert frontier.messages == len(covered), f"the frontier counts {frontier.messages} of {len(covered)}; {world}"
    full = [mark.header.end_timestamp for mark in frontier.index if mark.full]
    newest = covered[-1].store_timestamp if covered else 0
    stored = StoreCheckpoint(newest, newest, full[-1] if full else 0, 0, frontier.phy_offset)
    checkpoint = StoreCheckpoint.unpack(disk.peek(files.checkpoint), files.checkpoint)
    assert checkpoint == stored


class RefusedError(Exception):
    """Everything that was noted of the log has been rewritten: for the daemon it is another store."""


def check_refusal(disk: SimDisk, config: Config, log_begin: int) -> RefusedError:
    """A store is refused only if no frame that was noted, and has not expired, is there any more."""
    frontier = read_frontier(disk, config.store.data / "frontier")
    assert frontier is not None
    log = list_segments(Disk(), config.store.commit_log_directories, config.store.segment_size)
    noted = [point for point in frontier.evidence if point.phy_offset >= log_begin]
    with FrameReader(Disk(), log) as frames:
        assert noted
        assert not any(frames.holds(point) for point in noted), f"its own store is refused, which holds some of {noted}"
    return RefusedError()
