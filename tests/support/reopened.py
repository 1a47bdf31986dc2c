"""A data directory opened, caught up with its log and closed again, in this process; and logs that are cut."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from indexd.commitlog.segments import NOBODY, LogLimit
from indexd.config import Config, load
from indexd.errors import CorruptDataError
from indexd.flush.frontier import read_frontier, write_frontier
from indexd.recovery.open import open_data, reader_options
from indexd.recovery.rebuild import rebuild
from indexd.recovery.recover import WholeLog, once
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.commitlog_writer import CommitLogWriter
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, QUEUE_FILE_SIZE, SEGMENT_SIZE, messages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from indexd.recovery.recover import RecoveryResult


@dataclass(frozen=True, slots=True)
class Reopened:
    """What a start came to, and then a stop."""

    recovered: RecoveryResult
    #: Where it went on, before it read anything new.
    resumed_at: int
    resumed_messages: int
    messages: int
    phy_offset: int


def config_for(store: Path, data: Path, **keys: object) -> Config:
    """The sizes of ``small_log``, no time to settle, and ``keys``."""
    given = {
        "store": store,
        "data": data,
        "segment_size": SEGMENT_SIZE,
        "hash_slot_num": HASH_SLOT_NUM,
        "index_num": INDEX_NUM,
        "consume_queue_file_size": QUEUE_FILE_SIZE,
        "settle_ms": 1,
        "corrupt_after_ms": 1,
    } | keys
    return load({key: str(value) for key, value in given.items()}, None, {})


def reopen(config: Config, *, unclean: bool = False, forced: bool = False, log_limit: LogLimit = NOBODY) -> Reopened:
    """Start, catch up with the log as far as it can be read, stop; ``log_limit``: a broker that can be asked."""
    disk = Disk()
    disk.make_dir(config.store.data)
    opened = open_data(config, disk, lambda *_: None, unclean=unclean, forced=forced, log_limit=log_limit)
    opened.reader.log_limit = log_limit
    pipeline = opened.pipeline
    resumed_at, resumed_messages = pipeline.built.phy_offset, pipeline.built.messages
    opened.reader.options = once(reader_options(config))
    for item in WholeLog(opened.reader):
        pipeline.apply([item], opened.reader.log.min_offset or 0)
    opened.reader.close()
    pipeline.finish()
    return Reopened(opened.recovered, resumed_at, resumed_messages, pipeline.built.messages, pipeline.built.phy_offset)


def undisturbed(config: Config, out: Path) -> Path:
    """What a build of the log as it is now makes of it, be it a new daemon's: behind a cut may stand older frames."""
    try:
        rebuild(config, Disk(), out, lambda *_: None)
    except CorruptDataError:
        reopen(config.model_copy(update={"store": config.store.model_copy(update={"data": out})}))
    return out


def named_for(store: Path, data: Path) -> None:
    """Let a data directory belong to a store at another place."""
    path = DataFiles(data).frontier
    frontier = read_frontier(Disk(), path)
    assert frontier is not None
    write_frontier(Disk(), path, replace(frontier, store=str(store)), "0")


@contextmanager
def cut_at(store: Path, phy_offset: int) -> Iterator[CommitLogWriter]:
    """A broker that lost what stood from ``phy_offset`` on: later segments are gone, stale frames stay in its own."""
    for path in (store / "commitlog").iterdir():
        if int(path.name) > phy_offset:
            path.unlink()
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE, start_offset=phy_offset) as writer:
        yield writer


def write_on(writer: CommitLogWriter, count: int, seed: int, *, later_ms: int = 3_600_000) -> int:
    """Append ``count`` messages of ``seed``, stored so much later than those of ``small_log``; the new end."""
    for spec in islice(messages(seed), count):
        writer.append(replace(spec, store_timestamp=spec.store_timestamp + later_ms))
    return writer.max_offset
