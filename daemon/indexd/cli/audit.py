"""audit: a broker's own index held against its log, strictly read-only, whether the broker runs or not."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from indexd.cli.engine import spark_session, uses_spark
from indexd.cli.options import Parser, add_command, wants_json
from indexd.cli.output import print_json, print_line, show_bytes, show_time
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.units import printable
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from indexd.audit import Audit

_LINES_PER_KIND = 20
_HOLES_SHOWN = 20
_EXIT_FINDINGS = 1


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    text = "hold a broker's own index against its log, changing nothing"
    add_command(commands, "audit", [common], text).set_defaults(function=audit)


def audit(args: argparse.Namespace, config: Config) -> int:
    """Compare STORE/index with the log; 1 if a key is not findable or something does not hold."""
    prepare_compiler()
    found, seconds = _on_spark(config) if uses_spark(config) else _here(config)
    if wants_json(args):
        for row in found.rows():
            if row["kind"] == "summary":
                row |= {"seconds": round(seconds, 3), "store": str(config.store.store)}
            print_json(row)
    else:
        _print_findings(found)
        _print_summary(found, str(config.store.store), seconds)
    return 0 if found.is_sound else _EXIT_FINDINGS


def _here(config: Config) -> tuple[Audit, float]:
    from indexd.audit import audit_with, load_kernels, plan_audit  # noqa: PLC0415 - loads numba
    from indexd.cli.progress import ProgressBar  # noqa: PLC0415 - queries need no bar

    disk = disk_for(config)
    load_kernels(config)
    started = time.monotonic()
    with ProgressBar("audit") as bar:
        found = audit_with(plan_audit(disk, config), disk, config, bar.to)
    return found, time.monotonic() - started


def _on_spark(config: Config) -> tuple[Audit, float]:
    from indexd.cli.progress import ProgressBar  # noqa: PLC0415 - queries need no bar

    with spark_session(config, "indexd audit") as spark:
        from indexd.spark.audit import audit_on_spark  # noqa: PLC0415 - loads pyspark, which is optional

        started = time.monotonic()
        with ProgressBar("audit") as bar:
            found = audit_on_spark(spark, config, bar.to)
        return found, time.monotonic() - started


def _print_findings(found: Audit) -> None:
    shown: Counter[str] = Counter()
    for finding in found.findings:
        shown[finding.what] += 1
        if shown[finding.what] <= _LINES_PER_KIND:
            print_line(f"{finding.file} byte {finding.position}: {printable(finding.text)}")
    for what, count in found.counts.items():
        more = count - min(shown[what], _LINES_PER_KIND)
        if more > 0:
            print_line(f"and {more:,} more of the kind {what}")


def _print_summary(found: Audit, store: str, seconds: float) -> None:
    for hole in found.holes[:_HOLES_SHOWN]:
        where = "from there to the end of the log" if hole == found.tail else f"to {hole.end}"
        print_line(
            f"hole: log bytes {hole.begin} {where} ({show_bytes(hole.size)}), stored {show_time(hole.begin_timestamp)} "
            f"to {show_time(hole.end_timestamp)}: {hole.keys:,} keys of {hole.messages:,} messages are not findable"
        )
    if found.hole_count > _HOLES_SHOWN:
        print_line(f"and {found.hole_count - _HOLES_SHOWN:,} more holes")
    share = 100 * found.findable_keys / found.keys if found.keys else 100.0
    # Rounded down: what is not whole must not look so.
    print_line(
        f"{printable(store)}: {int(share * 100) / 100:.2f} % of {found.keys:,} keys findable, "
        f"{_count(found.hole_count, 'hole')}, {_count(sum(found.counts.values()), 'finding')}"
    )
    print_line(_covered(found, seconds))


def _covered(found: Audit, seconds: float) -> str:
    flavours = ", ".join(
        era.flavour if not n else f"{era.flavour} from {era.begin} on" for n, era in enumerate(found.eras)
    )
    size = found.log_end - found.log_begin
    line = (
        f"covered: log bytes {found.log_begin} to {found.log_end} ({show_bytes(size)}, {found.messages:,} messages), "
        f"{_count(len(found.files), 'index file')} of flavour {flavours} "
        f"({'as given' if found.is_flavour_given else 'by its entries'}), {found.entries:,} entries compared, "
        f"in {seconds:.2f} s"
    )
    if found.expired_entries:
        line += f"; {found.expired_entries:,} entries point before the log begins: their messages have expired"
    if found.gaps:
        size = sum(gap.end - gap.begin for gap in found.gaps)
        line += f"; {_count(len(found.gaps), 'range')} of {show_bytes(size)} in the log could not be read"
    if found.unreadable is not None:
        line += f"; behind its end stands {found.unreadable}"
    return line


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}" if number else f"no {what}s"
