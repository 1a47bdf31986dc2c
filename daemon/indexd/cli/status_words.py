"""Words: the figures of a look as people say them, and the log as a strip; nothing here knows how it is drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from indexd.cli.output import show_bytes
from indexd.cli.status_ask import Look

Row = Mapping[str, Any]
#: What a cell of the strip can be, worst first: a cell is what is worst in it.
LEFT_OUT, NOT_READ, READ, INDEXED, DURABLE = range(5)
_RATE_WORDS = {
    "writtenBytesPerSecond": "written",
    "readBytesPerSecond": "read",
    "indexedBytesPerSecond": "indexed",
}
_OFFSET_WORDS = {
    "commitLogMinOffset": "begins at",
    "durableOffset": "durable to",
    "phyOffset": "indexed to",
    "readOffset": "read to",
    "commitLogMaxOffset": "ends at",
}


def strip(row: Row, width: int) -> list[int]:
    """The log from its begin to its end in ``width`` cells, each the worst that is in it."""
    built = int(row["phyOffset"])
    begin, durable, read = (
        int(row.get(key) or default)
        for key, default in (("commitLogMinOffset", 0), ("durableOffset", 0), ("readOffset", built))
    )
    end = max(int(row.get("commitLogMaxOffset") or 0), read, built, begin + 1)
    gaps = [(int(gap[0]), int(gap[1])) for gap in row.get("uncovered") or ()]
    gaps.append((0, int(row.get("beginOffset") or 0)))
    found = []
    for number in range(width):
        first = begin + (end - begin) * number // width
        last = max(begin + (end - begin) * (number + 1) // width, first + 1)
        if any(low < last and high > first for low, high in gaps):
            found.append(LEFT_OUT)
        elif last <= durable:
            found.append(DURABLE)
        elif last <= built:
            found.append(INDEXED)
        else:
            found.append(READ if last <= read else NOT_READ)
    return found


def knows_log(look: Look) -> bool:
    """Whether the end of the log is known, so that a strip can be drawn."""
    return "phyOffset" in look.row and ("commitLogMaxOffset" in look.row or look.row.get("caughtUp") is True)


def head(look: Look) -> list[str]:
    """Who it is."""
    row = look.row
    words = [f"pid {row['pid']}"] if row.get("pid") else []
    if row.get("startedAt") and not look.is_over:
        words.append(f"up {span(look.at - row['startedAt'] / 1000)}")
    if row.get("cluster"):
        words.append(f"{row['cluster']} / {row.get('nodeId')}")
    if row.get("mode"):
        words.append(f"mode {row['mode']}")
    if row.get("version"):
        words.append(f"indexd {row['version']}")
    return words


def recovery(progress: Row) -> tuple[float, str]:
    """How much of the step is done, and in words; files or bytes of log, as the step counts."""
    done, total = int(progress["done"]), int(progress["total"])
    ratio = done / total if total > 0 else 0.0
    if progress.get("unit") == "files":
        words = f"{done:,} of {total:,} files"
    else:
        words = f"{show_bytes(done)} of {show_bytes(total)}"
    return ratio, f"{ratio:.0%}  {progress['step']}: {words}"


def standing(look: Look) -> str:
    """What it does, as the headline has it."""
    if look.phase == "opening" and look.row.get("compiling"):
        return "opening: compiling, once"
    if look.phase != "unreachable" or "lastPhase" not in look.row:
        return look.phase
    return f"does not answer (figures are {span(look.age)} old)"


def asked(look: Look) -> str:
    """Whom it was asked, and when; of what was written down, how old that is and what it was doing then."""
    words = f"asked {look.asked}, {clock(look.at * 1000)}"
    if look.age:
        words += f", written {span(look.age)} ago"
    if "lastPhase" in look.row:
        words += f", when it was {look.row['lastPhase']}"
    return words


def lag(look: Look) -> str:
    """How far the index is behind the log, or was when one wrote it down that does not answer now."""
    row = look.row
    then = " then" if look.phase == "unreachable" else ""
    words = [show_bytes(row["dispatchBehindBytes"]), span((row.get("dispatchBehindMilliseconds") or 0) / 1000)]
    if row.get("dispatchBehindMessages") is not None:
        words.append(f"{row['dispatchBehindMessages']:,} messages")
    return ", ".join([*words, f"{'caught up' if row.get('caughtUp') else 'catching up'}{then}"])


def rates(found: Mapping[str, float]) -> str:
    """How fast it grows; "not known yet" is no rate of nothing."""
    if not found:
        return "not known yet"
    words = [f"{word} {show_bytes(found[name])}/s" for name, word in _RATE_WORDS.items() if name in found]
    if "indexedBytesPerSecond" not in found:
        words.append("indexed not known yet")
    if "readMessagesPerSecond" in found:
        words.append(f"{found['readMessagesPerSecond']:,.0f} messages/s")
    return ", ".join(words)


def offsets(row: Row) -> str:
    """The offsets of the log, from its begin to its end."""
    return ", ".join(f"{word} {row[key]}" for key, word in _OFFSET_WORDS.items() if row.get(key) is not None)


def covered(look: Look) -> str:
    """Which part of the log the index speaks for."""
    row = look.row
    words = f"log bytes {row.get('beginOffset', 0)} to {row['phyOffset']}"
    if gaps := row.get("uncovered"):
        size = show_bytes(sum(int(gap[1]) - int(gap[0]) for gap in gaps))
        words += f", without {len(gaps)} {'range' if len(gaps) == 1 else 'ranges'} of {size}"
    if look.is_over and "caughtUp" in row:
        words += ", all of the log" if row["caughtUp"] else ", the log goes on behind that"
    return words


def details(look: Look) -> Iterator[tuple[str, str]]:
    """The lines that are plain words, each with its label."""
    row = look.row
    if "messages" in row:
        entries = f", {row['indexEntries']:,} entries in {row['indexFiles']} index files" if look.is_over else ""
        yield "holds", f"{row['messages']:,} messages{entries}"
    if row.get("queueRows") is not None:
        oldest = span((row.get("queueOldestMilliseconds") or 0) / 1000)
        yield "queue", f"{row['queueRows']:,} messages, {show_bytes(row['queueBytes'])}, the oldest waits for {oldest}"
    if opening := row.get("lastRecovery"):
        kept = f", {opening['keptEntries']:,} entries kept, {opening['droppedEntries']:,} dropped"
        yield "opening", f"{opening['event']} in {span(opening['seconds'])}{kept}"
    if (scrub := row.get("scrub")) and scrub.get("endedAt"):
        found = f"damage found by {scrub['damaged']:,}" if scrub["damaged"] else "no damage found"
        yield "scrub", f"the last ended {clock(scrub['endedAt'])}, {show_bytes(scrub['bytes'])} read, {found}"
    if row.get("broker"):
        yield "broker", broker(row["broker"])
    if outlet := row.get("remoting"):
        yield "remoting", f"{outlet['address']}, {int(outlet.get('connections', 0)):,} connections"
    if row.get("mqtt"):
        yield "mqtt", values(row["mqtt"])
    if row.get("diskUsedRatio") is not None:
        most = f", indexing waits above {row['diskUsedMax']:.0%}" if row.get("diskUsedMax", 1) < 1 else ""
        yield "limits", f"disk {row['diskUsedRatio']:.0%} full{most}; memory {show_bytes(row.get('memoryBytes') or 0)}"
    for name in ("store", "data"):
        if row.get(name):
            yield name, str(row[name])


def broker(row: Row) -> str:
    """What is known of the broker."""
    alive = "it is not known whether it is alive"
    if row.get("alive") is not None:
        alive = "alive" if row["alive"] else "not running"
    words = [f"{alive}, pid {row['pid']}" if row.get("pid") else alive]
    if row.get("indexing") is not None:
        words.append("keeps an index itself" if row["indexing"] else "keeps no index itself")
    if row.get("maxOffset") is not None:
        words.append(f"its log ends at {row['maxOffset']}")
    return ", ".join(words)


def values(fields: Row) -> str:
    """Names and values of an event, or of an outlet; without those that are not known."""
    found = ((name, _value(value)) for name, value in fields.items() if value is not None)
    return ", ".join(f"{name} {words}" for name, words in found if words)


def _value(value: object) -> str:
    # An empty list says nothing.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return values(value)
    if isinstance(value, list | tuple):
        return "; ".join(_value(item) for item in value)
    return str(value)


def span(seconds: float) -> str:
    """A time that passed."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours < 1:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def clock(millis: float) -> str:
    """A time in ms as local time to the second, or the bare number if no clock can show it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(millis // 1000))
    except (OverflowError, OSError, ValueError):
        return str(millis)
