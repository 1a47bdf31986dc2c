"""What a simulation's answers and a cleanly stopped directory are held against."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from indexd.commitlog.evidence import FrameReader
from indexd.commitlog.segments import list_segments
from indexd.flush.frontier import StoreCheckpoint, read_frontier
from indexd.query import Answer, KeyQuery
from indexd.query.coverage import ABSENT
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.naive import exact_oracle, split_keys

if TYPE_CHECKING:
    from indexd.config import Config
    from support.sim_disk import SimDisk
    from support.sim_log import SimLog
    from support.sim_oracle import Gaps
    from support.simulation import World

_MOST = 10_000


class BrokenError(AssertionError):
    """An invariant does not hold; ``kind`` is one of lost, invented, twice, differs, other."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(f"{kind}: {words}")
        self.kind = kind


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
    if promised - set(found):
        raise BrokenError("lost", f"{query} does not find {sorted(promised - set(found))}; {coverage}")
    if set(found) - there:
        raise BrokenError("invented", f"{query} finds {sorted(set(found) - there)}; {coverage}")
    if len(found) != len(set(found)):
        raise BrokenError("twice", f"{query} finds {found}")
    if answer.why == ABSENT and there:
        raise BrokenError("lost", f"{query} is said to be absent, and stands at {sorted(there)}; {coverage}")
    if answer.truncated is not None:
        raise BrokenError("other", f"{query} was cut off: {answer.truncated}")


def check_stopped(world: World) -> None:
    """What a clean stop leaves: the files of the frontier and no other, the checkpoint, no flag, no state."""
    disk, files = world.disk, DataFiles(world.data)
    frontier = read_frontier(disk, files.frontier)
    assert frontier is not None
    world.check_files(frontier.phy_offset, frontier.index)
    names = [name for name, _ in disk.list_dir(files.index)]
    if names != [mark.name for mark in frontier.index]:
        raise BrokenError(
            "other", f"{names} stand in index/, the frontier names {[mark.name for mark in frontier.index]}"
        )
    here = [name for name, _ in disk.list_dir(world.data)]
    if here != ["checkpoint", "frontier"]:
        raise BrokenError("other", f"a clean stop leaves {here}")
    covered = world.oracle.messages(frontier.begin_offset, frontier.phy_offset, world.gaps)
    if frontier.messages != len(covered):
        raise BrokenError(
            "other", f"the frontier counts {frontier.messages} messages, there are {len(covered)}; {world}"
        )
    full = [mark.header.end_timestamp for mark in frontier.index if mark.full]
    newest = covered[-1].store_timestamp if covered else 0
    wanted = StoreCheckpoint(newest, newest, full[-1] if full else 0, 0, frontier.phy_offset)
    found = StoreCheckpoint.unpack(disk.peek(files.checkpoint), files.checkpoint)
    if found != wanted:
        raise BrokenError("other", f"the checkpoint is {found}, not {wanted}")


class RefusedError(Exception):
    """Everything that was noted of the log has been rewritten: for the daemon it is another store."""


def check_refusal(disk: SimDisk, config: Config, log_begin: int) -> RefusedError:
    """A store is refused only if no frame that was noted, and has not expired, is there any more."""
    frontier = read_frontier(disk, config.store.data / "frontier")
    assert frontier is not None
    log = list_segments(Disk(), config.store.commit_log_directories, config.store.segment_size)
    noted = [point for point in frontier.evidence if point.phy_offset >= log_begin]
    with FrameReader(Disk(), log) as frames:
        if not noted or any(frames.holds(point) for point in noted):
            raise BrokenError("other", f"its own store is refused, though it holds what was noted: {noted}")
    return RefusedError()
