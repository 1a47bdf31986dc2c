"""The stages of a rebuild on Spark without Spark: runs of a log, cut anywhere, and what stage two makes of them."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from indexd.commitlog.segments import list_segments
from indexd.flush.frontier import Frontier, read_frontier
from indexd.recovery.rebuild import Rebuilt, rebuild
from indexd.spark.rebuild.runs import RunWriter
from indexd.spark.rebuild.stage_two import QueuesResult, QueuesTask, SparseTask
from indexd.spark.splits import Split, SplitReader
from indexd.sparse.format import SparseMark
from indexd.storage.disk import Disk
from support.queues import tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from indexd.config import Config
    from indexd.spark.rebuild.runs import Run


@dataclass(frozen=True, slots=True)
class OneProcess:
    """What the one-process rebuild makes of a log."""

    rebuilt: Rebuilt
    frontier: Frontier
    queues: dict[str, bytes]
    sparse: dict[str, bytes]


def one_process(config: Config, out: Path) -> OneProcess:
    """Rebuild into ``out``, which is not there yet."""
    rebuilt = rebuild(config, Disk(), out, lambda *_: None)
    frontier = read_frontier(Disk(), out / "frontier")
    assert frontier is not None
    return OneProcess(rebuilt, frontier, tree(out / "consumequeue"), tree(out / "sparse"))


def splits_at(config: Config, cuts: Iterable[int]) -> list[Split]:
    """The whole log in splits that begin at ``cuts``, each where a message begins, and with each segment in use."""
    segments = list_segments(Disk(), config.store.commit_log_directories, config.store.segment_size).segments
    used = [one for one in segments if one.path.read_bytes()[:8] != bytes(8)]
    begins = sorted({*(one.base for one in used), *(cut for cut in cuts if cut < used[-1].end)}) if used else []
    ends = [*begins[1:], used[-1].end] if used else []
    return [Split(begin, end) for begin, end in zip(begins, ends, strict=True)]


def make_runs(config: Config, splits: Sequence[Split], directory: Path) -> list[Run]:
    """Stage one: a run of each split."""
    runs = []
    for number, split in enumerate(splits):
        reader = SplitReader(Disk(), config, split)
        directory.mkdir(parents=True, exist_ok=True)
        with RunWriter(Disk(), directory / f"{number:06d}", split) as writer:
            for found in reader:
                writer.put(found)
            runs.append(writer.close(reader))
    return runs


@dataclass(frozen=True, slots=True)
class StageTwo:
    """What the tasks of stage two make of runs, committed."""

    queues: dict[str, bytes]
    result: QueuesResult
    sparse: dict[str, bytes]
    mark: SparseMark


def stage_two(config: Config, runs: Sequence[Run], out: Path) -> StageTwo:
    """Run all tasks, in another order than they were planned, everything pickled on its way, and commit."""
    queue_tasks = QueuesTask.plan(runs, config, out / "attempts")
    sparse_tasks = SparseTask.plan(runs, config, out / "attempts")
    queues_built = _scattered(runs, queue_tasks)
    sparse_built = _scattered(runs, sparse_tasks)
    result = QueuesTask.collect(runs, queue_tasks, queues_built, config)
    mark = SparseTask.collect(sparse_tasks, sparse_built, config)
    QueuesTask.commit(Disk(), queues_built, out / "consumequeue")
    SparseTask.commit(Disk(), sparse_built, out / "sparse")
    assert tree(out / "attempts") == {}
    return StageTwo(tree(out / "consumequeue"), result, tree(out / "sparse"), mark)


def assert_same(config: Config, runs: Sequence[Run], root: Path, expected: OneProcess) -> StageTwo:
    """Stage two of these runs makes what one process made of their log: files, marks and counts."""
    found = stage_two(config, runs, root)
    frontier = expected.frontier
    assert frontier.queues is not None
    assert frontier.sparse is not None
    assert found.queues == expected.queues
    assert found.result.mark == frontier.outputs["consumeQueue"]
    assert found.result.counters.without_unit == expected.rebuilt.left_out_messages
    assert found.result.counters.messages == expected.rebuilt.messages
    assert found.sparse == expected.sparse
    assert found.mark == frontier.sparse
    return found


def _scattered(runs: Sequence[Run], tasks: Sequence[Any]) -> list[Any]:
    built = {}
    slim = [run.slim() for run in runs]
    for number in random.Random(len(tasks)).sample(range(len(tasks)), len(tasks)):
        sent, task = pickle.loads(pickle.dumps((slim, tasks[number])))
        built[number] = pickle.loads(pickle.dumps(task.work(sent)))
    return [built[number] for number in range(len(tasks))]
