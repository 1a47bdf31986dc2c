"""QueueFiles: what is kept open for speed is given back where descriptors are short."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from indexd.consumequeue.files import QueueFiles
from indexd.errors import DiskError
from indexd.output import Unsynced
from support.sim_disk import SimDisk
from support.sim_fault import FaultMap

ROOT = Path("/simulated")
UNIT = bytes(range(20))


def made(count: int) -> tuple[SimDisk, QueueFiles]:
    disk = SimDisk(ROOT)
    files = QueueFiles(disk, ROOT / "q", 40, Unsynced())
    for number in range(count):
        files.write(ROOT / "q" / "T" / str(number), 0, UNIT)
    return disk, files


@pytest.mark.parametrize("operation", ["open_write", "create"])
def test_descriptors_are_given_back_when_there_are_none(operation: str) -> None:
    disk, files = made(70)
    assert len(disk.handles) == 64
    disk.faults = FaultMap.parse(f"{operation}#1=EMFILE")
    directory, offset = (ROOT / "q" / "T" / "0", 1) if operation == "open_write" else (ROOT / "q" / "T" / "99", 0)
    files.write(directory, offset, UNIT)
    assert sum(disk.faults.injected.values()) == 1
    assert len(disk.handles) == 1
    files.close()
    assert disk.peek(directory / f"{0:020d}") == (UNIT + bytes(20) if offset == 0 else UNIT + UNIT)


def test_where_nothing_is_kept_open_the_error_comes_out() -> None:
    disk, files = made(3)
    files.close()
    disk.faults = FaultMap.parse("open_write@all=EMFILE")
    with pytest.raises(DiskError) as raised:
        files.write(ROOT / "q" / "T" / "0", 1, UNIT)
    assert raised.value.errno == errno.EMFILE
