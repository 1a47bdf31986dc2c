"""What Kafka's own index classes left on the disk: 81 cases of 4.1.2 (and one of 3.9.0), opened, searched and made.

``kafka-goldens.tar.gz`` explains its files in a README of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tarfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest

from indexd.kafka.indexes import check, rebuild
from indexd.sparse.format import OFFSET_ENTRY, TIME_ENTRY, index_name, sanity_problem, time_index_name
from indexd.storage.disk import Disk

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


def test_no_case_is_left_out() -> None:
    assert len(json.loads(FILES["manifest.json"])["cases"]) == len(CASES) == 81
    assert {Path(file).stem for file in FILES if file.startswith("dump/")} == set(FOUND)


# --- what stands in a file that is opened ---


def check_opened(path: Path, kind: str, base: int, opened: dict[str, Any], what: str) -> None:
    """Entries, sanity check and, where the entries are in order, lookups; of others Kafka finds whatever it meets."""
    is_time, packed, data = kind == "time", TIME_ENTRY if kind == "time" else OFFSET_ENTRY, path.read_bytes()
    rows = packed.iter_unpack(data[: len(data) // packed.size * packed.size])
    entries = [[first, base + second] if is_time else [base + first, second] for first, second in rows]
    nothing = [-1, base] if is_time else [base, 0]
    state, last = opened["state"], entries[-1] if entries else nothing
    found = (len(entries), len(entries), len(data), len(entries) * packed.size)
    assert found == tuple(state[key] for key in ("entries", "maxEntries", "length", "sizeInBytes")), what
    assert (last if is_time else last[0]) == state["lastEntry" if is_time else "lastOffset"], what
    with Disk().open_read(path) as file:
        assert (sanity_problem(file, base, len(entries), packed) is None) == (opened["sanityCheck"] == "ok"), what
    if "entries" in opened:
        assert entries == opened["entries"], what
    else:
        assert (entries[:3], entries[-3:]) == (opened["entriesHead"], opened["entriesTail"]), what
    keys = [first for first, _ in entries]
    for target, *answer in opened["lookups"] if keys == sorted(set(keys)) else ():
        slot = bisect_right(keys, target) - 1
        assert (entries[slot] if slot >= 0 else nothing) == answer, f"{what}: {target}"


@pytest.mark.parametrize(
    ("name", "snapshot"),
    [
        pytest.param(name, snapshot, id=f"{name}-{snapshot['label']}")
        for name in names("offset", "time")
        for snapshot in CASES[name]["snapshots"]
    ],
)
def test_every_snapshot_reopened(name: str, snapshot: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / Path(snapshot["file"]).name
    path.write_bytes(FILES[f"{name}/{snapshot['file']}"])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == snapshot["sha256"]
    base = int(path.name.partition(".")[0])
    check_opened(path, CASES[name]["kind"], base, snapshot["reopened"], f"{name} {snapshot['label']}")


@pytest.mark.parametrize("name", names("corrupt"))
def test_damaged_files_are_judged_as_kafka_judges_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / case["file"]
    path.write_bytes(bytes.fromhex(case["hex"]) if "hex" in case else FILES[f"{name}/{case['file']}"])
    check_opened(path, case["kind"], case["baseOffset"], case["opened"], name)


# --- facts ---


def test_file_names() -> None:
    for row in FACTS["fileNames"]:
        base = row["baseOffset"]
        assert (index_name(base), time_index_name(base)) == (row["index"], row["timeindex"])


SEGMENTS = [name.removeprefix("segment/") for name in names("segment")]
#: Written otherwise than recovery would: entries of sets, and after a truncation.
OTHERWISE = {"multi-batch-call-old-rule", "truncate-then-append"}


def files_of(name: str) -> dict[str, bytes]:
    """The files of a segment's case with the log: as rolled, or as recovered where there is no other."""
    for label in ("rolled", "recovered"):
        prefix = f"segment/{name}/{label}/"
        if found := {file.removeprefix(prefix): FILES[file] for file in FILES if file.startswith(prefix)}:
            return found
    raise KeyError(name)


def copied(name: str, tmp_path: Path) -> Path:
    """A copy as a sealed segment: an empty one follows it."""
    path = tmp_path / f"{name}-0"
    path.mkdir()
    for file, data in (files_of(name) | {f"{10**18:020d}.log": b""}).items():
        (path / file).write_bytes(data)
    return path


@pytest.mark.parametrize("name", SEGMENTS)
def test_the_check_finds_nothing(tmp_path: Path, name: str) -> None:
    report = check(copied(name, tmp_path), Disk())
    assert not report.findings
    assert {note.what for note in report.notes} == ({"entries_of_sets"} if name.endswith("old-rule") else set())


@pytest.mark.parametrize("name", SEGMENTS)
def test_rebuilt_byte_for_byte(tmp_path: Path, name: str) -> None:
    case, out = CASES[f"segment/{name}"], tmp_path / "out"
    sizes = {"interval": case["indexIntervalBytes"], "max_index_size": case["segmentIndexBytes"]}
    assert not rebuild(copied(name, tmp_path), Disk(), out=out, **sizes).findings
    for label in {"rolled", "recovered"} - ({"rolled"} if name in OTHERWISE else set()):
        prefix = f"segment/{name}/{label}/"
        for file in [file for file in FILES if file.startswith(prefix) and file.endswith("index")]:
            assert (out / file.removeprefix(prefix)).read_bytes() == FILES[file], file


# --- what DumpLogSegments said ----------------------------------------------------------------------------------

SOURCES = {"m1": "interval-boundary", "good": "interval-boundary", "mb": "multi-batch-call", "nots": "no-timestamps",
           "old": "multi-batch-call-old-rule", "falling": "falling-timestamps"}  # fmt: skip
#: What is in the files and was not printed.
HIDDEN = {
    "position-mid-batch": (".index", struct.pack(">6i", 4, 450, 8, 800, 12, 1200)),
    "position-past-log": (".index", struct.pack(">6i", 4, 400, 8, 800, 12, 65536)),
}
FOUND: dict[str, set[str]] = {
    "deleted-suffix": {"index_missing"},
    "empty-index": set(),  # sparser than usual: lookups scan, and are right
    "empty-timeindex": set(),  # no timestamps
    "falling": set(),
    "good": set(),
    "missing-file": {"time_index_missing"},
    "missing-log": {"orphan"},
    "missing-offset-index": {"index_missing"},
    "odd-length": {"ragged_length"},
    "offset-mismatch": {"offset_mismatch"},
    "old-rule-false-mismatch": set(),
    "position-mid-batch": {"position_not_at_batch"},
    "position-past-log": {"position_behind_log"},
    "time-mismatch": {"time_mismatch"},
    "time-offset-beyond-log": {"time_offset_behind_log"},
    "time-offset-not-last-of-batch": {"time_offset_not_last"},
    "time-out-of-order": {"time_mismatch"},
    "zero-tail": {"zero_tail"},
}


def damaged(tmp_path: Path, name: str) -> Path:
    """The files of a dump case as they were when the tool was called."""
    text = FILES[f"dump/{name}.txt"].decode().split("\n\n")[0]
    path = copied(SOURCES[re.findall(r"--files (\w+)/", text)[0]], tmp_path)
    sizes = {file: int(size) for size, file in re.findall(r"^file\| (\d+) (\S+)$", text, re.MULTILINE)}
    offsets = re.findall(r"^out\| offset: (\d+) position: (\d+)$", text, re.MULTILINE)
    pairs = re.findall(r"^out\| timestamp: (\d+) offset: (\d+)$", text, re.MULTILINE)
    entries = {
        ".index": b"".join(struct.pack(">ii", int(o), int(p)) for o, p in offsets),
        ".timeindex": b"".join(struct.pack(">qi", int(t), int(o)) for t, o in dict.fromkeys(pairs)),
    }
    if name in HIDDEN:
        entries[HIDDEN[name][0]] = HIDDEN[name][1]
    for suffix in (".index", ".timeindex", ".log"):
        file = path / f"{0:020d}{suffix}"
        size = sizes.get(file.name)
        if name == "deleted-suffix" and size is None:
            file.rename(file.with_name(file.name + ".deleted"))
        elif size is None or (name.startswith("missing") and not size):
            file.unlink()
        elif suffix in entries and (entries[suffix] or not size):
            file.write_bytes(entries[suffix])
        if size and file.stat().st_size < size:
            with file.open("ab") as end:
                end.write(bytes(size - file.stat().st_size))
        assert not size or file.stat().st_size == size, (file, size)
    return path


@pytest.mark.parametrize("name", FOUND)
def test_what_the_tool_reports_and_what_it_misses(tmp_path: Path, name: str) -> None:
    report = check(damaged(tmp_path, name), Disk())
    assert {finding.what for finding in report.findings.kept} == FOUND[name], report.findings.kept
    assert [note.what for note in report.notes] == (
        ["entries_of_sets"] if name.startswith("old") else ["left_alone"] if name == "deleted-suffix" else []
    )
