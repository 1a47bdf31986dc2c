"""The report on a terminal, as wide as that is; plain words and tables where standard output is none."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from indexd.pages.wording import show_duration, show_name, show_number, show_share, show_size, show_utc
from indexd.spark.stats.wording import RANGE_WORDS, show_range, show_repeated

_PLAIN_WIDTH = 110
_BARS = " ▁▂▃▄▅▆▇█"
Row = dict[str, Any]


def print_report(report: Row, top: int) -> None:
    """All of it to standard output; of each list the first ``top``."""
    console = Console(markup=False, highlight=False, emoji=False)
    is_unicode = console.encoding.lower().replace("-", "") == "utf8"
    if console.is_terminal:
        _print(console, report, top, is_unicode)
        return
    # A pipe gets no trailing blanks, and an escape where its encoding has no such character.
    console.width = shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns
    with console.capture() as captured:
        _print(console, report, top, is_unicode)
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip().encode(console.encoding, "backslashreplace").decode(console.encoding) + "\n")


def _print(console: Console, report: Row, top: int, is_unicode: bool) -> None:
    for title, body in _sections(report, top, console.width, is_unicode):
        console.print(Text(title, style="bold"))
        console.print(Padding(body, (0, 0, 1, 2), expand=False))


def _sections(report: Row, top: int, width: int, is_unicode: bool) -> list[tuple[str, RenderableType]]:
    found = [(show_name(report["store"]), _headline(report, width, is_unicode))]
    if not report["messages"]:
        return found
    found += [
        ("Topics", _topics(report, top)),
        (
            f"Hot keys ({_keys_note(report['keysSeen'], report['hotKeys'])})",
            _hot(report["hotKeys"], report["keys"], top),
        ),
    ]
    if report["repeatedUniqKeys"] or report["hotUniqKeys"]["top"]:
        found.append((f"Unique keys that occur more than once ({_twice_note(report)})", _twice(report, top)))
    if report["tags"]["top"]:
        found.append(("Tags", _hot(report["tags"], report["messages"], top, "tags")))
    found += [
        ("Hosts of producers", _hot(report["hosts"], report["messages"], top, "host")),
        (f"Body sizes ({_size_note(report)})", _sizes(report, is_unicode)),
        (f"The store's clock ({_clock_note(report)})", _clock(report, top)),
    ]
    if report["index"] is not None:
        found.append(("The index", _index(report["index"], is_unicode)))
    return found


def _table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for column in columns:
        is_number = column in numbers
        # A name gives way where the terminal is narrow, a number never.
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="ellipsis")
    return table


def _name(text: str | None) -> Text:
    return Text(show_name(text), no_wrap=True, overflow="ellipsis")


def _headline(report: Row, width: int, is_unicode: bool) -> RenderableType:
    first, last = report["firstStoreTimestamp"], report["lastStoreTimestamp"]
    lines = [
        f"{report['messages']:,} messages, {show_size(report['bytes'])}, in log bytes {report['beginOffset']:,} to "
        f"{report['endOffset']:,}",
    ]
    if first is not None:
        lines.append(f"stored {show_utc(first)} to {show_utc(last)} UTC, {show_duration(last - first)}")
    selection = report["selection"]
    if selection["topics"] or selection["begin"] is not None or selection["end"] is not None:
        lines.append("only what was asked for: the topics or times given; the index below is of the whole log")
    lines.append(
        f"{report['keys']:,} keys; {report['withoutKeys']:,} messages without ({_share(report, 'withoutKeys')}), "
        f"{report['withoutAnyKey']:,} without even a unique key"
    )
    if report["skippedBytes"]:
        lines.append(f"{show_size(report['skippedBytes'])} of the log were passed over as unreadable")
    if report["unreadableAt"] is not None:
        lines.append(f"the log ends at offset {report['unreadableAt']:,} in bytes that are no frame")
    line = _by_time(report, width - 4) if is_unicode else None
    return Group(*(Text(text) for text in lines), *([line] if line else []))


def _share(report: Row, field: str) -> str:
    return show_share(report[field] / report["messages"] if report["messages"] else None)


def _by_time(report: Row, width: int) -> Text | None:
    by_time: Counter[int] = Counter()
    for row in report["bins"]["rows"]:
        by_time[row["begin"]] += row["messages"]
    if len(by_time) < 2:
        return None
    step = report["bins"]["stepMs"]
    first, span = min(by_time), max(by_time) - min(by_time) + step
    columns = [0] * int(min(width, span // step))
    for begin, messages in by_time.items():
        columns[int((begin - first) * len(columns) // span)] += messages
    bars = "".join(_BARS[-(-8 * count // max(columns))] for count in columns)
    return Text.assemble(bars, f"\nmessages by time, {show_duration(span // len(columns))} a column")


def _topics(report: Row, top: int) -> RenderableType:
    table = _table(
        "TOPIC", "MESSAGES", "SHARE", "SIZE", "KEYS", "NO KEYS", "TAGGED",
        numbers=("MESSAGES", "SHARE", "SIZE", "KEYS", "NO KEYS", "TAGGED"),
    )  # fmt: skip
    for row in report["topics"][:top]:
        table.add_row(
            _name(row["topic"]), f"{row['messages']:,}", show_share(row["messages"] / report["messages"]),
            show_size(row["bytes"]), f"{row['keys']:,}", f"{row['withoutKeys']:,}", f"{row['tagged']:,}",
        )  # fmt: skip
    return _with_rest(table, len(report["topics"]) - top, "topics")


def _with_rest(table: RenderableType, more: int, what: str) -> RenderableType:
    return Group(table, Text(f"and {more:,} more {what}")) if more > 0 else table


def _keys_note(seen: Row, hot: Row) -> str:
    about = "" if seen["isExact"] else f", ± {100 * seen['standardError']:.1f} %"
    counts = "exact" if hot["isExact"] else f"too low by {hot['completeAbove']:,} at most"
    repeated = show_repeated(seen, hot)
    return f"{show_number(seen['distinct'])} distinct{about}, {repeated} more than once; counts {counts}"


def _twice_note(report: Row) -> str:
    seen = report["uniqKeysSeen"]
    return f"{show_repeated(seen, report['hotUniqKeys'])} of {show_number(seen['distinct'])}"


def _hot(hot: Row, total: int, top: int, what: str = "key") -> RenderableType:
    if not hot["top"]:
        return Text("none")
    has_topic = any(row["topic"] for row in hot["top"])
    table = _table(
        what.upper(),
        *(["TOPIC"] if has_topic else []),
        "COUNT",
        "SHARE",
        "FIRST AT",
        numbers=("COUNT", "SHARE", "FIRST AT"),
    )
    for row in hot["top"][:top]:
        topic = [_name(row["topic"])] if has_topic else []
        share = show_share(row["count"] / total if total else None)
        table.add_row(_name(row["text"]), *topic, f"{row['count']:,}", share, f"{row['phyOffset']:,}")
    return table


def _twice(report: Row, top: int) -> RenderableType:
    rows = {row["phyOffset"]: row for row in (*report["hotUniqKeys"]["top"], *report["repeatedUniqKeys"])}
    best = sorted(rows.values(), key=lambda row: (-row["count"], row["phyOffset"]))
    return _hot({"top": best}, report["messages"], top, "unique key")


def _size_note(report: Row) -> str:
    sizes = report["bodySizes"]
    return f"as stored; half up to {show_size(sizes['median'])}, 99 % up to {show_size(sizes['p99'])}"


def _sizes(report: Row, is_unicode: bool) -> RenderableType:
    powers: dict[int, list[int]] = {}
    for row in report["bodySizes"]["buckets"]:
        power = powers.setdefault(row["from"].bit_length(), [0, 0])
        power[0] += row["messages"]
        power[1] += row["bytes"]
    table = _table("BODY", "MESSAGES", "BYTES", "", numbers=("BODY", "MESSAGES", "BYTES"))
    most = max(messages for messages, _ in powers.values())
    for bits, (messages, size) in sorted(powers.items()):
        label = f"< {show_size(1 << bits)}" if bits else "empty"
        table.add_row(label, f"{messages:,}", show_size(size), _bar(messages / most, is_unicode))
    return table


def _bar(share: float, is_unicode: bool, width: int = 30) -> Text:
    cells = max(round(share * width), 1 if share else 0)
    return Text(("█" if is_unicode else "#") * cells, style="cyan")


def _clock_note(report: Row) -> str:
    clock = report["clock"]
    silence = show_duration(clock["silenceMs"])
    return f"{clock['steps']:,} steps back, {clock['silences']:,} silences of more than {silence}"


def _clock(report: Row, top: int) -> RenderableType:
    kinds = (("step back", "largestSteps"), ("silence", "largestSilences"))
    rows = [(kind, row) for kind, field in kinds for row in report["clock"][field][:top]]
    if not rows:
        return Text("nothing to say: no step, no silence")
    table = _table("WHAT", "BY", "FROM (UTC)", "TO (UTC)", "AT", numbers=("BY", "FROM (UTC)", "TO (UTC)", "AT"))
    for kind, row in rows:
        before, after = (show_utc(row[name], seconds=True).partition(".")[0] for name in ("before", "after"))
        table.add_row(kind, show_duration(row["ms"]), before, after, f"{row['phyOffset']:,}")
    return table


def _index(index: Row, is_unicode: bool) -> RenderableType:
    verdict = index["verdict"]
    lines: list[RenderableType] = [Text(words) for words in verdict["words"]]
    if index["longestChain"]["entries"]:
        longest = index["longestChain"]
        lines.append(
            Text(
                f"The longest chain holds {longest['kind'] or 'a key'} {show_name(longest['text'])} of topic "
                f"{show_name(longest['topic'])}."
            )
        )
        lines += [Text(""), _chains(index["chains"], is_unicode)]
    queries = index["queries"]
    if any(row["asked"] for row in queries["ranges"]):
        lines += [Text(""), Text("Queries for a key that RocketMQ would answer wrongly, by the range asked for:")]
        lines.append(_queries(queries["ranges"]))
        lines.append(
            Text(f"one slot in {queries['slotsSampledOneIn']:,} tried; {queries['overlongSlots']:,} too long to try")
        )
    return Group(*lines)


def _chains(chains: Sequence[Row], is_unicode: bool) -> RenderableType:
    powers: dict[int, list[int]] = {}
    for row in chains:
        power = powers.setdefault(row["from"].bit_length(), [0, 0])
        power[0] += row["slots"]
        power[1] += row["entries"]
    table = _table("CHAIN OF", "SLOTS", "ENTRIES", "", numbers=("CHAIN OF", "SLOTS", "ENTRIES"))
    all_entries = sum(entries for _, entries in powers.values()) or 1
    for bits, (slots, entries) in sorted(powers.items()):
        label = "none" if not bits else show_range(1 << (bits - 1), (1 << bits) - 1)
        table.add_row(label, f"{slots:,}", f"{entries:,}", _bar(entries / all_entries, is_unicode))
    return table


def _queries(ranges: Sequence[Row]) -> RenderableType:
    names = ("WRONG", "ASKED", "OVER 64", "MISSED", "OTHER KEY", "OTHER TIME")
    table = _table("RANGE", *names, numbers=names)
    for row in ranges:
        counts = (f"{row[name]:,}" for name in ("asked", "limit", "missed", "collision", "outside"))
        table.add_row(RANGE_WORDS[row["range"]], show_share(row["wrongShare"]), *counts)
    return table
