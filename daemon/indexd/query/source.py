"""QueryIndex: where queries read, found from DATA alone, and what stands there at one moment.

A daemon that runs makes new index files between two frontiers and removes old ones, so every query looks anew. Without
one, and after a crash, only what the frontier names counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexd.commitlog.decoder import DecoderOptions
from indexd.config import Config, flag_name
from indexd.errors import CorruptDataError, DiskError, UsageError
from indexd.flush.frontier import Frontier, Uncovered, read_frontier
from indexd.index.flavour import FLAVOURS, Flavour
from indexd.index.format import FileMark, IndexLayout
from indexd.index.reader import IndexFileReader
from indexd.query.coverage import Coverage, make_coverage
from indexd.query.log import LogView
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles, is_index_name

_DEFAULT = "default"
_FRAME_SIZE_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Look:
    """The index at one moment. ``files`` oldest first, with what the frontier says of each, None for newer files.

    ``is_unclean``: the daemon ended without a stop, so an open file holds for sure only what its mark says.
    """

    layout: IndexLayout
    flavour: Flavour
    files: tuple[tuple[str, FileMark | None], ...]
    is_unclean: bool
    coverage: Coverage


class QueryIndex:
    """One data directory and the log it belongs to; ``close`` it after use. Raises IndexdError of every kind."""

    def __init__(self, disk: Disk, config: Config, log: LogView) -> None:
        self.config = config
        self.log = log
        self._disk = disk
        self._files = DataFiles(config.store.data)

    def __repr__(self) -> str:
        return f"QueryIndex({self._files.data}, {self.log})"

    def look(self) -> Look:
        """What stands now. The progress is read before the files are listed: they hold at least what it covers."""
        self.log.begin_query()
        pid = owner_pid(self._files.lock)
        frontier = known_frontier(self._disk, self._files)
        begin, end, uncovered = _progress(self._disk, self._files, frontier, pid)
        files: list[tuple[str, FileMark | None]] = [(mark.name, mark) for mark in frontier.index]
        if pid is not None:
            last = files[-1][0] if files else ""
            size = frontier.layout.file_size
            names = [name for name, found in self._list() if is_index_name(name) and found == size and name > last]
            files.extend((name, None) for name in names)
        complete = not self.log.goes_on_at(end)
        coverage = make_coverage(begin, end, uncovered, self.log.begin, complete=complete, daemon_pid=pid)
        unclean = pid is None and self._disk.exists(self._files.abort)
        return Look(frontier.layout, FLAVOURS[frontier.flavour], tuple(files), unclean, coverage)

    def newest_first(self, look: Look) -> Iterator[tuple[IndexFileReader, FileMark | None]]:
        """Each index file of ``look``, open while it is the current one; those that expired meanwhile are left out."""
        for name, mark in reversed(look.files):
            try:
                file = self._disk.open_read(self._files.index / name)
            except DiskError as error:
                if not error.is_missing:
                    raise
                self._check_expired(name, mark)
                continue
            with file:
                reader = IndexFileReader(file, look.layout)
                if mark is not None and mark.full and reader.header() != mark.header:
                    raise CorruptDataError(f"the header of index file {file.path} is not what the frontier says")
                yield reader, mark

    def close(self) -> None:
        """Close every file."""
        self.log.close()

    def _list(self) -> list[tuple[str, int]]:
        return self._disk.list_dir(self._files.index)

    def _check_expired(self, name: str, mark: FileMark | None) -> None:
        # The daemon removes a file once the log begins behind its last entry; any other loss is damage.
        self.log.refresh()
        if mark is not None and mark.header.end_phy_offset >= (self.log.begin or 0):
            raise CorruptDataError(f"index file {self._files.index / name} is missing")


def open_index(disk: Disk, config: Config) -> QueryIndex:
    """The index in DATA; UsageError if there is none, or if it was built with other settings than were given."""
    files = DataFiles(config.store.data)
    frontier = known_frontier(disk, files)
    check_as_built(config, frontier)
    return QueryIndex(disk, config, open_log(disk, config, frontier, check_crc=False))


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


def open_log(disk: Disk, config: Config, frontier: Frontier | None, *, check_crc: bool) -> LogView:
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
        config.store.delay_levels_ms, max(_FRAME_SIZE_MAX, 2 * config.reader.max_message_size), check_crc
    )
    return LogView(disk, directories, segment_size, options)


def known_frontier(disk: Disk, files: DataFiles) -> Frontier:
    """The frontier; UsageError if the directory has none yet."""
    frontier = read_frontier(disk, files.frontier)
    if (
        frontier is None
        and disk.exists(files.index)
        and any(is_index_name(name) for name, _ in disk.list_dir(files.index))
    ):
        raise CorruptDataError(f"{files.data} has index files, but no frontier that says what they hold")
    if frontier is None:
        raise UsageError(f"{files.data} holds no index yet", f"run indexd --store DIR --data {files.data} first")
    if frontier.flavour not in FLAVOURS:
        raise CorruptDataError(f"{files.frontier} names a flavour {frontier.flavour!r} that there is not")
    return frontier


def _progress(
    disk: Disk, files: DataFiles, frontier: Frontier, pid: int | None
) -> tuple[int, int, tuple[Uncovered, ...]]:
    # (begin offset, end offset, uncovered): the running daemon's word, else the frontier's.
    state = _read_state(disk, files.state) if pid else {}
    if state.get("pid") != pid or not isinstance(state.get("phyOffset"), int):
        return frontier.begin_offset, frontier.phy_offset, frontier.uncovered
    begin = state.get("beginOffset", frontier.begin_offset)
    uncovered = frontier.uncovered
    if isinstance(state.get("uncovered"), list):
        uncovered = tuple(Uncovered(int(first), int(last), str(why)) for first, last, why in state["uncovered"])
    return int(begin), state["phyOffset"], uncovered


def _read_state(disk: Disk, path: Path) -> dict[str, Any]:
    # A hint only: whatever cannot be read says nothing.
    try:
        row = json.loads(disk.read(path))
    except (DiskError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
