"""Reports of audits nobody made: logs of any size, with as many holes and as odd names as a test of the page wants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from indexd.audit.causes import Cause, CrashCost, StoreState
from indexd.audit.plan import AuditPlan
from indexd.audit.report import AuditReport
from indexd.audit.result import Audit, BrokerFile, FlavourRange, Gap, Hole
from indexd.findings import Finding
from indexd.index.format import IndexHeader, IndexLayout
from indexd.storage.lock import BrokerLock

GIB = 1 << 30
LAYOUT = IndexLayout(5_000_000, 20_000_000)
#: 2026-11-20 22:00 UTC, ms.
NOON = 1_795_212_000_000
# A message has so many bytes, and one is stored every ms.
_MESSAGE = 1 << 10
_KEYS = 3


def _file(begin: int, end: int) -> BrokerFile:
    entries, times = (end - begin) // _MESSAGE * _KEYS, (NOON + begin // _MESSAGE, NOON + end // _MESSAGE)
    count = min(entries + 1, LAYOUT.index_num)
    header = IndexHeader(*times, begin, end, entries // 2, count)
    name = f"{20261120220000000 + begin // _MESSAGE:017d}"
    return BrokerFile(name, header, count, begin, end, count >= LAYOUT.index_num, used_slots=entries // 2)


def _hole(begin: int, size: int) -> Hole:
    count, times = max(size // _MESSAGE, 1), (NOON + begin // _MESSAGE, NOON + (begin + size) // _MESSAGE)
    return Hole(begin, begin + size - _MESSAGE, *times, count, count * _KEYS, begin + size)


def made_report(
    segments: int = 64,
    files: int = 8,
    holes: Sequence[tuple[int, int, Cause]] = (),
    findings: Sequence[tuple[str, str, str, int]] = (),
    gaps: Sequence[Gap] = (),
    more_holes: int = 0,
) -> AuditReport:
    """A log of ``segments`` GiB, all of it indexed in ``files`` files; then what is wrong.

    ``holes`` as begin, size and cause in the order of the log, of which ``more_holes`` were too small to be kept;
    ``findings`` as file, kind, text and how many there are.
    """
    end, size = segments * GIB, segments * GIB // max(files, 1)
    seen = tuple(_file(number * size, (number + 1) * size - _MESSAGE) for number in range(files))
    found, eras, messages = tuple(_hole(begin, size) for begin, size, _ in holes), (FlavourRange(0, "5.4"),), end >> 10
    audit = Audit(
        log_begin=0,
        log_end=end,
        log_begin_now=0,
        expired=(),
        unreadable=None,
        messages=messages,
        keyed_messages=messages,
        keys=messages * _KEYS,
        missing_keys=sum(hole.keys for hole in found) + more_holes,
        entries=sum(file.entries for file in seen),
        holes=found,
        hole_count=len(found) + more_holes,
        tail=found[-1] if found and found[-1].end >= end else None,
        gaps=tuple(gaps),
        files=seen,
        eras=eras,
        findings=tuple(Finding(file, 40, what, text) for file, what, text, _ in findings),
        counts={what: sum(row[3] for row in findings if row[1] == what) for _, what, _, _ in findings},
    )
    store = "/data/rocketmq/store"
    return AuditReport(
        store=store,
        plan=AuditPlan(Path(store) / "index", 0, end, end, seen, eras, is_flavour_given=False, layout=LAYOUT),
        audit=audit,
        state=StoreState(BrokerLock(False, None, "none"), True, False, None, (), NOON + (end >> 10)),
        causes=tuple(cause for _, _, cause in holes),
        crash=CrashCost((), 0, 0, end),
        answers=None,
        queues=None,
        bytes_read=end,
        seconds=end / (600 << 20),
    )
