"""A broker's writing half in a process of its own, and what its crashes and recoveries do to a log.

``Writer`` appends some thousand messages a second, with the clock's time, until it is stopped or killed. ``cut``,
``tear`` and ``expire`` change the log of one that does not run, as a broker that starts again finds or leaves it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import struct
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from support.commitlog_writer import CommitLogWriter, FrameSpec, encode_frame
from support.naive import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, NaiveMessage, naive_frames

if TYPE_CHECKING:
    from collections.abc import Iterator

SEGMENT_SIZE = 256 << 10
BLANK_SIZE = 8
_TOPICS = ["TopicTest", "OrderPaid", "OrderPaid", "订单主题", "L" + "x" * 199]
_TAGS = ["TagA", "TagB", "标签", "a || b"]
_FLAGS = [0, 0, 0, 0, 0, 0x4, 0x8, 0xC]
# Where the length of a body stands in a frame whose hosts have four bytes.
_BODY = 84
_BURST = 40
_BURST_PAUSE = 0.01
# The clock goes back by so much after so many messages of one writer.
_SET_BACK_MS = 1500
_SET_BACK_AFTER = 3000
_STOP_SECONDS = 60.0


def messages(seed: int) -> Iterator[FrameSpec]:
    """Without an end: keys that repeat, also within one message, keys of one hash, messages that are not indexed."""
    rand = random.Random(seed)
    number = 0
    while True:
        keys = [
            rand.choice(["Aa", "BB", "单"]) if rand.random() < 0.02 else f"order-{rand.randrange(20_000)}"
            for _ in range(rand.randrange(4))
        ]
        properties = {"KEYS": " ".join(keys + keys[: rand.random() < 0.05])} if keys else {}
        if rand.randrange(4):
            properties["UNIQ_KEY"] = f"{seed:08X}{number:024X}"
        if rand.randrange(3):
            properties["TAGS"] = rand.choice(_TAGS)
        now = int(time.time() * 1000) - (_SET_BACK_MS if number >= _SET_BACK_AFTER else 0)
        yield FrameSpec(
            topic=rand.choice(_TOPICS),
            body=rand.randbytes(rand.randrange(200)),
            properties=properties,
            queue_id=rand.randrange(4),
            sys_flag=rand.choice(_FLAGS),
            born_timestamp=now,
            store_timestamp=now,
        )
        number += 1


class Writer:
    """The process; ``begin`` is the physical offset of its first message."""

    def __init__(self, store: Path, begin: int, seed: int) -> None:
        self.begin = begin
        command = [sys.executable, "-m", "soak.writer", str(store), str(begin), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop(self, past: int = 0) -> int:
        """End it once it has come past that offset; the offset behind its last message. No stale frame stands there."""
        out, _ = self._process.communicate(f"{past}\n", timeout=_STOP_SECONDS)
        if self._process.returncode:
            raise AssertionError(f"the writer ended with {self._process.returncode}")
        return int(out)

    def kill(self) -> None:
        """SIGKILL, if it still runs; segments stay as they are."""
        self._process.kill()
        self._process.communicate()


def end_of(store: Path, begin: int) -> int:
    """Where a broker that starts again goes on, when a frame begins at ``begin``: behind the last whole frame."""
    end = begin
    for message in naive_frames(store / "commitlog", SEGMENT_SIZE, begin):
        end = message.phy_offset + message.size
    return end


def segments(store: Path) -> list[Path]:
    """The files of the log, oldest first."""
    return sorted((store / "commitlog").iterdir())


def frames(store: Path) -> list[NaiveMessage]:
    """All messages of the log by the slow truth."""
    return list(naive_frames(store / "commitlog", SEGMENT_SIZE))


def cut(store: Path, phy_offset: int) -> None:
    """RocketMQ's truncateDirtyFiles: later segments go, what stands behind the offset in its own segment stays."""
    for path in segments(store):
        if int(path.name) > phy_offset:
            path.unlink()


def tear(store: Path, end: int, rand: random.Random) -> int:
    """The first bytes of a frame at the end, as a writer that was killed inside it leaves them; how many."""
    frame = encode_frame(next(messages(rand.randrange(1 << 32))), end)
    room = SEGMENT_SIZE - end % SEGMENT_SIZE - BLANK_SIZE
    # No CRC covers what is behind the body: with its end cut off, it might pass for a whole one of queue offset 0.
    written = min(rand.randrange(1, _BODY), room)
    if written <= 0:
        return 0
    with _segment(store, end).open("r+b") as file:
        os.pwrite(file.fileno(), frame[:written], end % SEGMENT_SIZE)
    return written


def expire(store: Path, count: int) -> None:
    """The oldest segments are deleted, one after the other, as a broker's cleaning does."""
    for path in segments(store)[:count]:
        path.unlink()


def _write(store: Path, begin: int, seed: int) -> int:
    # Until a line comes, or standard input ends with whoever started this.
    endless = messages(seed)
    writer = CommitLogWriter(store / "commitlog", SEGMENT_SIZE, start_offset=begin)
    writer.queue_offsets.update(_queue_offsets(store, begin))
    while not select.select([sys.stdin], [], [], _BURST_PAUSE)[0]:
        for spec in islice(endless, _BURST):
            writer.append(spec)
    past = int(sys.stdin.readline() or 0)
    # What stands behind the offset may be what a longer log left there; nobody could tell a whole stale frame at the
    # very end from one that was written just now.
    while writer.max_offset <= past or _is_frame_at(store, writer.max_offset):
        writer.append(next(endless))
    writer.close(clean=False)
    return writer.max_offset


def _queue_offsets(store: Path, end: int) -> dict[tuple[str, int], int]:
    """The next queue offset of each queue behind the messages before ``end``, as a broker finds it when it starts."""
    offsets: dict[tuple[str, int], int] = {}
    for path in segments(store):
        data, base, at = path.read_bytes(), int(path.name), 0
        while base + at < end:
            size, magic = struct.unpack_from(">ii", data, at)
            if magic not in (MAGIC_V1, MAGIC_V2) or size <= 0:
                break
            queue_id, queue_offset, sys_flag = struct.unpack_from(">i4xq8xi", data, at + 12)
            if sys_flag & 0xC in (0x0, 0x8):
                topic_at = at + _BODY + 4 + int.from_bytes(data[at + _BODY : at + _BODY + 4], "big")
                width = 2 if magic == MAGIC_V2 else 1
                length = int.from_bytes(data[topic_at : topic_at + width], "big")
                topic = data[topic_at + width : topic_at + width + length].decode()
                offsets[topic, queue_id] = queue_offset + 1
            at += size
    return offsets


def _is_frame_at(store: Path, phy_offset: int) -> bool:
    with contextlib.suppress(FileNotFoundError), _segment(store, phy_offset).open("rb") as file:
        magic = os.pread(file.fileno(), BLANK_SIZE, phy_offset % SEGMENT_SIZE)[4:]
        return int.from_bytes(magic, "big", signed=True) in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK)
    return False


def _segment(store: Path, phy_offset: int) -> Path:
    return store / "commitlog" / f"{phy_offset - phy_offset % SEGMENT_SIZE:020d}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("begin", type=int)
    parser.add_argument("seed", type=int)
    print(_write(**vars(parser.parse_args())))
