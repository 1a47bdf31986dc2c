"""Shows the statistics of a log on a terminal, as wide as that is, and as an HTML page that any browser opens."""

from __future__ import annotations

import shutil
import sys
from collections import Counter, defaultdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from indexd.pages.report import Section, render_report
from indexd.pages.wording import show_duration, show_name, show_number, show_share, show_size, show_utc
from indexd.spark.stats.report import RIGHT, STEPS, TOO_FEW, Report, Row, step_for
from indexd.storage.disk import Disk

_PLAIN_WIDTH = 110
#: Topics with a colour of their own in the plot; the rest are one more.
_TOPICS_MAX = 7
_TICKS = 6
_MARKS_MAX = 12


def sections_of(report: Report, top: int) -> list[Section]:
    """What is shown of a report, in order; of each list the first ``top``."""
    if not report["messages"]:
        return [Section("Messages", ["There is no message in what was read."])]
    events = [
        (kind, show_duration(event["ms"]), *(show_utc(event[name], seconds=True) for name in ("before", "after")),
         f"{event['phyOffset']:,}")
        for kind, found in (("step back", "largestSteps"), ("silence", "largestSilences"))
        for event in report["clock"][found][:top]
    ]  # fmt: skip
    clock = f"{report['clock']['steps']:,} steps back, {report['clock']['silences']:,} silences of more than "
    return [
        _topics(report, top),
        _hot("Hot keys", "key", report["hotKeys"], report["keys"], top),
        _hot("Unique keys that occur more than once", "unique key", report["hotUniqKeys"], report["messages"], top),
        _hot("Tags", "tags", report["tags"], report["messages"], top),
        _hot("Hosts of producers", "host", report["hosts"], report["messages"], top),
        _body_sizes(report),
        Section("The store's clock", [f"{clock}{show_duration(report['clock']['silenceMs'])}."],
                ("what", ">by", ">from (UTC)", ">to (UTC)", ">at"), events),
        _index(report["index"]),
    ]  # fmt: skip


def _topics(report: Report, top: int) -> Section:
    rows = [
        (show_name(row["topic"]), f"{row['messages']:,}", show_share(row["messages"] / report['messages']),
         show_size(row["bytes"]), f"{row['keys']:,}", f"{row['withoutKeys']:,}", f"{row['tagged']:,}")
        for row in report["topics"][:top]
    ]  # fmt: skip
    more = len(report["topics"]) - len(rows)
    columns = ("topic", ">messages", ">share", ">size", ">keys", ">no keys", ">tagged")
    bars = [row["messages"] / report["topics"][0]["messages"] for row in report["topics"][:top]]
    return Section(
        "Messages by topic", [f"The first {top:,}; there are {more:,} more."] if more else [], columns, rows, bars
    )


def _hot(title: str, what: str, hot: Row, total: int, top: int) -> Section:
    shown = hot["top"][:top]
    of_topics = any(row["topic"] for row in shown)
    words = [f"{show_number(hot['repeatedAtLeast'])} of {show_number(hot['distinct'])} occur more than once."]
    rows = [
        (show_name(row["text"]), *([show_name(row["topic"])] if of_topics else []), f"{row['count']:,}",
         show_share(row["count"] / total if total else None), f"{row['phyOffset']:,}")
        for row in shown
    ]  # fmt: skip
    bars = [row["count"] / shown[0]["count"] for row in shown]
    columns = (what, *(["topic"] if of_topics else []), ">count", ">share", ">first at")
    return Section(title, words if shown else ["None was found."], columns, rows, bars)


def _body_sizes(report: Report) -> Section:
    # A row a power of two; the bars are of bytes.
    found, share = report["bodySizes"], report["compressed"] / report["messages"]
    words = f"Half of the bodies have up to {show_size(found['median'])}, 99 % up to {show_size(found['p99'])}, as"
    compressed = f"; {show_share(share)} are compressed" if share else ""
    messages, sizes = Counter[int](), Counter[int]()
    for row in found["buckets"]:
        bits = row["from"].bit_length()
        messages[bits] += row["messages"]
        sizes[bits] += row["bytes"]
    rows = [
        (f"< {show_size(1 << bits)}" if bits else "none", f"{messages[bits]:,}", show_size(sizes[bits]))
        for bits in sorted(messages)
    ]
    bars = [sizes[bits] / (sizes.total() or 1) for bits in sorted(messages)]
    return Section("Body sizes", [f"{words} they are stored{compressed}."], ("body", ">messages", ">bytes"), rows, bars)


def _index(index: Row) -> Section:
    verdict = index["verdict"]
    state = {RIGHT: "good", TOO_FEW: "bad"}.get(verdict["answer"], "")
    return Section(f"Are {index['hashSlotNum']:,} slots right for this store?", verdict["words"], (), [], (), state)


def headline(report: Report) -> list[str]:
    """What was read, in a few lines."""
    lines = [
        f"{report['messages']:,} messages, {show_size(report['bytes'])}, in log bytes {report['beginOffset']:,} to "
        f"{report['endOffset']:,}"
    ]
    first, last, chosen = report["firstStoreTimestamp"], report["lastStoreTimestamp"], report["selection"]
    if first is not None and last is not None:
        lines.append(f"stored {show_utc(first)} to {show_utc(last)} UTC, {show_duration(last - first)}")
    if any(value not in ([], None) for value in chosen.values()):
        topics = ", ".join(map(show_name, chosen["topics"])) or "all topics"
        times = f"{show_utc(chosen['begin'])} to {show_utc(chosen['end'])} UTC"
        lines.append(f"Only what was asked for: {topics}, {times}. What is said of the index is of the whole log.")
    without = f"{report['withoutKeys']:,} messages without, {report['withoutAnyKey']:,} without even a unique key"
    lines.append(f"{report['keys']:,} keys; {without}")
    if report["skippedBytes"]:
        lines.append(f"{show_size(report['skippedBytes'])} of the log were passed over as unreadable")
    if report["unreadableAt"] is not None:
        lines.append(f"the log ends at offset {report['unreadableAt']:,} in bytes that are no frame")
    return lines


def print_report(report: Report, top: int) -> None:
    """All of it to standard output, as wide as the terminal is."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns
    with console.capture() as captured:
        for section in [Section(show_name(report["store"]), headline(report)), *sections_of(report, top)]:
            console.print(Text(section.title, style="bold"))
            for words in section.words:
                console.print(Padding(Text(words), (0, 0, 0, 2)))
            if section.rows:
                console.print(Padding(_table(section), (0, 0, 0, 2), expand=False))
            console.print()
    sys.stdout.write(captured.get().encode(console.encoding, "backslashreplace").decode(console.encoding))


def _table(section: Section) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for column in section.columns:
        # A name gives way where the terminal is narrow, a number never.
        is_number = column.startswith(">")
        table.add_column(
            column.lstrip(">").upper(),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="ellipsis",
        )
    for row in section.rows:
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
    return table


def write_page(report: Report, disk: Disk, path: Path, top: int) -> None:
    """Write the page to ``path``, in place of what is there; its folder is made. Raises DiskError."""
    disk.make_dir(path.parent)
    disk.write_atomically(path, render_page(report, top).encode("utf-8", "replace"), durable=False)


def render_page(report: Report, top: int) -> str:
    """The page of a report, of each list the first ``top``."""
    store = show_name(report["store"])
    return render_report(
        title=f"Commitlog of {store}", heading="What is in this commitlog", state="", lines=[store, *headline(report)],
        tiles=[
            (show_number(report["messages"]), "messages"),
            (show_size(report["bytes"]), "of frames"),
            (show_number(len(report["topics"])), "topics"),
            (show_number(report["keysSeen"]["distinct"]), "distinct keys"),
            (show_share(report["withoutKeys"] / report["messages"] if report["messages"] else None), "without a key"),
            (show_number(report["clock"]["steps"]), "steps of the clock back"),
        ],
        plot=_plot(report), sections=sections_of(report, top),
        footer=f"index entries as RocketMQ {report['flavour']} makes them · all times in UTC",
    )  # fmt: skip


def _plot(report: Report) -> Row | None:
    """Messages by topic and time as columns, with what the clock did, in per cent of the page's width."""
    rows = report["bins"]["rows"]
    if not rows:
        return None
    step = max(report["bins"]["stepMs"], step_for(rows[-1]["begin"] - rows[0]["begin"]))
    own = [row["topic"] for row in report["topics"][:_TOPICS_MAX]]
    sums: dict[int, Counter[int]] = defaultdict(Counter)
    for row in rows:
        topic = own.index(row["topic"]) if row["topic"] in own else _TOPICS_MAX
        sums[row["begin"] // step * step][topic] += row["messages"]
    first, span = min(sums), max(sums) + step - min(sums)
    most = max(counts.total() for counts in sums.values())
    names = [*(show_name(topic, 40) for topic in own), "other topics"]

    def at(time: int) -> float:
        return float(100 * min(max((time - first) / span, 0), 1))

    silences = [(at(event["before"]), at(event["after"])) for event in report["clock"]["largestSilences"][:_MARKS_MAX]]
    ticks = range(first, first + span, -(-span // step // _TICKS) * step)
    return {
        "title": f"messages in {show_duration(step)}",
        "caption": f", up to {most:,}{'; silences are grey' if silences else ''}",
        "columns": [
            {
                "at": at(begin),
                "width": 94 * step / span,
                "title": show_utc(begin, seconds=True)
                + "".join(f"\n{names[n]}: {counts[n]:,}" for n in sorted(counts)),
                "parts": [(f"t{number}", 100 * counts[number] / most) for number in sorted(counts)],
            }
            for begin, counts in sums.items()
        ],
        "ticks": [(at(time), show_utc(time, seconds=step < STEPS[4]).partition(".")[0]) for time in ticks],
        "steps": [at(event["before"]) for event in report["clock"]["largestSteps"][:_MARKS_MAX]],
        "silences": silences,
    }
