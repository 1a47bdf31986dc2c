"""The data source where workers are no children of the driver: on a standalone cluster and through Connect."""

from __future__ import annotations

import json
from pathlib import Path

from support.rows import rows_of_log
from support.small_log import SEGMENT_SIZE, write_log
from support.spark_cluster import ConnectServer, Standalone, output_of, start_python

SCRIPT = """
import json, sys
from support.spark_session import session_of

store, split = sys.argv[1:3]
with session_of(sys.argv[3:]) as spark:
    frame = spark.read.format("rocketmq_commitlog").option("columns", "phyOffset,topic,keys").option("splitSize", split)
    rows = frame.load(store).collect()
    counts = frame.load(store).groupBy("topic").count().collect()
    try:
        frame.load(store + "/nothing").count()
    except Exception as error:
        missing = str(error)
found = sorted([row.phyOffset, row.topic, row["keys"]] for row in rows)
print(json.dumps({"rows": found, "counts": {row.topic: row["count"] for row in counts}, "missing": missing}))
"""


def check(folder: Path, flags: list[str]) -> None:
    store = folder / "store"
    write_log(store, 3000)
    seen = json.loads(output_of(start_python(SCRIPT, store, SEGMENT_SIZE // 2, *flags)))
    rows = rows_of_log(store / "commitlog")
    assert seen["rows"] == [[row["phyOffset"], row["topic"], row["keys"]] for row in rows]
    assert sum(seen["counts"].values()) == len(rows)
    assert "/store/nothing" in seen["missing"]


def test_on_a_standalone_cluster(standalone: Standalone, tmp_path: Path) -> None:
    check(tmp_path, standalone.flags)


def test_through_connect(connect_server: ConnectServer, tmp_path: Path) -> None:
    check(tmp_path, connect_server.flags)
