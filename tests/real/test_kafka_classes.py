"""OffsetIndex and TimeIndex, step by step, against Kafka's own classes: random calls on new and on damaged files."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from indexd.errors import IndexdError, OffsetOverflowError
from indexd.sparse.format import OFFSET_ENTRY, TIME_ENTRY
from support.kafka_check import Answer, Ours, same_error
from support.kafka_real import VERSIONS, answers, require

pytestmark = pytest.mark.real

CALLS = 12_000
CALLS_AN_INDEX = 60
BASES = (0, 1, 1000, 1 << 40, 2**63 - 1, 2**63 - 2**31 + 7)
SUFFIX = {"offset": ".index", "time": ".timeindex"}


class Player:
    """Makes up calls that make sense for our index as it stands, and keeps those that Kafka's can be asked, too."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.rand = random.Random(seed)
        self.ours = Ours(directory)
        self.lines: list[str] = []
        self.found: list[Answer] = []
        self._made = 0

    def call(self, line: str) -> Answer:
        answer = self.ours.do(line)
        if line.startswith("maybeAppend") and isinstance(answer.result, OffsetOverflowError):
            return answer  # here Kafka's class tears its file
        self.lines.append(line)
        self.found.append(answer)
        return answer

    def play(self, calls: int) -> None:
        while len(self.lines) < calls:
            kind = self.rand.choice(["offset", "time"])
            base = self.rand.choice(BASES)
            name = f"{self._made}-{base:020d}{SUFFIX[kind]}"
            self._made += 1
            is_damaged = self.rand.random() < 0.4
            if is_damaged:
                self._damaged(kind, self.directory / name)
            is_read_only = is_damaged and self.rand.random() < 0.3
            mode = " ro" if is_read_only else ""
            self.call(f"open {kind} {name} {base} {self.rand.randrange(12, 500)}{mode}")
            for _ in range(self.rand.randrange(CALLS_AN_INDEX)):
                if self.ours.index is None:
                    self.call(f"open {kind} {name} {base} {self.rand.randrange(12, 500)}")
                line = self._next(kind, is_read_only)
                self.call(line)
            if self.ours.index is not None:
                self.call("hex")
                self.call(self.rand.choice(["unmap"] if is_read_only else ["unmap", "close"]))
        self.ours.close()

    def _damaged(self, kind: str, path: Path) -> None:
        # Entries in order or not, some of them zeros, and the file's end anywhere.
        count = self.rand.choice([0, 1, 5, 30, 690, 1030, 1500])
        keys = [self.rand.randrange(-20, 4000) for _ in range(count)]
        if self.rand.random() < 0.5:
            keys.sort()
        values = [self.rand.randrange(4000) for _ in range(count)]
        if self.rand.random() < 0.5:
            values.sort()
        entry = OFFSET_ENTRY if kind == "offset" else TIME_ENTRY
        data = b"".join(entry.pack(*pair) for pair in zip(keys, values, strict=True))
        data += bytes(self.rand.choice([0, 0, 3, entry.size, 50 * entry.size]))
        path.write_bytes(data)

    def _next(self, kind: str, is_read_only: bool) -> str:
        rand, index = self.rand, self.ours.index
        assert index is not None
        near = self._near(rand.choice([index.base, index.base + rand.randrange(4000)]))
        looks = [f"lookup {near}", f"lookup {rand.randrange(4000)}", "sanity", "state", f"canAppend {near}"]
        looks.append(f"entry {rand.randrange(index.entries + 2)}")
        if index.entries < 100:
            looks.append("entries")
        if is_read_only or rand.random() < 0.4:
            return rand.choice(looks)
        if rand.random() < 0.6:
            return self._append(kind)
        return rand.choice(
            [
                *(f"truncateTo {near}", f"truncateTo {self._near(self._last() - rand.randrange(4))}"),
                *("truncate", "trim", "flush", "unmap", "close"),
                f"resize {index.size_in_bytes + rand.randrange(200)}",
            ]
        )

    def _last(self) -> int:
        index = self.ours.index
        assert index is not None
        return index.last_offset if hasattr(index, "last_offset") else index.last_entry.offset

    def _append(self, kind: str) -> str:
        rand, index = self.rand, self.ours.index
        assert index is not None
        offset = self._near(self._last() + rand.choice([0, 1, 1, 2, 5, -1, 2**31]))
        if kind == "offset":
            return f"append {offset} {rand.choice([rand.randrange(5000), -1, 2**31 - 1, -(2**31)])}"
        timestamp = self._near(index.last_entry.timestamp + rand.choice([0, 1, 1, 3, -1]))  # type: ignore[union-attr]  # a TimeIndex
        return f"maybeAppend {timestamp} {offset}{rand.choice(['', '', ' skip'])}"

    @staticmethod
    def _near(number: int) -> int:
        return min(max(number, -(2**63)), 2**63 - 1)


def plain(result: Any) -> Any:
    """A result as JSON says it."""
    if isinstance(result, tuple):
        return list(result)
    return [list(entry) for entry in result] if isinstance(result, list) else result


@pytest.mark.parametrize(("version", "seed"), [(VERSIONS[0], 1), (VERSIONS[0], 2), (VERSIONS[0], 3), (VERSIONS[1], 4)])
def test_every_answer_is_kafkas(version: str, seed: int, tmp_path: Path) -> None:
    require(version)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    player = Player(ours, seed)
    damaged = player._damaged

    def in_both(kind: str, path: Path) -> None:
        damaged(kind, path)
        shutil.copy(path, theirs / path.name)

    player._damaged = in_both  # type: ignore[method-assign]  # what it writes has to be in both directories
    player.play(CALLS)
    kinds = set()
    for number, (found, row) in enumerate(zip(player.found, answers(version, theirs, player.lines), strict=True)):
        history = "\n".join(player.lines[max(0, number - 12) : number + 1])
        result = row["result"]
        if isinstance(result, dict) and "exception" in result:
            kinds.add(result["exception"])
            assert same_error(found.result, result["exception"]), f"{history}\n{found.result!r} for {result}"
        else:
            assert not isinstance(found.result, IndexdError), f"{history}\n{found.result!r} for {result}"
            assert plain(found.result) == result, history
        state = row.get("state")
        assert found.state == (state and {key: value for key, value in state.items() if key != "mmapPosition"}), history
        assert found.length == row["fileLength"], history
    assert len(kinds) >= 4, kinds
    assert {path.name: path.read_bytes() for path in ours.iterdir()} == {
        path.name: path.read_bytes() for path in theirs.iterdir()
    }
