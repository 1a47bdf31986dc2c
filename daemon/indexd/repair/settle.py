"""What interrupted repairs have left: seen by whoever only looks, and brought to an end by the next repair.

What no repair has made, or cannot be judged, is named and left alone.
"""

from __future__ import annotations

from pathlib import Path

from indexd.errors import CorruptDataError
from indexd.repair.folder import Manifest, RepairFolder
from indexd.repair.swap import finish, finish_undo, where_is
from indexd.storage.disk import Disk


def settle(disk: Disk, store: Path) -> list[str]:
    """Bring to an end what earlier repairs were interrupted in: removed if it had not begun, else finished.

    What was done, in lines for a person. Raises DiskError.
    """
    lines = []
    for folder in RepairFolder.all_of(disk, store):
        try:
            line = _settled(disk, store, folder, folder.read())
        except CorruptDataError:
            continue  # ``left_alone`` names it
        if line is not None:
            lines.append(line)
    return lines


def unfinished(disk: Disk, store: Path) -> list[str]:
    """What ``settle`` would have to do, for whoever may not do it yet."""
    return _looked(disk, store)[0]


def left_alone(disk: Disk, store: Path) -> list[str]:
    """Folders named as those of repairs that ``settle`` does not touch, and why."""
    return _looked(disk, store)[1]


def _looked(disk: Disk, store: Path) -> tuple[list[str], list[str]]:
    lines, others = [], []
    for folder in RepairFolder.all_of(disk, store):
        try:
            manifest = folder.read()
            if manifest.state == "done":
                continue
            where = _where(disk, store, manifest)
            if where == "before" and manifest.state not in ("undoing", "undone"):
                folder.check_removable()
        except CorruptDataError as error:
            others.append(error.line())
            continue
        name = folder.path.name
        if where == "elsewhere" and manifest.state != "undone":
            others.append(
                f"{name} is of a repair that was interrupted, and the index is neither its new nor its old one: left"
            )
        else:
            lines.append(f"{name} is of a repair that was interrupted: indexd repair removes or finishes it")
    return lines, others


def _settled(disk: Disk, store: Path, folder: RepairFolder, manifest: Manifest) -> str | None:
    where = _where(disk, store, manifest)
    name = folder.path.name
    if manifest.state == "undone":
        finish_undo(disk, store, folder, manifest)
        return f"{name} is undone, and called so now"
    if manifest.state == "done" or where == "elsewhere":
        return None
    if manifest.state == "undoing":
        if where == "swapped":
            folder.set_state("done")
            return f"{name} was about to be undone, and is not"
        finish_undo(disk, store, folder, manifest)
        return f"{name} was about to be undone, and is now"
    if where == "swapped":
        finish(disk, store, folder, manifest)
        return f"{name} had its index in place, and has its checkpoint now: the repair that was interrupted is done"
    folder.remove()
    return f"{name} is removed: of a repair that was interrupted before it had changed anything"


def _where(disk: Disk, store: Path, manifest: Manifest) -> str:
    return "before" if manifest.state == "building" else where_is(disk, store, manifest)
