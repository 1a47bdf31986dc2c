"""A file's own check, and what is written down of it by the task that owns the file."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from indexd.audit.chains import Chained, check_chains
from indexd.audit.ground import BrokerFile
from indexd.audit.notes import Notes
from indexd.audit.part import FileSeen
from indexd.audit.plan import AuditTask
from indexd.errors import DiskError
from indexd.index.entries import read_entries, time_diff_of
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk


@dataclass(frozen=True, slots=True)
class Checked:
    """``chained`` is None of a file that is gone; ``seen`` of that, and of one that another task owns."""

    chained: Chained | None
    seen: FileSeen | None = None
    notes: Notes = field(default_factory=Notes)

    @property
    def is_sound(self) -> bool:
        """Whether entries may be taken as they come: in the order of the log, and all of them reached by walks."""
        return self.chained is not None and self.chained.is_ordered and len(self.chained.findable) == 0


#: What is taken for granted of a file until its check has ended.
SOUND = Checked(Chained(np.empty(0, dtype=np.uint8), is_ordered=True, used_slots=0, expired=0, unreachable=0))


def check_file(disk: Disk, layout: IndexLayout, task: AuditTask, file: BrokerFile) -> Checked:
    """Read one of the task's files from front to back; raises DiskError, but for a file that is gone."""
    notes = Notes()
    try:
        chained = check_chains(disk, task.folder, layout, file, task.log_begin, notes)
        if file.name not in task.owned:
            return Checked(chained)
        with disk.open_read(task.folder / file.name) as opened:
            first = time_diff_of(read_entries(opened, layout, 1, 1)[0]) if file.entries else 0
    except DiskError as error:
        if not error.is_missing:
            raise
        return Checked(None)  # it has expired; and if not, its messages are a hole now
    return Checked(chained, _seen(file, chained, first), notes)


def _seen(file: BrokerFile, chained: Chained, first_time_difference: int) -> FileSeen:
    header = file.header
    return FileSeen(
        name=file.name,
        entries=file.entries,
        begin=file.begin,
        end=file.end,
        begin_timestamp=header.begin_timestamp,
        end_timestamp=header.end_timestamp,
        used_slots=chained.used_slots,
        used_slot_count=header.used_slot_count,
        expired=chained.expired,
        unreachable=chained.unreachable,
        header_count=header.entries,
        header_end=header.end_phy_offset,
        first_time_difference=first_time_difference,
        is_full=file.is_full,
    )
