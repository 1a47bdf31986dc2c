"""What an audit on Spark has kept counts in one process, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.audit import AuditOptions, audit_here
from indexd.audit.report import AuditReport
from indexd.index.format import IndexLayout
from indexd.spark.audit import audit_on_spark
from indexd.storage.disk import Disk
from support.auditing import config_for, index_log
from support.small_log import SEGMENT_SIZE, write_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAYOUT = IndexLayout(500, 5000)


def rows(report: AuditReport) -> list[dict[str, Any]]:
    volatile = ("seconds", "bytesRead", "resumedTasks", "manner")
    return [{key: row[key] for key in row if key not in volatile} for row in report.rows()]


def test_parts_of_either_engine(spark: SparkSession, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_log(store, 4000)
    config = config_for(store, LAYOUT, SEGMENT_SIZE, split_size=SEGMENT_SIZE, read_rate_max="20MiB")
    index_log(config)
    sorted((store / "index").iterdir())[1].unlink()
    wanted = audit_here(config, Disk(), AuditOptions(samples=9), lambda *_: None)
    done: list[tuple[int, int]] = []

    first = audit_on_spark(spark, config, AuditOptions(samples=9, kept=tmp_path / "kept"), lambda *at: done.append(at))
    tasks = len(first.plan.tasks)
    assert (first.resumed_tasks, done[-1][0]) == (0, done[-1][1])
    assert done == sorted(done)
    assert first.manner[0].startswith("at most ")
    assert tasks > len(wanted.plan.tasks)  # cut more finely, and that is kept, too

    here = audit_here(config, Disk(), AuditOptions(samples=9, kept=tmp_path / "kept"), lambda *_: None)
    assert (here.resumed_tasks, len(here.plan.tasks)) == (tasks - 1, tasks)
    again = audit_on_spark(spark, config, AuditOptions(samples=9, kept=tmp_path / "kept"))
    assert again.resumed_tasks == tasks - 1
    assert rows(first) == rows(here) == rows(again) == rows(wanted)
