"""A real broker on a store that was repaired, asked by its own mqadmin."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.daemon import indexd_here
from support.naive import naive_frames
from support.rocketmq import BROKER_CONF, REAL, Broker, arguments, run

pytestmark = REAL

SEGMENT_SIZE = int(str(BROKER_CONF["mappedFileSizeCommitLog"]))
SENT, ASKED = 300, 2  # mqadmin is a JVM for each question
LATEST = str(2**63 - 1)


def send(broker: Broker, seed: int) -> list[dict[str, Any]]:
    out = broker.home / f"sent-{seed}.jsonl"
    words = arguments(namesrv=broker.namesrv, count=SENT, seed=seed, out=out)
    run("Client", "send", *words, home=broker.home / "client")
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    return [row for row in rows if row["kind"] in ("normal", "batch")]


def indexd(command: str, broker: Broker, *words: str) -> Any:
    conf = broker.home / "broker.conf"
    return indexd_here(command, *words, "--broker-conf", conf, "--data", broker.home / "unused")


def found_by_unique_key(broker: Broker, row: dict[str, Any]) -> int:
    """The physical offset that mqadmin says."""
    said = broker.mqadmin("queryMsgByUniqueKey", "-t", row["topic"], "-i", row["msgId"], "-s", "0", "-e", LATEST)
    facts = dict(re.findall(r"^([A-Z][A-Za-z ]+): +(\S+)", said, re.MULTILINE))
    Path(facts["Message Body Path"]).unlink()  # it puts bodies into a directory of its own
    return int(facts["CommitLog Offset"])


def found_by_key(broker: Broker, row: dict[str, Any]) -> list[str]:
    """Unique keys of the messages in the answer."""
    said = broker.mqadmin("queryMsgByKey", "-t", row["topic"], "-k", row["keys"].split(" ")[0], "-b", "0", "-e", LATEST)
    return re.findall(r"^([0-9A-F]{32,56}) +\d", said, re.MULTILINE)


def check(broker: Broker, rows: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(2 * len(rows)) as threads:  # each waits for a JVM, and that one for the network
        by_unique_key = threads.map(partial(found_by_unique_key, broker), rows)
        by_key = threads.map(partial(found_by_key, broker), rows)
        assert list(by_unique_key) == [int(row["offsetMsgId"][-16:], 16) for row in rows]
        assert list(by_key) == [[row["msgId"]] for row in rows]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broker")


def test_a_broker_finds_what_was_mended(home: Path) -> None:
    with Broker(home / "first") as broker:
        rows = send(broker, 1)
    store = broker.store
    # As after an unclean start; what the broker finds in the end are the keys of this file.
    files = sorted((store / "index").iterdir())
    files[-1].unlink()
    assert indexd("audit", broker).returncode == 1
    done = indexd("repair", broker, "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    asked = random.Random(1).sample(rows, ASKED)
    with Broker(home / "second", store=store) as broker:
        assert indexd("repair", broker, "--yes").returncode == 3
        check(broker, asked)
        more = send(broker, 2)
        broker.kill()
    # The start after a kill throws away what the checkpoint does not vouch for: mended before, nothing goes.
    done = indexd("repair", broker, "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    asked[1:] = random.Random(2).sample(more, 1)
    with Broker(home / "third", store=store) as broker:
        check(broker, asked)
    done = indexd("audit", broker, "--json")
    assert done.returncode == 0, done.stdout
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["messages"] == sum(1 for _ in naive_frames(store / "commitlog", SEGMENT_SIZE))
