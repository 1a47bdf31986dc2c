"""The audit finds exactly the keys that RocketMQ's own index service does not find, and after a repair it finds all."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from indexd.audit import Audit, audit_task, join, plan_audit, task
from indexd.compare import index
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.lock import look_at_lock
from support.auditing import config_for
from support.daemon import indexd_here
from support.goldens import unpack
from support.naive import key_hash
from support.rocketmq import REAL
from support.rocketmq_rewrite import (
    LAST_STEPS,
    LATEST,
    Found,
    History,
    Keys,
    RealStore,
    golden_history,
    histories_in,
    open_all,
)


def config_of(history: History, store: Path | None = None, **keys: Any) -> Config:
    """What the audit of a store is told."""
    layout = IndexLayout(history.slots, history.entries)
    return config_for(store or history.store, layout, history.segment, **keys)


def flags_of(history: History, store: Path) -> list[object]:
    """The same for a command line."""
    words = ["--hash-slot-num", history.slots, "--index-num", history.entries, "--segment-size", history.segment]
    return ["--store", store, "--data", store.with_name("unused"), *words]


def audited(config: Config, size: int | None = None) -> tuple[Audit, Keys]:
    """The audit of a store that no broker writes to, and each key that it takes for not findable."""
    lost: Keys = Counter()

    def compared(keys: index.Keys, *args: Any) -> index.Match:
        match = index.compare_files(keys, *args)
        offsets, hashes = keys.phy_offset[keys.row], keys.key_hash
        lost.update(zip(offsets[match.is_lost].tolist(), hashes[match.is_lost].tolist(), strict=True))
        return match

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "compare_files", compared)
        plan = plan_audit(Disk(), config, size=size)
        found = join(plan, [audit_task(one, Disk(), config) for one in plan.tasks])
    assert found.missing_keys == lost.total() == sum(hole.keys for hole in found.holes)
    return found, lost


pytestmark = REAL

GOLDENS = ("rocketmq-5.4-killed", "rocketmq-5.4-killed-open-index")
#: These lose keys for certain: their one file is thrown away, or the log is cut under the index.
LOSING = {"cut", "cut-far", "even-cut", "one-file"}


@pytest.mark.parametrize("name", LAST_STEPS)
def test_after_all_that_can_happen_to_a_store(real: RealStore, histories: Path, name: str) -> None:
    history = histories_in(histories / real.version)[name]
    found, lost = audited(config_of(history))
    wanted = real.find(history, history.store)
    assert lost == wanted.lost
    assert found.messages == wanted.figures["messages"]
    assert found.keys == wanted.figures["keys"]
    # And the answers that are one too many.
    assert found.counts.get("entry-twice", 0) == wanted.figures["twice"]
    assert {era.flavour for era in found.eras} == {"5.4" if real.version == LATEST else "4.7"}
    if name in LOSING:
        assert lost


@pytest.mark.parametrize("name", ["stopped", "cut-far", "one-file"])
def test_a_store_that_was_killed_and_not_started_again(real: RealStore, histories: Path, name: str) -> None:
    history = histories_in(histories / real.version)[name]
    assert (history.killed / "abort").exists()
    found, lost = audited(config_of(history, history.killed), size=4 * history.segment)
    wanted = real.find(history, history.killed)
    assert lost == wanted.lost
    assert found.messages == wanted.figures["messages"]
    assert found.counts.get("entry-twice", 0) == wanted.figures["twice"] == 0


@pytest.fixture(scope="module")
def latest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStore]:
    real = RealStore(LATEST, tmp_path_factory.mktemp("latest"))
    yield real
    real.rewriter.close()


def test_beside_a_broker_that_has_it_open(latest: RealStore, histories: Path, tmp_path: Path) -> None:
    history = histories_in(histories / LATEST)["expired"]
    store = Path(shutil.copytree(history.store, tmp_path / "store"))
    latest.open(history, store, count=100)
    assert look_at_lock(store / "lock").alive
    found, lost = audited(config_of(history, store))
    wanted = latest.find(history, store)
    latest.rewriter.stop()
    assert lost == wanted.lost
    assert found.messages == wanted.figures["messages"]
    assert found.counts.get("entry-twice", 0) == wanted.figures["twice"]


@pytest.fixture(scope="module")
def restarted(latest: RealStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The goldens that were killed, after RocketMQ was started on them and stopped."""
    home = tmp_path_factory.mktemp("goldens")
    goldens = [golden_history(unpack(name, home)) for name in GOLDENS]
    open_all(latest, [(history, history.store) for history in goldens])
    return home


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_that_were_killed_and_started_again(latest: RealStore, restarted: Path, name: str) -> None:
    golden = unpack(name, restarted)
    history = golden_history(golden)
    found, lost = audited(config_of(history))
    wanted = latest.find(history, history.store)
    assert lost == wanted.lost
    assert (found.messages, found.keys) == (wanted.figures["messages"], wanted.figures["keys"])
    unique = {
        (row["phyOffset"], key_hash(f"{row['topic']}#{row['uniqKey']}"))
        for row in golden.messages()
        if row["uniqKey"] is not None and row["sysFlag"] & 0xC != 0xC
    }
    if name.endswith("open-index"):
        assert (len(unique), len(unique & set(lost))) == (2571, 1514)


STARTS = ("clean", "unclean")
#: Of the version before; what differs there is how an index ends.
EARLIER = ("stopped", "cut", "torn", "one-file", "stopped-killed", "one-file-killed")
WRITTEN = 120  # messages after each start


@dataclass(frozen=True)
class Mended:
    """A store before and after its repair: what is found, what an index made anew finds, and what after starts."""

    history: History
    store: Path
    before: Found
    status: int
    said: str
    after: Found
    anew: Found
    started: dict[str, Found]
    written: dict[str, Found]


def _damaged(real: RealStore, histories: Path, home: Path) -> dict[str, tuple[History, Path]]:
    """Copies of all that there is, by name; killed ones are those that were not started again since."""
    made = histories_in(histories / real.version)
    stores = {name: (history, history.store) for name, history in made.items()}
    stores |= {f"{name}-killed": (made[name], made[name].killed) for name in ("stopped", "one-file")}
    if real.version == LATEST:
        for suffix in ("", "-unstarted"):  # what made them goes on with them
            goldens = [golden_history(unpack(name, home / f"goldens{suffix}")) for name in GOLDENS]
            stores |= {f"{history.name}{suffix}": (history, history.store) for history in goldens}
        open_all(real, [stores[name] for name in GOLDENS])
    else:
        stores = {name: stores[name] for name in EARLIER}
    return {
        name: (history, Path(shutil.copytree(store, home / name / "store")))
        for name, (history, store) in stores.items()
    }


@pytest.fixture(scope="module")
def mended(real: RealStore, histories: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mended]:
    """All of a version, repaired and started twice: each start of RocketMQ takes its time, so they are made at once."""
    home = tmp_path_factory.mktemp("mended")
    found: dict[str, Mended] = {}
    for name, (history, store) in _damaged(real, histories, home).items():
        before = real.find(history, store)
        done = indexd_here("repair", "--yes", *flags_of(history, store))
        after, anew = real.find(history, store), real.reindexed(history, store)
        found[name] = Mended(history, store, before, done.returncode, done.stdout + done.stderr, after, anew, {}, {})
    for start in STARTS:
        for name, one in found.items():
            copy = Path(shutil.copytree(one.store, home / f"{name}-{start}" / "store"))
            (copy / "abort").unlink(missing_ok=True)
            if start == "unclean":
                (copy / "abort").write_text("1")
            real.open(one.history, copy)
            one.started[start] = real.find(one.history, copy)
            real.open(one.history, copy, count=WRITTEN, first=9_000_000, seed=9, profile=one.history.profile)
            one.written[start] = real.find(one.history, copy)
        real.rewriter.stop()
    return found


def test_every_key_is_found_once(mended: dict[str, Mended]) -> None:
    assert {name: one.said for name, one in mended.items() if one.status != 0} == {}
    for name, one in mended.items():
        for found in (one.after, *one.started.values(), *one.written.values()):
            figures = found.figures
            assert (figures["lost"], figures["twice"], figures["astray"]) == (0, 0, 0), name
        for start in STARTS:
            started, written = one.started[start].figures, one.written[start].figures
            assert started["messages"] == one.after.figures["messages"], (name, start)
            assert written["messages"] == started["messages"] + WRITTEN, (name, start)
    # It was not so before, in many of them.
    is_latest = len(mended) > len(EARLIER)
    assert len([one for one in mended.values() if one.before.lost]) >= (4 if is_latest else 2)
    assert any(one.before.figures["twice"] for one in mended.values()) or not is_latest


def test_the_answers_are_those_of_an_index_made_anew(mended: dict[str, Mended]) -> None:
    for name, one in mended.items():
        assert one.after.figures == one.anew.figures, name
        assert one.started["clean"].figures == one.started["unclean"].figures == one.anew.figures, name


def test_there_is_nothing_left_to_do(mended: dict[str, Mended]) -> None:
    for name, one in mended.items():
        found, lost = audited(config_of(one.history, one.store))
        assert not lost, name
        assert found.is_sound, (name, found.findings)
        done = indexd_here("repair", "--plan", *flags_of(one.history, one.store))
        assert done.returncode == 0, (name, done.stdout)
