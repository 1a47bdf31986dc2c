"""query-offset, query-time and --cursor, as they are typed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from indexd.cli.main import main
from indexd.query import Hit
from support.data_directory import T0, spec
from support.queue_store import QueueStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def asked(tmp_path: Path) -> QueueStore:
    store = QueueStore(tmp_path)
    store.append(*[spec(T0 + 10 * n, KEYS=f"k order-{n}", TAGS="标签\x1b") for n in range(20)])
    store.build()
    return store


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def test_query_offset(asked: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("query-offset", "--data", asked.data, "-t", "T", "-i", 0, "-o")
    code, out, _ = run(capsys, *command, 3, "-m", 2)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["3", "4"]
    assert "order-4" in lines[2]
    assert "\x1b" not in out
    assert "PROBLEM" not in out
    assert lines[3:5] == ["more: -o 5", "queue: offsets 0 to 20"]
    assert lines[5].startswith("covered: log bytes 0 to ")
    row = json.loads(run(capsys, *command, 3, "-m", 2, "--json")[1])
    assert ([m["queueOffset"] for m in row["messages"]], row["nextOffset"], row["truncated"]) == ([3, 4], 5, True)
    assert row["hits"] == [asked.messages()[number].hit() for number in (3, 4)]
    assert "no message: behind the last message" in run(capsys, *command, 99)[1]
    code, out, _ = run(capsys, "query-offset", "--data", asked.data, "-t", "none", "-i", 0, "-o", 0)
    assert (code, out.splitlines()[0]) == (0, "no message: no such queue")


def test_query_offset_shows_what_does_not_fit(asked: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    path = asked.root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[20:28] = (77).to_bytes(8, "big")
    path.write_bytes(bytes(data))
    out = run(capsys, "query-offset", "--data", asked.data, "-t", "T", "-i", 0, "-o", 0, "-m", 1)[1]
    assert "the message there has queue offset 77" in out
    assert "1 units name what is not their message" in out
    out = run(capsys, "query-offset", "--data", asked.data, "-t", "T", "-i", 0, "-o", 0, "-m", 1, "--json")[1]
    (hit,) = json.loads(out)["hits"]
    # Of the message that was meant nothing is known but its place: what the log has there is another one.
    assert hit == Hit(0, None, 0, 0, asked.messages()[0].size, topic="T").to_dict() | {
        "problem": "the message there has queue offset 77"
    }


def test_query_time(asked: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("query-time", "--data", asked.data, "-t", "T", "-i", 0, "-s")
    for time, boundary, offset in ((T0 + 55, "lower", 6), (T0 + 55, "upper", 5), (T0 + 60, "upper", 6)):
        code, out, _ = run(capsys, *command, time, "--boundary", boundary)
        assert (code, out.split(":")[0]) == (0, f"queue offset {offset}")
        row = json.loads(run(capsys, *command, time, "--boundary", boundary, "--json")[1])
        assert (row["queueOffset"], row["storeTimestamp"]) == (offset, T0 + 10 * offset)
        assert row["hits"] == [asked.messages()[offset].hit()]
    assert run(capsys, *command, T0 + 55)[1].startswith("queue offset 6:")
    assert "where no message stands: behind the last message" in run(capsys, *command, T0 + 999)[1]
    assert json.loads(run(capsys, *command, T0 + 999, "--json")[1])["hits"] == []
    assert "no offset: no such queue" in run(capsys, *command[:-2], 5, "-s", 1)[1]


def test_query_time_in_the_log(asked: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("query-time", "--data", asked.data, "--log", "-s")
    wanted = asked.messages()[7].phy_offset
    assert run(capsys, *command, T0 + 65)[1].startswith(f"physical offset {wanted}: stored at ")
    row = json.loads(run(capsys, *command, T0 + 65, "--json")[1])
    assert (row["phyOffset"], row["storeTimestamp"], row["segment"]) == (wanted, T0 + 70, 0)
    assert row["hits"] == [asked.messages()[7].hit()]
    assert json.loads(run(capsys, *command, T0 + 999, "--json")[1])["hits"] == []
    assert run(capsys, *command, T0 + 999)[1].startswith("no message: absent\n")


@pytest.mark.parametrize(
    "words",
    [
        "query-time -s 1", "query-time -t T -s 1", "query-time -i 0 -s 1", "query-time --log", "query-time -t T -i 0",
        "query-time --log -t T -s 1", "query-time --log -i 0 -s 1", "query-time --log -s 1 --boundary lower",
        "query-time -t T -i 0 -s x", "query-time -t T -i 0 -s 1 --boundary middle", "query-time -t T -i q -s 1",
        "query-offset -t T -i 0", "query-offset -t T -o 0", "query-offset -i 0 -o 0",
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
def test_wrong_words(asked: QueueStore, capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, out, err = run(capsys, *words.split(), "--data", asked.data)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_pages_of_a_key(asked: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["query-key", "--data", asked.data, "-t", "T", "-k", "k", "-m", 6]
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
    assert got == [message.phy_offset for message in asked.messages()][::-1]


def test_these_queries_load_neither_numpy_nor_the_compiler(asked: QueueStore) -> None:
    code = (
        "import sys; from indexd.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stopped: assert not stopped.code, stopped.code\n"
        "loaded = {'numpy', 'numba', 'llvmlite', 'asyncio', 'structlog'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    for words in (f"query-offset -t T -i 0 -o 0 --data {asked.data}", f"query-time --log -s 5 --data {asked.data}"):
        done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
