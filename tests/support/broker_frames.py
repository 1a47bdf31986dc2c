"""Frames of a test's store: as a broker takes them from its log, and damaged ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from support.data_directory import Store

ANY_SIZE = 1 << 24


def raw(directory: Path, segment_size: int, phy_offset: int) -> bytes:
    """As a broker takes a frame: the bytes that its first field counts."""
    with (directory / f"{phy_offset - phy_offset % segment_size:020d}").open("rb") as file:
        file.seek(phy_offset % segment_size)
        size = file.read(4)
        return size + file.read(int.from_bytes(size, "big") - 4)


def frames_at(store: Store, offsets: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(raw(store.root / "commitlog", store.segment, offset) for offset in offsets)


def damage(store: Store, phy_offset: int, at: int = -1) -> None:
    """Turn a byte of a frame, by default one of its body."""
    path = store.root / "commitlog" / f"{phy_offset - phy_offset % store.segment:020d}"
    data = bytearray(path.read_bytes())
    place = phy_offset % store.segment + (89 if at < 0 else at)
    data[place] ^= 0xFF
    path.write_bytes(data)
