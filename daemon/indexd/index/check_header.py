"""The header of an index file against the frontier's word, and both against what the entries say."""

from __future__ import annotations

from indexd.findings import Findings
from indexd.index.check_ground import Condition, Place, Seen, time_difference
from indexd.index.format import HEADER_SIZE, IndexHeader
from indexd.storage.disk import DiskFile

FIELDS = (
    ("begin timestamp", 0),
    ("end timestamp", 8),
    ("begin phy offset", 16),
    ("end phy offset", 24),
    ("used slot count", 32),
    ("index count", 36),
)
_BEGIN_TIMESTAMP, _END_TIMESTAMP, _BEGIN_PHY, _END_PHY, _USED, _COUNT = range(6)


def check_header(file: DiskFile, place: Place, seen: Seen, findings: Findings) -> None:
    """One finding for each field that the file, the frontier and the entries do not agree on."""
    marked = place.mark.header.values()
    if place.condition is Condition.CUT_SHORT:
        stored = marked
    else:
        stored = read_header(file, place.mark.header)
    grown = place.condition is Condition.GROWING
    said = _by_entries(seen)
    for field, ((name, position), here, wanted, entries) in enumerate(zip(FIELDS, stored, marked, said, strict=True)):
        if grown and _may_grow(field, here, wanted, place):
            here = wanted  # noqa: PLW2901 - what the daemon has built since is not looked at
        if here == wanted and entries in (None, wanted):
            continue
        text = f"{name} {here}"
        if here != wanted:
            text += f", but the frontier says {wanted}"
        if entries is not None:
            text += f", but the entries say {entries}" if here == wanted else f" and the entries say {entries}"
        findings.add(place.name, position, f"header-{name.replace(' ', '-')}", text)


def check_times(place: Place, seen: Seen, findings: Findings) -> None:
    """The two time differences that follow from headers alone: that of entry 1 and that of the last entry."""
    header = place.mark.header
    first, last = seen.first, seen.last
    if first is None or last is None:
        return
    if place.before is not None and first.time_diff >= 0:
        # Entry 1 counts from the end of the file before, which this header held until then (spec 3.4, 3.5).
        wanted = time_difference(header.begin_timestamp, max(place.before.end_timestamp, 0))
        if first.time_diff != wanted:
            findings.add(
                place.name,
                place.layout.entry_position(1) + 12,
                "entry-time-difference-first",
                f"entry 1: the time difference is {first.time_diff}, but from the end of the file before to the "
                f"begin timestamp of the header it is {wanted}",
            )
    if place.count > 2 and last.time_diff >= 0:
        wanted = time_difference(header.end_timestamp, header.begin_timestamp)
        if last.time_diff != wanted:
            findings.add(
                place.name,
                place.layout.entry_position(place.count - 1) + 12,
                "entry-time-difference-last",
                f"entry {place.count - 1}: the time difference is {last.time_diff}, but from the begin to the end "
                f"timestamp of the header it is {wanted}",
            )
    elif place.count == 2 and header.begin_timestamp != header.end_timestamp:
        text = f"begin timestamp {header.begin_timestamp} and end timestamp {header.end_timestamp} of one entry differ"
        findings.add(place.name, 8, "header-end-timestamp", text)


def read_header(file: DiskFile, wanted: IndexHeader) -> tuple[int, int, int, int, int, int]:
    """The six fields as they stand there; the 0 that an empty file may count on disk is the 1 of ``wanted``."""
    raw = file.pread(HEADER_SIZE, 0)
    values = list(IndexHeader.unpack(raw).values())
    count = int.from_bytes(raw[36:HEADER_SIZE], "big", signed=True)
    if not (count == 0 and wanted.index_count == 1):
        values[_COUNT] = count
    begin, end, begin_phy, end_phy, used, index_count = values
    return begin, end, begin_phy, end_phy, used, index_count


def _by_entries(seen: Seen) -> tuple[int | None, ...]:
    if seen.first is None or seen.last is None:
        return None, None, None, None, seen.used_slot_count, None
    return None, None, seen.first.phy_offset, seen.last.phy_offset, seen.used_slot_count, None


def _may_grow(field: int, here: int, marked: int, place: Place) -> bool:
    # A daemon has put entries since: counts and the end grow, the end time may even fall, and the first entry of
    # all also sets the begin.
    if field == _COUNT:
        return marked <= here <= place.layout.index_num
    if field in (_BEGIN_TIMESTAMP, _BEGIN_PHY):
        return place.mark.header.entries == 0 and (field == _BEGIN_TIMESTAMP or here >= marked)
    return field == _END_TIMESTAMP or here >= marked
