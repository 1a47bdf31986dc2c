"""Kafka's own segments: rebuilt byte for byte as its recovery and its roll made them, and what its tool says of them.

The damaged segments that Kafka's DumpLogSegments was run on are made here once more, from what it printed.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest

from indexd.kafka.check import CheckReport, check
from indexd.kafka.rebuild import rebuild
from indexd.storage.disk import Disk

ARCHIVE = Path(__file__).with_name("kafka-goldens.tar.gz")
SEGMENTS = [
    "big-batches", "default-4096", "empty", "falling-timestamps", "interval-boundary", "interval-zero", "large-base",
    "multi-batch-call", "multi-batch-call-old-rule", "no-timestamps", "recover-garbage", "truncate-then-append",
]  # fmt: skip
#: Written otherwise than recovery would: entries of sets, and after a truncation.
OTHERWISE = {"multi-batch-call-old-rule", "truncate-then-append"}
NAME = "00000000000000000000"


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("goldens")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return place / "kafka-goldens"


def case_of(goldens: Path, name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((goldens / "segment" / name / "case.json").read_text("utf-8"))
    return parsed


def segment_of(goldens: Path, name: str) -> Path:
    """The folder with the log: as rolled, or as recovered where there is no other."""
    place = goldens / "segment" / name
    return place / ("rolled" if (place / "rolled").exists() else "recovered")


def copied(goldens: Path, name: str, tmp_path: Path) -> Path:
    """A copy as a sealed segment: an empty one follows it."""
    path = tmp_path / f"{name}-0"
    shutil.copytree(segment_of(goldens, name), path)
    (path / f"{10**18:020d}.log").write_bytes(b"")
    return path


def whats(report: CheckReport) -> set[str]:
    return {finding.what for finding in report.findings.kept}


def test_no_case_is_left_out(goldens: Path) -> None:
    assert sorted(path.name for path in (goldens / "segment").iterdir()) == SEGMENTS


@pytest.mark.parametrize("name", SEGMENTS)
def test_the_check_finds_nothing(goldens: Path, tmp_path: Path, name: str) -> None:
    report = check(copied(goldens, name, tmp_path), Disk())
    assert not report.findings
    assert {note.what for note in report.notes} == ({"entries_of_sets"} if name.endswith("old-rule") else set())


@pytest.mark.parametrize("name", SEGMENTS)
def test_rebuilt_byte_for_byte(goldens: Path, tmp_path: Path, name: str) -> None:
    case = case_of(goldens, name)
    place = segment_of(goldens, name)
    report = rebuild(
        place, Disk(), out=tmp_path, interval=case["indexIntervalBytes"], max_index_size=case["segmentIndexBytes"]
    )
    assert not report.findings
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(made) == 2
    for label in {"rolled", "recovered"} - ({"rolled"} if name in OTHERWISE else set()):
        for path in (goldens / "segment" / name / label).glob("*index"):
            assert made[path.name] == path.read_bytes(), path


def test_garbage_behind_the_log_is_left_for_kafka_to_cut(goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, "recover-garbage", tmp_path)
    (log,) = path.glob("*100.log")
    data = log.read_bytes()
    log.write_bytes(data + bytes(range(200, 256)) * 3)
    report = rebuild(path, Disk(), out=tmp_path / "out", interval=300)
    assert report.findings.counts == {"log_not_whole": 1}
    assert log.read_bytes() == data + bytes(range(200, 256)) * 3
    for kept in (goldens / "segment" / "recover-garbage" / "recovered").glob("*index"):
        assert (tmp_path / "out" / kept.name).read_bytes() == kept.read_bytes()


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


def damaged(goldens: Path, tmp_path: Path, name: str) -> Path:
    """The files of a dump case as they were when the tool was called."""
    text = (goldens / "dump" / f"{name}.txt").read_text("utf-8").split("\n\n")[0]
    source = re.findall(r"--files (\w+)/", text)[0]
    path = copied(goldens, SOURCES[source], tmp_path)
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
        file = path / (NAME + suffix)
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
def test_what_the_tool_reports_and_what_it_misses(goldens: Path, tmp_path: Path, name: str) -> None:
    report = check(damaged(goldens, tmp_path, name), Disk())
    assert whats(report) == FOUND[name], report.findings.kept
    assert [note.what for note in report.notes] == (
        ["entries_of_sets"] if name.startswith("old") else ["left_alone"] if name == "deleted-suffix" else []
    )


def test_no_dump_is_left_out(goldens: Path) -> None:
    assert {path.stem for path in (goldens / "dump").iterdir()} == set(FOUND)


@pytest.mark.parametrize("name", sorted(set(FOUND) - {"missing-log"}))
def test_every_damaged_one_is_mended(goldens: Path, tmp_path: Path, name: str) -> None:
    path = damaged(goldens, tmp_path, name)
    source = re.findall(r"--files (\w+)/", (goldens / "dump" / f"{name}.txt").read_text("utf-8"))[0]
    case = case_of(goldens, SOURCES[source])
    assert not rebuild(path, Disk(), interval=case["indexIntervalBytes"]).findings
    assert not check(path, Disk()).findings
    if SOURCES[source] not in OTHERWISE:
        for kept in segment_of(goldens, SOURCES[source]).iterdir():
            assert (path / kept.name).read_bytes() == kept.read_bytes()
