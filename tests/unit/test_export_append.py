"""Appending exports: a log that was cut or has expired is noticed; and no name leads out of a target."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from indexd.cli import export as command
from indexd.commitlog.writer import CommitLogWriter, blank_record
from indexd.config import Config
from indexd.errors import CorruptDataError, UnsafeStoreError, UsageError
from indexd.spark.export.outputs import LocalFiles
from support.exporting import config_of, export_here, files_of, logged, rows_of
from support.small_log import SEGMENT_SIZE, messages, write_log


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A log of two segments, and the one that a broker makes ahead."""
    with CommitLogWriter(tmp_path / "store/commitlog", SEGMENT_SIZE) as writer:
        for spec in islice(messages(1), 1000):
            writer.append(spec)
        writer.close(clean=False)
    return tmp_path / "store"


@pytest.fixture
def config(store: Path, tmp_path: Path) -> Config:
    return config_of(store, tmp_path / "data")


def content(to: Path) -> dict[str, bytes]:
    return {name: (to / name).read_bytes() for name in files_of(to)}


def manifest_of(to: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((to / "_manifest.json").read_text())
    return found


def zero_from(store: Path, offset: int) -> None:
    with (store / "commitlog" / f"{offset - offset % SEGMENT_SIZE:020d}").open("r+b") as file:
        file.seek(offset % SEGMENT_SIZE)
        file.write(bytes(SEGMENT_SIZE - offset % SEGMENT_SIZE))


def offsets_in(to: Path) -> list[int]:
    return [row["phyOffset"] for row in rows_of(to)]


@pytest.mark.parametrize("written_on", [0, 50, 3000])
@pytest.mark.parametrize("topics", [None, frozenset({"OrderPaid"})])
def test_a_log_that_was_cut_is_refused(
    config: Config, store: Path, tmp_path: Path, written_on: int, topics: frozenset[str] | None
) -> None:
    to = tmp_path / "out"
    export_here(config, to, topics=topics)
    cut = logged(store)[900].phy_offset
    assert cut > SEGMENT_SIZE
    zero_from(store, cut)
    (store / "commitlog" / f"{3 * SEGMENT_SIZE:020d}").write_bytes(bytes(SEGMENT_SIZE))
    write_log(store, written_on, seed=2, start_offset=cut)
    before = content(to)
    for on_expired in ("fail", "skip"):
        with pytest.raises(UnsafeStoreError, match=r"the last message that .* holds began at") as error:
            export_here(config, to, mode="append", topics=topics, on_expired=on_expired)
        assert "--mode overwrite" in error.value.line()
    assert content(to) == before
    export_here(config, to, mode="overwrite")
    assert offsets_in(to) == [message.phy_offset for message in logged(store)]


def test_a_cut_just_behind_the_last_message_is_seen_where_a_segment_was_over(tmp_path: Path) -> None:
    store, to = tmp_path / "store", tmp_path / "out"
    end = write_log(store, 100)
    with (store / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(end)
        file.write(blank_record(SEGMENT_SIZE - end))
    write_log(store, 1, start_offset=SEGMENT_SIZE)
    config = config_of(store, tmp_path / "data")
    # As when the export ended with the blank record: the next segment was not in use.
    zero_from(store, SEGMENT_SIZE)
    found = export_here(config, to)
    assert found.end_offset == SEGMENT_SIZE
    assert export_here(config, to, mode="append").rows == 0
    zero_from(store, end)
    write_log(store, 3, seed=2, start_offset=end)
    with pytest.raises(UnsafeStoreError, match=f"at {end} of the log stands a message"):
        export_here(config, to, mode="append")


def test_an_export_of_nothing_new_keeps_the_evidence(config: Config, store: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    export_here(config, to)
    export_here(config, to, mode="append")
    first, second = manifest_of(to)["exports"]
    last = logged(store)[-1]
    assert first["last_message"] == second["last_message"]
    assert (last.phy_offset, last.size) == (first["last_message"]["offset"], first["last_message"]["size"])
    zero_from(store, logged(store)[950].phy_offset)
    with pytest.raises(UnsafeStoreError, match="no message any more"):
        export_here(config, to, mode="append")


def test_a_first_export_of_an_empty_log_proves_nothing(tmp_path: Path) -> None:
    store, to = tmp_path / "store", tmp_path / "out"
    (store / "commitlog").mkdir(parents=True)
    config = config_of(store, tmp_path / "data")
    export_here(config, to, mode="append")
    assert manifest_of(to)["exports"][0]["last_message"] is None
    write_log(store, 100)
    assert export_here(config, to, mode="append").rows == 100


def test_the_blank_end_of_a_segment_is_no_gap(tmp_path: Path) -> None:
    store, to = tmp_path / "store", tmp_path / "out"
    end = write_log(store, 100)
    config = config_of(store, tmp_path / "data")
    assert export_here(config, to).end_offset == end
    with (store / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(end)
        file.write(blank_record(SEGMENT_SIZE - end))
    write_log(store, 20, seed=2, start_offset=SEGMENT_SIZE)
    found = export_here(config, to, mode="append")
    assert (found.rows, found.begin_offset, found.expired) == (20, end, None)


def test_a_segment_missing_in_the_middle_is_no_silent_gap(config: Config, store: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    (store / "commitlog" / f"{2 * SEGMENT_SIZE:020d}").unlink(missing_ok=True)
    export_here(config, to)
    write_log(store, 20, start_offset=3 * SEGMENT_SIZE)
    with pytest.raises(CorruptDataError, match="corrupt"):
        export_here(config, to, mode="append")


def test_what_expired_is_refused_or_stated(
    config: Config, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"
    end = export_here(config, to).end_offset
    old = offsets_in(to)
    shutil.rmtree(store / "commitlog")
    begin = 5 * SEGMENT_SIZE
    write_log(store, 200, seed=2, start_offset=begin)
    before = content(to)
    with pytest.raises(UnsafeStoreError, match=f"begins at {begin}, .* up to {end}: {begin - end} bytes") as error:
        export_here(config, to, mode="append")
    assert "--on-expired skip" in error.value.line()
    assert content(to) == before
    found = export_here(config, to, mode="append", on_expired="skip")
    assert (found.expired, found.begin_offset, found.rows) == ((end, begin), begin, 200)
    assert offsets_in(to) == old + [message.phy_offset for message in logged(store)]
    assert [export["expired_bytes"] for export in manifest_of(to)["exports"]] == [0, begin - end]
    command._print(found, str(to))
    assert f"log bytes {end} to {begin} had expired" in capsys.readouterr().out
    assert command._row(found, _Asked(to))["expiredBytes"] == begin - end  # type: ignore[arg-type]
    assert export_here(config, to, mode="append").expired is None


class _Asked:
    mode = "append"

    def __init__(self, to: Path) -> None:
        self.to = to


def test_the_segment_of_the_last_message_may_expire(config: Config, store: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    end = export_here(config, to).end_offset
    log = store / "commitlog"
    for path in log.iterdir():
        if int(path.name) < end - SEGMENT_SIZE:
            path.unlink()
    assert export_here(config, to, mode="append").rows == 0


@pytest.mark.parametrize("more", [{"topics": frozenset({"OrderPaid"})}, {"begin": 0}, {"end": 1 << 60}])
def test_another_selection_is_not_added(config: Config, store: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    to = tmp_path / "out"
    export_here(config, to)
    before = content(to)
    with pytest.raises(UsageError, match="other topics or times"):
        export_here(config, to, mode="append", **more)
    assert content(to) == before
    shutil.copytree(store, tmp_path / "another")
    assert export_here(config_of(tmp_path / "another", tmp_path / "data"), to, mode="append", **more).rows > 0


@pytest.mark.parametrize("mode", ["error", "append", "overwrite"])
@pytest.mark.parametrize("where", ["manifest", "journal", "removed"])
@pytest.mark.parametrize(
    "name", ["../victim", "{tmp}/victim", "topic=a/../../victim", "topic=l/part-1.parquet", "mine.txt", "_SUCCESS", 7]
)
def test_a_name_that_leads_out_of_the_target_touches_nothing(
    config: Config, tmp_path: Path, mode: str, where: str, name: Any
) -> None:
    to = tmp_path / "out"
    export_here(config, to)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/part-1.parquet").write_text("precious")
    (to / "topic=l").symlink_to(tmp_path / "elsewhere")
    name = name.format(tmp=tmp_path) if isinstance(name, str) else name
    manifest = manifest_of(to)
    if where == "manifest":
        manifest["exports"][0]["files"].append([name, 1, 8])
        (to / "_manifest.json").write_text(json.dumps(manifest))
    else:
        job = manifest["exports"][0]["job"] if where == "removed" else "0123456789ab"
        (to / "_temporary" / job).mkdir(parents=True)
        (to / "_temporary" / job / "journal.json").write_text(json.dumps({"files": [name], "removed": [name]}))
        (to / "_temporary" / job / "part-1.parquet.tmp").touch()
    before = content(tmp_path)
    with pytest.raises(CorruptDataError) as error:
        export_here(config, to, mode=mode)
    assert "nothing was touched" in error.value.line()
    assert content(tmp_path) == before


def test_what_is_below_a_link_is_not_what_a_job_left(config: Config, tmp_path: Path) -> None:
    to = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/part-1.parquet").write_text("precious")
    (to / "_temporary").mkdir(parents=True)
    (to / "_temporary/0123456789ab").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptDataError, match="leads out"):
        export_here(config, to)
    assert (tmp_path / "elsewhere/part-1.parquet").read_text() == "precious"
    assert not LocalFiles(to).leads_out("topic=a/part-1.parquet")
