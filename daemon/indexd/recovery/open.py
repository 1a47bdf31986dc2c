"""Opens a data directory: from whatever was left behind to builders and a reader that stand at the same offset."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from indexd import __version__
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.log_limit import LogLimit
from indexd.commitlog.lookup import MessageLookup
from indexd.commitlog.reader import LogReader
from indexd.commitlog.reading import ReaderCounters
from indexd.commitlog.segments import SegmentList, list_segments
from indexd.config import Config, OutputsConfig
from indexd.errors import CorruptDataError, UnsafeStoreError
from indexd.flush.flusher import Flusher
from indexd.flush.frontier import Frontier, read_frontier, write_frontier
from indexd.flush.outputs import Outputs
from indexd.flush.witness import Witness
from indexd.index.flavour import FLAVOURS
from indexd.index.service import IndexService
from indexd.recovery.against import Comparison
from indexd.recovery.beside import Beside, Wanted, refill
from indexd.recovery.plan import RecoveryPlan, plan_recovery
from indexd.recovery.recover import Ground, OnProgress, Recovered, carry_out, look
from indexd.recovery.settings import check_store, decode_rules, fresh_frontier, reader_options
from indexd.recovery.standing import Standing
from indexd.recovery.whole import once
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles


@dataclass(frozen=True, slots=True)
class Opened:
    """Everything a run needs, standing at ``reader.position``.

    ``is_changed``: recovery came to something else than the frontier says, so a new one should be written at once.
    ``damage`` is why the frontier could not be read. ``refilled_bytes`` of log were read again for queues and sparse
    indexes alone.
    """

    outputs: Outputs
    flusher: Flusher
    reader: LogReader
    recovered: Recovered
    is_changed: bool
    seconds: float
    damage: str | None
    refilled_bytes: int = 0


def open_data(
    config: Config,
    disk: Disk,
    on_progress: OnProgress,
    *,
    unclean: bool,
    forced: bool = False,
    log_limit: LogLimit | None = None,
) -> Opened:
    """Recover if need be and open; the caller holds the lock and has written the abort flag.

    ``unclean`` says whether the flag was there before: only then is the open file rebuilt from its durable prefix.
    ``log_limit`` is asked about messages that were taken while nobody could be asked.
    """
    started = time.monotonic()
    files = DataFiles(config.store.data)
    fresh = fresh_frontier(config, check_store(config))
    frontier, damage = _known_frontier(disk, files)
    _check_same(frontier, fresh, config.outputs, files)
    disk.make_dir(files.index)
    reader = _reader(config, disk)
    standing = None
    witness = Witness(disk, partial(_list_log, disk, config))
    if frontier is not None:
        standing = Standing(disk, reader, frontier, config.recovery.recheck_bytes, is_forced=forced)
        standing.check_same_store(files.data, frontier)
    begin = reader.log.min_offset or 0
    beside = Beside(disk, files, Wanted.of(config), frontier or fresh, begin, unclean=unclean, forced=forced)
    plan = plan_recovery(look(disk, files, frontier, unclean=unclean, log_begin=begin), forced=forced)
    plan = _without_removed(plan, frontier, log_limit)
    base_of = partial(_base, frontier or fresh, fresh.commit_log_paths, begin, standing)
    commit = partial(_commit, disk, files, frontier, base_of, standing, beside)
    compare_before = partial(_comparison, standing, beside) if standing else None
    try:
        with closing(_lookup(config, disk)) as lookup:
            time_of, flavour = partial(_store_timestamp, lookup), FLAVOURS[fresh.flavour]
            ground = Ground(disk, files.index, fresh.layout, flavour, begin, time_of, on_progress)
            recovered = carry_out(plan, ground, compare_before, commit)
        base = commit(recovered)
        beside.carry_out()
        recovered.reasons += beside.reasons
    finally:
        reader.close()
    witness.take_over(standing.evidence_before(base.phy_offset) if standing else (), recovered.compared.tail)
    index = IndexService(disk, files.index, fresh.layout, flavour)
    outputs = _load(index, recovered, beside, base, witness)
    flusher = Flusher(disk, files, base)
    if beside.refill_from is not None:
        _refill(config, disk, outputs, flusher, beside.refill_from, on_progress)
    outputs.remember_log()
    _go_on(reader, base, is_clean=plan.is_clean)
    return Opened(
        outputs,
        flusher,
        reader,
        recovered,
        is_changed=not plan.is_clean or base != frontier or beside.refill_from is not None,
        seconds=time.monotonic() - started,
        damage=damage,
        refilled_bytes=0 if beside.refill_from is None else base.phy_offset - beside.refill_from,
    )


def _reader(config: Config, disk: Disk) -> LogReader:
    reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), reader_options(config))
    reader.refresh()
    # With checksums: what is compared, and what a crash has left to be read again.
    reader.check_until = reader.log.segments[-1].end if reader.log.segments else 0
    return reader


def _go_on(reader: LogReader, base: Frontier, *, is_clean: bool) -> None:
    # From where ``base`` ends, as if the reader had read it all.
    reader.position = base.phy_offset
    reader.counters = ReaderCounters()  # what was compared above is not what is read from here on
    reader.check_until = 0 if is_clean else reader.check_until
    reader.last_timestamp = base.store_timestamp or reader.last_timestamp
    newest = base.store_timestamp if base.newest_timestamp is None else base.newest_timestamp
    reader.newest_timestamp = newest or reader.newest_timestamp
    reader.unproven_from = base.unproven_from


def _without_removed(plan: RecoveryPlan, frontier: Frontier | None, log_limit: LogLimit | None) -> RecoveryPlan:
    # What the broker does not know of the messages that nobody could be asked about is read again.
    cut = None if frontier is None else frontier.unproven_from
    if frontier is None or cut is None or plan.phy_offset is None or log_limit is None:
        return plan
    vouched = log_limit.ask(frontier.phy_offset)
    if vouched is None or vouched >= frontier.phy_offset:
        return plan
    reason = f"the broker's log ends at {vouched}; messages behind {cut} were not proven"
    return replace(plan, phy_offset=cut, cut=True, reason=reason)


def _base(
    known: Frontier,
    paths: tuple[str, ...],
    begin: int,
    standing: Standing | None,
    recovered: Recovered,
) -> Frontier:
    # What is true after the recovery, and building goes on from.
    if recovered.phy_offset is None or standing is None:
        return replace(known, commit_log_paths=paths, begin_offset=begin, phy_offset=begin, store_timestamp=0,
                       newest_timestamp=None, messages=0, uncovered=(), evidence=(), index=())  # fmt: skip
    offset = recovered.phy_offset
    base = replace(known, commit_log_paths=paths, phy_offset=offset)
    if offset == known.phy_offset:
        return base
    gaps = tuple(replace(gap, end=min(gap.end, offset)) for gap in known.uncovered if gap.begin < offset)
    newest = max((mark.header.end_timestamp for mark in recovered.files), default=0)
    is_proven = all(not gap.is_unproven for gap in gaps)
    return replace(
        base,
        uncovered=gaps,
        store_timestamp=recovered.compared.store_timestamp or newest,
        newest_timestamp=None if is_proven else known.newest_timestamp,
        messages=standing.messages_counted(recovered.compared, offset),
    )


def _comparison(standing: Standing, beside: Beside, end: int) -> Comparison:
    comparison = standing.comparison(end)
    queues = beside.comparison(comparison.reader.position, end)
    return replace(comparison, queues=queues, is_same_log=standing.is_same_log)


def _commit(
    disk: Disk,
    files: DataFiles,
    known: Frontier | None,
    base_of: Callable[[Recovered], Frontier],
    standing: Standing | None,
    beside: Beside,
    recovered: Recovered,
) -> Frontier:
    # A frontier with what is true from now on, durable before any file becomes less than the one before said of it.
    base = base_of(recovered)
    doubtful_from = standing.doubtful_from if standing else None
    beside.plan(base.phy_offset, doubtful_from, recovered.compared.queues_until)
    evidence = standing.evidence_before(base.phy_offset) if standing else ()
    named = beside.named(replace(base, index=recovered.files, evidence=evidence))
    if named != known:
        write_frontier(disk, files.frontier, named, __version__)
    return named


def _load(index: IndexService, recovered: Recovered, beside: Beside, base: Frontier, witness: Witness) -> Outputs:
    try:
        index.load(recovered.files)
        return Outputs(index, *beside.open(base), base, witness)
    except BaseException:
        index.close()
        raise


def _refill(
    config: Config, disk: Disk, outputs: Outputs, flusher: Flusher, begin: int, on_progress: OnProgress
) -> None:
    # What is passed over here was passed over when the key index was built, and is in ``uncovered``.
    options = replace(once(reader_options(config)), skip_corrupt=True)
    reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), options)
    reader.refresh()

    def commit(filled: int) -> None:
        progress = replace(outputs.progress(), refill_offset=filled)
        flusher.persist(progress)
        outputs.synced(progress)

    try:
        refill(reader, outputs, begin, commit, lambda at: on_progress("refill", at - begin, outputs.phy_offset - begin))
    except BaseException:
        outputs.close()
        raise
    finally:
        reader.close()


def _lookup(config: Config, disk: Disk) -> MessageLookup:
    options = DecoderOptions(check_crc=False)
    return MessageLookup(disk, config.store.commit_log_directories, config.store.segment_size, options)


def _list_log(disk: Disk, config: Config) -> SegmentList:
    return list_segments(disk, config.store.commit_log_directories, config.store.segment_size)


def _known_frontier(disk: Disk, files: DataFiles) -> tuple[Frontier | None, str | None]:
    # A frontier that cannot be read is as good as none: everything is built again, and said so.
    try:
        return read_frontier(disk, files.frontier), None
    except CorruptDataError as error:
        return None, error.line()


def _check_same(known: Frontier | None, wanted: Frontier, outputs: OutputsConfig, files: DataFiles) -> None:
    if known is None:
        return
    # What is turned off goes, however it was built.
    queue_file_size = known.queue_file_size if known.queues is not None and outputs.consume_queue else None
    interval = known.sparse.interval if known.sparse is not None and outputs.sparse else None
    for name, ours, given in (
        ("store", known.store, wanted.store),
        ("segment_size", known.segment_size, wanted.segment_size),
        ("flavour", known.flavour, wanted.flavour),
        ("hash_slot_num", known.layout.hash_slot_num, wanted.layout.hash_slot_num),
        ("index_num", known.layout.index_num, wanted.layout.index_num),
        ("consume_queue_file_size", queue_file_size, wanted.queue_file_size),
        ("sparse_interval", interval, outputs.sparse_interval),
    ):
        if ours not in (None, given):
            raise UnsafeStoreError(
                f"{files.data} was built with {name} {ours}, and now {given} is asked for",
                "give what it was built with, or another --data",
            )


def _store_timestamp(lookup: MessageLookup, phy_offset: int) -> int | None:
    found = lookup.at(phy_offset)
    return found.store_timestamp if isinstance(found, Message) else None
