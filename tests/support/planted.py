"""A small sound index into which faults are planted, and the audit of it beside RocketMQ's own walk."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from indexd.audit import Audit
from indexd.config import Config
from support.auditing import audit, config_for, index_log, lost_keys, rows_of
from support.data_directory import SEGMENT, T0, Store, spec
from support.verifying import LAYOUT, change

# Where the header's fields stand, and how wide they are.
BEGIN_TIME, END_TIME, BEGIN_PHY, END_PHY, USED, COUNT = (
    (0, ">q"),
    (8, ">q"),
    (16, ">q"),
    (24, ">q"),
    (32, ">i"),
    (36, ">i"),
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Ten messages of two or four keys: three full files of nine entries, and one of three that is open."""
    store = Store(tmp_path, LAYOUT)
    for number in range(10):
        extra = {"UNIQ_KEY": f"u{number}", "TAGS": "t"} if number % 2 else {}
        store.append(spec(T0 + 1700 * number, size=60, KEYS=f"a{number} b{number % 3}", **extra))
    config = config_for(store.root, LAYOUT, SEGMENT)
    index_log(config)
    assert audit(config).is_sound
    return config


def files(config: Config) -> list[Path]:
    assert config.store.store is not None
    return sorted((config.store.store / "index").iterdir())


def checked(config: Config) -> Audit:
    """The audit, with its holes compared to what RocketMQ's own walk does not find."""
    found, lost = audit(config), lost_keys(config, "5.4")
    assert found.missing_keys == lost.total(), rows_of(found)
    for hole in found.holes:
        assert {hole.begin, hole.last} <= set(lost)
    assert sum(hole.messages for hole in found.holes) == len(lost)
    return found


def set_header(path: Path, field: tuple[int, str], value: int) -> None:
    position, form = field
    assert struct.unpack_from(form, path.read_bytes(), position) != (value,)
    change(path, position, struct.pack(form, value))


def whats(found: Audit) -> set[str]:
    return set(found.counts)
