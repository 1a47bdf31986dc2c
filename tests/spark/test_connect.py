"""A real Spark Connect server: tasks, data source, errors, progress and Ctrl-C, without a JVM in the client."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from support.small_log import write_log
from support.spark_cluster import ConnectServer, output_of, start_python
from support.spark_session import check_source

SCRIPT = """
import json, os, signal, sys, threading, time
from functools import partial
from pathlib import Path
from support import spark_work
from support.spark_session import read_source, session_of
from indexd.errors import CorruptDataError, SparkError

folder, store = map(Path, sys.argv[1:3])
with session_of(sys.argv[3:]) as spark:
    from indexd.spark.session import slots
    from indexd.spark.tasks import is_local, run_tasks

    seen = {"slots": slots(spark), "local": is_local(spark), "errors": []}
    seen["squares"] = run_tasks(spark, spark_work.square, range(5))
    for work in (spark_work.raise_corrupt, spark_work.raise_internal):
        try:
            run_tasks(spark, work, range(3))
        except (CorruptDataError, SparkError) as error:
            seen["errors"].append([type(error).__name__, str(error), error.hint])
    seen["source"] = read_source(spark, store, 20000)
    told = []
    work = partial(spark_work.wait, seconds=0.4)
    run_tasks(spark, work, range(8), sizes=[10] * 8, progress=lambda done, size: told.append(done))
    seen["told"] = told
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        run_tasks(spark, partial(spark_work.touch_then_wait, folder, seconds=0.5), range(60))
    except KeyboardInterrupt:
        seen["interrupted"] = time.monotonic() - started
    seen["begun"] = len(os.listdir(folder))
    time.sleep(1.5)
    seen["later"] = len(os.listdir(folder))
    seen["java"] = any("java" in process.name() for process in __import__("psutil").Process().children(recursive=True))
print(json.dumps(seen))
"""


def test_tasks_through_connect(connect_server: ConnectServer, tmp_path: Path) -> None:
    marks, store = tmp_path / "marks", tmp_path / "store"
    marks.mkdir()
    write_log(store, 500)
    seen = json.loads(output_of(start_python(SCRIPT, marks, store, *connect_server.flags)))
    check_source(seen["source"], store)
    assert (seen["slots"], seen["local"], seen["java"]) == (2, False, False)
    assert seen["squares"] == [0, 1, 4, 9, 16]
    corrupt, internal = seen["errors"]
    assert corrupt[0] == "CorruptDataError"
    assert corrupt[1].startswith("split 1 does not hold (on executor ")
    assert corrupt[2] == "look at it"
    assert internal[:2] == ["SparkError", "a job on Spark failed: KeyError: 'a key that nobody has'"]
    assert seen["told"][-1] == 80
    assert seen["told"] == sorted(seen["told"])
    assert any(0 < done < 80 for done in seen["told"])
    assert seen["interrupted"] < 15
    assert 0 < seen["begun"] == seen["later"] < 40


def test_the_server_listens_on_loopback_alone(connect_server: ConnectServer) -> None:
    server = psutil.Process(connect_server.process.pid)
    listening = {
        connection.laddr.ip
        for process in (server, *server.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
