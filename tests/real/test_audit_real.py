"""The audit finds exactly the keys that RocketMQ's own index service does not find: no more, no fewer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexd.storage.lock import look_at_lock
from support.audited_keys import audited, config_of
from support.goldens import unpack
from support.naive import key_hash
from support.rocketmq import REAL
from support.rocketmq_rewrite import LAST_STEPS, LATEST, RealStore, golden_history, histories_in, open_all

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
