"""Where root writes in a directory of another user: nowhere else, and what it makes is that user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexd.config import Config
from indexd.config.compiled import make_private, prepare_compiler, why_not_trusted
from indexd.errors import BusyError, DiskError
from indexd.storage.disk import Disk, OutputDisk
from indexd.storage.lock import DirectoryLock, owner_pid
from support.daemon import compile_kernels, indexd, indexd_here
from support.missing import need_root, requires
from support.repairing import holed_store, repair, tree
from support.small_log import SIZES, write_log

OTHER = 4321
AS_ROOT = requires(lambda: need_root("write in another user's directory"))
PRECIOUS = b"root's own, and nobody else's to change"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of root's."""
    path = tmp_path / "etc" / "shadow"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory of another user's."""
    path = tmp_path / "theirs"
    path.mkdir(mode=0o750)
    os.chown(path, OTHER, OTHER)
    return path


@pytest.fixture(params=[0, 0o077, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def plant(path: Path, target: Path) -> None:
    """A link of the other user's."""
    path.symlink_to(target)
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def give_away(*roots: Path) -> None:
    for root in roots:
        for path in (root, *root.rglob("*")):
            os.chown(path, OTHER, OTHER, follow_symlinks=False)


def owners(root: Path) -> set[int]:
    return {path.lstat().st_uid for path in (root, *root.rglob("*"))}


def rights(*paths: Path) -> set[int]:
    return {path.stat().st_mode & 0o7777 for path in paths}


@pytest.fixture
def recovery(tmp_path: Path) -> tuple[str, ...]:
    """The command line that recovers ``data`` from a small store."""
    compile_kernels()
    write_log(tmp_path / "store", 500)
    return ("--recover", "--store", str(tmp_path / "store"), "--data", str(tmp_path / "data"), *SIZES)


@AS_ROOT
@pytest.mark.parametrize("is_dangling", [True, False])
def test_a_repair_by_root_makes_no_file_through_a_link_in_place_of_the_lock(
    tmp_path: Path, victim: Path, is_dangling: bool
) -> None:
    compile_kernels()
    store = tmp_path / "store"
    config: Config = holed_store(store)
    (store / "lock").unlink()
    give_away(store)
    plant(store / "lock", victim.with_name("cron.d") if is_dangling else victim)
    before, around = sorted(store.rglob("*")), tree(victim.parent)
    code, _, errors = repair(config, "--yes")
    assert (code, errors.count("\n")) == (3, 1), errors
    assert f"cannot open {store / 'lock'}: Too many levels of symbolic links; " in errors
    assert (sorted(store.rglob("*")), tree(victim.parent)) == (before, around)
    assert (victim.read_bytes(), owners(victim.parent)) == (PRECIOUS, {0})


@AS_ROOT
def test_a_recovery_by_root_writes_through_no_planted_link_and_leaves_nothing_of_roots(
    tmp_path: Path, victim: Path, recovery: tuple[str, ...]
) -> None:
    data = tmp_path / "data"
    assert indexd(*recovery).returncode == 0
    min((data / "index").iterdir()).unlink()
    give_away(data)
    for name in ("frontier", "checkpoint", "abort", "starts", "state"):
        plant(data / f"{name}.tmp", victim)
    done = indexd(*recovery)
    assert (done.returncode, victim.read_bytes()) == (0, PRECIOUS), done.stderr
    assert owners(data) == {OTHER}, "the service, which is not root, could not go on"


@AS_ROOT
@pytest.mark.parametrize("name", ["lock", "index", "consumequeue", "sparse", "frontier"])
def test_a_recovery_by_root_where_a_link_leads_out(
    tmp_path: Path, victim: Path, recovery: tuple[str, ...], name: str
) -> None:
    (tmp_path / "data").mkdir()
    plant(tmp_path / "data" / name, victim if name in ("lock", "frontier") else victim.parent)
    give_away(tmp_path / "data")
    around = tree(victim.parent)
    done = indexd_here(*recovery)
    if name != "frontier":  # that is replaced, not written to
        assert (done.returncode, "link" in done.stderr) == (70, True), done.stderr
        assert done.stderr.splitlines()[-1].endswith("put what it leads to in its place, or run as its owner")
    assert (tree(victim.parent), victim.read_bytes()) == (around, PRECIOUS)


@AS_ROOT
def test_every_call_of_the_disk_stays_in_its_directory(theirs: Path, victim: Path) -> None:
    disk = Disk()
    plant(theirs / "way", victim.parent)
    plant(theirs / "file", victim)
    disk.write_atomically(theirs / "own", b"1")
    calls = {
        "open": lambda: disk.open_write(theirs / "file"),
        "create": lambda: disk.open_write(theirs / "way" / "new", create=True),
        "write": lambda: disk.write_atomically(theirs / "way" / "new", b"1"),
        "rename": lambda: disk.rename(theirs / "own", theirs / "way" / "shadow"),
        "link": lambda: disk.link(theirs / "own", theirs / "way" / "new"),
        "exchange": lambda: disk.exchange(theirs / "own", theirs / "way" / "shadow"),
        "give": lambda: disk.give(theirs / "file", theirs),
        "give through": lambda: disk.give(theirs / "way" / "shadow", theirs),
        "unlink": lambda: disk.unlink(theirs / "way" / "shadow"),
        "make": lambda: disk.make_dir(theirs / "way" / "new" / "er"),
        "remove": lambda: disk.remove_tree(theirs / "way"),
        "remove through": lambda: disk.remove_tree(theirs / "way" / "." / ".." / "way"),
        "lock": lambda: DirectoryLock(theirs / "file").acquire(),
    }
    before = tree(victim.parent)
    for name, call in calls.items():
        with pytest.raises(DiskError):
            call()
        assert tree(victim.parent) == before, name
    assert owners(victim.parent) == {0}
    disk.unlink(theirs / "file")  # the link itself
    assert victim.read_bytes() == PRECIOUS


@AS_ROOT
def test_root_follows_its_own_links(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to("theirs")
    (tmp_path / "longer").symlink_to(tmp_path / "way")
    Disk().write_atomically(tmp_path / "longer" / "file", b"1")
    assert (theirs / "file").read_bytes() == b"1"
    assert owners(theirs) == {OTHER}


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(DiskError, match="Too many levels"):
        Disk().open_write(tmp_path / "a" / "file", create=True)


@AS_ROOT
def test_a_file_of_roots_under_a_second_name_is_neither_written_nor_given_away(theirs: Path, victim: Path) -> None:
    twin = theirs / "twin"
    os.link(victim, twin)
    for call in (lambda: Disk().open_write(twin), lambda: Disk().give(twin, theirs), DirectoryLock(twin).acquire):
        with pytest.raises(DiskError, match="under a second name"):
            call()
    assert (victim.read_bytes(), victim.stat().st_uid) == (PRECIOUS, 0)


def make_all(data: Path) -> None:
    """One of everything that the disk makes."""
    disk = Disk()
    disk.make_dir(data / "index")
    disk.open_write(data / "index" / "file", create=True).close()
    disk.write_atomically(data / "frontier", b"1")
    OutputDisk().write_atomically(data.with_name("report"), b"1")
    DirectoryLock(data / "lock").acquire()


@AS_ROOT
def test_what_root_makes_is_the_directorys_owners(theirs: Path) -> None:
    make_all(theirs / "data")
    assert owners(theirs) == {OTHER}


def test_a_data_directory_has_its_rights_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    data = tmp_path / "data"
    make_all(data)
    make_private(data / "compiled" / "word")
    assert rights(data, data / "index", data / "compiled", data / "compiled" / "word") == {0o750}
    assert rights(data / "index" / "file", data / "frontier", data / "lock") == {0o640}
    assert rights(tmp_path / "report") == {0o644 & ~umask}


def test_what_a_crash_has_left_goes_and_a_writing_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("frontier.tmp", "notes.tmp"):
        (tmp_path / name).write_bytes(b"half")
    Disk().write_atomically(tmp_path / "frontier", b"1")
    with monkeypatch.context() as full:
        full.setattr("os.pwrite", lambda *_: 0)
        with pytest.raises(DiskError, match=r"frontier\.tmp"):
            Disk().write_atomically(tmp_path / "frontier", b"2")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"frontier": b"1", "notes.tmp": b"half"}


def test_a_lock_that_is_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert owner_pid(tmp_path / "lock") is None
    with pytest.raises(DiskError, match="no plain file"):
        DirectoryLock(tmp_path / "lock").acquire()


def test_a_lock_names_its_owner_and_is_renewed(tmp_path: Path) -> None:
    lock, second = DirectoryLock(tmp_path / "lock"), DirectoryLock(tmp_path / "lock")
    lock.acquire()
    with pytest.raises(BusyError, match=f"pid {os.getpid()}"):
        second.acquire()
    (tmp_path / "lock").unlink()
    assert [lock.renew(), lock.renew()] == [True, False]
    lock.release()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory in which nothing has been compiled."""
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    path = tmp_path / "state" / "indexd"
    monkeypatch.setenv("STATE_DIRECTORY", str(path))
    return path


def cache_of_compiler() -> Path:
    os.environ.pop("NUMBA_CACHE_DIR", None)
    prepare_compiler()
    return Path(os.environ["NUMBA_CACHE_DIR"])


@pytest.mark.usefixtures("umask")
def test_the_kernels_cache_is_this_users_alone(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cache_of_compiler()
    assert folder.parent == state / "compiled"
    assert rights(folder, folder.parent, state) == {0o750}
    assert cache_of_compiler() == folder
    assert capsys.readouterr().err == ""


@AS_ROOT
@pytest.mark.parametrize("whose", ["state", "compiled", "folder", "inside"])
def test_a_kernels_cache_of_another_user_is_not_used(
    state: Path, capsys: pytest.CaptureFixture[str], whose: str
) -> None:
    folder = cache_of_compiler()
    inside = folder / "index_0123"
    inside.mkdir()
    path = {"state": state, "compiled": folder.parent, "folder": folder, "inside": inside}[whose]
    os.chown(path, OTHER, OTHER)
    fallback = cache_of_compiler()
    assert (fallback.is_relative_to(state), fallback.is_dir(), rights(fallback)) == (False, True, {0o700})
    prepare_compiler()  # as the next module does
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"indexd: what was compiled before is not used, {path} belongs to user {OTHER}; "
        "it is compiled for this run alone"
    ]


@pytest.mark.parametrize("mode", [0o757, 0o1757])
def test_a_kernels_cache_that_others_may_write_is_not_used(state: Path, mode: int) -> None:
    folder = cache_of_compiler()
    folder.chmod(mode)
    assert not cache_of_compiler().is_relative_to(state)
    folder.chmod(0o750)
    state.parent.chmod(mode)
    # Nobody may rename what is another's where the sticky bit is set.
    assert cache_of_compiler().is_relative_to(state) == (mode == 0o1757)


def test_a_kernels_cache_behind_a_link_is_where_the_link_led(state: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    state.parent.mkdir()
    state.symlink_to(tmp_path / "real")
    assert cache_of_compiler().is_relative_to(tmp_path / "real")


@AS_ROOT
@pytest.mark.parametrize(("group", "others"), [(OTHER, True), (0, False)])  # root's own group is root alone
def test_a_group_of_several_may_not_write_what_is_executed(tmp_path: Path, group: int, others: bool) -> None:
    os.chown(tmp_path, 0, group)
    tmp_path.chmod(0o770)
    assert why_not_trusted(tmp_path) == (f"others may write to {tmp_path}" if others else None)


@pytest.mark.parametrize("umask", [0o077], indirect=True)
@pytest.mark.usefixtures("umask")
def test_an_audit_page_has_the_umasks_rights(tmp_path: Path) -> None:
    config = holed_store(tmp_path / "store")
    sizes = ("--segment-size", config.store.segment_size, "--hash-slot-num", config.index.hash_slot_num)
    words = ("--store", tmp_path / "store", *sizes, "--index-num", config.index.index_num, "--samples", 0)
    assert indexd_here("audit", *words, "--report", tmp_path / "page.html").returncode == 1
    assert rights(tmp_path / "page.html") == {0o600}


def test_no_script_writes_to_a_name_that_can_be_guessed() -> None:
    for path in (Path(__file__).parents[2] / "scripts").iterdir():
        if path.is_file():
            assert "/tmp}/" not in path.read_text("utf-8"), path
