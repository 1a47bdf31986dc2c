"""What the index files of a simulation must hold: an undisturbed build by the naive service, to any offset."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from indexd.index.format import HEADER_SIZE, FileMark, IndexHeader, IndexLayout
from support.naive import NaiveIndexFile, NaiveIndexService, NaiveMessage
from support.sim_log import SimLog

Gaps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """One index file of the undisturbed build."""

    header: IndexHeader
    data: bytes
    full: bool


@dataclass(slots=True)
class _Build:
    service: NaiveIndexService
    end: int
    #: Whole files, once they are full.
    done: list[Expected]


class Oracle:
    """Knows the log alone. ``files`` is kept, for a crash at every operation asks for few offsets again and again."""

    def __init__(self, log: SimLog, layout: IndexLayout, flavour: str) -> None:
        self._log, self._layout, self._flavour = log, layout, flavour
        self._edition = log.edition
        self._builds: dict[tuple[int, Gaps], _Build] = {}
        self._files: dict[tuple[int, Gaps, int], list[Expected]] = {}

    def messages(self, begin: int, end: int, gaps: Gaps) -> list[NaiveMessage]:
        """Those of log bytes ``[begin, end)`` that lie in none of ``gaps``."""
        return [
            message
            for message in self._log.history
            if begin <= message.phy_offset < end and not any(first <= message.phy_offset < last for first, last in gaps)
        ]

    def files(self, begin: int, end: int, gaps: Gaps) -> list[Expected]:
        """The files after exactly these messages."""
        if self._edition != self._log.edition:
            self._builds.clear()
            self._files.clear()
            self._edition = self._log.edition
        key = (begin, gaps, end)
        if key not in self._files:
            self._files[key] = self._grow(begin, end, gaps)
        return self._files[key]

    def _grow(self, begin: int, end: int, gaps: Gaps) -> list[Expected]:
        build = self._builds.get((begin, gaps))
        if build is None or build.end > end:
            service = NaiveIndexService(self._layout.hash_slot_num, self._layout.index_num, self._flavour)
            build = self._builds[begin, gaps] = _Build(service, begin, [])
        for message in self.messages(build.end, end, gaps):
            build.service.build_index(message)
        build.end = end
        files = build.service.files
        build.done += [_expected(file) for file in files[len(build.done) : -1]]
        return [*build.done, _expected(files[-1])] if files else []


def _expected(file: NaiveIndexFile) -> Expected:
    data = file.to_bytes(flushed=True)
    return Expected(IndexHeader.unpack(data), data, file.is_write_full())


@dataclass(frozen=True, slots=True)
class Difference:
    """How two lists of index files differ, in entries: what is missing, what nobody wrote, what is there twice."""

    lost: int
    invented: int
    twice: int
    words: str


def compare(
    wanted: list[Expected], found: list[tuple[FileMark, bytes]], layout: IndexLayout, log_begin: int
) -> Difference | None:
    """None when ``found`` is ``wanted``, byte by byte; oldest files that point to expired messages only may be gone.

    An index count of 0 and 1 both say that a file is empty. An empty last file may be missing: it is made at the next
    message.
    """
    missing = len(wanted) - len(found)
    if missing > 0 and wanted[-1].header.entries == 0 and not (found and found[-1][0].header.entries == 0):
        wanted, missing = wanted[:-1], missing - 1
    expired = wanted[: max(missing, 0)]
    problems = []
    if missing < 0:
        problems.append(f"{-missing} files too many")
    problems += [
        f"{one.header} is missing" for one in expired if not one.full or one.header.end_phy_offset >= log_begin
    ]
    for place, ((mark, data), one) in enumerate(zip(found, wanted[len(expired) :], strict=False)):
        header = IndexHeader.unpack(data)
        if not all(_is_same(known, one.header, log_begin) for known in (header, mark.header)):
            problems.append(f"file {place} ({mark.name}) has {header}, marked {mark.header}, not {one.header}")
        if data[HEADER_SIZE:] != one.data[HEADER_SIZE:]:
            at = next((i for i in range(HEADER_SIZE, min(len(data), len(one.data))) if data[i] != one.data[i]), -1)
            problems.append(f"file {place} ({mark.name}) differs at byte {at}, sizes {len(data)} and {len(one.data)}")
        if mark.full and not one.full:
            problems.append(f"file {place} ({mark.name}) is marked full")
    if not problems:
        return None
    there = _entries([data for _, data in found], layout)
    should = _entries([one.data for one in wanted[len(expired) :]], layout)
    lost, invented = should - there, there - should
    twice = sum(count for entry, count in invented.items() if entry in should)
    words = f"{'; '.join(problems)}; {len(found)} files of {len(wanted)}"
    return Difference(lost.total(), invented.total() - twice, twice, words)


def _is_same(found: IndexHeader, wanted: IndexHeader, log_begin: int) -> bool:
    # When the last entry that a roll-back left is of an expired message, nobody knows the millisecond any more.
    if wanted.end_phy_offset < log_begin and 0 <= wanted.end_timestamp - found.end_timestamp < 1000:
        found = replace(found, end_timestamp=wanted.end_timestamp)
    return found == wanted


def _entries(files: list[bytes], layout: IndexLayout) -> Counter[tuple[int, int]]:
    # (key hash, physical offset) of every entry that a header vouches for.
    counted: Counter[tuple[int, int]] = Counter()
    for data in files:
        if len(data) < HEADER_SIZE:
            continue
        count = min(IndexHeader.unpack(data).index_count, layout.index_num)
        file = NaiveIndexFile.from_bytes(data.ljust(layout.file_size, b"\0"), layout.hash_slot_num, layout.index_num)
        counted.update((key_hash, phy) for key_hash, phy, _, _ in file.entries[1:count])
    return counted
