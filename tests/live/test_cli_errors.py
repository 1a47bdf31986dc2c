"""Whatever is wrong with what the command is given: one line that says so, the exit code of its kind, no traceback."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import pytest

from support.commitlog_writer import FrameSpec, encode_frame
from support.daemon import compile_kernels, indexd_here
from support.repairing import tree
from support.small_log import SEGMENT_SIZE, SIZES, write_log

USAGE, UNSAFE, CORRUPT, INTERNAL = 2, 3, 4, 70


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store and the data directory of that store."""
    compile_kernels()
    root = tmp_path_factory.mktemp("errors")
    write_log(root / "store", 50)
    done = indexd_here("--recover", "--store", root / "store", "--data", root / "data", *SIZES)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy, with the store at the same place, so that the data directory is its own."""
    shutil.copytree(written / "data", tmp_path / "data")
    (tmp_path / "store").symlink_to(written / "store")
    return tmp_path


def error_of(done: subprocess.CompletedProcess[str], code: int, *says: object) -> str:
    """The one line on standard error, beside log lines, which says all that; nothing on standard output."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    # What happened, where, and what to do.
    assert re.fullmatch(r"indexd: [^;]+; .+", line), line
    assert [text for text in says if str(text) not in line] == [], line
    return line


COMMANDS = [("run",), ("--recover",), ("rebuild", "--out", "{out}")]


@pytest.mark.parametrize("command", COMMANDS, ids=["run", "recover", "rebuild"])
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--data", "{root}/new"), USAGE, ["no store is given", "--store DIR"]),
        (("--store", "{root}/none", "--data", "{root}/new"), UNSAFE, ["{root}/none", "no directory", "--store"]),
        (("--store", "{root}/data", "--data", "{root}/new"), UNSAFE, ["no commitlog at {root}/data/commitlog"]),
        (
            ("--store", "{root}/store", "--data", "{root}/new", "--segment-size", "1MiB"),
            UNSAFE,
            ["has 262144 bytes", "is 1048576", "give the broker's own --segment-size"],
        ),
        (("--store", "{root}/store", "--data", "{root}/store/data"), UNSAFE, ["lies inside the store", "--data"]),
        (("--store", "{root}/store", "--data", "{root}/store"), UNSAFE, ["lies inside the store", "--data"]),
    ],
    ids=["no store", "store missing", "no commitlog", "segment size", "data inside", "data is the store"],
)
def test_a_store_that_cannot_be_read_as_asked(
    root: Path, command: tuple[str, ...], flags: tuple[str, ...], code: int, says: list[str]
) -> None:
    words = [word.format(root=root, out=root / "out") for word in (*command, *SIZES, *flags)]
    error_of(indexd_here(*words), code, *(text.format(root=root) for text in says))
    assert not (root / "out").exists()
    assert not (root / "store" / "data").exists()


@pytest.mark.parametrize("command", [("run",), ("--recover",)])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--store", "{root}/other"), ["built with store", "/other is asked for", "another --data"]),
        (("--hash-slot-num", "501"), ["built with hash_slot_num 500, and now 501"]),
        (("--index-num", "4001"), ["built with index_num 4000, and now 4001"]),
        (("--flavour", "4.7"), ["built with flavour 5.4, and now 4.7"]),
    ],
)
def test_a_data_directory_that_belongs_to_something_else(
    root: Path, command: tuple[str, ...], flags: tuple[str, ...], says: list[str]
) -> None:
    write_log(root / "other", 5)
    data = root / "data"
    before = tree(data / "index")
    words = (*command, "--store", root / "store", "--data", data, *SIZES)
    error_of(indexd_here(*words, *(word.format(root=root) for word in flags)), UNSAFE, data, *says)
    assert tree(data / "index") == before
    # It stays what it was: opened as what it is, it is as good as before.
    done = indexd_here("verify", *words[1:])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bogus"], ["unrecognized arguments: --bogus", "--help"]),
        (["--segment-size", "many"], ['segment_size = "many" (from --segment-size) is not a size']),
        (["--index-num", "1"], ['index_num = "1"', "2 to 2147483647"]),
        (["--drain-interval", "-1"], ["drain_interval"]),
        (["--flavour", "6.0"], ["flavour", "3.x, 4.0, 4.7, 5.4"]),
        (["--segment-size"], ["--segment-size", "expected one argument"]),
        (["bogus"], ["indexd has no command 'bogus'", "run, status"]),
        (["staus"], ["indexd has no command 'staus'", "did you mean status or stats?"]),
        (["query"], ["did you mean", "query-key", "query-time"]),
        (["i"], ["did you mean inspect?"]),
        (["kafka", "rebild"], ["indexd kafka has no command 'rebild'", "did you mean rebuild?"]),
        (["help", "inspet"], ["did you mean inspect?"]),
        (["rebuild"], ["--out"]),
        (["completion"], ["SHELL"]),
        (["completion", "tcsh"], ["tcsh", "bash", "fish"]),
        (["completion", "bash", "--data", "/d"], ["--data"]),
        (["rebuild", "--out", "x", "--recover"], ["--recover"]),
        (["query-key", "-t", "T"], ["--key is missing"]),
        (["query-key", "-t", "T", "-k", "k", "-m", "many"], ["many", "no whole number"]),
        (["message"], ["-i", "-o"]),
        (["message", "-i", "zz"], ["'zz' is no offset message id"]),
        (["-c", "/dev/null/none"], ["/dev/null/none"]),
        (["--broker-conf", "/none/broker.conf"], ["/none/broker.conf"]),
    ],
)
def test_a_wrong_command_line(words: list[str], says: list[str]) -> None:
    error_of(indexd_here(*words), USAGE, *says)


@pytest.mark.parametrize("command", [("query-key", "-t", "T", "-k", "k"), ("query-unique-key", "-t", "T", "-i", "u")])
def test_a_query_where_nothing_is_indexed_yet(root: Path, command: tuple[str, ...]) -> None:
    error_of(indexd_here(*command, "--data", root / "new"), USAGE, f"{root / 'new'} holds no index yet")
    (root / "data" / "frontier").write_bytes(b"{")
    done = indexd_here(*command, "--data", root / "data")
    error_of(done, CORRUPT, f"{root / 'data' / 'frontier'} is not JSON", "--recover")


def test_a_data_directory_that_cannot_be_made(root: Path) -> None:
    (root / "file").write_text("mine")
    for data in (root / "file", root / "file" / "data"):
        for command in ("run", "--recover"):
            error_of(indexd_here(command, "--store", root / "store", "--data", data, *SIZES), INTERNAL, data)
    assert (root / "file").read_text() == "mine"


def dledger_entry() -> bytes:
    """A frame behind the 48 bytes that DLedger puts before each (spec rocketmq-store 2.9)."""
    frame = encode_frame(FrameSpec("T"), 48)
    return struct.pack(">iiqqqiiii", 1, 48 + len(frame), 0, 1, 0, 0, 0, 0, len(frame)) + frame


@pytest.mark.parametrize("command", COMMANDS, ids=["run", "recover", "rebuild"])
def test_a_dledger_log(tmp_path: Path, written: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    segment = tmp_path / "store" / "commitlog" / "00000000000000000000"
    segment.write_bytes(dledger_entry().ljust(SEGMENT_SIZE, b"\0"))
    words = [word.format(out=tmp_path / "out") for word in command]
    done = indexd_here(*words, "--store", tmp_path / "store", "--data", tmp_path / "data", *SIZES)
    error_of(done, UNSAFE, f"{segment} is a DLedger log")
    assert not (tmp_path / "out").exists()


def test_a_broker_conf_that_names_a_dledger_log(root: Path) -> None:
    conf = root / "broker.conf"
    conf.write_text(f"storePathRootDir={root / 'store'}\nenableDLegerCommitLog=true\n")
    error_of(indexd_here("--broker-conf", conf, "--data", root / "new", *SIZES), UNSAFE, "enableDLegerCommitLog")


def test_another_store_than_the_one_that_was_indexed(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    write_log(store, 2000)
    words = ("--store", store, "--data", data, *SIZES)
    assert indexd_here("--recover", *words).returncode == 0
    shutil.rmtree(store / "commitlog")
    write_log(store, 2000, seed=2)
    for command in ("run", "--recover"):
        error_of(indexd_here(command, *words), UNSAFE, f"{store} is not the store that {data} was built from", "--data")


def test_one_file_of_another_size_among_many_is_the_one_that_is_wrong(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 3000)
    first, *_, cut = sorted((tmp_path / "store/commitlog").iterdir())
    words = ("rebuild", "--store", tmp_path / "store", "--data", tmp_path, *SIZES, "--out", tmp_path / "out")
    os.truncate(cut, 1000)
    error_of(indexd_here(*words), UNSAFE, f"segment {cut} has 1000 bytes", "this file is cut or foreign")
    foreign = cut.rename(cut.with_name(f"{17:020d}"))
    os.truncate(foreign, first.stat().st_size)
    error_of(indexd_here(*words), UNSAFE, f"segment {foreign} begins at 17", "this file is cut or foreign")


@pytest.mark.parametrize("target", ["itself", "/dev/null"])
def test_a_link_in_place_of_an_index_file_is_named_with_its_remedy(root: Path, target: str) -> None:
    name = next((root / "data/index").iterdir())
    name.unlink()
    name.symlink_to(name if target == "itself" else target)
    done = indexd_here("verify", "--store", root / "store", "--data", root / "data", *SIZES)
    line = error_of(done, INTERNAL, name)
    assert ("device" in line, "link" in line.partition("; ")[2]) == (False, True)


def test_a_link_in_place_of_a_segment_is_named_with_its_remedy(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 2000)
    segment = sorted((tmp_path / "store/commitlog").iterdir())[1]
    words = ("rebuild", "--store", tmp_path / "store", "--data", tmp_path, "--out", tmp_path / "out", *SIZES)
    for target, code in ((segment, INTERNAL), (tmp_path / "elsewhere", CORRUPT)):
        segment.unlink()
        segment.symlink_to(target)
        assert "device" not in error_of(indexd_here(*words), code, int(segment.name), "link")


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=["thread", "memory"])
def test_no_memory_is_no_defect(root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(_: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", refuse)
    words = ("rebuild", "--store", root / "store", "--data", root / "data", "--out", root / "out", *SIZES)
    assert "report" not in error_of(indexd_here(*words), INTERNAL, "there is no memory")
