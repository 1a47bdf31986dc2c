"""Index files as bands below the drawing of the log, one behind the other, each above the log that it points to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from indexd.audit.page.scale import MERGED, Scale
from indexd.audit.part import FileSeen
from indexd.audit.report import AuditReport
from indexd.pages.wording import show_local

_LANES_MAX = 3
# Per cent: files that are narrower are drawn together with the next ones.
_WIDTH_MIN = 0.3


@dataclass(frozen=True, slots=True)
class Band:
    """One index file, or some that would be too narrow: ``[first, behind)`` per cent, up to physical offset ``end``."""

    first: float
    behind: float
    end: int
    files: int
    is_wrong: bool
    words: str


def lanes_of(report: AuditReport, scale: Scale) -> list[list[Band]]:
    """Bands from left to right, in as many lanes as files point to the same log, three at most."""
    wrong = {finding.file for finding in report.audit.findings}
    lanes: list[list[Band]] = []
    for file in sorted((file for file in report.audit.files if file.entries), key=lambda file: (file.begin, file.name)):
        first, behind = scale.at(file.begin), scale.at(file.end + 1)
        is_wrong = f"index/{file.name}" in wrong
        band = Band(first, max(behind, first + MERGED), file.end, 1, is_wrong, _words(file))
        # The last message of a file may go on in the next one.
        lane = next((lane for lane in lanes if lane[-1].end <= file.begin), None)
        if lane is None and len(lanes) < _LANES_MAX:
            lanes.append([band])
        elif lane is None:
            lane = min(lanes, key=lambda lane: lane[-1].end)
            lane[-1] = _both(lane[-1], band)
        elif lane[-1].behind - lane[-1].first < _WIDTH_MIN and first - lane[-1].behind < MERGED:
            lane[-1] = _both(lane[-1], band)
        else:
            lane.append(replace(band, first=max(first, lane[-1].behind)))
    return lanes


def _both(before: Band, band: Band) -> Band:
    files = before.files + band.files
    return Band(
        before.first,
        max(before.behind, band.behind),
        max(before.end, band.end),
        files,
        before.is_wrong or band.is_wrong,
        f"{files:,} index files, the last of them {band.words}",
    )


def _words(file: FileSeen) -> str:
    times = f"{show_local(file.begin_timestamp)} to {show_local(file.end_timestamp)}"
    return f"{file.name}: {file.entries:,} entries, log bytes {file.begin:,} to {file.end:,}, {times}"
