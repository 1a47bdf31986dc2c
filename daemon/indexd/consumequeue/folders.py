"""What lies below the folder of all ConsumeQueues, ours or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from indexd.consumequeue.format import (
    UNIT_SIZE,
    QueueMark,
    file_name,
    file_offset,
    is_topic_name,
    queue_directory,
    queue_id_of,
)
from indexd.storage.disk import Disk


def queue_folders(disk: Disk, root: Path) -> dict[Path, dict[int, int]]:
    """By the folder of each queue that lies below ``root``, the bytes of its files by what their names say.

    Folders and files that could not be ours are left out.
    """
    folders: dict[Path, dict[int, int]] = {}
    for topic in disk.list_dirs(root) if disk.exists(root) else []:
        for name in disk.list_dirs(root / topic) if is_topic_name(topic) else []:
            if queue_id_of(name) is not None:
                rows = ((file_offset(file), size) for file, size in disk.list_dir(root / topic / name))
                folders[root / topic / name] = {begin: size for begin, size in rows if begin is not None}
    return folders


def unnamed_files(
    root: Path, file_size: int, marks: Sequence[QueueMark], folders: dict[Path, dict[int, int]]
) -> Iterator[Path]:
    """The files of ``folders`` that belong to no queue of ``marks``, or not to the units it has."""
    named = {queue_directory(root, mark.topic, mark.queue_id): mark for mark in marks}
    for folder, sizes in folders.items():
        mark = named.get(folder)
        begin, end = (mark.first_offset * UNIT_SIZE, mark.max_offset * UNIT_SIZE) if mark is not None else (0, 0)
        yield from (folder / file_name(at) for at in sorted(sizes) if not begin <= at < end or at % file_size)
