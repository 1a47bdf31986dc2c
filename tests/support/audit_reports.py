"""Reports of audits nobody made: logs of any size, with as many holes and as odd names as a test of the page wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from indexd.audit.causes import Cause, CrashCost, SegmentStart, StoreState
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


class Made:
    """A log of ``segments`` GiB that begins at ``begin``, all of it indexed in ``files`` files; then what is wrong."""

    def __init__(self, segments: int = 64, files: int = 8, begin: int = 100 * GIB) -> None:
        self.begin, self.end = begin, begin + segments * GIB
        self.holes: list[tuple[Hole, Cause]] = []
        self.gaps: list[Gap] = []
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.store = "/data/rocketmq/store"
        self.state = StoreState(
            lock=BrokerLock(False, None, "none"),
            has_lock_file=True,
            has_abort=False,
            checkpoint=None,
            segments=tuple(
                SegmentStart(at, at + GIB, self.time(at)) for at in range(self.begin, self.end, GIB) if segments
            ),
            looked_at=self.time(self.end),
        )
        size = (self.end - self.begin) // max(files, 1)
        self.files = [self.file(self.begin + n * size, self.begin + (n + 1) * size - _MESSAGE) for n in range(files)]
        self.crash = CrashCost((), 0, 0, self.end)

    def time(self, offset: int) -> int:
        """When the message at ``offset`` was stored, ms."""
        return NOON + (offset - self.begin) // _MESSAGE

    def file(self, begin: int, end: int, name: str | None = None, entries: int | None = None) -> BrokerFile:
        """A file whose entries point to ``begin`` .. ``end``."""
        entries = (end - begin) // _MESSAGE * _KEYS if entries is None else entries
        name = name if name is not None else f"{20261120220000000 + (begin - self.begin) // _MESSAGE:017d}"
        times = (self.time(begin), self.time(end)) if entries else (0, 0)
        count = min(entries + 1, LAYOUT.index_num)
        header = IndexHeader(*times, begin, end, entries // 2, count)
        return BrokerFile(name, header, count, begin, end, count >= LAYOUT.index_num, used_slots=entries // 2)

    def add_hole(self, begin: int, size: int, cause: Cause) -> Hole:
        """Nothing of ``[begin, begin + size)`` is findable."""
        count = max(size // _MESSAGE, 1)
        end = begin + size
        hole = Hole(begin, end - _MESSAGE, self.time(begin), self.time(end), count, count * _KEYS, end)
        self.holes.append((hole, cause))
        return hole

    def add_finding(self, file: str, what: str, text: str, count: int = 1) -> None:
        """One in words, ``count`` in all."""
        self.findings.append(Finding(file, 40, what, text))
        self.counts[what] += count

    def audit(self, more_holes: int = 0) -> Audit:
        """What the tasks came to; ``more_holes`` were too small to be kept."""
        messages = (self.end - self.begin) // _MESSAGE
        holes = sorted(self.holes, key=lambda pair: pair[0].begin)
        last = holes[-1][0] if holes else None
        return Audit(
            log_begin=self.begin,
            log_end=self.end,
            log_begin_now=self.begin,
            expired=(),
            unreadable=None,
            messages=messages,
            keyed_messages=messages,
            keys=messages * _KEYS,
            missing_keys=sum(hole.keys for hole, _ in holes) + more_holes,
            unreachable_keys=0,
            entries=sum(file.entries for file in self.files),
            expired_entries=0,
            left_out_entries=0,
            holes=tuple(hole for hole, _ in holes),
            hole_count=len(holes) + more_holes,
            tail=last if last is not None and last.end >= self.end else None,
            gaps=tuple(self.gaps),
            files=tuple(sorted(self.files, key=lambda file: file.name)),
            eras=(FlavourRange(0, "5.4"),),
            is_flavour_given=False,
            findings=tuple(self.findings),
            counts=dict(self.counts),
        )

    def report(self, more_holes: int = 0) -> AuditReport:
        """All of it."""
        plan = AuditPlan(
            Path(self.store) / "index",
            self.begin,
            self.end,
            self.end,
            tuple(self.files),
            (FlavourRange(0, "5.4"),),
            is_flavour_given=False,
            layout=LAYOUT,
        )
        size = self.end - self.begin
        return AuditReport(
            store=self.store,
            plan=plan,
            audit=self.audit(more_holes),
            state=self.state,
            causes=tuple(cause for _, cause in sorted(self.holes, key=lambda pair: pair[0].begin)),
            crash=self.crash,
            answers=None,
            queues=None,
            bytes_read=size,
            seconds=max(size / (600 << 20), 0.5),
        )


def with_pid(made: Made, pid: int) -> None:
    """A broker is at work there."""
    made.state = replace(made.state, lock=BrokerLock(True, pid, "lock"))


def evenly(made: Made, count: int, size: int, causes: Sequence[Cause]) -> None:
    """``count`` holes of ``size`` bytes all over the log."""
    step = (made.end - made.begin) // max(count, 1)
    for number in range(count):
        made.add_hole(made.begin + number * step, size, causes[number % len(causes)])
