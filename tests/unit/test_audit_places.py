"""Where ``indexd audit`` writes its page and what it keeps: only to a plain file, or to a name that nothing has."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemon import compile_kernels, indexd_here
from support.data_directory import SEGMENT
from support.indexing_broker import LAYOUT, Broker


@pytest.fixture
def store(tmp_path: Path) -> Path:
    compile_kernels()
    broker = Broker(tmp_path)
    broker.dispatch(broker.messages)
    broker.stopped()
    return broker.store.root


def words(store: Path, *more: object) -> tuple[object, ...]:
    sizes = ("--hash-slot-num", LAYOUT.hash_slot_num, "--index-num", LAYOUT.index_num)
    return ("audit", "--store", store, "--segment-size", SEGMENT, *sizes, "--samples", 0, *more)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        yield tmp_path / "socket"


@pytest.mark.parametrize("option", ["--report", "--resume"])
def test_what_is_no_plain_file_is_left_as_it_is(store: Path, tmp_path: Path, listening: Path, option: str) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    null = Path("/dev/null")
    for path in (pipe, link, listening, null):
        before = os.lstat(path)
        done = indexd_here(*words(store, option, path))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert f"{option} {path} is no plain file" in done.stderr
        after = os.lstat(path)
        assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))


def test_a_link_to_a_page_is_followed(store: Path, tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link"
    page.write_text("an older one", "utf-8")
    link.symlink_to(page)
    assert indexd_here(*words(store, "--report", link)).returncode == 0
    assert link.is_symlink()
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")


def test_a_link_in_place_of_the_temporary_file_is_not_followed(store: Path, tmp_path: Path) -> None:
    lock, link = store / "lock", tmp_path / "page.html.tmp"
    link.symlink_to(lock)
    assert indexd_here(*words(store, "--report", tmp_path / "page.html")).returncode == 0
    assert link.is_symlink()
    assert lock.read_bytes() == b"lock"
