"""Messages that a real broker has removed, whole behind its end and older than a newer one of the same length.

The daemon has no broker_address and no broker.conf: it finds the broker by the lock of the store.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from indexd.flush.frontier import DOUBTED, UNPROVEN, Uncovered
from indexd.query import open_data
from support.daemon import Daemon, compile_kernels, indexd
from support.naive import naive_frames
from support.remoting import RemotingClient
from support.rocketmq import REAL, Broker

if TYPE_CHECKING:
    from support.naive_log import NaiveMessage

pytestmark = REAL

SEGMENT_SIZE = 1 << 20
FLAGS = ("--segment-size", str(SEGMENT_SIZE))
SENT, CUT_AT = 200, 106
SEND_MESSAGE, SUCCESS = 10, 0


def send(broker: Broker, name: str, count: int) -> None:
    """Messages of one length, with the keys NAME00000, NAME00001, ..., each a millisecond or more after the other."""
    with RemotingClient(broker.address) as client:
        for number in range(count):
            fields = {
                "producerGroup": "even", "topic": "Even", "defaultTopic": "TBW102", "defaultTopicQueueNums": 4,
                "queueId": 0, "sysFlag": 0, "bornTimestamp": int(time.time() * 1000), "flag": 0,
                "properties": f"KEYS\x01{name}{number:05d}\x02WAIT\x01true", "reconsumeTimes": 0, "unitMode": "false",
            }  # fmt: skip
            answer = client.ask(SEND_MESSAGE, fields, b"x" * 50)
            assert answer.code == SUCCESS, answer
            time.sleep(0.002)


def frames_of(store: Path) -> list[NaiveMessage]:
    return sorted(naive_frames(store / "commitlog", SEGMENT_SIZE), key=lambda frame: frame.phy_offset)


def found(data: Path, name: str, numbers: range) -> list[int]:
    """Of these keys, the numbers of those that have a message."""
    with open_data(data) as opened:
        return [number for number in numbers if opened.by_key("Even", f"{name}{number:05d}").hits]


def check_nothing_removed(data: Path, end: int) -> None:
    """None of the 93 is found, all others are, and nothing is said to be missing."""
    assert found(data, "old", range(SENT)) == list(range(CUT_AT))
    assert found(data, "new", range(1)) == [0]
    with open_data(data) as opened:
        coverage = opened.coverage()
        print(data.name, coverage.to_json())
        assert (coverage.complete, coverage.uncovered, coverage.end) == (True, (), end)


def is_complete(data: Path) -> bool:
    with open_data(data) as opened:
        return opened.coverage().complete


@pytest.fixture(scope="module")
def removed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where stores/before is a log of 200, and the data directories of daemons that were stopped and killed then."""
    home = tmp_path_factory.mktemp("removed")
    compile_kernels()
    with Broker(home / "before", store=home / "store") as broker:
        send(broker, "old", SENT)
        end = frames_of(home / "store")[-1]
        with Daemon(home / "store", home / "killed", *FLAGS) as killed:
            with Daemon(home / "store", home / "stopped", *FLAGS) as stopped:
                stopped.wait_durable(end.phy_offset + end.size)
                assert stopped.terminate() == 0
            killed.wait_durable(end.phy_offset + end.size)
            killed.kill()
        broker.kill()
    return home


def cut(store: Path) -> int:
    """What a recovering broker takes for the end of its log, as after a loss of power."""
    frames = frames_of(store)
    assert len(frames) == SENT
    assert len({frame.size for frame in frames}) == 1
    with (store / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(frames[CUT_AT].phy_offset + 4)
        file.write(bytes(4))
    return frames[CUT_AT + 1].phy_offset


def test_no_removed_message_is_found_running_killed_and_stopped(removed: Path) -> None:
    store, through, beside = removed / "store", removed / "through", removed / "beside"
    shutil.copytree(removed / "killed", removed / "recovered")
    shutil.copytree(removed / "killed", through)
    whole = frames_of(store)
    with Daemon(store, through, *FLAGS) as during:
        during.wait_state(lambda row: bool(row["caughtUp"] and row["messages"] == SENT))
        end = cut(store)
        # It may be damage as well: nobody can be asked.
        during.wait_state(lambda row: [gap[2] for gap in row["uncovered"]] == [DOUBTED])
        with Daemon(store, beside, *FLAGS) as running:
            running.wait_state(lambda row: bool(row["messages"] == CUT_AT))
            with Broker(removed / "after", store=store) as broker:
                # The broker is back, and has written nothing yet.
                during.wait_state(lambda row: bool(row["staleHead"] and row["messages"] == CUT_AT))
                assert found(through, "old", range(SENT)) == list(range(CUT_AT))
                assert is_complete(through)
                send(broker, "new", 1)
                assert [frame.phy_offset for frame in frames_of(store)] == [frame.phy_offset for frame in whole]
                for data, daemon in ((through, during), (beside, running)):
                    daemon.wait_state(
                        lambda row: bool(row["caughtUp"] and row["phyOffset"] == end and row["staleHead"])
                    )
                    check_nothing_removed(data, end)
                    daemon.kill()
                check_others(removed, end)
                broker.kill()
    # What the broker has said holds without it, until something is written there.
    for data in (through, removed / "stopped"):
        with Daemon(store, data, *FLAGS) as daemon:
            daemon.wait_state(lambda row: bool(row["caughtUp"]))
            check_nothing_removed(data, end)
            assert daemon.terminate() == 0
        check_nothing_removed(data, end)
    check_said_while_nobody_can_be_asked(store, removed / "alone", end)


def check_others(removed: Path, end: int) -> None:
    """Started, recovered and rebuilt beside the broker."""
    store = removed / "store"
    for data in (removed / "through", removed / "beside", removed / "killed", removed / "stopped"):
        with Daemon(store, data, *FLAGS) as daemon:
            daemon.wait_state(lambda row: bool(row["caughtUp"] and row["phyOffset"] == end and row["staleHead"]))
            check_nothing_removed(data, end)
            assert daemon.terminate() == 0
        check_nothing_removed(data, end)
    for words in (("rebuild", "--out", removed / "rebuilt"), ("--recover", "--data", removed / "recovered")):
        done = indexd(*words, "--store", store, *FLAGS)
        assert done.returncode == 0, done.stderr
        check_nothing_removed(Path(words[-1]), end)


def check_said_while_nobody_can_be_asked(store: Path, data: Path, end: int) -> None:
    """Found or not: the range is named, with its reason, and no answer is complete."""
    last = frames_of(store)[-1]
    done = indexd("rebuild", "--store", store, "--out", data, *FLAGS)
    assert done.returncode == 0, done.stderr
    with open_data(data) as opened:
        coverage = opened.coverage()
        assert not coverage.complete
        assert coverage.uncovered == (Uncovered(end, last.phy_offset + last.size, UNPROVEN),)
        assert not opened.by_key("Even", "none").coverage.complete
