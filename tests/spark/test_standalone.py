"""A real standalone cluster: a master and two workers, of which one loses its executor and the other all, in a job.

What starts no session of its own uses the one that is there: a driver and its executors take longer than what they do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.dataset as ds

from support.small_log import SIZES, write_log
from support.spark_cluster import Standalone, output_of, start_python, wait_for
from support.spark_session import check_source

MESSAGES = 500
SCRIPT = """
import contextlib, io, json, sys
from functools import partial
from pathlib import Path
from support import spark_work
from support.spark_session import read_source, session_of
from indexd.errors import DiskError

folder, store = map(Path, sys.argv[1:3])
export = json.loads(sys.argv[3])
with session_of(sys.argv[4:]) as spark:
    from indexd.cli.main import main
    from indexd.spark.session import slots
    from indexd.spark.tasks import is_local, run_tasks

    seen = {"slots": slots(spark), "local": is_local(spark)}
    rows = run_tasks(spark, partial(spark_work.where_later, seconds=0.5), range(4))
    seen["parents"] = sorted({row["parent"] for row in rows})
    seen["source"] = read_source(spark, store, 20000)
    try:
        run_tasks(spark, spark_work.raise_ours, range(5))
    except DiskError as error:
        seen["error"] = error.line()
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main(export)
    seen["export"] = said.getvalue()
    # The other side kills workers as soon as the first marks are there.
    told = []
    work = partial(spark_work.touch_then_wait, folder, seconds=0.3)
    seen["results"] = run_tasks(spark, work, range(16), sizes=[10] * 16, progress=lambda done, size: told.append(done))
    seen["told"] = told
print(json.dumps(seen))
"""


def test_a_job_ends_right_though_its_workers_are_killed(standalone: Standalone, tmp_path: Path) -> None:
    marks, store, target = tmp_path / "marks", tmp_path / "store", tmp_path / "parquet"
    marks.mkdir()
    write_log(store, MESSAGES)
    export = ("export", "--store", store, "--to", target, *SIZES, "--json", "--split-size", "20000", *standalone.flags)
    process = start_python(SCRIPT, marks, store, json.dumps([str(word) for word in export]), *standalone.flags)
    try:
        wait_for("the job", lambda: len(list(marks.iterdir())) >= 3 or process.poll() is not None)
        standalone.kill_executor(standalone.workers[0])
        wait_for("more of it", lambda: len(list(marks.iterdir())) >= 6 or process.poll() is not None)
        standalone.kill_worker(standalone.workers[1])
        seen = json.loads(output_of(process))
    finally:
        process.kill()
    assert seen["results"] == list(range(16))
    begun = sorted(int(path.name.split("-")[0]) for path in marks.iterdir())
    assert sorted(set(begun)) == list(range(16))
    assert len(begun) > 16, "nothing was lost: the workers were killed too late"
    assert seen["told"][-1] == 160
    assert seen["told"] == sorted(seen["told"])
    check_source(seen["source"], store)
    assert json.loads(seen["export"])["rows"] == MESSAGES
    table = ds.dataset(target, partitioning="hive").to_table(columns=["phyOffset", "topic"])
    assert table.num_rows == len(set(table["phyOffset"].to_pylist())) == MESSAGES
    assert (seen["slots"], seen["local"]) == (2, False)
    assert len(seen["parents"]) == 2, "both workers had a task"
    # Which host lacks the path, and what to do.
    assert seen["error"].startswith("cannot open /no/such/segment: No such file or directory (on executor ")
    assert seen["error"].endswith("every executor has to see this path: use a shared file system or an object store")
