"""``indexd verify`` beside those who work in the same directory, and after those who were killed there."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.flush.frontier import write_frontier
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.verify import whole
from indexd.verify.whole import look as whole_look
from support.data_directory import Store
from support.verifying import (
    HASH,
    LAYOUT,
    PHY,
    PREV,
    change,
    change_entry,
    check,
    files_of,
    kinds,
    set_slot,
    small_store,
)

SLOT = struct.Struct(">i")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return small_store(tmp_path)


def test_after_an_unclean_stop_only_durable_entries_count(store: Store) -> None:
    (store.data / "abort").write_bytes(b"1")
    path = files_of(store)[-1]
    count = store.frontier.index[-1].header.index_count
    change(path, 0, bytes(LAYOUT.entry_position(0)))
    change(path, LAYOUT.entry_position(count), b"\x05" * 20)
    (store.data / "index" / "20990101000000000").write_bytes(b"")
    report = check(store.data)
    assert kinds(report) == {}
    assert "the last stop was unclean: indexd --recover or the next start mends it" in report.notes[0]
    change_entry(path, 1, PREV, 3)
    assert kinds(check(store.data)) == {"chain-forward": 1}
    # A full file was durable to its end.
    set_slot(files_of(store)[0], 0, 77)
    assert kinds(check(store.data)) == {"chain-forward": 1, "slot-range": 1}


def test_beside_a_daemon_the_open_file_may_know_more(store: Store, tmp_path: Path) -> None:
    lock = DirectoryLock(store.data / "lock")
    lock.acquire()
    (store.data / "state").write_text(json.dumps({"pid": os.getpid(), "phyOffset": 0}))
    path, mark = files_of(store)[-1], store.frontier.index[-1]
    # One more entry, of a slot of its own, published but not flushed.
    count, header = mark.header.index_count, mark.header
    free = next(slot for slot in range(7) if not any(path.read_bytes()[LAYOUT.slot_position(slot) :][:4]))
    change_entry(path, count, HASH, free or 7)
    change_entry(path, count, PHY, header.end_phy_offset + 10)
    set_slot(path, free, count)
    more = replace(header, used_slot_count=header.used_slot_count + 1, index_count=count + 1)
    change(path, 0, replace(more, end_phy_offset=header.end_phy_offset + 10).pack())
    (store.data / "index" / "20990101000000000").write_bytes(b"")
    report = check(store.data)
    assert kinds(report) == {}
    assert f"pid {os.getpid()}, is at work" in report.notes[0]
    # An entry that the header does not count is none.
    set_slot(path, free, count + 1)
    assert kinds(check(store.data)) == {"slot-behind-last": 1}
    change(path, 0, header.pack())
    set_slot(path, free, 0)
    assert kinds(check(store.data)) == {}
    change(path, 36, SLOT.pack(count - 1))
    assert kinds(check(store.data)) == {"header-index-count": 1}
    # While it still opens, its slots say nothing.
    (store.data / "state").unlink()
    report = check(store.data)
    assert kinds(report) == {}
    assert "is opening the directory" in report.notes[0]
    lock.release()


def test_what_is_found_while_a_daemon_flushes_is_looked_at_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = files_of(store)[0]
    saved = store.frontier
    looks = []

    def look(disk: Disk, files: object) -> whole.StoreState:
        # The first file expires behind the first look: the frontier goes on without it, then it is removed.
        ground = whole_look(disk, files)  # type: ignore[arg-type]
        looks.append(ground)
        if len(looks) == 1:
            write_frontier(disk, store.data / "frontier", saved.with_outputs(index=saved.index[1:]), "0")
            first.unlink()
        return ground

    monkeypatch.setattr(whole, "look", look)
    report = check(store.data)
    assert kinds(report) == {}
    assert report.files == len(saved.index) - 1
    assert len(looks) == 2


def test_an_empty_open_file(store: Store, tmp_path: Path) -> None:
    full = [mark for mark in store.frontier.index if mark.full]
    files_of(store)[-1].unlink()
    service = IndexService(Disk(), store.data / "index", LAYOUT, FLAVOURS["5.4"])
    service.load(tuple(full))
    service._open = service._create_file()
    mark = service.mark()
    service.flush()
    service.close()
    store.change_frontier(index=mark.held)
    assert kinds(check(store.data)) == {}
    change(files_of(store)[-1], 36, SLOT.pack(0))
    assert kinds(check(store.data)) == {}
    change(files_of(store)[-1], 7, b"\x01")
    assert kinds(check(store.data)) == {"header-begin-timestamp": 1}
