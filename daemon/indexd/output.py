"""Output: what is built from the log (key index, ConsumeQueues, sparse indexes), each behind the same calls.

The pipeline builds, marks, flushes and expires a tuple of outputs; recovery, verify, scrub and the status loop over it.
An output knows no frontier: ``mark`` says what stands and what has to be synced for that.
"""

from __future__ import annotations

import enum
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.storage.disk import Disk, DiskFile

Held = TypeVar("Held")
Row = dict[str, Any]
_READ_SIZE = 1 << 20
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


@dataclass(frozen=True, slots=True)
class OutputMark(Generic[Held]):
    """One output at one moment.

    ``held``: what the frontier says of it, once ``unsynced`` files and then ``directories`` are durable. ``expired``:
    files to be removed once a frontier without them is durable. ``serial`` tells what was written later.
    """

    held: Held
    unsynced: tuple[Path, ...] = ()
    directories: tuple[Path, ...] = ()
    expired: tuple[Path, ...] = ()
    serial: int = 0


@dataclass(frozen=True, slots=True)
class RecoveryScope:
    """All is to stand at ``phy_offset``; of an output, what lies behind ``believed`` is not believed.

    ``is_unclean``: behind what a mark names anything may lie. ``is_forced``: everything is built again.
    """

    phy_offset: int
    believed: int
    log_begin: int
    is_unclean: bool
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class OutputRecovery(Generic[Held]):
    """What is kept of an output, and what has to be changed for that; nothing is changed before ``carry_out``.

    ``refill_from``: the physical offset from which the log has to be read again for it, None if from nowhere.
    ``directories`` are removed if empty. ``cut``: files, the bytes that are kept and the size that they have, in zeros.
    ``reasons``: what did not hold, a line each. A frontier with ``held`` must be durable before ``carry_out``.
    """

    held: Held
    refill_from: int | None = None
    delete: tuple[Path, ...] = ()
    directories: tuple[Path, ...] = ()
    cut: tuple[tuple[Path, int, int], ...] = ()
    reasons: tuple[str, ...] = ()

    def carry_out(self, disk: Disk, unsynced: Unsynced) -> None:
        """Do it, noting in ``unsynced`` what to sync. Broken off, it is planned again, and comes to the same."""
        for path in self.delete:
            disk.unlink(path)
        left = {path.parent for path in self.delete}
        for path in self.directories:
            try:
                disk.remove_dir(path)
            except DiskError as error:
                if error.errno not in _NOT_EMPTY:
                    raise
                continue  # it holds something that is not ours
            left.discard(path)
            left.add(path.parent)
        for path, size, length in self.cut:
            with disk.open_write(path) as file:
                clear_behind(file, size)
                file.truncate(length)
            unsynced.add(path)
        for path in sorted(left):
            unsynced.add_directory(path)


class Condition(enum.Enum):
    """What may be asked of a file besides its durable content."""

    #: No one writes into it, and the last stop was clean or it is full: all of it is as the frontier says.
    AT_REST = "at rest"
    #: A daemon builds into it: it may know more than the frontier.
    GROWING = "growing"
    #: The daemon died while it built: what lies behind the durable content may be anything.
    CUT_SHORT = "cut short"


@dataclass(frozen=True, slots=True)
class CheckScope:
    """How an output is checked: ``condition`` of the files that grow; ``on_bytes`` is told how much more was read.

    ``is_complete``: files that the frontier does not name are findings.
    ``log_begin`` says where the log begins now, None if unknown. ``sound`` remembers between two checks what needs no
    second look, ``notes`` what was not asked.
    """

    condition: Condition
    is_complete: bool
    on_bytes: Callable[[int], None]
    log_begin: Callable[[], int | None] = lambda: None
    sound: dict[Any, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_at_rest(self) -> bool:
        """Nobody writes there, and the last who did stopped cleanly."""
        return self.condition is Condition.AT_REST


class ProgressReporter:
    """How far a pass over ``total`` bytes is, told to ``on_progress`` as (bytes done, bytes in all).

    Call it with how many bytes more are done.
    """

    def __init__(self, on_progress: Callable[[int, int], None], total: int) -> None:
        self._on_progress, self._total, self._done = on_progress, total, 0

    def __call__(self, more: int) -> None:
        self._done += more
        self._on_progress(self._done, max(self._total, self._done))


class Unsynced:
    """Files and directories that were changed and are not known to be durable."""

    def __init__(self) -> None:
        #: Each with the mark by which it was changed last.
        self.files: dict[Path, int] = {}
        self.directories: dict[Path, int] = {}
        #: Of the mark that comes next.
        self.serial = 1

    def add(self, path: Path) -> None:
        """A file was changed, or will be right now: where the disk refuses half way, it was changed as well."""
        self.files[path] = self.serial

    def add_directory(self, path: Path) -> None:
        """A name in it was made or removed."""
        self.directories[path] = self.serial

    def synced(self, mark: OutputMark[Any]) -> None:
        """What ``mark`` names is durable as it was then; it may have changed since."""
        for known, paths in ((self.files, mark.unsynced), (self.directories, mark.directories)):
            for path in paths:
                if known.get(path, mark.serial + 1) <= mark.serial:
                    del known[path]


class Output(ABC, Generic[Held]):
    """Builds into ``directory``. Raises DiskError; after one, the same call may be made again. One owner, no locks."""

    #: Its key in the frontier, its name in the status, its folder in a data directory.
    name: ClassVar[str]
    label: ClassVar[str]
    folder: ClassVar[str]
    #: Recovery compares it with the log, entry by entry.
    is_compared: ClassVar[bool] = False

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self.directory = directory
        self.unsynced = Unsynced()
        self._expired: dict[Path, None] = {}

    @classmethod
    @abstractmethod
    def of(cls, config: Config, disk: Disk, directory: Path) -> Output[Held]:
        """An empty one, as configured."""

    @classmethod
    def is_wanted(cls, config: Config) -> bool:
        """Whether the configuration asks for it."""
        return config is not None

    @staticmethod
    @abstractmethod
    def load_kernels() -> None:
        """Have what it needs compiled, or loaded from where it is kept."""

    @abstractmethod
    def built_with(self, held: Held) -> tuple[str, int, int]:
        """A setting that it cannot change: its name, its value when ``held`` was built, and as asked now."""

    @abstractmethod
    def load(self, held: Held) -> None:
        """Take over files that are known to be as ``held`` says: after a clean stop, or after recovery."""

    @abstractmethod
    def build(self, batch: DispatchBatch) -> None:
        """Build from the next messages; given again after a DiskError, it goes on where it stopped."""

    @abstractmethod
    def publish(self) -> None:
        """Write what has been built: every reader sees it."""

    def begin_anew(self) -> None:
        """The log goes on behind messages that nobody has read and that have expired."""

    @abstractmethod
    def mark(self) -> OutputMark[Held]:
        """What stands now, published."""

    def _mark(self, held: Held) -> OutputMark[Held]:
        files, directories = tuple(self.unsynced.files), tuple(self.unsynced.directories)
        mark = OutputMark(held, files, directories, expired=tuple(self._expired), serial=self.unsynced.serial)
        self.unsynced.serial += 1
        return mark

    def synced(self, mark: OutputMark[Held]) -> None:
        """``mark`` is durable, and so is a frontier with it: removes what expired in it."""
        self.unsynced.synced(mark)
        for path in mark.expired:
            if path in self._expired:
                self._disk.unlink(path)
                del self._expired[path]

    @abstractmethod
    def expire(self, min_phy_offset: int) -> list[str]:
        """The log begins there now: leave out files that only point before it. Their names; they go with ``synced``."""

    def _leave_out(self, paths: Iterable[Path]) -> list[str]:
        # Nobody syncs these any more, and the next mark has them expired.
        names = []
        for path in paths:
            self.unsynced.files.pop(path, None)
            self._expired[path] = None
            names.append(str(path.relative_to(self.directory)))
        return names

    def flush(self) -> None:
        """Bring the files into the form that a clean stop leaves; the caller syncs a mark after it."""
        self.publish()

    def close(self) -> None:
        """Close what is open; writes nothing."""

    @abstractmethod
    def recover(self, held: Held | None, scope: RecoveryScope) -> OutputRecovery[Held]:
        """What is left of ``held``, or of nothing, at ``scope``; reads only."""

    @abstractmethod
    def check(self, held: Held | None, scope: CheckScope) -> Findings:
        """The files held against what the frontier says of them, if anything; reads only, never the log."""

    @abstractmethod
    def parts(self, held: Held) -> list[tuple[Any, Held]]:
        """``held`` in parts that can be checked one by one, each under a name that outlives the next mark."""

    def left_out(self) -> dict[str, int]:
        """How many messages it could not take, by why."""
        return {}

    @abstractmethod
    def totals(self, held: Held) -> Row:
        """``files``, ``entries``, ``bytes`` and ``fillRatio`` of what stands."""

    @abstractmethod
    def figures(self) -> Row:
        """What has been built since it was opened, by the status's keys."""


def ratio(part: int, whole: int) -> float:
    """How full something is, to four digits."""
    return round(part / whole, 4) if whole > 0 else 0.0


def find_nonzero(file: DiskFile, position: int, end: int) -> tuple[int, int]:
    """The first byte of ``[position, end)`` that is not zero, and how many there are; holes are not read."""
    first = found = 0
    for begin, block in _nonzero_blocks(file, position, end):
        wrong = np.flatnonzero(block)
        first, found = first or begin + int(wrong[0]), found + len(wrong)
    return first, found


def clear_behind(file: DiskFile, position: int) -> None:
    """Overwrite what is not zero behind ``position`` with zeros.

    The file never gets shorter: neither a reader nor a crash meets half of it, and no space is given back that may not
    be had again.
    """
    for begin, block in _nonzero_blocks(file, position, file.size()):
        file.pwrite(bytes(len(block)), begin)


def _nonzero_blocks(file: DiskFile, position: int, end: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    # Parts of ``[position, end)`` that are not all zero, and where each begins.
    buffer = np.empty(_READ_SIZE, dtype=np.uint8)
    while (begin := file.next_data(position)) < end:
        block = buffer[: file.pread_into(buffer[: end - begin].data, begin)]
        if len(block) == 0:  # it has become shorter
            break
        if block.any():
            yield begin, block
        position = begin + len(block)
