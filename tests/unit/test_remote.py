"""Stores behind a URI: the same bytes and errors as on this machine."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from indexd.cli.main import main
from indexd.commitlog.batcher import DispatchBatch
from indexd.config import load
from indexd.config.load import check_outside
from indexd.config.units import RemotePath, parse_place
from indexd.errors import DiskError, UnsafeStoreError, UsageError
from indexd.spark.splits import SplitReader, plan_splits
from indexd.storage.disk import Disk
from indexd.storage.remote import RemoteDisk, disk_for, named
from support.rows import config_of
from support.s3 import Bucket, running_s3
from support.small_log import write_log

COUNT = 1500


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("store")
    write_log(found, COUNT)
    return found


@pytest.fixture(scope="module")
def bucket(store: Path) -> Iterator[Bucket]:
    """The same in a bucket."""
    with running_s3() as found:
        found.put(store, "the store")
        yield found


@pytest.fixture(scope="module", params=["file", "s3"])
def uri(request: pytest.FixtureRequest, store: Path) -> str:
    """The store behind a URI: as a file's, and in the bucket."""
    return f"file://{store}" if request.param == "file" else request.getfixturevalue("bucket").uri("the store")


def _place(text: str) -> RemotePath:
    found = parse_place(text)
    assert isinstance(found, RemotePath)
    return found


def test_a_uri_is_a_path_that_grows() -> None:
    place = _place("s3://key:secret@bucket/a%20b/c%25?region=x&endpoint_override=host:1/2")
    below = place / "commitlog" / "00"
    assert str(below) == "s3://***@bucket/a b/c%25/commitlog/00?region=x&endpoint_override=host:1%2F2"
    assert below.root_uri == "s3://key:secret@bucket/?region=x&endpoint_override=host:1%2F2"
    assert (below.names, below.name, below.parent.parent) == (("a b", "c%", "commitlog", "00"), "00", place)
    assert pickle.loads(pickle.dumps(below)) == below
    assert pickle.loads(pickle.dumps(below)).root_uri == below.root_uri
    assert {below: 1}[place / "commitlog/00"] == 1
    assert str(_place("hdfs://nn:8020/x")) == "hdfs://nn:8020/x"
    assert str(_place("file:///x/y")) == "file:///x/y"
    assert _place("s3a://b").scheme == _place("S3N://b").scheme == "s3"
    assert parse_place("/a//b") == Path("/a/b")
    assert not isinstance(parse_place("./s3://x"), RemotePath)


@pytest.mark.parametrize(
    "text",
    ["ftp://h/x", "s3:///x", "s3://b/../x", "s3://b/a%2Fb", "file://host/x", "s3://b/x#y", "s3://[b/x", "s3://b/\n", "s3://b/\0"],
)  # fmt: skip
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"\(from --store\) is "):
        load({"store": text}, None, {"HOME": "/home/op"})


def test_a_uri_is_never_taken_for_a_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = _place("s3://bucket/store")
    for call in (Disk().list_dir, Disk().make_dir, Disk().unlink, Disk().open_read, Path.exists, RemoteDisk().unlink):
        with pytest.raises(UnsafeStoreError, match="s3://bucket/store is not on this machine"):
            call(place)
    assert list(tmp_path.iterdir()) == []


def test_commands_of_this_machine_refuse_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run"], ["rebuild", "--out", str(tmp_path / "out")]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--store", "s3://key:secret@bucket/store", "--data", str(tmp_path / "data")])
        said = capsys.readouterr().err
        assert ended.value.code == 3
        assert "s3://***@bucket/store" in said
        assert "not on this machine" in said


def test_places_overlap_whatever_their_spelling(store: Path, tmp_path: Path) -> None:
    config = config_of("s3://key:secret@bucket/store?region=x", data=tmp_path / "data")
    check_outside(config, _place("s3://bucket/other"), "--to")
    check_outside(config, tmp_path, "--to")
    with pytest.raises(UnsafeStoreError):
        check_outside(config, _place("s3://bucket/store/out"), "--to")
    with pytest.raises(UnsafeStoreError):
        check_outside(config_of(store, data=tmp_path / "data"), _place(f"file://{store}/out"), "--to")


def test_disk_and_remote_disk_say_the_same(store: Path, uri: str, tmp_path: Path) -> None:
    log, disk = store / "commitlog", Disk()
    place = _place(uri) / "commitlog"
    there = disk_for(place)
    assert isinstance(there, RemoteDisk)
    # Paths of this machine are its own.
    assert there.list_dir(place) == there.list_dir(log) == disk.list_dir(log)
    assert there.list_dirs(place.parent) == ["commitlog"]
    assert [there.exists(path) for path in (place, place.parent, place / "x")] == [True, True, False]
    name = there.list_dir(place)[0][0]
    assert there.read(place / name) == disk.read(log / name)
    assert there.stamp(place / name).size == there.stamps(place)[name].size == disk.stamp(log / name).size
    with there.open_read(place / name) as file, disk.open_read(log / name) as own:
        size = own.size()
        assert file.size() == file.stamp().size == size
        for position in (0, 1, 1000, size - 3, size, size + 9):
            one, other = bytearray(50), bytearray(50)
            assert file.pread(100, position) == own.pread(100, position)
            assert (file.pread_into(one, position), one) == (own.pread_into(other, position), other)
    there.write_atomically(tmp_path / "x", b"x")
    assert there.read(tmp_path / "x") == b"x"


def test_errors_are_disk_errors(uri: str) -> None:
    there = RemoteDisk()
    for call in (there.open_read, there.stamp, there.list_dir, there.list_dirs, there.read):
        with pytest.raises(DiskError) as caught:
            call(_place(uri) / "nothing")
        assert caught.value.is_missing


def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    with pytest.raises(DiskError, match="nowhere") as caught:
        RemoteDisk().read(_place(bucket.uri("the store", "nowhere")) / "x")
    assert (caught.value.is_missing, "secret" in caught.value.line()) == (True, False)


S3, FILE = "s3://key:secret@b/s", "file:///x"
ELSEWHERE = "check the URI, the credentials and the network"


@pytest.mark.parametrize(
    ("place", "error", "number", "hint"),
    [
        (S3, OSError("AWS Error ACCESS_DENIED: HTTP status 403"), errno.EACCES, ELSEWHERE),
        (S3, OSError("AWS Error NETWORK_CONNECTION: curlCode: 7"), errno.ENETUNREACH, ELSEWHERE),
        (S3, OSError("what is new"), errno.EIO, ELSEWHERE),
        (S3, ValueError(), errno.EIO, ELSEWHERE),
        (S3, FileNotFoundError(errno.ENOENT, "there is no such file"), errno.ENOENT, "check the path"),
        (FILE, OSError(errno.EIO, "Input/output error"), errno.EIO, "mend the device"),
    ],
)
def test_a_store_that_cannot_be_reached_is_no_device_to_be_mended(
    place: str, error: Exception, number: int, hint: str
) -> None:
    with pytest.raises(DiskError) as caught, named("list", _place(place)):
        raise error
    assert (caught.value.errno, "secret" in caught.value.line()) == (number, False)
    assert caught.value.hint.startswith(hint)


def _batches(config_store: str | Path, tmp_path: Path) -> list[tuple[int, bytes]]:
    config = config_of(config_store, data=tmp_path / "data")
    disk, found = disk_for(config), []
    for split in plan_splits(disk, config, size=100_000):
        reader = SplitReader(disk, config, split)
        for batch in reader:
            assert isinstance(batch, DispatchBatch)
            columns = b"".join(np.ascontiguousarray(column).tobytes() for column in batch.columns)
            found.append((batch.begin_offset, columns + reader.frames(batch).tobytes()))
    return found


def test_the_log_is_read_the_same(store: Path, uri: str, tmp_path: Path) -> None:
    wanted = _batches(store, tmp_path)
    assert len(wanted) > 5
    assert _batches(uri, tmp_path) == wanted
