"""Everything that was found as one plain object: what ``--json`` prints, and what terminal, tables and page show.

Times in ms since 1970, sizes in bytes, shares from 0 to 1. Texts are as the log has them, hostile ones too: whoever
shows them escapes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from indexd.commitlog.decoder import decode_utf8
from indexd.spark.stats.buckets import HOUR, bounds_of, quantile, used
from indexd.spark.stats.clock import Event
from indexd.spark.stats.collect import Hot, Index, Named, Statistics, total_lengths
from indexd.spark.stats.content import Content
from indexd.spark.stats.content_kernel import CELL, NO_BIN
from indexd.spark.stats.queries import RANGES
from indexd.spark.stats.queries_kernel import TALLY
from indexd.spark.stats.tally import Sample

#: Of the object and of the tables; a field that changes its meaning or goes counts it up, a new one does not.
VERSION = 1
_CELL_NAMES = tuple(name.split("_")[0] + "".join(part.title() for part in name.split("_")[1:]) for name in CELL)


def to_report(found: Statistics) -> dict[str, Any]:
    """The object; its keys are part of the interface."""
    content, clock = found.content, found.content.clock
    totals = dict(zip(_CELL_NAMES, (content.total(name) for name in CELL), strict=True))
    return {
        "kind": "stats",
        "version": VERSION,
        "store": found.store,
        "flavour": found.flavour,
        "beginOffset": found.begin,
        "endOffset": found.end,
        "skippedBytes": content.skipped_bytes,
        "unreadableAt": found.unreadable_at,
        "selection": {
            "topics": list(found.selection.topics),
            "begin": found.selection.begin if found.selection.begin > -(1 << 63) else None,
            "end": found.selection.end if found.selection.end < (1 << 63) - 1 else None,
        },
        "firstStoreTimestamp": clock.least if clock.messages else None,
        "lastStoreTimestamp": clock.greatest if clock.messages else None,
        **totals,
        "compressed": content.sum("compressed"),
        "transactions": {name: content.sum(name) for name in ("normal", "prepared", "committed", "rolled_back")},
        "topics": _topics(content),
        "hours": _hours(content),
        "bins": {"stepMs": content.step, "rows": _bins(content)},
        "keysSeen": _sample(content.key_sample),
        "uniqKeysSeen": _sample(content.uniq_sample),
        "hotKeys": _hot(found.keys),
        "hotUniqKeys": _hot(found.uniq_keys, least=2),
        "repeatedUniqKeys": [_named(named) for named in found.twice],
        "tags": _hot(found.tags),
        "hosts": _hot(found.hosts),
        "bodySizes": _sizes(content),
        "clock": {
            "silenceMs": found.selection.silence,
            "steps": clock.steps,
            "silences": clock.silences,
            "largestSteps": [_event(event) for event in clock.largest_steps],
            "largestSilences": [_event(event) for event in clock.largest_silences],
        },
        "index": _index(found.index) if found.index is not None else None,
    }


def _topics(content: Content) -> list[dict[str, Any]]:
    sums: dict[bytes, list[int]] = {}
    hours: dict[bytes, list[int]] = {}
    for (topic, hour), values in content.cells.items():
        mine = sums.get(topic, [0] * len(CELL))
        sums[topic] = [a + b for a, b in zip(mine, values, strict=True)]
        if hour != NO_BIN:
            hours.setdefault(topic, []).append(hour)
    rows: list[dict[str, Any]] = []
    for topic, summed in sorted(sums.items(), key=lambda item: (-item[1][0], item[0])):
        known = [hour * HOUR for hour in hours.get(topic, ())]
        span = {"firstHour": min(known, default=None), "lastHour": max(known, default=None)}
        rows.append({"topic": decode_utf8(topic), **dict(zip(_CELL_NAMES, summed, strict=True)), **span})
    return rows


def _hours(content: Content) -> list[dict[str, Any]]:
    """By topic and hour; hour None: those that no clock shows, or all of a log with too many pairs of both."""
    return [
        {"topic": decode_utf8(topic), "hour": hour * HOUR if hour != NO_BIN else None}
        | dict(zip(_CELL_NAMES, values, strict=True))
        for (topic, hour), values in sorted(content.cells.items(), key=lambda item: (item[0][1], item[0][0]))
    ]


def _bins(content: Content) -> list[dict[str, Any]]:
    """Messages by topic and ``stepMs``, which fits to the log; times as those of ``hours``."""
    column = CELL.index("messages")
    return [
        {"topic": decode_utf8(topic), "begin": number * content.step, "messages": values[column]}
        for (topic, number), values in sorted(content.bins.items(), key=lambda item: (item[0][1], item[0][0]))
        if number != NO_BIN
    ]


def _sample(sample: Sample) -> dict[str, Any]:
    """Distinct keys by how often they occur; estimates unless ``isExact``, with their relative standard error."""
    times = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 128), (129, 1024), (1025, None)]
    return {
        "distinct": sample.distinct,
        "isExact": sample.is_exact,
        "standardError": round(sample.spread, 6),
        "repeated": int((sample.counts > 1).sum()) * sample.scale,
        "byOccurrences": [
            {
                "from": first,
                "to": last,
                "keys": int(((sample.counts >= first) & (sample.counts <= (last or np.inf))).sum()) * sample.scale,
            }
            for first, last in times
        ],
    }


def _named(named: Named) -> dict[str, Any]:
    text = named.text
    return {
        "topic": text.topic if text else None,
        "text": text.text if text else None,
        "count": named.count,
        "phyOffset": named.phy_offset,
    }


def _hot(hot: Hot, least: int = 1) -> dict[str, Any]:
    return {
        "isExact": hot.is_exact,
        "completeAbove": hot.complete_above,
        "distinct": hot.distinct,
        "repeatedAtLeast": hot.repeated,
        "top": [_named(named) for named in hot.named if named.count >= least],
    }


def _event(event: Event) -> dict[str, Any]:
    return {"phyOffset": event.phy_offset, "before": event.before, "after": event.after, "ms": event.size}


def _sizes(content: Content) -> dict[str, Any]:
    counts, sizes = content.bodies
    first, behind = used(counts)
    return {
        "median": quantile(counts, 0.5),
        "p99": quantile(counts, 0.99),
        "max": bounds_of(behind - 1)[1] if behind else 0,
        "buckets": [
            dict(zip(("from", "to"), bounds_of(bucket), strict=True))
            | {"messages": int(counts[bucket]), "bytes": int(sizes[bucket])}
            for bucket in range(first, behind)
        ],
    }


def _index(index: Index) -> dict[str, Any]:
    slots, entries = total_lengths(index.files)
    first, behind = used(slots)
    verdict, judgement = index.verdict, index.judgement
    longest = max(index.files, key=lambda file: file.longest, default=None)
    return {
        "hashSlotNum": index.layout.hash_slot_num,
        "indexNum": index.layout.index_num,
        "files": [
            {
                "file": file.number,
                "entries": file.entries,
                "usedSlots": file.used_slots,
                "longestChain": file.longest,
                "meanChain": file.squares / file.entries,
                "begin": file.begin,
                "end": file.end,
            }
            for file in index.files
        ],
        "chains": [
            dict(zip(("from", "to"), bounds_of(bucket), strict=True))
            | {"slots": int(slots[bucket]), "entries": int(entries[bucket])}
            for bucket in range(first, behind)
        ],
        "longestChain": {
            "entries": longest.longest if longest else 0,
            "file": longest.number if longest else None,
            "kind": index.longest.kind if index.longest else None,
            "topic": index.longest.topic if index.longest else None,
            "text": index.longest.text if index.longest else None,
        },
        "verdict": {
            "answer": verdict.answer,
            "recommendedSlots": verdict.recommended,
            "meanChain": verdict.walk,
            "strangers": verdict.strangers,
            "spread": verdict.spread,
            "words": list(verdict.words),
        },
        "queries": {
            "ranges": [
                {"range": name, "spanMs": span or None}
                | dict(zip(TALLY, row, strict=True))
                | {"wrongShare": judgement.share(name)}
                for (name, span), row in zip(RANGES, judgement.tallies, strict=True)
            ],
            "slotsTried": judgement.slots,
            "slotsSampledOneIn": judgement.mask + 1,
            "overlongSlots": judgement.overlong_slots,
            "keys": judgement.keys,
            "collidingKeys": judgement.colliding_keys,
        },
    }
