"""Building: the builders and the flusher of one data directory, and what passes between them.

Plain steps in the order in which a daemon takes them; who calls them, from which thread and how often is the caller's.
"""

from __future__ import annotations

from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.reading import Skipped
from indexd.errors import DiskError
from indexd.flush.flusher import Flusher, Progress
from indexd.flush.outputs import Outputs

Item = DispatchBatch | Skipped


class Building:
    """``apply``, ``persisted`` and ``finish`` belong to the building thread, ``persist`` to any one other.

    ``progress`` is what a ``persist`` may be given: all that has been built, published. Raises DiskError.
    """

    def __init__(self, outputs: Outputs, flusher: Flusher) -> None:
        self.outputs = outputs
        self.flusher = flusher
        self.progress = outputs.progress()

    def __repr__(self) -> str:
        return f"Building({self.outputs}, {self.flusher})"

    def apply(self, items: list[Item], log_begin: int) -> list[str]:
        """Build ``items`` and drop what only points before ``log_begin``; the names of files that can go.

        Items that are done are removed, so that after a DiskError the same list goes on where it failed.
        """
        try:
            while items:
                self.outputs.apply(items[0])
                items.pop(0)
        except DiskError:
            # What was built before the disk failed can be found, and made durable, while it waits.
            self.progress = self.outputs.progress()
            raise
        expired = self.outputs.expire(log_begin)
        self.progress = self.outputs.progress()
        return expired

    def persist(self, progress: Progress) -> None:
        """Make ``progress`` durable; tell ``persisted`` afterwards. A failed fsync must end the process."""
        self.flusher.persist(progress)

    def persisted(self, progress: Progress) -> None:
        """Close what is durable to its end and remove what no frontier names any more.

        Building has gone on meanwhile: a file that was open in ``progress`` may be full by now, but not durable to its
        end; and what is to be persisted next was marked before these files are closed.
        """
        self.outputs.synced(progress)
        self.progress = self.progress.without(progress)

    def finish(self) -> None:
        """Bring everything into the form a clean stop leaves, durably, and close it."""
        self.outputs.flush()
        progress = self.outputs.progress()
        self.persist(progress)
        self.outputs.synced(progress)
        self.outputs.close()
