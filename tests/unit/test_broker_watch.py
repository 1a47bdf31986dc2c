"""The broker as it is seen from beside it: its lock, its configuration, its index files."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from indexd.config import Config
from indexd.config.load import load
from indexd.service.broker import BrokerWatch
from indexd.storage.disk import Disk
from support.broker_stand_in import stand_in


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    (tmp_path / "store" / "lock").write_text("lock")
    return tmp_path / "store"


def config_of(store: Path, conf: str | None = None, **flags: str) -> Config:
    given = {"store": str(store), "data": str(store.parent / "data"), **flags}
    if conf is not None:
        path = store.parent / "broker.conf"
        path.write_text(conf)
        given["broker_conf"] = str(path)
    return load(given, None, {})


def rewrite(path: Path, text: str, seconds: float) -> None:
    """Change broker.conf, as of some seconds from now: its broker is not to be waited for."""
    path.write_text(text)
    at = time.time() + seconds
    os.utime(path, (at, at))


def test_what_a_look_says_without_a_broker(store: Path) -> None:
    row = BrokerWatch(config_of(store), Disk()).look()
    assert {key: row[key] for key in ("alive", "pid", "how", "why", "indexing", "answers", "maxOffset", "unsafe")} == {
        "alive": False, "pid": None, "how": "none", "why": None, "indexing": None, "answers": None,
        "maxOffset": None, "unsafe": [],
    }  # fmt: skip
    assert row["indexingWhy"] == "no broker.conf is given"
    assert abs(row["checkedAt"] - time.time() * 1000) < 60_000


@pytest.mark.parametrize(
    ("flavour", "conf", "indexing"),
    [
        ("5.4", "", True),
        ("5.4", "messageIndexEnable=false\n", False),
        ("5.4", "indexFileWriteEnable=false\n", False),
        ("4.7", "indexFileWriteEnable=false\n", True),
        ("4.7", "messageIndexEnable=false\n", False),
    ],
)
def test_indexing_by_broker_conf(store: Path, flavour: str, conf: str, *, indexing: bool) -> None:
    watch = BrokerWatch(config_of(store, conf, flavour=flavour), Disk())
    with stand_in(store / "lock") as broker:
        broker.start()
        row = watch.look()
    assert (row["indexing"], row["unsafe"]) == (indexing, [])


OFF, ON = "indexFileWriteEnable=false\n", "indexFileWriteEnable=true\n"


def test_offload_beside_a_broker_whose_configuration_changes(store: Path) -> None:
    config = config_of(store, OFF, run_mode="offload")
    path = store.parent / "broker.conf"
    watch = BrokerWatch(config, Disk())
    with stand_in(store / "lock") as broker:
        broker.start()
        row = watch.look()
        assert (row["indexing"], row["unsafe"]) == (False, [])
        # It has read its file and does not look again: only its next start is in danger.
        rewrite(path, ON, 60)
        row = watch.look()
        assert row["indexing"] is False
        assert "as it was at the broker's start" in row["indexingWhy"]
        assert len(row["unsafe"]) == 1
        assert "from its next start on" in row["unsafe"][0]
    # Between the two nobody indexes, and the next will.
    rewrite(path, ON, -60)
    row = watch.look()
    assert (row["alive"], row["indexing"]) == (False, True)
    with stand_in(store / "lock") as broker:
        broker.start()
        row = watch.look()
        assert row["indexing"] is True
        assert "writes an index of its own" in row["unsafe"][0]
        assert f"indexFileWriteEnable=false in {path}" in row["unsafe"][0]


def test_a_file_that_changed_before_anybody_saw_it(store: Path) -> None:
    with stand_in(store / "lock") as broker:
        broker.start()
        config = config_of(store, OFF, run_mode="offload")
        rewrite(store.parent / "broker.conf", OFF, 60)
        row = BrokerWatch(config, Disk()).look()
    assert row["indexing"] is None
    assert "changed after the broker's start" in row["indexingWhy"]
    assert "not known" in row["unsafe"][0]


def write_index_header(store: Path, name: str, count: int) -> None:
    (store / "index").mkdir(exist_ok=True)
    (store / "index" / name).write_bytes(struct.pack(">qqqqii", 1, 2, 3, 4, 5, count))


def test_an_index_file_that_grows_is_believed_more_than_the_configuration(store: Path) -> None:
    watch = BrokerWatch(config_of(store, OFF, run_mode="offload"), Disk())
    write_index_header(store, "20240101000000000", 10)
    write_index_header(store, "20240102000000000", 20)
    with stand_in(store / "lock") as broker:
        broker.start()
        assert [watch.look()["indexing"] for _ in range(2)] == [False, False]
        write_index_header(store, "20240102000000000", 21)
        row = watch.look()
        assert (row["indexing"], row["indexingWhy"]) == (True, "its newest index file grows")
        assert "writes an index of its own (its newest index file grows)" in row["unsafe"][0]
        assert watch.look()["indexing"] is True  # a quiet minute is no change of its mind
    with stand_in(store / "lock") as another:
        another.start()
        # A broker deletes its newest file when it starts after a crash: that is no growth.
        assert watch.look()["indexing"] is False
        (store / "index" / "20240102000000000").unlink()
        assert watch.look()["indexing"] is False
        write_index_header(store, "20240103000000000", 1)
        assert watch.look()["indexing"] is True


@pytest.mark.parametrize("text", [None, "mappedFileSizeCommitLog=many\n", "messageIndexEnable=perhaps\n"])
def test_a_configuration_that_cannot_be_read_any_more(store: Path, text: str | None) -> None:
    watch = BrokerWatch(config_of(store, OFF, run_mode="offload"), Disk())
    path = store.parent / "broker.conf"
    if text is None:
        path.unlink()
    else:
        rewrite(path, text, 1)
    row: dict[str, Any] = watch.look()
    assert row["indexing"] is False  # as it was read last
    assert "the next start of indexd is refused" in row["unsafe"][0]
    rewrite(path, OFF, 2)
    assert watch.look()["unsafe"] == []
