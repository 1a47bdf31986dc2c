"""query-key, query-unique-key, query-offset, query-time and message, as they are typed."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from indexd.cli.main import main
from indexd.query import TIME_MAX
from support.data_directory import T0, Store, spec
from support.queue_store import QueueStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


# --- the commands ---


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def asked(store: Store) -> Store:
    store.append(
        spec(KEYS="k 订单", UNIQ_KEY="u", TAGS="t"),
        spec(time=T0 + 5000),
        spec(topic="L\x07", KEYS="a\x1b\tb"),
        spec(size=1),
    )
    store.build()
    return store


def test_query_key(asked: Store, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = [message.phy_offset for message in asked.messages()]
    command = ("query-key", "--data", asked.data, "-t", "T", "-k", "k")
    code, out, _ = run(capsys, *command, "--json")
    assert (code, out.count("\n")) == (0, 1)
    row = json.loads(out)
    assert row == {
        "topic": "T",
        "key": "k",
        "phyOffsets": [offsets[3], offsets[1], offsets[0]],
        "storeTimestamps": [T0, T0 + 5000, T0],
        "hits": [asked.messages()[number].hit() for number in (3, 1, 0)],
        "truncated": False,
        "coverage": {
            "begin": 0, "end": asked.writer.max_offset, "logBegin": 0, "complete": True, "uncovered": [],
            "daemonPid": None,
        },
    }  # fmt: skip
    row = json.loads(run(capsys, *command, "-m", 1, "--mode", "rocketmq", "--json")[1])
    assert row["phyOffsets"] == [offsets[3]] == [hit["phyOffset"] for hit in row["hits"]]
    assert (row["indexLastUpdateTimestamp"], row["indexLastUpdatePhyoffset"]) == (T0, offsets[3])
    code, out, _ = run(capsys, *command)
    assert code == 0
    assert "k 订单" in out
    assert f"covered: log bytes 0 to {asked.writer.max_offset}, all of the log; no daemon runs" in out
    out = run(capsys, *command[:-1], "none")[1]
    assert out.startswith("no message: absent\n")
    out = run(capsys, "query-key", "--data", asked.data, "-t", "L\x07", "-k", "a\x1b\tb", "-m", "1")[1]
    assert "\x1b" not in out
    assert r"a\x1b\tb" in out
    row = json.loads(run(capsys, *command[:-1], "t", "--index-type", "T", "--json")[1])
    assert (row["indexType"], row["phyOffsets"]) == ("T", offsets[:1])


def test_query_unique_key(asked: Store, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("query-unique-key", "--data", asked.data, "-t", "T", "-i", "u", "--json")
    row = json.loads(run(capsys, *command)[1])
    assert (row["key"], row["indexType"], row["phyOffsets"]) == ("u", "U", [0])
    assert row["hits"] == [asked.messages()[0].hit()]
    assert json.loads(run(capsys, *command, "--mode", "rocketmq", "-m", 0)[1])["phyOffsets"] == [0]
    row = json.loads(run(capsys, *command[:-2], "k", "--json")[1])
    assert (row["phyOffsets"], row["why"]) == ([], "absent")


def test_batch(
    asked: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = f"T\tk\t64\t0\t{TIME_MAX}\nT\tt\t1\t0\t{T0}\tT\nT\t订单\t2\t0\t{T0}\t\nT\tnone\t64\t0\t5"
    (tmp_path / "batch").write_text(lines)
    command = ("query-key", "--data", asked.data, "--batch")
    code, out, _ = run(capsys, *command, tmp_path / "batch")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [len(row["phyOffsets"]) for row in rows] == [3, 1, 1, 0]
    assert [row.get("indexType") for row in rows] == [None, "T", None, None]
    assert [row["key"] for row in rows] == ["k", "t", "订单", "none"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert run(capsys, *command, "-", "--mode", "rocketmq")[1].count("indexLastUpdateTimestamp") == 4


@pytest.mark.parametrize(
    "line",
    [b"", b"T\tk", b"T\tk\t1\t2\t3\tK\tx", b"T\tk\tone\t0\t5", b"T\tk\t1\t0\t9223372036854775808", b"T\tk\t1\t0\t5\tX",
     b"T\t\t1\t0\t5", b"\tk\t1\t0\t5", b"T\tk\t1\t-5\t5", b"T\tk\t1\t0\t-5", b"T\tk\t1\t6\t5",
     b"T\t\xff\t1\t0\t5", b"T\tk\t10001\t0\t5", b"T\tk\t1_0\t0\t5", b"T\tk\t1\r\t0\t5"],
)  # fmt: skip
def test_a_malformed_line(asked: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: bytes) -> None:
    (tmp_path / "batch").write_bytes(b"T\tk\t1\t0\t5\n" + line + b"\n")
    code, out, err = run(capsys, "query-key", "--data", asked.data, "--batch", tmp_path / "batch")
    assert (code, out.count("\n")) == (2, 1)
    assert "line 2" in err


@pytest.mark.parametrize(
    "words",
    [["-t", "T"], ["-k", "k"], ["-t", "T", "-k", "\udc80"], ["-t", "T", "-k", "k", "--batch", "-"], ["--batch", "/no"],
     ["-t", "T", "-k", "k", "-m", "10001"], ["-t", "T", "-k", "k", "-b", "x"], ["-t", "T", "-k", "k", "--mode", "x"]],
)  # fmt: skip
def test_wrong_words(asked: Store, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run(capsys, "query-key", "--data", asked.data, *words)
    assert code in (2, 70)
    assert (out, err.count("\n")) == ("", 1)


def test_message(asked: Store, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("message", "--data", asked.data)
    row = json.loads(run(capsys, *command, "-o", 0, "--json")[1])
    assert (row["topic"], row["keys"], row["uniqKey"], row["body"], row["size"]) == (
        "T",
        ["k", "订单"],
        "u",
        "",
        row["size"],
    )
    code, out, _ = run(capsys, *command, "-i", row["offsetMsgId"], "--body")
    assert code == 0
    assert "KEYS = k 订单" in out
    code, out, err = run(capsys, *command, "-o", 1)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert run(capsys, *command)[0] == 2


@pytest.fixture
def queued(tmp_path: Path) -> QueueStore:
    store = QueueStore(tmp_path)
    store.append(*[spec(T0 + 10 * n, KEYS=f"k order-{n}", TAGS="标签\x1b") for n in range(20)])
    store.build()
    return store


def test_query_offset(queued: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("query-offset", "--data", queued.data, "-t", "T", "-i", 0, "-o")
    code, out, _ = run(capsys, *command, 3, "-m", 2)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["STORE", "TIME", "PHY", "OFFSET", "QUEUE", "OFFSET", "SIZE", "TAGS", "KEYS", "UNIQ_KEY"]
    assert "order-4" in lines[2]
    assert "\x1b" not in out
    assert "PROBLEM" not in out
    assert lines[3] == "more: -o 5"
    assert "minOffset 0, maxOffset 20" in lines[4]
    assert lines[5].startswith("covered: log bytes 0 to ")
    row = json.loads(run(capsys, *command, 3, "-m", 2, "--json")[1])
    assert ([m["queueOffset"] for m in row["messages"]], row["nextOffset"], row["truncated"]) == ([3, 4], 5, True)
    assert row["hits"] == [queued.messages()[number].hit() for number in (3, 4)]
    assert "no message: behind the last message" in run(capsys, *command, 99)[1]
    row = json.loads(run(capsys, *command[:-1], "--json")[1])
    assert (row["queueOffset"], len(row["messages"])) == (0, 20)
    code, out, _ = run(capsys, "query-offset", "--data", queued.data, "-t", "none", "-i", 0, "-o", 0)
    assert (code, out.splitlines()[0]) == (0, "no message: no such queue")


def test_query_time(queued: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("query-time", "--data", queued.data, "-t", "T", "-i", 0, "-s")
    for time, boundary, offset in ((T0 + 55, "lower", 6), (T0 + 55, "upper", 5), (T0 + 60, "upper", 6)):
        code, out, _ = run(capsys, *command, time, "--boundary", boundary)
        assert code == 0
        assert f"order-{offset}" in out
        assert f"queueOffset {offset}," in out
        row = json.loads(run(capsys, *command, time, "--boundary", boundary, "--json")[1])
        assert (row["queueOffset"], row["storeTimestamp"]) == (offset, T0 + 10 * offset)
        assert row["hits"] == [queued.messages()[offset].hit()]
    assert "queueOffset 6, " in run(capsys, *command, T0 + 55)[1]
    assert "no message: behind the last message" in run(capsys, *command, T0 + 999)[1]
    assert json.loads(run(capsys, *command, T0 + 999, "--json")[1])["hits"] == []
    assert "no message: no such queue" in run(capsys, *command[:-2], 5, "-s", 1)[1]


def test_query_time_in_the_log(queued: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("query-time", "--data", queued.data, "--log", "-s")
    wanted = queued.messages()[7].phy_offset
    assert "order-7" in run(capsys, *command, T0 + 65)[1]
    row = json.loads(run(capsys, *command, T0 + 65, "--json")[1])
    assert (row["phyOffset"], row["storeTimestamp"], row["segment"]) == (wanted, T0 + 70, 0)
    assert row["hits"] == [queued.messages()[7].hit()]
    assert json.loads(run(capsys, *command, T0 + 999, "--json")[1])["hits"] == []
    assert run(capsys, *command, T0 + 999)[1].startswith("no message: absent\n")


@pytest.mark.parametrize(
    "words",
    [
        "query-time -s 1", "query-time -t T -s 1", "query-time -i 0 -s 1", "query-time --log", "query-time -t T -i 0",
        "query-time --log -t T -s 1", "query-time --log -i 0 -s 1", "query-time --log -s 1 --boundary lower",
        "query-time -t T -i 0 -s x", "query-time -t T -i 0 -s 1 --boundary middle", "query-time -t T -i q -s 1",
        "query-offset -t T -o 0", "query-offset -i 0 -o 0",
        "query-offset -t T -i 0 -o 0 -m 0",
        "query-offset -t T -i 0 -o 0 -m 10001", "query-offset -t T -i 0 -o 0.5", "query-offset -t T -i -1 -o 0",
        "query-offset -t T -i 2147483648 -o 0", "query-offset -t T -i 0 -o -1", "query-offset -t= -i 0 -o 0",
        "query-time -t T -i 0 -s -1", "query-time -t T -i -1 -s 1", "query-time --log -s -1",
        "query-time -t= -i 0 -s 1",
        "query-key -t T -k=", "query-key -t= -k k", "query-key -t T -k k -b -1", "query-key -t T -k k -e -1",
        "query-key -t T -k k -b 2 -e 1", "query-key -t T -k k --cursor -1", "query-unique-key -t T -i=",
        "query-unique-key -t= -i u", "query-unique-key -t T -i u -b -1", "message -o -1", "message -i=",
        "stats -b -1", "stats -e -1", "stats -t=", "export --to x -b -1", "export --to x -e -1",
        "query-key -t T -k k --cursor x", "query-key -t T -k k --cursor 5 --mode rocketmq",
        "query-key --batch - --cursor 5", "query-key --batch - -m 5", "query-key --batch - -b 5",
        "query-key --batch - -e 5", "query-key --batch - --index-type K", "inspect --frames -1 .",
    ],
)  # fmt: skip
def test_wrong_words_of_any_query(queued: QueueStore, capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, out, err = run(capsys, *words.split(), "--data", queued.data)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_pages_of_a_key(queued: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["query-key", "--data", queued.data, "-t", "T", "-k", "k", "-m", 6]
    got, cursor = [], []
    while True:
        row = json.loads(run(capsys, *command, *cursor, "--json")[1])
        got += row["phyOffsets"]
        said = run(capsys, *command, *cursor)[1]
        if "cursor" not in row:
            assert not row["truncated"]
            assert "more:" not in said
            break
        assert f"more: --cursor {row['cursor']}\n" in said
        cursor = ["--cursor", row["cursor"]]
    assert got == [message.phy_offset for message in queued.messages()][::-1]
