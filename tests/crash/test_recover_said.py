"""Recovery of ConsumeQueues and sparse indexes by what the frontier and the settings say of them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from indexd.errors import UnsafeStoreError
from support.daemon import assert_same_index, compile_kernels, indexd_here
from support.outputs import INTERVAL, Built, build, copied
from support.recovering_outputs import FLAGS, check_whole, recover
from support.reopened import config_for, reopen, undisturbed
from support.verifying import check, kinds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UNSAFE = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Built:
    compile_kernels()
    return build(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def built(base: Built, tmp_path: Path) -> Built:
    return copied(base, tmp_path)


def change_json(built: Built, edit: Callable[[dict[str, Any]], object]) -> None:
    row = json.loads((built.data / "frontier").read_bytes())
    del row["crc32"]
    edit(row)
    (built.data / "frontier").write_text(json.dumps(row))


def as_before(row: dict[str, Any]) -> None:
    """As it was written before there were these outputs."""
    for name in ("consumeQueue", "sparse", "refillOffset"):
        row.pop(name, None)


@pytest.mark.parametrize("files", ["none", "left"])
@pytest.mark.parametrize("how", ["start", "--recover"])
def test_a_directory_of_an_older_version_gets_the_outputs(built: Built, base: Built, how: str, files: str) -> None:
    change_json(built, as_before)
    if files == "none":
        shutil.rmtree(built.data / "consumequeue")
        shutil.rmtree(built.data / "sparse")
    if how == "start":
        reopen(config_for(built.store, built.data, sparse_interval=INTERVAL))
    else:
        recover(built)
    check_whole(built, base)


@pytest.mark.parametrize(
    "edit",
    [
        lambda row: row["consumeQueue"]["queues"].pop(3),
        lambda row: row["consumeQueue"]["queues"].clear(),
        lambda row: row["consumeQueue"]["queues"].append(["Other", 0, 0, 0, 5, 500, 0]),
        lambda row: row["consumeQueue"]["queues"][2].__setitem__(4, 5),
        lambda row: row["consumeQueue"]["queues"][2].__setitem__(3, 5),
        lambda row: row["consumeQueue"]["queues"][2].__setitem__(5, 1),
        lambda row: row["consumeQueue"]["queues"][2].__setitem__(2, 60),
        lambda row: row["sparse"]["segments"].pop(1),
        lambda row: row["sparse"]["segments"][1].__setitem__(1, 3),
        lambda row: row["sparse"]["segments"][0].__setitem__(2, 3),
        lambda row: row["sparse"]["active"].__setitem__(0, 0),
        lambda row: row["sparse"]["active"].__setitem__(3, 5),
        lambda row: row["sparse"].__setitem__("active", None),
    ],
)
def test_recover_believes_no_mark_that_the_log_denies(
    built: Built, base: Built, edit: Callable[[dict[str, Any]], Any]
) -> None:
    change_json(built, edit)
    recover(built)
    check_whole(built, base)


def test_turned_off_and_on_again(built: Built, base: Built) -> None:
    def start(**keys: object) -> None:
        reopen(config_for(built.store, built.data, **{"sparse_interval": INTERVAL} | keys))

    start(consume_queue="false")
    assert built.frontier.queues is None
    assert not list((built.data / "consumequeue").rglob("0" * 10 + "*"))
    assert built.frontier.sparse == base.frontier.sparse
    start(sparse="false")
    assert built.frontier.sparse is None
    assert sorted(built.marks) == sorted(base.marks)
    assert not list((built.data / "sparse").iterdir())
    assert kinds(check(built.data, deep=True)) == {}
    start()
    check_whole(built, base)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--sparse-interval", "1001", "was built with sparse_interval 1000, and now 1001 is asked for"),
        ("--consume-queue-file-size", "1220", "was built with consume_queue_file_size 1200, and now 1220 is asked for"),
    ],
)
@pytest.mark.parametrize("command", [(), ("--recover",)])
def test_built_otherwise(
    built: Built, base: Built, flag: str, value: str, words: str, command: tuple[str, ...]
) -> None:
    done = indexd_here(*command, "--store", built.store, "--data", built.data, *FLAGS, flag, value)
    assert done.returncode == UNSAFE
    assert words in done.stderr.splitlines()[-1]
    assert_same_index(built.data, base.data)
    with pytest.raises(UnsafeStoreError):
        reopen(config_for(built.store, built.data, **{"sparse_interval": INTERVAL, flag[2:].replace("-", "_"): value}))


def test_an_output_that_is_off_may_be_asked_for_otherwise(built: Built) -> None:
    reopen(config_for(built.store, built.data, sparse="false", consume_queue="false"))
    reopen(config_for(built.store, built.data, sparse_interval=300, consume_queue_file_size=400))
    config = config_for(built.store, built.data, sparse_interval=300, consume_queue_file_size=400)
    assert_same_index(built.data, undisturbed(config, built.root / "whole"))
    assert kinds(check(built.data, deep=True)) == {}


@pytest.mark.parametrize("unclean", [False, True])
def test_queues_that_were_left_out_are_filled_when_there_is_room(built: Built, base: Built, unclean: bool) -> None:
    shutil.rmtree(built.data)
    few = config_for(built.store, built.data, sparse_interval=INTERVAL, queues_max=3)
    reopen(few)
    assert (built.frontier.queues_limit, len(built.frontier.queues or ())) == (3, 3)
    report = check(built.data, deep=True)
    assert kinds(report) == {}  # what is there is right, whatever the limit of whoever looks
    # The same limit, or a lower one: nothing is read again.
    for most in (3, 2):
        config = config_for(built.store, built.data, sparse_interval=INTERVAL, queues_max=most)
        done = reopen(config, unclean=unclean)
        assert (done.recovered.dropped_entries, done.recovered.compared.queues_until) == (0, None)
        assert (built.frontier.queues_limit, len(built.frontier.queues or ())) == (3, 3)
    more = config_for(built.store, built.data, sparse_interval=INTERVAL)
    assert reopen(more, unclean=unclean).recovered.dropped_entries == 0
    assert built.frontier.queues_limit is None
    assert_same_index(built.data, base.data)
    assert {mark[:6] for mark in built.frontier.queues or ()} == {mark[:6] for mark in base.frontier.queues or ()}


def test_rebuild_says_what_has_no_place_in_a_queue(built: Built, tmp_path: Path) -> None:
    words = ("rebuild", "--store", built.store, "--data", tmp_path / "d", *FLAGS)
    done = indexd_here(*words, "--out", tmp_path / "all", "--json")
    assert json.loads(done.stdout)["leftOutMessages"] == 0
    done = indexd_here(*words, "--out", tmp_path / "few", "--queues-max", 1)
    assert done.returncode == 0
    assert "messages have no place in a ConsumeQueue" in done.stdout


@pytest.mark.parametrize("unclean", [False, True])
@pytest.mark.parametrize("at", ["unit", "last tags code"])
def test_a_damaged_queue_is_not_taken_for_another_log(built: Built, base: Built, at: str, unclean: bool) -> None:
    mark = max(built.frontier.queues or (), key=lambda mark: mark.max_offset)
    number = mark.max_offset // 2 if at == "unit" else mark.max_offset - 1
    path = built.queue_file(mark, number)
    data = bytearray(path.read_bytes())
    data[number * 20 % len(data) + (5 if at == "unit" else 19)] ^= 0x55
    path.write_bytes(data)
    done = reopen(config_for(built.store, built.data, sparse_interval=INTERVAL), unclean=unclean)
    assert done.recovered.dropped_entries == 0
    assert any("ConsumeQueue" in reason for reason in done.recovered.reasons), done.recovered.reasons
    check_whole(built, base)
