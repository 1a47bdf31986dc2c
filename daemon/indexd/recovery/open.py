"""What the configuration comes to for those who read the log and build from it.

Standing: what the log says today about the evidence that was kept when it was indexed (decision 7).

Decides whether this is the same log at all, and from where on the entries have to be compared with it. Reads only.

Opens a data directory: from whatever was left behind to builders and a reader that stand at the same offset.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from indexd import __version__
from indexd.commitlog import batcher
from indexd.commitlog.batcher import make_rules
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.evidence import WATCHED_SIZE, Evidence, FrameReader, MessageLookup, compare, newest
from indexd.commitlog.kernel import Rules
from indexd.commitlog.reader import LogReader, ReaderCounters, ReaderOptions
from indexd.commitlog.segments import SegmentList, list_segments
from indexd.commitlog.tail import LogLimit
from indexd.config import Config, OutputsConfig
from indexd.config.load import check_outside
from indexd.config.units import RemotePath
from indexd.consumequeue import queues as queue_units
from indexd.errors import CorruptDataError, UnsafeStoreError, UsageError
from indexd.flush.flusher import Flusher, Outputs, Witness
from indexd.flush.frontier import DOUBTED, Frontier, Uncovered, read_frontier, write_frontier
from indexd.index import file as index_file
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, IndexLayout
from indexd.recovery.beside import Beside, Wanted, refill
from indexd.recovery.compare import Compared, Comparison, once
from indexd.recovery.recover import (
    NO_DAMAGE,
    Damage,
    Ground,
    OnProgress,
    Recovered,
    RecoveryPlan,
    carry_out,
    look,
    plan_recovery,
)
from indexd.sparse import kernel as sparse_kernel
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_BODY_SIZE_BELIEVED = 64 << 20
# Topic, properties and fixed fields: what the broker allows above maxMessageSize (spec rocketmq-store 2.6).
_FRAME_OVERHEAD = 64 << 10
_READ_SIZE_MIN = 64 << 10
# So many of the newest segments are the consumers': their page cache is never given back.
_HOT_SEGMENTS = 2


def reader_options(config: Config) -> ReaderOptions:
    """The reader's share of the configuration."""
    return ReaderOptions(
        segment_size=config.store.segment_size,
        read_size=_read_size(config),
        settle=config.reader.settle_ms / 1000,
        corrupt_after=config.reader.corrupt_after_ms / 1000,
        skip_corrupt=config.reader.on_corrupt == "skip",
        verify_crc=config.reader.verify_crc,
        drop_behind=_HOT_SEGMENTS * config.store.segment_size if config.limits.drop_cache else None,
    )


def _read_size(config: Config) -> int:
    # Half a second's worth at a bounded rate, so that a wait for it is short.
    rate = config.limits.read_rate_max
    return config.reader.read_bytes if not rate else min(config.reader.read_bytes, max(rate // 2, _READ_SIZE_MIN))


def decode_rules(config: Config) -> Rules:
    """What the flavour and the broker's settings ask of the decoder."""
    flavour = FLAVOURS[config.index.flavour]
    return make_rules(
        config.store.delay_levels_ms,
        check_crc=False,
        want_uniq_key=flavour.uniq_key,
        want_tags=flavour.tags,
        want_queue=config.outputs.consume_queue or config.outputs.sparse,
        frame_size_max=frame_size_max(config),
    )


def frame_size_max(config: Config) -> int:
    """The largest total size that is believed: the broker's maxMessageSize may have been larger before."""
    return max(config.reader.max_message_size, _BODY_SIZE_BELIEVED) + _FRAME_OVERHEAD


def load_kernels(config: Config) -> None:
    """Compile, or load what is compiled, before there is work that would wait for it; the two halves side by side."""
    loads = [index_file.load_kernels]
    loads += [queue_units.load_kernels] if config.outputs.consume_queue else []
    loads += [sparse_kernel.load_kernels] if config.outputs.sparse else []
    builders = threading.Thread(target=lambda: [load() for load in loads])
    builders.start()
    batcher.load_kernels(decode_rules(config))
    builders.join()


def check_store(config: Config) -> Path:
    """The store root; refuses what must not be indexed at all."""
    store = config.store.store
    if store is None and not config.store.commit_log_directories:
        raise UsageError("no store is given", "say --store DIR (the broker's storePathRootDir), or --broker-conf FILE")
    if store is not None and not isinstance(store, RemotePath) and not store.is_dir():
        raise UnsafeStoreError(f"the store {store} is no directory", "give the broker's storePathRootDir as --store")
    root = store or config.store.commit_log_directories[0].parent
    check_outside(config, config.store.data, "--data")
    if config.broker.enable_dledger_commit_log:
        raise UnsafeStoreError(
            "the broker keeps a DLedger log (enableDLegerCommitLog), which is not read",
            "point --store at a broker that runs without it",
        )
    return root.resolve()


def fresh_frontier(config: Config, store: Path) -> Frontier:
    """Of a directory in which nothing has been built, and so nothing has to be scrubbed yet."""
    return Frontier(
        str(store),
        tuple(str(path.resolve()) for path in config.store.commit_log_directories),
        config.store.segment_size,
        config.index.flavour,
        IndexLayout(config.index.hash_slot_num, config.index.index_num),
        queue_file_size=config.store.consume_queue_file_size,
        scrubbed_at=int(time.time() * 1000),
    )


class Standing:
    """The evidence of one frontier held against the log that ``reader`` has listed.

    ``recheck_size``: so many bytes before the end are compared even if every point agrees, because a rewritten stretch
    may lie between two points.
    """

    def __init__(
        self, disk: Disk, reader: LogReader, frontier: Frontier, recheck_size: int, *, is_forced: bool
    ) -> None:
        self._disk = disk
        self._reader = reader
        self._recheck_size = recheck_size
        self._is_forced = is_forced
        begin = reader.log.min_offset or 0
        self._evidence = frontier.evidence
        self._points = tuple(point for point in frontier.evidence if point.phy_offset >= begin)
        self._agreement = compare(disk, reader.log, self._points, 2 * frontier.segment_size)
        self._anchor: Evidence | None = None
        self._has_expired = begin > frontier.begin_offset

    def check_same_store(self, data: Path, frontier: Frontier) -> None:
        """Raise UnsafeStoreError if nothing of what was indexed is in this log, though it should be."""
        if not self._reader.log.segments and frontier.phy_offset > frontier.begin_offset:
            what = "its commitlog is empty"
        elif self._agreement.differs is not None and self._agreement.agrees is None:
            what = f"none of the {len(self._points)} messages that were noted is where it was"
        else:
            return
        raise UnsafeStoreError(
            f"{frontier.store} is not the store that {data} was built from: {what}",
            "mount or give the right --store; if this one is right, give a fresh --data or remove the old one",
        )

    @property
    def is_same_log(self) -> bool:
        """All that was noted, and has not expired, is as it was."""
        return self._agreement.differs is None and self._agreement.agrees is not None

    @property
    def doubtful_from(self) -> int | None:
        """Behind this physical offset the log was rewritten; None if all evidence agrees."""
        if self._agreement.differs is None:
            return None
        return self._agreement.agrees.phy_offset if self._agreement.agrees is not None else 0

    def comparison(self, end: int) -> Comparison:
        """What to compare of the log before ``end``; the reader is put where it begins."""
        base = None if self._is_forced else self._newest_before(end)
        self._reader.position = base.phy_offset if base else self._reader.log.min_offset or 0
        self._anchor = base or next(iter(self._points), None)
        return Comparison(
            self._reader,
            end,
            self._first_behind,
            is_whole=self._is_forced,
            has_expired=self._has_expired,
            anchor=self._anchor.phy_offset if self._anchor else 0,
        )

    def messages_counted(self, compared: Compared, phy_offset: int) -> int:
        """How many messages are counted before ``phy_offset``, up to which the comparison agreed; expired ones too."""
        if compared.since is not None:
            return compared.since.messages + compared.messages - compared.before_anchor
        if self._anchor is None:
            # All of it has expired.
            before = (point.messages for point in self._evidence if point.phy_offset <= phy_offset)
            return compared.messages + max(before, default=0)
        return self._anchor.messages + compared.messages - compared.before_anchor

    def evidence_before(self, phy_offset: int) -> tuple[Evidence, ...]:
        """The points before ``phy_offset`` that are still true."""
        before = tuple(point for point in self._points if point.phy_offset < phy_offset)
        doubtful = before
        if before and self._agreement.differs is None:
            doubtful = newest(before, WATCHED_SIZE)  # a segment in the middle may be gone
        with FrameReader(self._disk, self._reader.log) as frames:
            return (*before[: len(before) - len(doubtful)], *(point for point in doubtful if frames.holds(point)))

    def _newest_before(self, end: int) -> Evidence | None:
        # The point at which to begin: a frame begins there, and what lies before it is not in doubt.
        last, limit = self._agreement.agrees, end - self._recheck_size
        if last is None:
            return None
        if self._agreement.differs is not None:
            # It was cut somewhere in the segment of the last point that agrees: that one may be stale, and others too.
            segment = self._reader.log.at(last.phy_offset)
            limit = min(limit, segment.base if segment else 0)
        sound = [point for point in self._points if point.phy_offset <= min(last.phy_offset, end)]
        return next((point for point in reversed(sound) if point.phy_offset <= limit), None)

    def _first_behind(self, phy_offset: int, store_timestamp: int) -> Evidence | None:
        behind = next((point for point in self._points if point.phy_offset > phy_offset), None)
        if behind is None or behind.store_timestamp < store_timestamp:
            # Nothing is known of it, or it is older than what stands before: left behind by a longer log.
            return None
        with FrameReader(self._disk, self._reader.log) as frames:
            return behind if frames.holds(behind) else None


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
    damage: Damage = NO_DAMAGE,
    log_limit: LogLimit | None = None,
) -> Opened:
    """Recover if need be, mend ``damage``, and open; the caller holds the lock and has written the abort flag.

    ``unclean`` says whether the flag was there before: only then is the open file rebuilt from its durable prefix.
    ``log_limit`` is asked about messages that were taken while nobody could be asked.
    """
    started = time.monotonic()
    files = DataFiles(config.store.data)
    fresh = fresh_frontier(config, check_store(config))
    frontier, unreadable = _known_frontier(disk, files)
    if frontier is not None:
        _check_same(frontier, fresh, config.outputs, files)
    disk.make_dir(files.index)
    reader = _open_reader(config, disk)
    standing = None if frontier is None else _standing(config, disk, reader, frontier, damage, forced=forced)
    witness = Witness(disk, partial(_list_log, disk, config))
    begin, refills = reader.log.min_offset or 0, forced or damage.is_beside
    beside = Beside(disk, files, Wanted.of(config), frontier or fresh, begin, unclean=unclean, forced=refills)
    found = look(disk, files, frontier, unclean=unclean, log_begin=begin, damaged=damage.files)
    plan = _without_removed(plan_recovery(found, forced=forced), frontier or fresh, log_limit)
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
        damage=unreadable,
        refilled_bytes=0 if beside.refill_from is None else base.phy_offset - beside.refill_from,
    )


def _open_reader(config: Config, disk: Disk) -> LogReader:
    reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), reader_options(config))
    reader.refresh()
    # With CRCs: what is compared, and what a crash has left to be read again.
    reader.check_until = reader.log.segments[-1].end if reader.log.segments else 0
    return reader


def _standing(
    config: Config, disk: Disk, reader: LogReader, frontier: Frontier, damage: Damage, *, forced: bool
) -> Standing:
    recheck = max(config.recovery.recheck_bytes, damage.recheck_size(frontier))
    standing = Standing(disk, reader, frontier, recheck, is_forced=forced)
    standing.check_same_store(config.store.data, frontier)
    return standing


def _go_on(reader: LogReader, base: Frontier, *, is_clean: bool) -> None:
    reader.position = base.phy_offset
    reader.counters = ReaderCounters()  # what was compared is not what is read from here on
    reader.check_until = 0 if is_clean else reader.check_until
    proven = base.store_timestamp if base.newest_timestamp is None else base.newest_timestamp
    reader.newest_timestamp = proven or reader.newest_timestamp
    reader.last_timestamp = base.store_timestamp or reader.last_timestamp
    reader.unproven_from = base.unproven_from
    if base.stale_head is not None:
        reader.deny(base.stale_head)


def _without_removed(plan: RecoveryPlan, frontier: Frontier, log_limit: LogLimit | None) -> RecoveryPlan:
    # What the broker does not know of the messages that nobody could be asked about is read again.
    cut = frontier.unproven_from
    if cut is None or plan.phy_offset is None or log_limit is None:
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
                       newest_timestamp=None, messages=0, uncovered=(), evidence=(), index=(),
                       stale_head=None)  # fmt: skip
    offset = recovered.phy_offset
    base = replace(known, commit_log_paths=paths, phy_offset=offset)
    if offset == known.phy_offset:
        return _doubted(base, recovered.compared.damaged)
    gaps = tuple(replace(gap, end=min(gap.end, offset)) for gap in known.uncovered if gap.begin < offset)
    newest = max((mark.header.end_timestamp for mark in recovered.files), default=0)
    is_proven = all(not gap.is_unproven for gap in gaps)
    base = replace(
        base,
        uncovered=gaps,
        stale_head=None,
        store_timestamp=recovered.compared.store_timestamp or newest,
        newest_timestamp=None if is_proven else known.newest_timestamp,
        messages=standing.messages_counted(recovered.compared, offset),
    )
    return _doubted(base, recovered.compared.damaged)


def _doubted(base: Frontier, damaged: tuple[int, ...]) -> Frontier:
    # Behind damage in the newest segment stand messages that were the log's, unless the broker cuts it there.
    newest = (base.phy_offset - 1) // base.segment_size * base.segment_size
    first = next((at for at in damaged if at >= newest), None)
    if first is None or (base.unproven_from is not None and base.unproven_from <= first):
        return base
    gaps = [*base.left_out, Uncovered(first, base.phy_offset, DOUBTED)]
    return replace(base, uncovered=tuple(sorted(gaps, key=lambda gap: gap.begin)))


def _comparison(standing: Standing, beside: Beside, end: int) -> Comparison:
    comparison = standing.comparison(end)
    queues_from = partial(beside.comparison, end=end)
    return replace(comparison, queues_from=queues_from, is_same_log=standing.is_same_log)


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


def _check_same(known: Frontier, wanted: Frontier, outputs: OutputsConfig, files: DataFiles) -> None:
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
