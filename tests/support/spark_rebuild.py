"""A rebuild by tasks without Spark, and its result held against that of the one process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from indexd.commitlog.lookup import FrameReader
from indexd.commitlog.segments import NOBODY, LogLimit, list_segments
from indexd.config import Config
from indexd.flush.frontier import Frontier, read_frontier
from indexd.recovery.rebuild import Rebuilt
from indexd.recovery.rebuild import rebuild as one_process
from indexd.spark.rebuild.job import MANIFEST, rebuild
from indexd.storage.disk import Disk
from support.queues import tree

#: With which the logs of ``small_log`` come to some splits a segment.
SPLIT_SIZE = 60_000


def run_here(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    *,
    sizes: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    """What run_tasks does, in this process: work, items and results are pickled; the last item is worked on first."""
    work, found = pickle.loads(pickle.dumps(work)), {}
    for number in reversed(range(len(items))):
        found[number] = pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(items[number])))))
        if progress is not None:
            progress(sum(sizes[number:]), sum(sizes))
    return [found[number] for number in range(len(items))]


def by_tasks(
    config: Config,
    out: Path,
    size: int = 0,
    run_tasks: Any = run_here,
    *,
    log_limit: LogLimit = NOBODY,
) -> Rebuilt:
    """Rebuild by tasks into ``out``."""
    config = config.model_copy(update={"spark": config.spark.model_copy(update={"split_size": size})})
    return rebuild(config, Disk(), out, run_tasks, lambda *_: None, slots=2, log_limit=log_limit)[0]


def by_one(config: Config, out: Path, log_limit: LogLimit = NOBODY) -> Rebuilt:
    """Rebuild in one process."""
    return one_process(config, Disk(), out, lambda *_: None, log_limit)


def frontier_of(data: Path) -> Frontier:
    """The frontier of a data directory."""
    found = read_frontier(Disk(), data / "frontier")
    assert found is not None
    return found


def files_of(data: Path) -> dict[str, bytes]:
    """All files but frontier and manifest, those of the key index by number: their names are times."""
    found = tree(data)
    for name in ("frontier", MANIFEST, "abort", "starts", "state", "lock"):
        found.pop(name, None)
    index = sorted(name for name in found if name.startswith("index/"))
    return {f"index/{index.index(name)}" if name in index else name: found[name] for name in found}


def timeless(frontier: Frontier) -> Frontier:
    """Without names and times of index files, of scrubs, and without evidence: that depends on how the log was read."""
    index = tuple(replace(mark, name=str(number), mtime_ns=0) for number, mark in enumerate(frontier.index))
    return replace(frontier.with_outputs(index=index), evidence=(), scrubbed_at=None)


def assert_same_data(config: Config, found: Path, wanted: Path) -> None:
    """Both directories hold the same, and the frontier of the first one has evidence of this log."""
    files, expected = files_of(found), files_of(wanted)
    assert sorted(files) == sorted(expected)
    assert [name for name in files if files[name] != expected[name]] == []
    frontier, other = frontier_of(found), frontier_of(wanted)
    assert timeless(frontier) == timeless(other)
    assert [mark.name for mark in frontier.index] == sorted({path.name for path in (found / "index").iterdir()})
    assert all((found / "index" / mark.name).stat().st_mtime_ns == mark.mtime_ns for mark in frontier.index)
    log = list_segments(Disk(), config.store.commit_log_directories, config.store.segment_size)
    with FrameReader(Disk(), log) as frames:
        assert all(frames.holds(point) for point in frontier.evidence)
    points = {point.phy_offset: point for point in frontier.evidence}
    assert list(points) == sorted(points)
    theirs = {point.phy_offset: point for point in other.evidence}
    assert all(points[offset] == theirs[offset] for offset in points.keys() & theirs.keys())
    if theirs:
        # The first message, the last one, and where segments begin.
        bases = {offset for offset in theirs if offset % config.store.segment_size == 0}
        assert {min(theirs), max(theirs), *bases} <= points.keys()
    manifest = json.loads((found / MANIFEST).read_bytes())
    assert manifest["messages"] == frontier.messages


def assert_same_rebuild(config: Config, root: Path, sizes: Sequence[int]) -> Rebuilt:
    """A rebuild of this log by tasks, for each of these sizes of splits, is that of one process; its result."""
    expected = by_one(config, root / "one")
    for size in sizes:
        out = root / f"tasks-{size}"
        found = by_tasks(config, out, size)
        assert replace(found, seconds=expected.seconds) == expected
        assert_same_data(config, out, root / "one")
        assert not out.with_name(out.name + ".building").exists()
    return expected


def failing(at: int, error: BaseException) -> Callable[..., list[Any]]:
    """Runs tasks one after the other until so many are done, over all stages; then one fails."""
    left = iter(range(at))

    def run(work: Callable[[Any], Any], items: Sequence[Any], **_: Any) -> list[Any]:
        found = []
        for item in items:
            if next(left, None) is None:
                raise error
            found.append(work(item))
        return found

    return run
