"""Logs for the statistics' tests, the rows that their splits are counted into, and the same counts by plain Python."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indexd.commitlog.decoder import Message
from indexd.config import Config, load
from indexd.index.format import FLAVOURS
from indexd.spark.splits import plan_splits
from indexd.spark.stats.report import (
    COUNTED,
    MEASURES,
    NO_TIME,
    SPLIT,
    Report,
    Selection,
    bucket_begins,
    count_split,
)
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter
from support.rows import logged
from support.strategies import Sample

BASE_TIME = 1_700_000_000_000
SEGMENT_SIZE = 64 << 10
_HOUR = 3_600_000


@dataclass(frozen=True)
class Log:
    """A store of one's own making."""

    config: Config

    def messages(self) -> list[Message]:
        """All of them, decoded in plain Python."""
        assert self.config.store.store is not None
        return logged(self.config.store.store)

    def entries(self) -> list[tuple[Message, str, str]]:
        """(message, index type, key) of each index entry, in order (spec rocketmq-store 4.2, 4.3)."""
        flavour, found = FLAVOURS[self.config.index.flavour], []
        for message in self.messages():
            if message.sys_flag & 0xC in flavour.skipped_types:
                continue
            keys = [message.uniq_key] if flavour.uniq_key and message.uniq_key is not None else []
            found += [(message, "K", key) for key in (*keys, *message.keys)]
            if flavour.tags and message.tags is not None:
                found.append((message, "T", message.tags))
        return found


def written_log(folder: Path, samples: Iterable[Sample], *, flavour: str = "5.4", **keys: Any) -> Log:
    """A log of these messages in ``folder``, as a broker that stops cleanly leaves it; ``keys``: of the config."""
    store = folder / "store"
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        for sample in samples:
            sample.append(writer)
    flags = {"store": str(store), "data": str(folder / "data"), "segment_size": str(SEGMENT_SIZE), "flavour": flavour}
    return Log(load(flags | {key: str(value) for key, value in keys.items()}, None, {"HOME": str(folder)}))


#: kind, topic, text, at: what a count row counts.
Counted = tuple[str, str, str, int]


@dataclass
class Counts:
    """The rows of all splits, added up; times of measures by the hour."""

    amounts: Counter[Counted]
    firsts: dict[Counted, int]
    splits: list[dict[str, Any]]


def counts_of(log: Log, split_size: int, selection: Selection | None = None) -> Counts:
    """What the splits of about ``split_size`` bytes are counted into."""
    found = Counts(Counter(), {}, [])
    for split in plan_splits(Disk(), log.config, size=split_size):
        for batch in count_split(log.config, selection or Selection(), split):
            for row in batch.to_pylist():
                if row["kind"] == SPLIT:
                    found.splits.append(json.loads(row["text"]))
                    continue
                kind, topic, text, at = (row[name] for name in COUNTED)
                place = (kind, topic, text, hour_of(at) if kind in MEASURES else at)
                found.amounts[place] += row["amount"]
                found.firsts[place] = min(row["first"], found.firsts.get(place, row["first"]))
    return found


def hour_of(time: int) -> int:
    """When the hour begins; NO_TIME where no clock shows it."""
    hour = time // _HOUR
    return hour * _HOUR if abs(hour) < 1 << 31 else NO_TIME


def naive_counts(log: Log) -> tuple[Counter[Counted], dict[Counted, int]]:
    """The same by plain Python, of messages that ``decoder.decode_frame`` has decoded; and where each text is first."""
    found: Counter[Counted] = Counter()
    firsts: dict[Counted, int] = {}
    entries = Counter(message.phy_offset for message, _, _ in log.entries())
    for message in log.messages():
        without = int(not message.keys)
        values = (
            1, message.size, len(message.body), len(message.keys), without, without * (message.uniq_key is None),
            int(message.tags is not None), entries[message.phy_offset],
        )  # fmt: skip
        for name, value in zip(MEASURES, values, strict=True):
            found[name, message.topic, "", hour_of(message.store_timestamp)] += value
        bucket = int(bucket_begins(np.array([len(message.body)]))[0])
        found["size", "", "", bucket] += 1
        found["sizeBytes", "", "", bucket] += len(message.body)
        found["flag", "", "", message.sys_flag & 0xD] += 1
        texts = [("KEYS", message.topic, key) for key in message.keys]
        texts += [("UNIQ_KEY", message.topic, message.uniq_key)] if message.uniq_key is not None else []
        texts += [("TAGS", message.topic, message.tags)] if message.tags is not None else []
        for kind, topic, text in [*texts, ("host", "", message.born_host[0])]:
            found[kind, topic, text, 0] += 1
            firsts.setdefault((kind, topic, text, 0), message.phy_offset)
    return +found, firsts


def naive_clock(log: Log, silence: int = 60_000) -> tuple[int, int]:
    """How many steps back, and how many silences."""
    times = [message.store_timestamp for message in log.messages()]
    pairs = list(itertools.pairwise(times))
    return sum(b < a for a, b in pairs), sum(b - a > silence for a, b in pairs)


_PWN = "document.documentElement.dataset.pwned=1"
#: Names that would do harm where a page took them for markup.
HOSTILE = [
    f"<script>{_PWN}</script>", f'"><img/src=x/onerror={_PWN}>', f"</script><script>{_PWN}</script>",
    f"<svg/onload={_PWN}>", f"<a/href=javascript:{_PWN}>click</a>", "{{7*7}}{%print(1)%}", "--bad",
    "<b>bold</b>&lt;&amp;", "[bold red]T[/]", "订单主题", "\u202egnp.exe", "<!--", "]]>",
]  # fmt: skip


def hostile_report() -> Report:
    """A report in which everything occurs that is shown, with HOSTILE for all names."""
    size = dict(zip(MEASURES, (900, 90_000, 30_000, 1800, 10, 5, 900, 2700), strict=True))
    named = [{"topic": name, "text": name, "count": 500 - n, "phyOffset": n} for n, name in enumerate(HOSTILE)]
    hot = {"isExact": True, "completeAbove": 0, "distinct": 400, "repeatedAtLeast": 13, "top": named}
    seen: dict[str, Any] = {"distinct": 4000, "isExact": True, "standardError": 0.0, "repeated": 400}
    seen["byOccurrences"] = [{"from": 1, "to": 1, "keys": 3600}, {"from": 1025, "to": None, "keys": 400}]
    event = {"phyOffset": 9, "before": BASE_TIME + 10_000, "after": BASE_TIME + 2000, "ms": 8000}
    bucket = {"from": 28, "to": 31, "messages": 900, "bytes": 30_000}
    return {
            "kind": "stats", "version": 4,
            "store": f"/data/{HOSTILE[0]}", "flavour": "5.4", "beginOffset": 0, "endOffset": 90_000, "skippedBytes": 0,
            "unreadableAt": None, "selection": {"topics": [], "begin": None, "end": None}, **size,
            "firstStoreTimestamp": BASE_TIME, "lastStoreTimestamp": BASE_TIME + 40_000, "compressed": 3,
            "transactions": {"normal": 900}, "topics": [size | {"topic": name} for name in HOSTILE], "hours": [],
            "bins": {
                "stepMs": 1000,
                "rows": [{"topic": HOSTILE[n % 13], "begin": BASE_TIME + 1000 * n, "messages": 20} for n in range(40)],
            },
            "keysSeen": seen, "uniqKeysSeen": seen, "hotKeys": hot, "hotUniqKeys": hot,
            "tags": hot | {"top": [*named, named[0] | {"text": "t\x1b[31m", "count": 501}][::-1]}, "hosts": hot,
            "bodySizes": {"median": 31, "p99": 31, "max": 31, "buckets": [bucket]},
            "clock": {
                "silenceMs": 5000, "steps": 1, "silences": 1, "largestSteps": [event],
                "largestSilences": [event | {"after": BASE_TIME + 18_000}],
            },
            "index": {
                "hashSlotNum": 5000, "indexNum": 20_000, "entries": 2700, "files": 1,
                "verdict": {"answer": "right", "words": ["5,000 slots are right: so it is."]},
            },
        }  # fmt: skip
