"""What stands around a hole: the files before and behind it, those that reach over it, where segments begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from indexd.audit.causes.log_cut import log_cut
from indexd.audit.crash import dispatch_start
from indexd.audit.holes import Hole
from indexd.audit.part import FileSeen, Strays
from indexd.audit.standing import Standing
from indexd.audit.whole import Audit
from indexd.config import Config
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.check import time_difference

#: What a file's own check says of one whose entries or slots were not left so by putKey.
_BROKEN = ("chain-", "slot", "entry-key-hash", "entry-phy-offset", "header-index-count")


@dataclass(frozen=True, slots=True)
class Around:
    """Files about one hole. ``before`` ends at its first message or before, ``behind`` begins at its last or behind.

    A message that straddles two files has entries in both, so both may touch the hole. ``across`` has entries on both
    sides; ``inside`` are all others that point into it. ``cut`` counts entries up to the hole or behind its begin, and
    they are not there. ``strays`` are of files that hold by themselves. ``empty`` and ``unreadable`` are names between
    those of ``before`` and ``behind``. ``segment_begin``: of a segment that begins where the hole ends, if one does.
    """

    hole: Hole
    is_tail: bool
    before: FileSeen | None
    behind: FileSeen | None
    across: FileSeen | None
    inside: tuple[FileSeen, ...]
    cut: FileSeen | None
    strays: tuple[Strays, ...]
    empty: tuple[str, ...]
    unreadable: tuple[str, ...]
    segment_begin: int | None

    @property
    def counts_from_before(self) -> bool | None:
        """Whether ``behind`` was begun when ``before`` was the last file: entry 1 counts from its end.

        None where that cannot be told, for want of one of them.
        """
        if self.before is None or self.behind is None:
            return None
        wanted = time_difference(self.behind.begin_timestamp, self.before.end_timestamp)
        return self.behind.first_time_difference == wanted

    @property
    def is_cut_message_behind(self) -> bool:
        """The hole's last message has entries in ``behind``, too: the others stood in a file that is gone."""
        return self.behind is not None and self.hole.last == self.behind.begin

    @property
    def vanished_end(self) -> int | None:
        """The time, ms, at which a file ended that ``behind`` counts from and that is not ``before``; to a second."""
        if self.behind is None or self.behind.first_time_difference == 0 or self.counts_from_before:
            return None
        return self.behind.begin_timestamp - 1000 * self.behind.first_time_difference


class Surroundings:
    """All that an audit and a look at the store say about holes, put in order once."""

    def __init__(self, audit: Audit, standing: Standing, config: Config) -> None:
        self.audit, self.standing, self.config = audit, standing, config
        self.files = [file for file in audit.files if file.entries]
        self.broken = {_name(one.file) for one in audit.findings if one.what.startswith(_BROKEN)}
        self._empty = [file.name for file in audit.files if not file.entries]
        self._unreadable = sorted({_name(one.file) for one in audit.findings if one.what == "file-size"})
        #: Where a broker's start would cut the log, and why, if it ends in bytes that are no frame.
        self.cut = self._cut()
        self._segments = [segment.begin for segment in standing.segments]

    @property
    def flavour(self) -> str:
        """What the newest messages are indexed as."""
        return self.audit.eras[-1].flavour if self.audit.eras else self.config.index.flavour

    def _cut(self) -> tuple[int, str | None]:
        checkpoint = self.standing.checkpoint or StoreCheckpoint()
        start = dispatch_start(self.standing.segments, checkpoint, self.config, self.flavour)
        return log_cut(self.audit, self.standing, start.begin if start is not None else self.audit.log_begin)

    def around(self, hole: Hole) -> Around:
        """Everything about one hole; goes through all files."""
        before = behind = across = cut = None
        inside = []
        for file in self.files:
            if file.end <= hole.begin:
                before = file if before is None or (file.end, file.name) > (before.end, before.name) else before
                if file.header_count > file.entries and file.header_end >= hole.begin:
                    cut = file
            elif file.begin >= hole.last:
                behind = file if behind is None or (file.begin, file.name) < (behind.begin, behind.name) else behind
            elif file.begin <= hole.begin and file.end >= hole.last:
                across = file
            else:
                inside.append(file)
        is_tail = hole == self.audit.tail
        return Around(
            hole,
            is_tail,
            before,
            behind,
            across,
            tuple(inside),
            cut,
            strays=self._strays_in(hole),
            empty=_between(self._empty, before, behind),
            unreadable=_between(self._unreadable, before, behind),
            segment_begin=self._segment_between(hole.end, behind) if not is_tail else None,
        )

    def _strays_in(self, hole: Hole) -> tuple[Strays, ...]:
        found = [one for one in self.audit.strays if one.low < hole.end and one.high >= hole.begin]
        return tuple(one for one in found if one.name not in self.broken)

    def _segment_between(self, end: int, behind: FileSeen | None) -> int | None:
        # Dispatching begins at a segment's first frame; the first message there with keys may stand further behind.
        last = behind.begin if behind is not None else end
        return next((begin for begin in self._segments if end <= begin <= last), None)


def _between(names: Sequence[str], before: FileSeen | None, behind: FileSeen | None) -> tuple[str, ...]:
    return tuple(
        name for name in names if (before is None or name > before.name) and (behind is None or name < behind.name)
    )


def _name(path: str) -> str:
    return PurePosixPath(path).name
