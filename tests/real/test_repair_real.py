"""After a repair RocketMQ's own code finds every key, once, after a clean start and after an unclean one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.audited_keys import audited, config_of, flags_of
from support.daemon import indexd_here
from support.goldens import unpack
from support.rocketmq import REAL
from support.rocketmq_rewrite import (
    LATEST,
    Found,
    History,
    RealStore,
    golden_history,
    histories_in,
    open_all,
)

pytestmark = REAL

GOLDENS = ("rocketmq-5.4-killed", "rocketmq-5.4-killed-open-index")
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
