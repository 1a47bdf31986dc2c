"""Faults of headers, of whole files, of the index folder and of the log: what the audit makes of them."""

from __future__ import annotations

import os
import struct

import pytest

from indexd.config import Config
from indexd.errors import UnsafeStoreError, UsageError
from support.auditing import audit, config_for
from support.data_directory import SEGMENT
from support.planted import (
    BEGIN_PHY,
    BEGIN_TIME,
    COUNT,
    END_PHY,
    END_TIME,
    USED,
    checked,
    config,
    files,
    set_header,
    whats,
)
from support.verifying import LAYOUT, change, entry_of

__all__ = ["config"]


def test_a_put_that_a_crash_cut_short(config: Config) -> None:
    # Entry and slot are there, the header does not count it yet: RocketMQ's query finds it (spec 11, number 5).
    path = files(config)[-1]
    set_header(path, COUNT, 3)
    found = checked(config)
    assert (whats(found), found.missing_keys) == ({"header-index-count"}, 0)


def test_a_header_that_counts_too_few(config: Config) -> None:
    path = files(config)[1]
    set_header(path, COUNT, 5)
    found = checked(config)
    assert {"slot-behind-last", "header-end-phy-offset"} <= whats(found)
    assert found.missing_keys >= 4


def test_a_header_that_counts_too_many(config: Config) -> None:
    set_header(files(config)[-1], COUNT, 8)
    found = checked(config)
    assert (whats(found), found.missing_keys) == ({"header-index-count"}, 0)


def test_a_header_of_zeros_hides_the_file(config: Config) -> None:
    path = files(config)[1]
    change(path, 0, bytes(40))
    found = checked(config)
    assert found.missing_keys == 9
    assert whats(found) == {"slot-behind-last"}


@pytest.mark.parametrize(
    ("field", "what"),
    [
        (BEGIN_PHY, "header-begin-phy-offset"),
        (END_PHY, "header-end-phy-offset"),
        (BEGIN_TIME, "header-begin-timestamp"),
        (END_TIME, "header-end-timestamp"),
    ],
)
@pytest.mark.parametrize("more", [-1, 2, 1 << 33])
def test_a_wrong_header(config: Config, field: tuple[int, str], what: str, more: int) -> None:
    path = files(config)[1]
    (value,) = struct.unpack_from(field[1], path.read_bytes(), field[0])
    set_header(path, field, value + more)
    found = checked(config)
    assert what in found.counts
    assert whats(found) <= {what, "entry-time-difference"}
    assert found.missing_keys == 0


@pytest.mark.parametrize("value", [0, 100])
def test_a_wrong_slot_count(config: Config, value: int) -> None:
    set_header(files(config)[1], USED, value)
    assert whats(checked(config)) == {"header-used-slot-count"}


def test_a_file_of_another_size_is_not_read(config: Config) -> None:
    path = files(config)[1]
    with path.open("r+b") as file:
        file.truncate(LAYOUT.file_size + 20)
    found = audit(config)
    assert (found.counts, found.missing_keys) == ({"file-size": 1}, 9)
    assert len(found.files) == 3


def test_sizes_that_fit_no_file_end_it(config: Config) -> None:
    assert config.store.store is not None
    with pytest.raises(UnsafeStoreError, match="7 slots and 11 entries make"):
        audit(config_for(config.store.store, type(LAYOUT)(7, 11), SEGMENT))
    with pytest.raises(UsageError, match="no store is given"):
        audit(config.model_copy(update={"store": config.store.model_copy(update={"store": None})}))


def test_what_is_no_index_file(config: Config) -> None:
    folder = files(config)[0].parent
    (folder / "notes.txt").write_text("mine")
    (folder / "20260101").write_bytes(b"")
    (folder / "20260101000000099").mkdir()
    os.mkfifo(folder / "20260101000000098")
    found = audit(config)
    assert found.counts == {"file-foreign": 3}
    words = {finding.file: finding.text for finding in found.findings}
    assert "leaves it alone" in words["index/notes.txt"]
    assert "its name is a number" in words["index/20260101"]
    assert "fails to load" in words["index/20260101000000099"]


def test_a_log_that_cannot_be_read_in_places(config: Config) -> None:
    assert config.store.store is not None
    segment = min((config.store.store / "commitlog").iterdir())
    whole = audit(config)
    offset = entry_of(files(config)[0], 3).phy_offset
    change(segment, offset + 4, b"\1\2\3\4")
    found = audit(config)
    assert found.is_sound
    assert (found.left_out_entries, found.entries) == (whole.entries - found.keys, found.keys)
    (gap,) = found.gaps
    assert gap.begin == offset
    assert "magic" in gap.reason
