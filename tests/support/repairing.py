"""Stores to be repaired, by ``indexd repair`` or without the command, and how they look before and after."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.config import Config
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from indexd.repair.build import build_range, check_built, mark_end
from indexd.repair.plan import RepairPlan, RepairRange, plan_repair
from indexd.storage.disk import Disk
from support.auditing import (
    config_for,
    files_of,
    index_log,
    key_texts,
    lost_keys,
    naive_files,
    select,
    store_of,
)
from support.daemon import indexd_here
from support.data_directory import SEGMENT, T0, Store, spec
from support.naive import key_hash, naive_frames
from support.small_log import SEGMENT_SIZE, write_log

HASH_SLOT_NUM = 200
INDEX_NUM = 1000


def holed_store(root: Path, messages: int = 1500) -> Config:
    """A log of several segments, the oldest file of whose index is lost: some full files, an open one, a checkpoint."""
    write_log(root, messages)
    config = config_for(root, IndexLayout(HASH_SLOT_NUM, INDEX_NUM), SEGMENT_SIZE)
    index_log(config)
    files = sorted((root / "index").iterdir())
    assert len(files) > 3
    files[0].unlink()
    (root / "checkpoint").write_bytes(StoreCheckpoint(1, 2, newest_end(root / "index", full_only=True), 4, 5).pack())
    (root / "lock").write_text("lock")
    return config


def words_of(config: Config) -> tuple[object, ...]:
    """The options that name the store and its sizes."""
    return (
        *("--store", config.store.store, "--segment-size", config.store.segment_size),
        *("--hash-slot-num", config.index.hash_slot_num, "--index-num", config.index.index_num),
    )


def index_of(store: Path) -> dict[str, bytes]:
    """Every index file."""
    return {path.name: path.read_bytes() for path in sorted((store / "index").iterdir())}


def newest_end(index: Path, *, full_only: bool = False) -> int:
    """The newest end timestamp, ms, that a file's header says."""
    headers = [IndexHeader.unpack(path.read_bytes()[:HEADER_SIZE]) for path in index.iterdir()]
    return max(header.end_timestamp for header in headers if header.index_count >= INDEX_NUM or not full_only)


def index_timestamp(store: Path) -> int:
    """The indexMsgTimestamp of the checkpoint."""
    path = store / "checkpoint"
    return StoreCheckpoint.unpack(path.read_bytes(), path).index_msg_timestamp


def assert_repaired(config: Config, flavour: str = "5.4") -> None:
    """RocketMQ's walk finds every key, and neither start of a broker throws a file away."""
    store = config.store.store
    assert store is not None
    assert not lost_keys(config, flavour)
    assert index_timestamp(store) >= newest_end(store / "index")


def folders_of(store: Path) -> list[str]:
    """The folders of repairs, undone ones included."""
    return sorted(path.name for path in store.iterdir() if path.name.startswith("indexd-repair-"))


def repair(config: Config, *more: object) -> tuple[int, str, str]:
    """``indexd repair`` in this process: exit code, standard output, standard error."""
    done = indexd_here("repair", *words_of(config), *more)
    return done.returncode, done.stdout, done.stderr


def tree(store: Path) -> dict[str, tuple[int, int, int]]:
    """All that a change of the store would change."""
    found = {path: path.stat() for path in sorted(store.rglob("*"))}
    return {str(path): (status.st_ino, status.st_size, status.st_mtime_ns) for path, status in found.items()}


#: Twenty entries a file.
LAYOUT = IndexLayout(7, 21)


def report_of(config: Config, samples: int = 0) -> AuditReport:
    """``indexd audit`` in this process."""
    return audit_here(config, Disk(), AuditOptions(samples=samples), lambda *_: None)


def planned(config: Config, **options: Any) -> RepairPlan:
    """What a repair would do."""
    return plan_repair(Disk(), config, report_of(config), **options)


def mend(config: Config, *, ranges_max: int | None = None, **options: Any) -> RepairPlan:
    """Repair STORE/index; with ``ranges_max`` only so many ranges, the newest."""
    plan = planned(config, **options)
    if plan.is_needed:
        put_in_place(config, plan, plan.ranges[:ranges_max])
    return plan


def put_in_place(config: Config, plan: RepairPlan, built: Sequence[RepairRange]) -> None:
    """Build ``built`` beside, check it, and have the new folder instead of the old one."""
    assert config.store.store is not None
    folder, beside = config.store.store / "index", config.store.store / "beside"
    beside.mkdir()
    left = [name for wanted in plan.ranges if wanted not in built for name in wanted.replaces]
    for wanted in built:
        build_range(Disk(), config, beside, plan, wanted, lambda _: None, workers=0)
    for name in [*(file.name for file in plan.kept), *left]:
        assert not (beside / name).exists()
        shutil.copy2(folder / name, beside / name)
    names = sorted(path.name for path in beside.iterdir())
    if names and (built or not plan.ranges):
        mark_end(Disk(), config, beside / names[-1])
    check_built(Disk(), config, beside, plan, built, lambda _: None, workers=0)
    if folder.exists():
        shutil.rmtree(folder)
    beside.rename(folder)


def differences(config: Config, flavour: str) -> dict[int, tuple[list[int], list[int]]]:
    """Key hashes whose answers are not what is true, with both; answers that point to expired log count for nothing."""
    begin = int(files_of(config, "commitlog")[0].name)
    have, want = answers(config, flavour), truth(config, flavour)
    have = {hashed: [offset for offset in found if offset >= begin] for hashed, found in have.items()}
    return {hashed: (have[hashed], want[hashed]) for hashed in want if have[hashed] != want[hashed]}


def answers(config: Config, flavour: str) -> dict[int, list[int]]:
    """What RocketMQ's walk finds of each key hash of the log, newest first, asked for all time and any number."""
    files = list(naive_files(config).values())[::-1]
    return {hashed: [offset for file in files for offset in select(file, hashed)] for hashed in truth(config, flavour)}


def truth(config: Config, flavour: str) -> dict[int, list[int]]:
    """The same by the log: an offset for each time that a message has a key of that hash."""
    found: dict[int, list[int]] = {}
    for message in naive_frames(store_of(config) / "commitlog", config.store.segment_size):
        for text in key_texts(message, flavour):
            found.setdefault(key_hash(text), []).insert(0, message.phy_offset)
    return found


def entry_counts(config: Config) -> Counter[tuple[int, int]]:
    """How often each (key hash, physical offset) stands in the index."""
    files = naive_files(config).values()
    return Counter((entry[0], entry[1]) for file in files for entry in file.entries[1 : file.index_count])


def spaced(config: Config) -> None:
    """Name the files as if one took a minute to become full."""
    for path in reversed(files_of(config)):
        number = int(path.name) % 1000
        path.rename(path.with_name(f"20260101{number // 60:02d}{number % 60:02d}00000"))


def write(tmp: Path, count: int = 97, *, flavour: str | None = "5.4", straddling: bool = False) -> Config:
    """Four entries every two messages, so that a file ends with a message; or six each, so that two files share one."""
    store = Store(tmp, LAYOUT)
    for number in range(count):
        more = " m n o" if straddling else ""
        store.append(spec(T0 + 1300 * number, size=90, KEYS=f"a{number % 9}{more}", UNIQ_KEY=f"u{number}", TAGS="t"))
        if not straddling:
            store.append(spec(T0 + 1300 * number, size=10, KEYS=f"b{number}"))
    return config_for(store.root, LAYOUT, SEGMENT, **({"flavour": flavour} if flavour else {}))


def mended(config: Config, plan: RepairPlan) -> None:
    """Every key is found once, nothing is left to be done, and no sound file was touched."""
    assert differences(config, "5.4") == {}
    report = report_of(config)
    assert report.audit.is_sound, report.audit.findings
    assert not plan_repair(Disk(), config, report).is_needed
    assert set(entry_counts(config).values()) <= {1}
    assert [file.name for file in plan.kept] == sorted(file.name for file in plan.kept)
