"""What Kafka's own index classes left on the disk: 81 cases of 4.1.2 (and one of 3.9.0), opened, searched and made.

``kafka-goldens.tar.gz`` explains its files in a README of its own.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexd.errors import CorruptDataError
from indexd.sparse.format import base_of_name, index_name, search, time_index_name
from indexd.sparse.kernel import (
    OFFSET_ENTRY_TYPE,
    TIME_ENTRY_TYPE,
    final_time_entry,
    new_state,
    pack_entries,
    segment_entries,
)
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk, DiskFile

ARCHIVE = Path(__file__).with_name("kafka-goldens.tar.gz")


def _load() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]  # plain files only


FILES = _load()
CASES = {
    name.removesuffix("/case.json"): json.loads(data) for name, data in FILES.items() if name.endswith("case.json")
}
FACTS = json.loads(FILES["facts.json"])


def names(*kinds: str) -> list[str]:
    return sorted(name for name in CASES if name.partition("/")[0] in kinds)


def test_all_cases_are_there() -> None:
    listed = json.loads(FILES["manifest.json"])["cases"]
    assert len(listed) == len(CASES) == 81


# --- what stands in a file that is opened ---


def open_index(kind: str, file: DiskFile, base: int) -> OffsetIndex | TimeIndex:
    return (TimeIndex if kind == "time" else OffsetIndex)(file, base)


def check_opened(index: OffsetIndex | TimeIndex, opened: dict[str, Any], what: str) -> None:
    state = opened["state"]
    found = (index.entries, index.entries, index.length, index.entries * index.entry_size)
    assert found == tuple(state[key] for key in ("entries", "maxEntries", "length", "sizeInBytes")), what
    last = list(index.last_entry) if isinstance(index, TimeIndex) else index.last_entry.offset
    assert last == state["lastEntry" if isinstance(index, TimeIndex) else "lastOffset"], what
    if opened["sanityCheck"] == "ok":
        index.sanity_check()
    else:
        with pytest.raises(CorruptDataError):
            index.sanity_check()
    entries = [list(index.entry(slot)) for slot in range(index.entries)]
    if "entries" in opened:
        assert entries == opened["entries"], what
    else:
        assert (entries[:3], entries[-3:]) == (opened["entriesHead"], opened["entriesTail"]), what
    nothing = [-1, index.base] if isinstance(index, TimeIndex) else [index.base, 0]
    for target, *answer in opened["lookups"]:
        slot, _ = search(lambda slot: entries[slot][0], index.entries, index.entry_size, target)
        assert (entries[slot] if slot >= 0 else nothing) == answer, f"{what}: {target}"


def snapshots() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names("offset", "time"):
        for snapshot in CASES[name]["snapshots"]:
            yield name, snapshot


@pytest.mark.parametrize(
    ("name", "snapshot"), [pytest.param(*row, id=f"{row[0]}-{row[1]['label']}") for row in snapshots()]
)
def test_every_snapshot_reopened(name: str, snapshot: dict[str, Any], tmp_path: Path) -> None:
    case, opened = CASES[name], snapshot["reopened"]
    path = tmp_path / Path(snapshot["file"]).name
    path.write_bytes(FILES[f"{name}/{snapshot['file']}"])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == snapshot["sha256"]
    with Disk().open_read(path) as file:
        check_opened(open_index(case["kind"], file, base_of_name(path.name)), opened, f"{name} {snapshot['label']}")


@pytest.mark.parametrize("name", names("corrupt"))
def test_damaged_files_are_judged_as_kafka_judges_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / case["file"]
    data = bytes.fromhex(case["hex"]) if "hex" in case else FILES[f"{name}/{case['file']}"]
    path.write_bytes(data)
    with Disk().open_read(path) as file:
        check_opened(open_index(case["kind"], file, case["baseOffset"]), case["opened"], name)


# --- segments ---


# How Kafka 3.9.0 indexed a call, and what follows a truncation, is nothing that is built here.
@pytest.mark.parametrize("name", [one for one in names("segment") if not one.endswith(("old-rule", "then-append"))])
def test_segments_feed_their_indexes_as_kafkas(name: str) -> None:
    case = CASES[name]
    base, interval = case["baseOffset"], case["indexIntervalBytes"]
    snapshots = {snapshot["label"]: snapshot for snapshot in case["snapshots"]}
    state, pairs = new_state(), np.empty((2, 0, 2), dtype=np.int64)
    offsets, times = list(pairs)
    for op in case["ops"]:
        if op["op"] == "append" and op["result"] == "ok":
            batches = [batch for batch in case["batches"] if batch["call"] == op["call"]]
            made = np.empty((2, len(batches), 2), dtype=np.int64)
            columns = [
                np.array([batch[field] - less for batch in batches], dtype=np.int64)
                for field, less in (("position", 0), ("size", 0), ("lastOffset", base), ("maxTimestamp", 0))
            ]
            taken, *counts = segment_entries(*columns, 0, len(batches), interval, state, *made)
            assert taken == len(batches)
            offsets = np.concatenate([offsets, made[0, : counts[0]]])
            times = np.concatenate([times, made[1, : counts[1]]])
        elif op["op"] in ("onBecomeInactiveSegment", "recover"):
            last = final_time_entry(state)
            times = np.concatenate([times, np.array([last] if last else [], dtype=np.int64).reshape(-1, 2)])
        elif op["op"] == "snapshot":
            snapshot = snapshots[op["label"]]
            for rows, entry, key in ((offsets, OFFSET_ENTRY_TYPE, "index"), (times, TIME_ENTRY_TYPE, "timeindex")):
                if snapshot[key] is not None:  # Kafka had not made it yet
                    theirs = FILES[f"{name}/{snapshot[key]['file']}"]
                    assert pack_entries(rows, entry).ljust(len(theirs), b"\0") == theirs, f"{name}: {op}"


# --- facts ---


def test_file_names() -> None:
    for row in FACTS["fileNames"]:
        base = row["baseOffset"]
        assert (index_name(base), time_index_name(base)) == (row["index"], row["timeindex"])
        assert base_of_name(row["index"]) == base_of_name(row["deleted"]) == row["parsedBack"] == base
