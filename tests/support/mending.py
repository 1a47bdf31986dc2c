"""A whole repair of a small store without its command: plan, build, check, and the new files in the old ones' place."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.repair.build import build_range, check_built, mark_end
from indexd.repair.plan import RepairPlan, RepairRange, plan_repair
from indexd.storage.disk import Disk
from support.auditing import audit, config_for, key_texts
from support.data_directory import SEGMENT, T0, Store, spec
from support.naive import NaiveIndexFile, key_hash, naive_frames

#: Twenty entries a file.
LAYOUT = IndexLayout(7, 21)


def report_of(config: Config) -> AuditReport:
    """``indexd audit --samples 0``."""
    return audit_here(config, Disk(), AuditOptions(samples=0), lambda *_: None)


def planned(config: Config, **options: Any) -> RepairPlan:
    """What a repair would do."""
    return plan_repair(Disk(), config, report_of(config), **options)


def repair(config: Config, *, ranges_max: int | None = None, **options: Any) -> RepairPlan:
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


def index_files(config: Config) -> list[Path]:
    """The files of STORE/index, oldest name first."""
    assert config.store.store is not None
    folder = config.store.store / "index"
    return sorted(folder.iterdir()) if folder.exists() else []


def differences(config: Config, flavour: str) -> dict[int, tuple[list[int], list[int]]]:
    """Key hashes whose answers are not what is true, with both; answers that point to expired log count for nothing."""
    assert config.store.store is not None
    begin = min(int(path.name) for path in (config.store.store / "commitlog").iterdir())
    have, want = answers(config, flavour), truth(config, flavour)
    have = {hashed: [offset for offset in found if offset >= begin] for hashed, found in have.items()}
    return {hashed: (have[hashed], want[hashed]) for hashed in want if have[hashed] != want[hashed]}


def answers(config: Config, flavour: str) -> dict[int, list[int]]:
    """What RocketMQ's walk finds of each key hash of the log, newest first, asked for all time and any number."""
    layout = config.index
    files = [
        NaiveIndexFile.from_bytes(path.read_bytes(), layout.hash_slot_num, layout.index_num)
        for path in index_files(config)
    ]
    return {
        hashed: [offset for file in reversed(files) for offset in _walk(file, hashed)]
        for hashed in truth(config, flavour)
    }


def truth(config: Config, flavour: str) -> dict[int, list[int]]:
    """The same by the log: an offset for each time that a message has a key of that hash."""
    assert config.store.store is not None
    found: dict[int, list[int]] = {}
    for message in naive_frames(config.store.store / "commitlog", config.store.segment_size):
        for text in key_texts(message, flavour):
            found.setdefault(key_hash(text), []).insert(0, message.phy_offset)
    return found


def entry_counts(config: Config) -> Counter[tuple[int, int]]:
    """How often each (key hash, physical offset) stands in the index."""
    layout = config.index
    found: Counter[tuple[int, int]] = Counter()
    for path in index_files(config):
        file = NaiveIndexFile.from_bytes(path.read_bytes(), layout.hash_slot_num, layout.index_num)
        found.update((entry[0], entry[1]) for entry in file.entries[1 : file.index_count])
    return found


def _walk(file: NaiveIndexFile, hashed: int) -> list[int]:
    found, current = [], file.slots[hashed % len(file.slots)]
    while 0 < current < file.index_count:
        entry = file.entries[current]
        if entry[0] == hashed:
            found.append(entry[1])
        if entry[3] >= current:
            break
        current = entry[3]
    return found


def spaced(config: Config) -> None:
    """Name the files as if one took a minute to become full."""
    for path in reversed(index_files(config)):
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
    found = audit(config)
    assert found.is_sound, found.findings
    assert not planned(config).is_needed
    assert set(entry_counts(config).values()) <= {1}
    assert [file.name for file in plan.kept] == sorted(file.name for file in plan.kept)
