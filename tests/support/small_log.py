"""Logs of one's own making for tests of the whole daemon: small segments, a few topics, keys that repeat, odd flags.

``write_log`` writes one and is done; ``Growing`` writes on from another process until it is told to stop.
"""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

from support.commitlog_writer import CommitLogWriter, FrameSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

SEGMENT_SIZE = 256 << 10
HASH_SLOT_NUM = 500
INDEX_NUM = 4000
#: 60 units, so that each queue soon has several files.
QUEUE_FILE_SIZE = 1200
#: The flags that say the four numbers above.
SIZES = (
    *("--segment-size", str(SEGMENT_SIZE)),
    *("--hash-slot-num", str(HASH_SLOT_NUM)),
    *("--index-num", str(INDEX_NUM)),
    *("--consume-queue-file-size", str(QUEUE_FILE_SIZE)),
)
BASE_TIME = 1_700_000_000_000

_TOPICS = ["TopicTest", "OrderPaid", "订单主题", "L" + "x" * 199]
_TAGS = ["TagA", "TagB", "标签", "a || b"]
_FLAGS = [0, 0, 0, 0, 0, 0x4, 0x8, 0xC]
_CLOCK_SET_BACK = 500
_BURST = 20
_BURST_PAUSE = 0.01


def messages(seed: int) -> Iterator[FrameSpec]:
    """Without an end; the same for one seed. Store times grow by 40 ms each, and step back by a minute once."""
    rand = random.Random(seed)
    number = 0
    while True:
        properties = {}
        keys = [rand.choice(["Aa", "BB", f"order-{rand.randrange(3000)}"]) for _ in range(rand.randrange(5))]
        if keys:
            properties["KEYS"] = " ".join(keys)
        if rand.randrange(4):
            properties["UNIQ_KEY"] = f"{seed:08X}{number:024X}"
        if rand.randrange(3):
            properties["TAGS"] = rand.choice(_TAGS)
        yield FrameSpec(
            topic=rand.choice(_TOPICS),
            body=rand.randbytes(rand.randrange(200)),
            properties=properties,
            queue_id=rand.randrange(4),
            sys_flag=rand.choice(_FLAGS),
            born_timestamp=BASE_TIME,
            store_timestamp=BASE_TIME + 40 * number - (60_000 if number >= _CLOCK_SET_BACK else 0),
        )
        number += 1


def write_log(store: Path, count: int, *, seed: int = 1, start_offset: int = 0) -> int:
    """Write ``count`` messages from ``start_offset`` on, as a broker that stops cleanly; the offset behind the last."""
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE, start_offset=start_offset) as writer:
        for spec in islice(messages(seed), count):
            writer.append(spec)
        return writer.max_offset


_TESTS = Path(__file__).parents[1]


class Growing:
    """A process that appends some 2000 messages a second from offset 0 on; for use in a ``with`` block."""

    def __init__(self, store: Path, seed: int, seconds_max: float = 120) -> None:
        (store / "commitlog").mkdir(parents=True)
        command = [sys.executable, "-m", "support.small_log", str(store), str(seed), str(seconds_max)]
        self._process = subprocess.Popen(command, cwd=_TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def stop(self) -> int:
        """End it; the offset behind the last message."""
        out, _ = self._process.communicate(timeout=30)
        assert self._process.returncode == 0
        return int(out)


def _grow(store: Path, seed: int, seconds_max: float) -> int:
    # Until standard input ends. The segment made ahead stays, as a broker that is killed leaves it.
    endless = messages(seed)
    writer = CommitLogWriter(store / "commitlog", SEGMENT_SIZE)
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline and not select.select([sys.stdin], [], [], _BURST_PAUSE)[0]:
        for spec in islice(endless, _BURST):
            writer.append(spec)
    writer.close(clean=False)
    return writer.max_offset


if __name__ == "__main__":
    print(_grow(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
