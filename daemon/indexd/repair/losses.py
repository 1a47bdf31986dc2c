"""Keys that a repair would take away: the old files have them, their messages have them, and no new file would.

What is built is checked against the log by the flavour that it was built by, which cannot show that it was the wrong
one. The old entries can: one of a key that its message has, and that this RocketMQ indexes nowhere, was put by another.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from indexd.audit import AuditReport
from indexd.audit.chains import check_chains
from indexd.audit.entries import EntrySource
from indexd.audit.evidence import Era
from indexd.audit.ground import BrokerFile
from indexd.audit.match import Matched
from indexd.audit.stretch import Rows, Stretch
from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.index.flavour import FLAVOURS
from indexd.repair.build import aligned_at
from indexd.repair.keep import findings_by_file
from indexd.repair.plan import RepairPlan
from indexd.storage.disk import Disk

# It indexes all that any RocketMQ does.
_ALL = "5.4"
# What an entry is found to be whose key its flavour does not index.
_SIGNS = frozenset({"entry-without-key", "entry-hash"})


def refuse_losses(disk: Disk, config: Config, report: AuditReport, plan: RepairPlan) -> None:
    """CorruptDataError if a file that goes has keys of its messages that its flavour does not index.

    Never where ``--flavour`` says what is wanted. Reads only the log of files that have such findings, twice. Raises
    DiskError.
    """
    if report.audit.is_flavour_given:
        return
    gone, whats = {name for wanted in plan.ranges for name in wanted.replaces}, findings_by_file(report)
    for file in report.plan.files:
        if file.name not in gone or not whats.get(file.path, set()) & _SIGNS:
            continue
        for begin, end, flavour in _stretches(report, plan, file):
            counts = [_strays(disk, config, report, file, Stretch(begin, end, 0, name)) for name in (flavour, _ALL)]
            if counts[0] > counts[1]:
                raise CorruptDataError(
                    f"a repair would lose {counts[0] - counts[1]:,} keys: {file.path} has them, and so have their "
                    f"messages, but RocketMQ {flavour}, which seems to have written it, does not index them",
                    f"nothing was changed; say with --flavour what the broker indexes: --flavour {_ALL} loses none",
                )


def _stretches(report: AuditReport, plan: RepairPlan, file: BrokerFile) -> Iterator[tuple[int, int, str]]:
    for era, behind in pairwise([*report.audit.eras, Era(plan.ends_at, _ALL)]):
        begin, end = max(era.begin, file.begin, report.audit.log_begin), min(behind.begin, file.end + 1, plan.ends_at)
        if begin < end and not FLAVOURS[era.flavour].tags:
            yield begin, end, era.flavour


def _strays(disk: Disk, config: Config, report: AuditReport, file: BrokerFile, stretch: Stretch) -> int:
    # Entries that are of no key of any message, as the flavour of the stretch has it.
    folder, layout = report.plan.folder, report.plan.layout
    chained = check_chains(disk, folder, layout, file, report.audit.log_begin, None)
    source = EntrySource(disk, folder, layout, file, chained.findable)
    stretch.aligned = aligned_at(disk, config, stretch.begin)
    try:
        source.select(stretch.begin, stretch.end, is_ordered=chained.is_ordered)
        matched = Matched(source)
        for item in stretch.read(disk, config, 0):
            if isinstance(item, Rows):
                skip_mask = FLAVOURS[stretch.flavour].skip_mask
                taken = np.zeros(max(item.batch.keys, 1), dtype=np.uint8)
                matched.match(item.batch, item.first, item.last, skip_mask, taken)
        return int(matched.strays[2])
    finally:
        source.close()
