"""The daemon's start on clean data directories of 50 index files: small real ones, and ones of the size under test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench.ground import BenchError, Ground, progress
from bench.indexd import Daemon, call, options
from bench.keyed import KeyedStore, count_entries
from indexd import __version__
from indexd.flush.frontier import read_frontier, write_frontier
from indexd.index.format import FileMark, IndexHeader
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

FILES = 50
# A start compares the newest 64 MiB of log with the index, and must find none of it in the holes.
_LEAST_LOG = 128 << 20
_RUNS = 7
_SECONDS = 120
_FIRST_NAME = 20000101000000000


@dataclass(frozen=True, slots=True)
class Clean:
    """Starts on one directory: the bytes of each file, seconds to ``running`` and those of opening in them."""

    file_size: int
    running: list[float]
    opening: list[float]


def small_files(ground: Ground, store: KeyedStore, data: Path) -> Clean:
    """What ``data`` holds in one file, in 50 of them: all full of entries but the last."""
    progress(f"recover: starts on {FILES} small files")
    out = ground.work / "small-files"
    entries = count_entries(data / "index")
    # The last one half full.
    index_num = 1 + round(entries / (FILES - 0.5))
    sizes = replace(store.sizes, index_num=index_num, slots=index_num // 4)
    call(ground, "rebuild", *options(ground, store.path), *sizes.flags, "--out", str(out), "--json")
    return _starts(ground, replace(store, sizes=sizes), out)


def large_files(ground: Ground, store: KeyedStore, data: Path) -> Clean | None:
    """``data`` with 49 more full files before its own; they are holes behind their headers, so the disk can hold them.

    A clean start looks at the size and the header of a full file and at nothing else, unless the newest log is in it:
    None for a log that is too short for that.
    """
    if store.end_offset < _LEAST_LOG:
        return None
    progress(f"recover: starts on {FILES} files of the size under test")
    disk, files = Disk(), DataFiles(data)
    frontier = read_frontier(disk, files.frontier)
    if frontier is None:
        raise BenchError(f"{data} has no frontier")
    header = IndexHeader(1, 1, index_count=store.sizes.index_num)
    older = [FileMark(f"{_FIRST_NAME + number}", header, full=True) for number in range(FILES - len(frontier.index))]
    for mark in older:
        with (files.index / mark.name).open("xb") as file:
            file.write(header.pack())
            file.truncate(frontier.layout.file_size)
    write_frontier(disk, files.frontier, frontier.with_outputs(index=(*older, *frontier.index)), __version__)
    return _starts(ground, store, data)


def _starts(ground: Ground, store: KeyedStore, data: Path) -> Clean:
    sizes = [path.stat().st_size for path in (data / "index").iterdir()]
    if len(sizes) != FILES:
        raise BenchError(f"{data} has {len(sizes)} index files, not {FILES}")
    running: list[float] = []
    opening: list[float] = []
    for _ in range(_RUNS):
        with Daemon(ground, store.path, data, *store.sizes.flags) as daemon:
            running.append(daemon.wait_for_event("running", _SECONDS))
            row = daemon.event("opened")
            if row["index_files"] != FILES:
                raise BenchError(f"indexd opened {row['index_files']} index files, not {FILES}")
            opening.append(row["seconds"])
    return Clean(sizes[0], running, opening)
