"""``indexd --recover``: verify every file against its header and the log, mend, catch up with the log, and end."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.flush.frontier import remove_abort
from indexd.recovery.open import Opened, check_store, reader_options
from indexd.recovery.whole_log import WholeLog, once
from indexd.service.broker import suspects_limit
from indexd.service.log import configure_log
from indexd.service.progress import RecoveryProgress
from indexd.service.start import open_for_run
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles


def recover_now(config: Config) -> dict[str, Any]:
    """Do it and say what was done; raises IndexdError. The data directory is as after a clean stop then."""
    log = configure_log(config.log)
    disk = Disk()
    check_store(config)
    list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    disk.make_dir(config.store.data)
    files = DataFiles(config.store.data)
    lock = DirectoryLock(files.lock)
    lock.acquire()
    try:
        started = time.monotonic()
        with closing(suspects_limit(config, disk)) as limit:
            opened = open_for_run(config, disk, files, log, forced=True, log_limit=limit)
            opened.reader.set_options(replace(once(reader_options(config)), take_older=True))
            opened.reader.log_limit = limit
            log_left = WholeLog(opened.reader)
            pipeline = opened.pipeline
            entries, messages = _entries(opened), pipeline.built.messages
            with RecoveryProgress(log, disk, files) as progress:
                problem = _catch_up(opened, log_left, progress)
        pipeline.finish()
        remove_abort(disk, files.abort)
        disk.unlink(files.state)
        disk.unlink(files.starts)
        if problem is not None:
            raise problem
        return {
            "data": str(files.data),
            "reasons": opened.recovered.reasons,
            "keptFiles": len(opened.recovered.files),
            "keptEntries": opened.recovered.kept_entries,
            "droppedEntries": opened.recovered.dropped_entries,
            "deletedFiles": list(opened.recovered.deleted_files),
            "rewrittenFiles": opened.recovered.rewritten_files,
            "refilledBytes": opened.refilled_bytes,
            "rebuiltEntries": _entries(opened) - entries,
            "rebuiltMessages": pipeline.built.messages - messages,
            "beginOffset": pipeline.built.begin_offset,
            "phyOffset": pipeline.built.phy_offset,
            "unreadableAt": log_left.unreadable and log_left.unreadable.offset,
            "seconds": round(time.monotonic() - started, 3),
        }
    finally:
        lock.release()


def _entries(opened: Opened) -> int:
    # Of the key index, since it was opened.
    entries: int = opened.pipeline.outputs[0].figures()["indexEntries"]
    return entries


def _catch_up(opened: Opened, log: WholeLog, progress: RecoveryProgress) -> CorruptDataError | None:
    reader, pipeline = opened.reader, opened.pipeline
    begin = reader.position
    try:
        for item in log:
            pipeline.build(item)
            total = reader.log.segments[-1].end - begin if reader.log.segments else 0
            progress("index", pipeline.built.phy_offset - begin, total)
    except CorruptDataError as error:
        return CorruptDataError(f"{error}; everything before it is indexed", error.hint)
    finally:
        reader.close()
    return None
