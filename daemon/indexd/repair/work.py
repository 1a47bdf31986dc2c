"""What a repair does once its plan stands: build beside, carry over what stays, check, exchange."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from indexd.audit import AuditReport
from indexd.audit.ground import is_index_file
from indexd.audit.plan import layout_of
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import DiskError, UnsafeStoreError
from indexd.repair.broker_stopped import BrokerStopped
from indexd.repair.build import BuiltRange, build_range, mark_end
from indexd.repair.carry import carry
from indexd.repair.check import check_built
from indexd.repair.folder import RepairFolder
from indexd.repair.place import check_room
from indexd.repair.plan import RepairPlan, RepairRange
from indexd.repair.swap import swap
from indexd.storage.disk import Disk, Stamp

OnProgress = Callable[[int, int], None]
_ENTRY_SIZE = 20


def stamps_of(disk: Disk, index: Path) -> dict[str, Stamp]:
    """The index as it is: what was looked at must be what is exchanged. Empty where there is none."""
    return disk.stamps(index) if disk.exists(index) else {}


class Work:
    """Made when the lock is held and nothing was looked at; ``run`` once it is wanted.

    ``built`` belong to the first ranges of the plan, in its order.
    """

    def __init__(
        self,
        disk: Disk,
        config: Config,
        store: Path,
        report: AuditReport,
        plan: RepairPlan,
        stopped: BrokerStopped,
        on_build: OnProgress,
    ) -> None:
        self._disk, self._config, self._store, self._stopped = disk, config, store, stopped
        self._plan, self._index = plan, store / "index"
        self._full = {file.name for file in report.plan.files if file.is_readable and file.is_full}
        self._on_build, self._done = on_build, 0
        self.folder: RepairFolder | None = None
        self.built: list[BuiltRange] = []

    def check_space(self) -> None:
        """UnsafeStoreError without room for everything that will be written."""
        plan = self._plan
        # One more, for the copy of a last file that is full.
        copies = 1 + sum(file.name not in self._full for file in plan.kept)
        check_room(self._disk, self._store, plan.bytes_to_write + copies * layout_of(self._config).file_size)

    def run(self, stamps: dict[str, Stamp], deadline: float | None) -> bool:
        """Build, check, exchange; False when there is not even time for the first range, and nothing was changed."""
        disk, store = self._disk, self._store
        if not disk.exists(self._index):
            disk.make_dir(self._index)
            disk.give(self._index, store)
        folder = self.folder = RepairFolder.make(disk, store, time.time())
        try:
            is_begun = self._build(folder, deadline)
            if is_begun:
                kept = self._complete(folder)
                check_built(disk, self._config, folder.index, self._plan, self._reached, self._read)
                self._stopped.check()
                self._check_unchanged(stamps)
        except BaseException:
            folder.remove()
            raise
        if not is_begun:
            folder.remove()
            return False
        self._swap(folder, kept)
        return True

    @property
    def _reached(self) -> tuple[RepairRange, ...]:
        return self._plan.ranges[: len(self.built)]

    def _build(self, folder: RepairFolder, deadline: float | None) -> bool:
        for wanted in self._plan.ranges:
            if deadline is not None and time.monotonic() + self._seconds(wanted) > deadline:
                break
            self.built.append(build_range(self._disk, self._config, folder.index, self._plan, wanted, self._read))
        return bool(self.built) or not self._plan.ranges

    def _complete(self, folder: RepairFolder) -> tuple[str, ...]:
        # Old files beside the new ones; the last of all is the one that the broker goes on with.
        disk, store, plan = self._disk, self._store, self._plan
        left = plan.ranges[len(self.built) :]
        kept = sorted({*(file.name for file in plan.kept), *(name for wanted in left for name in wanted.replaces)})
        new = [name for built in self.built for name in built.files]
        last = max((*kept, *new), default=None)
        own = set(new)
        for name in kept:
            will_change = name == last or name not in self._full
            if carry(disk, self._index / name, folder.index / name, will_change=will_change):
                own.add(name)
        if last is not None:
            mark_end(disk, self._config, folder.index / last)
        # A link is the old index's file, too: what is changed there would be changed for an undo.
        rights = self._rights()
        for name in sorted(own):
            with disk.open_read(folder.index / name) as file:
                disk.give(folder.index / name, store, rights)
                file.fsync()
        disk.give(folder.index, self._index)
        disk.sync_dir(folder.index)
        disk.sync_dir(folder.path)
        return tuple(kept)

    def _rights(self) -> int:
        # As most index files have them: one that somebody has put back may have others, and a foreign one says nothing.
        names = [name for name, _ in self._disk.list_dir(self._index) if is_index_file(name)]
        modes = Counter((self._index / name).stat().st_mode for name in names)
        if modes:
            return modes.most_common(1)[0][0]
        store = self._config.store
        log = list_segments(self._disk, store.commit_log_directories, store.segment_size)
        return (log.segments[-1].path if log.segments else self._store).stat().st_mode

    def _check_unchanged(self, stamps: dict[str, Stamp]) -> None:
        if stamps_of(self._disk, self._index) != stamps:
            raise UnsafeStoreError(
                f"{self._index} was changed by somebody else meanwhile: nothing was exchanged",
                "let nothing else write there, and run indexd repair again",
            )

    def _swap(self, folder: RepairFolder, kept: tuple[str, ...]) -> None:
        try:
            swap(self._disk, self._store, folder, kept, self._plan.left_out)
        except UnsafeStoreError:
            folder.remove()
            raise
        except DiskError as error:
            error.hint = (
                f"{error.hint}; run indexd repair again before the broker starts: it finishes this or takes it back"
            )
            raise

    def _seconds(self, wanted: RepairRange) -> float:
        plan = self._plan
        sizes = {one: min(one.end, plan.ends_at) - one.begin + one.keys * _ENTRY_SIZE for one in plan.ranges}
        return plan.estimated_seconds * sizes[wanted] / max(sum(sizes.values()), 1)

    def _read(self, size: int) -> None:
        self._done += size
        self._on_build(self._done, self._plan.bytes_to_read)
