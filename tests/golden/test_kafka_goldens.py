"""Kafka's own index classes, call by call: 81 cases of 4.1.2 (and one of 3.9.0), every answer, state and byte.

``kafka-goldens.tar.gz`` explains its files in a README of its own. Here ours differ from Kafka's on purpose in the two
``*-desync`` cases, in which Kafka tears its file, and in what opening for reading only leaves behind.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from indexd.errors import DiskError, OffsetOverflowError, UsageError
from indexd.sparse.format import base_of_name, index_name, time_index_name
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk
from support.kafka_check import Index, Ours, open_index, same_error, state_of
from support.kafka_model import Segment

ARCHIVE = Path(__file__).with_name("kafka-goldens.tar.gz")
_SUFFIX = {"offset": ".index", "time": ".timeindex"}


def _load() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]  # plain files only


FILES = _load()
CASES = {
    name.removesuffix("/case.json"): json.loads(data) for name, data in FILES.items() if name.endswith("case.json")
}
FACTS = json.loads(FILES["facts.json"])
TORN = {"time/overflow-desync", "time/below-base-desync"}


def names(*kinds: str) -> list[str]:
    return sorted(name for name in CASES if name.partition("/")[0] in kinds)


def file_name(case: dict[str, Any]) -> str:
    return f"{case['baseOffset']:020d}{_SUFFIX[case['kind']]}"


def without_cursor(state: dict[str, Any]) -> dict[str, Any]:
    """Where the mapping stands is the size in bytes, and after a failed resize, nobody's business."""
    return {key: value for key, value in state.items() if key != "mmapPosition"}


def check_result(found: object, theirs: Any, what: str) -> None:
    if isinstance(theirs, dict) and "exception" in theirs:
        assert same_error(found, theirs["exception"]), f"{what}: {found!r} for {theirs}"
    else:
        assert found == theirs, what


def test_all_cases_are_there() -> None:
    listed = json.loads(FILES["manifest.json"])["cases"]
    assert len(listed) == len(CASES) == 81


# --- call by call ---


def commands(case: dict[str, Any], op: dict[str, Any]) -> list[str]:
    """The golden's call as the script's commands; the last one's answer is the call's."""
    kind, base = case["kind"], case["baseOffset"]
    size = op.get("maxIndexSize", case["maxIndexSize"])
    skip = " skip" if op.get("skipFullCheck") else ""
    words: dict[str, list[str]] = {
        "open": [f"open {kind} {file_name(case)} {base} {size}"],
        "reopen": [f"open {kind} {file_name(case)} {base} {size}"],
        "unmapWithoutTrim+reopen": ["unmap", f"open {kind} {file_name(case)} {base} {size}"],
        "append": [f"append {op.get('offset')} {op.get('position')}"],
        "maybeAppend": [f"maybeAppend {op.get('timestamp')} {op.get('offset')}{skip}"],
        "appendAll": [f"append {offset} {position}" for offset, position in op.get("entries", [])],
        "maybeAppendAll": [f"maybeAppend {timestamp} {offset}" for timestamp, offset in op.get("entries", [])],
        "canAppendOffset": [f"canAppend {op.get('offset')}"],
        "truncateTo": [f"truncateTo {op.get('offset')}"],
        "resize": [f"resize {op.get('size')}"],
        "renameTo": [f"rename {op.get('result')}"],
        "sanityCheck": ["sanity"],
        "trimToValidSize+close": ["trim", "state"],
    }
    return words.get(op["op"], [op["op"]])


@pytest.mark.parametrize("name", [name for name in names("offset", "time") if name not in TORN])
def test_every_call_answers_as_kafkas(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours = Ours(tmp_path)
    snapshots = {snapshot["label"]: snapshot for snapshot in case["snapshots"]}
    for op in case["ops"]:
        what = f"{name}: {op}"
        if op["op"] == "snapshot":
            snapshot = snapshots[op["label"]]
            path = tmp_path / Path(snapshot["file"]).name
            assert path.read_bytes() == FILES[f"{name}/{snapshot['file']}"], what
            continue
        for line in commands(case, op):
            answer = ours.do(line)
        if op["op"] == "trimToValidSize+close":
            assert answer.state == without_cursor(op["result"]), what
            ours.do("close")
            continue
        if "result" in op and op["op"] != "renameTo":
            check_result(answer.result, op["result"], what)
        assert answer.state == without_cursor(op["after"]), what
    ours.close()


@pytest.mark.parametrize("name", sorted(TORN))
def test_an_offset_out_of_range_leaves_the_file_whole(name: str, tmp_path: Path) -> None:
    """Kafka's class writes the timestamp first, and every later append is torn; here it is as if never asked."""
    case = CASES[name]
    with TimeIndex.open(Disk(), tmp_path / file_name(case), case["baseOffset"], case["maxIndexSize"]) as index:
        taken = []
        for op in case["ops"]:
            if op["op"] != "maybeAppend":
                continue
            if "IndexOffsetOverflowException" in str(op["result"]):
                with pytest.raises(OffsetOverflowError):
                    index.maybe_append(op["timestamp"], op["offset"])
            else:
                index.maybe_append(op["timestamp"], op["offset"])
                taken.append((op["timestamp"], op["offset"]))
        assert list(index) == taken
        index.sanity_check()


# --- what stands in a file that is opened ---


def check_opened(index: Index, opened: dict[str, Any], what: str) -> None:
    assert state_of(index) == without_cursor(opened["state"]), what
    try:
        index.sanity_check()
        sane: object = "ok"
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        sane = error
    check_result(sane, opened["sanityCheck"], what)
    entries = [list(entry) for entry in index]
    assert entries == [list(index.entry(slot)) for slot in range(index.entries)]
    if "entries" in opened:
        assert entries == opened["entries"], what
    else:
        assert (entries[:3], entries[-3:]) == (opened["entriesHead"], opened["entriesTail"]), what
    for target, *found in opened["lookups"]:
        assert list(index.lookup(target)) == found, f"{what}: {target}"
    for row in opened["entryOutOfRange"]:
        with pytest.raises(UsageError):
            index.entry(row["n"])


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
    size = opened["openedWith"]["maxIndexSize"]
    for writable in (True, False):
        with open_index(case["kind"], path, base_of_name(path.name), size, writable=writable) as index:
            check_opened(index, opened, f"{name} {snapshot['label']}")


@pytest.mark.parametrize("name", names("corrupt"))
def test_damaged_files_are_judged_as_kafka_judges_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / case["file"]
    data = bytes.fromhex(case["hex"]) if "hex" in case else FILES[f"{name}/{case['file']}"]
    path.write_bytes(data)
    with open_index(case["kind"], path, case["baseOffset"], case["maxIndexSize"]) as index:
        check_opened(index, case["opened"], name)
    index = open_index(case["kind"], path, case["baseOffset"], -1, writable=False)
    check_opened(index, case["opened"], name)
    index.close()
    assert path.read_bytes() == data  # Kafka's close trims, even here
    index = open_index(case["kind"], path, case["baseOffset"], case["maxIndexSize"])
    index.trim_to_valid_size()
    index.close()
    assert path.stat().st_size == case["afterTrimAndClose"]["length"]
    if "hex" in case["afterTrimAndClose"]:
        assert path.read_bytes().hex() == case["afterTrimAndClose"]["hex"]


# --- segments ---


@pytest.mark.parametrize("name", names("segment"))
def test_segments_feed_their_indexes_as_kafkas(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    segment = Segment(tmp_path, case["baseOffset"], case["indexIntervalBytes"], case["segmentIndexBytes"])
    segment.per_call = case["kafkaVersion"] == "3.9.0"
    snapshots = {snapshot["label"]: snapshot for snapshot in case["snapshots"]}
    for op in case["ops"]:
        what = f"{name}: {op}"
        match op["op"]:
            case "append" if op["result"] != "ok":
                assert "LogSegmentOffsetOverflowException" in op["result"]["exception"]
            case "append":
                segment.append([batch for batch in case["batches"] if batch["call"] == op["call"]])
            case "truncateTo":
                assert segment.truncate_to(op["offset"]) == op["bytesTruncated"]
            case "onBecomeInactiveSegment":
                segment.roll()
            case "recover":
                segment.recover()
            case "snapshot":
                check_segment(segment, name, snapshots[op["label"]], what)
        if "after" in op:
            assert segment.offset_index.entries == op["after"]["offsetEntries"], what
            assert segment.time_index.entries == op["after"]["timeEntries"], what
    segment.close()


def check_segment(segment: Segment, name: str, snapshot: dict[str, Any], what: str) -> None:
    for index, row in ((segment.offset_index, snapshot["index"]), (segment.time_index, snapshot["timeindex"])):
        if row is not None:  # Kafka had not made it yet
            assert index.path.read_bytes() == FILES[f"{name}/{row['file']}"], what
    assert [list(entry) for entry in segment.offset_index] == snapshot["offsetEntries"], what
    assert [list(entry) for entry in segment.time_index] == snapshot["timeEntries"], what
    for timestamp, start, found in snapshot["findOffsetByTimestamp"]:
        answer = segment.find_offset_by_timestamp(timestamp, start)
        assert (answer and list(answer)) == found, f"{what}: {timestamp}, {start}"


# --- facts ---


def test_file_names() -> None:
    for row in FACTS["fileNames"]:
        base = row["baseOffset"]
        assert (index_name(base), time_index_name(base)) == (row["index"], row["timeindex"])
        assert base_of_name(row["index"]) == base_of_name(row["deleted"]) == row["parsedBack"] == base


def test_sizes_of_new_files(tmp_path: Path) -> None:
    for number, row in enumerate(FACTS["creation"]):
        path = tmp_path / str(number)
        if "error" in row:
            with pytest.raises(UsageError):
                open_index(row["kind"], path, 0, row["maxIndexSize"])
            assert not path.exists()  # Kafka leaves an empty file
            continue
        with open_index(row["kind"], path, 0, row["maxIndexSize"]) as index:
            assert state_of(index) == without_cursor(row["state"])
        assert path.read_bytes() == bytes(row["fileLength"])


def test_a_missing_file_opened_for_reading_stays_missing(tmp_path: Path) -> None:
    for row in FACTS["openMissingReadOnly"]:
        with pytest.raises(DiskError) as caught:
            open_index(row["kind"], tmp_path / "none", 0, row["maxIndexSize"], writable=False)
        assert caught.value.is_missing
        assert not list(tmp_path.iterdir())  # Kafka makes it


def test_closing_reading_and_the_sum_that_wraps(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000000.index"
    index = OffsetIndex.open(Disk(), path, 0, 80)
    index.append(5, 100)
    index.append(9, 0x7FFFFFF0)
    index.close()
    index.close()
    assert path.stat().st_size == 16
    with pytest.raises(DiskError):  # Kafka: NullPointerException
        index.lookup(5)
    path.unlink()
    index = OffsetIndex.open(Disk(), path, 0, 80)
    index.append(5, 100)
    index.close(trim=False)
    assert path.stat().st_size == 80  # as from Kafka 4.4 on
    with OffsetIndex.load(Disk(), path, 0, 1) as reading, pytest.raises(UsageError):
        reading.append(10, 1)
