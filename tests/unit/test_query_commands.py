"""query-key, query-unique-key and message, as they are typed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from indexd.cli.main import main
from indexd.query import TIME_MAX
from support.data_directory import T0, Store, spec

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


def test_hits_are_objects_with_every_field(asked: Store, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads(run(capsys, "query-key", "--data", asked.data, "-t", "T", "-k", "订单", "--json")[1])
    (message, *_) = asked.messages()
    assert row["hits"] == [
        {
            "phyOffset": 0, "topic": "T", "queueId": 0, "queueOffset": 0, "storeTimestamp": T0,
            "bornTimestamp": message.born_timestamp, "tags": "t", "keys": "k 订单", "uniqKey": "u",
            "size": message.size, "sysFlag": message.sys_flag, "bornHost": "{}:{}".format(*message.born_host),
            "storeHost": "{}:{}".format(*message.store_host),
        }
    ]  # fmt: skip
    unique = json.loads(run(capsys, "query-unique-key", "--data", asked.data, "-t", "T", "-i", "u", "--json")[1])
    assert unique["hits"] == row["hits"]


def test_query_unique_key(asked: Store, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("query-unique-key", "--data", asked.data, "-t", "T", "-i", "u", "--json")
    row = json.loads(run(capsys, *command)[1])
    assert (row["key"], row["indexType"], row["phyOffsets"]) == ("u", "U", [0])
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


def test_a_query_loads_neither_numpy_nor_the_compiler(asked: Store) -> None:
    code = (
        "import sys; from indexd.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stopped: assert not stopped.code, stopped.code\n"
        "loaded = {'numpy', 'numba', 'llvmlite', 'asyncio', 'structlog'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    for words in (
        ["query-key", "--data", asked.data, "-t", "T", "-k", "k"],
        ["message", "--data", asked.data, "-o", "0"],
        ["inspect", asked.data],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
