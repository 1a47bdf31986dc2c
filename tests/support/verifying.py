"""Data directories to be verified, small ones made by the naive writer, and what damages them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.config import Config
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import IndexLayout, unpack_entry
from indexd.storage.disk import Disk
from indexd.verify import VerifyReport, verify
from support.data_directory import T0, Store, config_of, spec

if TYPE_CHECKING:
    from indexd.index.format import IndexEntry

#: Nine entries a file.
LAYOUT = IndexLayout(7, 10)
ENTRY = struct.Struct(">iqii")
SLOT = struct.Struct(">i")
HASH, PHY, TIME, PREV = range(4)


def small_store(root: Path, flavour: str = "5.4", messages: int = 10) -> Store:
    """Messages of three keys each, some seconds apart; with ten of them three full files and one that is open."""
    store = Store(root, LAYOUT, flavour)
    store.append(
        *(
            spec(T0 + 1700 * number, size=60, KEYS=f"a{number} b{number % 3}", UNIQ_KEY=f"u{number}", TAGS="t")
            if number % 2
            else spec(T0 + 1700 * number, size=60, KEYS=f"a{number} b{number % 3}")
            for number in range(messages)
        )
    )
    build(store)
    return store


def build(store: Store) -> None:
    """Index what has been appended, and write the checkpoint that belongs to it."""
    store.build()
    frontier = store.frontier
    full = [mark for mark in frontier.index if mark.full]
    end = full[-1].header.end_timestamp if full else 0
    checkpoint = StoreCheckpoint(frontier.store_timestamp, 0, end, 0, frontier.phy_offset)
    (store.data / "checkpoint").write_bytes(checkpoint.pack())


def check(data: Path, *, deep: bool = False, config: Config | None = None) -> VerifyReport:
    """``indexd verify`` in this process, with a short settle time."""
    return verify(
        config or config_of(data, settle_ms=1, corrupt_after_ms=2), Disk(), deep=deep, on_progress=lambda *_: None
    )


def kinds(report: VerifyReport) -> dict[str, int]:
    """How many findings of each kind."""
    return dict(report.findings.counts)


def files_of(store: Store) -> list[Path]:
    """Its index files, oldest first."""
    return sorted((store.data / "index").iterdir())


def change(path: Path, position: int, data: bytes) -> None:
    """Overwrite bytes with others."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def entry_of(path: Path, number: int, layout: IndexLayout = LAYOUT) -> IndexEntry:
    """One entry."""
    return unpack_entry(path.read_bytes()[layout.entry_position(number) :][:20])


def change_entry(path: Path, number: int, member: int, value: int, layout: IndexLayout = LAYOUT) -> None:
    """Set one of an entry's four members."""
    position = layout.entry_position(number)
    values = list(ENTRY.unpack(path.read_bytes()[position : position + ENTRY.size]))
    assert values[member] != value
    values[member] = value
    change(path, position, ENTRY.pack(*values))


def set_slot(path: Path, slot: int, value: int) -> int:
    """Overwrite a slot; its byte position."""
    change(path, LAYOUT.slot_position(slot), SLOT.pack(value))
    return LAYOUT.slot_position(slot)


#: Damages an index file, and says which byte of it is wrong now.
Damage = Callable[[Path], int]


def entry(number: int, member: int, value: int | Callable[[IndexEntry], int]) -> Damage:
    """One of an entry's four members."""

    def damage(path: Path) -> int:
        change_entry(path, number, member, value if isinstance(value, int) else value(entry_of(path, number)))
        return LAYOUT.entry_position(number) + (0, 4, 12, 16)[member]

    return damage


def chain(value: int | Callable[[int, IndexEntry], int]) -> Damage:
    """Of the last entry but one that has one before it."""

    def damage(path: Path) -> int:
        number = next(number for number in range(8, 0, -1) if entry_of(path, number).prev_index)
        wanted = value if isinstance(value, int) else value(number, entry_of(path, number))
        return entry(number, PREV, wanted)(path)

    return damage


def slot(number: int, value: int | Callable[[IndexEntry], int]) -> Damage:
    """Of the slot of an entry."""

    def damage(path: Path) -> int:
        there = entry_of(path, number)
        return set_slot(path, LAYOUT.slot_of(there.key_hash), value if isinstance(value, int) else value(there))

    return damage


def header(position: int, form: str, value: int | Callable[[int], int]) -> Damage:
    """A number of the header."""

    def damage(path: Path) -> int:
        (there,) = struct.unpack_from(form, path.read_bytes(), position)
        wanted = value if isinstance(value, int) else value(there)
        assert wanted != there
        change(path, position, struct.pack(form, wanted))
        return position

    return damage
