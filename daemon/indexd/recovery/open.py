"""Opens a data directory: from whatever was left behind to a pipeline and a reader that stand at the same offset.

What the configuration comes to for those who read the log and build from it is here, too; and LogRange, a range of the
log read once, for audit, verify and repair: what cannot be read is passed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from indexd import __version__
from indexd.commitlog import batcher
from indexd.commitlog.batcher import DispatchBatch, make_rules, within
from indexd.commitlog.decoder import DecoderOptions
from indexd.commitlog.format import Corrupt, Reason
from indexd.commitlog.kernel import Rules
from indexd.commitlog.lookup import LogView
from indexd.commitlog.reader import LogReader, ReaderCounters, ReaderOptions, Skipped
from indexd.commitlog.segments import NOBODY, LogLimit, list_segments
from indexd.compare.log import Comparison
from indexd.compare.secondary import QueueComparison
from indexd.config import Config
from indexd.config.load import check_outside
from indexd.config.units import RemotePath
from indexd.consumequeue.check import kept_queues
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import CorruptDataError, UnsafeStoreError, UsageError
from indexd.flush.frontier import DOUBTED, UNPROVEN, Frontier, Uncovered, read_frontier, write_frontier
from indexd.flush.pipeline import OUTPUTS, LogChangeDetector, Pipeline, all_outputs, missing_is_disturbed
from indexd.index.format import FLAVOURS, IndexLayout
from indexd.output import Output, OutputRecovery, RecoveryScope
from indexd.recovery.recover import (
    NEVER,
    NO_DAMAGE,
    Damage,
    IndexRecovery,
    KnownLog,
    OnProgress,
    RecoveryPlan,
    RecoveryResult,
    WholeLog,
    look,
    once,
    plan_recovery,
)
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
    # Half a second's worth at a bounded rate, so that a wait for it is short.
    rate, size = config.limits.read_rate_max, config.reader.read_bytes
    return ReaderOptions(
        segment_size=config.store.segment_size,
        read_size=min(size, max(rate // 2, _READ_SIZE_MIN)) if rate else size,
        settle=config.reader.settle_ms / 1000,
        corrupt_after=config.reader.corrupt_after_ms / 1000,
        skip_corrupt=config.reader.on_corrupt == "skip",
        verify_crc=config.reader.verify_crc,
        drop_behind=_HOT_SEGMENTS * config.store.segment_size if config.limits.drop_cache else None,
    )


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
    kinds = [kind for kind in OUTPUTS if kind.is_wanted(config)]
    builders = threading.Thread(target=lambda: [kind.load_kernels() for kind in kinds])
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
    if (config.store.data / "commitlog").exists():
        raise UnsafeStoreError(
            f"{config.store.data} holds a commitlog: it is a broker's store",
            "give another --data: nothing is written into a broker's store",
        )
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
        scrubbed_at=int(time.time() * 1000),
    )


@dataclass(frozen=True, slots=True)
class Opened:
    """Everything a run needs, standing at ``reader.position``.

    ``is_changed``: recovery came to something else than the frontier says, so a new one should be written at once.
    ``damage`` is why the frontier could not be read. ``refilled_bytes`` of log were read again for the secondary
    outputs alone.
    """

    pipeline: Pipeline
    reader: LogReader
    recovered: RecoveryResult
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
    log_limit: LogLimit = NOBODY,
) -> Opened:
    """Recover if need be, mend ``damage``, and open; the caller holds the lock and has written the abort flag.

    ``unclean`` says whether the flag was there before: only then is the open file rebuilt from its durable prefix.
    ``log_limit`` is asked about messages that were taken while nobody could be asked.
    """
    started = time.monotonic()
    opening = _Opening(config, disk, damage, unclean=unclean, forced=forced)
    with closing(opening.reader) as reader:
        plan = opening.plan(log_limit)
        recovered = opening.recover(plan, on_progress)
    base = opening.base
    pipeline = opening.load(recovered)
    begin = base.refill_offset
    if begin is not None:
        with missing_is_disturbed(pipeline.outputs):
            _refill(config, disk, pipeline, begin, on_progress)
    pipeline.detector.remember_tail(pipeline.built.phy_offset)
    _go_on(reader, base, is_clean=plan.is_clean)
    return Opened(
        pipeline,
        reader,
        recovered,
        is_changed=not plan.is_clean or base != opening.frontier or begin is not None,
        seconds=time.monotonic() - started,
        damage=opening.unreadable,
        refilled_bytes=0 if begin is None else base.phy_offset - begin,
    )


class _Opening:
    # One data directory while it is opened: what is known of it, of its log, and what its outputs come to.
    def __init__(self, config: Config, disk: Disk, damage: Damage, *, unclean: bool, forced: bool) -> None:
        self._config, self._disk, self._damage = config, disk, damage
        self._is_unclean, self._is_forced = unclean, forced
        self.files = DataFiles(config.store.data)
        fresh = fresh_frontier(config, check_store(config))
        self.frontier: Frontier | None = None
        self.unreadable: str | None = None
        try:
            self.frontier = read_frontier(disk, self.files.frontier)
        except CorruptDataError as error:  # as good as none: everything is built again, and said so
            self.unreadable = error.line()
        (self.index, _), *others = all_outputs(config, disk, self.files.data)
        if self.frontier is not None:
            _check_same(self.frontier, fresh, [(self.index, True), *others], self.files)
        disk.make_dir(self.index.directory)
        self.known = replace(self.frontier or fresh, commit_log_paths=fresh.commit_log_paths)
        directories = config.store.commit_log_directories
        self.reader = LogReader(disk, directories, decode_rules(config), reader_options(config))
        self.reader.refresh()
        # With CRCs: what is compared, and what a crash has left to be read again.
        self.reader.check_until = self.reader.log.segments[-1].end if self.reader.log.segments else 0
        self._begin = self.reader.log.min_offset or 0
        damaged = 0 if damage.recheck_from is None else self.known.phy_offset - damage.recheck_from
        recheck = max(config.recovery.recheck_bytes, damaged)
        self.log = KnownLog(disk, self.reader, self.known, recheck, is_forced=forced)
        self.log.check_same_store(config.store.data, self.known)
        # The outputs besides the key index, whether each is wanted, and what is kept of each.
        self._others = others
        self._kept: list[tuple[Output[Any], bool, OutputRecovery[Any]]] = []
        self._is_refilled = forced or damage.is_secondary
        #: What is true after the recovery, and building goes on from.
        self.base = self.known

    def plan(self, log_limit: LogLimit) -> RecoveryPlan:
        """What is to be done to the key index."""
        found = look(
            self._disk, self.files, self.frontier,
            unclean=self._is_unclean, log_begin=self._begin, damaged=self._damage.files,
        )  # fmt: skip
        plan, known = plan_recovery(found, forced=self._is_forced), self.known
        # What the broker does not know of the messages that nobody could be asked about is read again.
        if known.unproven_from is not None and plan.phy_offset is not None:
            vouched = log_limit.ask(known.phy_offset)
            if vouched is not None and vouched < known.phy_offset:
                cut = known.unproven_from
                reason = f"the broker's log ends at {vouched}; messages behind {cut} were not proven"
                return replace(plan, phy_offset=cut, cut=True, reason=reason)
        return plan

    def recover(self, plan: RecoveryPlan, on_progress: OnProgress) -> RecoveryResult:
        """Make the files of all outputs what holds of them."""
        options, store = DecoderOptions(check_crc=False), self._config.store
        with LogView(self._disk, store.commit_log_directories, store.segment_size, options) as lookup:
            index = self.index.directory
            recovery = IndexRecovery(self._disk, index, self.known, plan, lookup, self._begin, on_progress)
            recovered = recovery.carry_out(self._comparison, self._commit)
        self._commit(recovered)
        for output, is_wanted, kept in self._kept:
            if is_wanted:
                self._disk.make_dir(output.directory)
            kept.carry_out(self._disk, output.unsynced)  # files of an output that is not wanted any more go
            recovered.reasons += kept.reasons
        if recovered.compared.queues_until is not None:
            until = recovered.compared.queues_until
            recovered.reasons.append(f"the ConsumeQueues are not what the log says from offset {until} on")
        return recovered

    def load(self, recovered: RecoveryResult) -> Pipeline:
        """The pipeline of the outputs that are wanted."""
        config, disk = self._config, self._disk
        list_log = partial(list_segments, disk, config.store.commit_log_directories, config.store.segment_size)
        points = self.log.evidence_before(self.base.phy_offset)
        detector = LogChangeDetector(disk, list_log, points, recovered.compared.tail)
        wanted = [(output, kept.held) for output, is_wanted, kept in self._kept if is_wanted]
        for output, held in ((self.index, recovered.files), *wanted):
            output.load(held)
        return Pipeline(disk, self.files, [self.index, *(output for output, _ in wanted)], self.base, detector)

    def _comparison(self, end: int) -> Comparison:
        queues_from = partial(self._queues, end=end)
        return replace(self.log.comparison(end), queues_from=queues_from, is_same_log=self.log.is_same_log)

    def _queues(self, begin: int, end: int) -> QueueComparison | None:
        # What the ConsumeQueues hold of log bytes ``[begin, end)``, to be compared; None where there are none.
        name = ConsumeQueueStore.name
        held = self.known.outputs.get(name)
        store = next((one for one, is_wanted in self._others if one.name == name and is_wanted), None)
        if store is None or held is None or self.known.refill_offset is not None or self._is_refilled:
            return None
        at_begin, at_end = (RecoveryScope(at, at, self._begin, self._is_unclean) for at in (begin, end))
        whole, is_whole = kept_queues(self._disk, store.directory, held, at_end)
        if not is_whole:
            return None
        begins, _ = kept_queues(self._disk, store.directory, held, at_begin)
        most = held.limit or self._config.outputs.queues_max
        return QueueComparison(self._disk, store.directory, most, begins, whole)

    def _plan_others(self, phy_offset: int, queues_until: int | None) -> dict[str, Any]:
        # What holds of each at ``phy_offset``: true before and after its files are changed. Behind ``doubtful_from``
        # nothing is believed that was not compared with the log, behind ``queues_until`` nothing at all. What a refill
        # that was broken off had come to was compared by nobody.
        doubtful_from = self.log.doubtful_from
        limits = [phy_offset, self.known.filled_offset]
        limits += [queues_until] if queues_until is not None else []
        limits += [self._begin] if self._is_refilled else []
        self._kept, held = [], {}
        for output, is_wanted in self._others:
            believed = min(limits)
            if not output.is_compared and doubtful_from is not None:
                believed = min(believed, doubtful_from)
            scope = RecoveryScope(phy_offset, believed, self._begin, self._is_unclean, self._is_refilled)
            kept = output.recover(self.known.outputs.get(output.name) if is_wanted else None, scope)
            self._kept.append((output, is_wanted, kept))
            held[output.name] = kept.held if is_wanted else None
        return held

    def _commit(self, recovered: RecoveryResult) -> None:
        # A frontier with what is true from now on, durable before any file becomes less than the one before said of it.
        base = self._base(recovered)
        held = self._plan_others(base.phy_offset, recovered.compared.queues_until)
        evidence = self.log.evidence_before(base.phy_offset)
        refills = (kept.refill_from for _, is_wanted, kept in self._kept if is_wanted)
        # From here on the log has to be read again for them.
        begin = min((offset for offset in refills if offset is not None), default=None)
        base = base.with_outputs(index=recovered.files, **held)
        self.base = replace(base, evidence=evidence, refill_offset=begin)
        if self.base != self.frontier:
            write_frontier(self._disk, self.files.frontier, self.base, __version__)

    def _base(self, recovered: RecoveryResult) -> Frontier:
        known, offset = self.known, recovered.phy_offset
        if offset is None:
            return replace(known, begin_offset=self._begin, phy_offset=self._begin, store_timestamp=0,
                           newest_timestamp=None, messages=0, uncovered=(), evidence=(), stale_head=None)  # fmt: skip
        if offset == known.phy_offset:
            return self._with_doubts(known, recovered.compared.damaged)
        gaps = tuple(replace(gap, end=min(gap.end, offset)) for gap in known.uncovered if gap.begin < offset)
        newest = max((mark.header.end_timestamp for mark in recovered.files), default=0)
        base = replace(
            known,
            phy_offset=offset,
            uncovered=gaps,
            stale_head=None,
            store_timestamp=recovered.compared.store_timestamp or newest,
            newest_timestamp=known.newest_timestamp if any(gap.is_unproven for gap in gaps) else None,
            messages=self.log.messages_counted(recovered.compared, offset),
        )
        return self._with_doubts(base, recovered.compared.damaged)

    def _with_doubts(self, base: Frontier, damaged: tuple[int, ...]) -> Frontier:
        # A log that was cut and written on may say what it said before: then the comparison alone has seen the messages
        # of the longer one, which are older than one before them.
        first = self.reader.unproven_from
        if first is not None and first < base.phy_offset:
            begin = first if base.unproven_from is None else min(first, base.unproven_from)
            base = _doubted(base, begin, UNPROVEN)
            base = replace(base, newest_timestamp=self.reader.newest_timestamp, stale_head=None)
        # Behind damage in the newest segment stand messages that were the log's, unless the broker cuts it there.
        newest = (base.phy_offset - 1) // base.segment_size * base.segment_size
        first = next((at for at in damaged if at >= newest), None)
        if first is None or (base.unproven_from is not None and base.unproven_from <= first):
            return base
        return _doubted(base, first, DOUBTED)


def _doubted(base: Frontier, begin: int, why: str) -> Frontier:
    gaps = [*base.left_out, Uncovered(begin, base.phy_offset, why)]
    return replace(base, uncovered=tuple(sorted(gaps, key=lambda gap: gap.begin)))


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


def _refill(config: Config, disk: Disk, pipeline: Pipeline, begin: int, on_progress: OnProgress) -> None:
    # Reads the log from ``begin`` to where the pipeline stands, for all but the key index. Broken off, it begins again.
    # What cannot be read (any more) is left out, and noted as uncovered.
    options = replace(once(reader_options(config)), skip_corrupt=True)
    reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), options, begin)
    reader.refresh()
    end = pipeline.built.phy_offset
    with closing(reader):
        while reader.position < end:
            for item in (log := WholeLog(reader, end)):
                if isinstance(item, DispatchBatch):
                    batch = within(item, item.begin_offset, end)
                    for output in pipeline.outputs[1:]:
                        output.build(batch)
                    on_progress("refill", batch.end_offset - begin, end - begin)
                elif not item.is_expired:
                    pipeline.leave_out(Uncovered(item.begin, min(item.end, end), item.reason))
            if (first := reader.position) < end:
                reader.pass_over(end)
                reason = log.unreadable.reason if log.unreadable else Reason.UNFINISHED.text
                pipeline.leave_out(Uncovered(first, reader.position, reason))
    pipeline.progress = pipeline.mark()


def _check_same(known: Frontier, wanted: Frontier, outputs: list[tuple[Output[Any], bool]], files: DataFiles) -> None:
    # What is turned off goes, however it was built.
    built = [
        output.built_with(known.outputs[output.name])
        for output, is_wanted in outputs
        if is_wanted and output.name in known.outputs
    ]
    for name, ours, given in (
        ("store", known.store, wanted.store),
        ("segment_size", known.segment_size, wanted.segment_size),
        ("flavour", known.flavour, wanted.flavour),
        ("hash_slot_num", known.layout.hash_slot_num, wanted.layout.hash_slot_num),
        ("index_num", known.layout.index_num, wanted.layout.index_num),
        *built,
    ):
        if ours != given:
            raise UnsafeStoreError(
                f"{files.data} was built with {name} {ours}, and now {given} is asked for",
                "give what it was built with, or another --data",
            )


# So long a range waits for what stands at the end of the log to be decided: a log that is written never stands still.
_TAIL_SECONDS = 1.0


@dataclass(slots=True)
class LogRange:
    """Messages that start in ``[begin, end)``, read from ``aligned`` on: the start of a message or of a segment.

    While iterated, ``position`` is how far all is known; in the end ``log_end`` is set if the log ends inside, and
    ``unreadable`` if it ends in bytes that are no frame. ``log_begin``: where the log began when it was read. It goes
    on to ``stop`` at most: a log may grow for ever.
    """

    begin: int
    end: int
    aligned: int
    flavour: str
    want_queue: bool = False
    stop: int = NEVER
    position: int = 0
    log_end: int | None = None
    unreadable: Corrupt | None = None
    log_begin: int | None = None

    def read(self, disk: Disk, config: Config, workers: int) -> Iterator[DispatchBatch | Skipped]:
        """Batches in the order of the log, Skipped for what could not be read, both cut to the range."""
        kind = FLAVOURS[self.flavour]
        rules = decode_rules(config)._replace(
            want_uniq_key=kind.uniq_key, want_tags=kind.tags, want_queue=self.want_queue
        )
        options = replace(once(reader_options(config)), skip_corrupt=True, check_tail=False, workers=workers)
        reader = LogReader(disk, config.store.commit_log_directories, rules, options, self.aligned)
        reader.refresh()
        log, self.position = WholeLog(reader, min(self.end, self.stop), _TAIL_SECONDS), self.begin
        with closing(reader):
            for item in log:
                if isinstance(item, DispatchBatch):
                    self.position = max(self.begin, min(reader.position, self.end))
                    batch = within(item, self.begin, self.end)
                    if batch.rows:
                        yield batch
                else:
                    begin, end = max(item.begin, self.begin), min(item.end, self.end)
                    if begin < end:
                        self.position = end
                        yield replace(item, begin=begin, end=end)
            self.log_begin, self.unreadable = reader.log.min_offset, log.unreadable
            if reader.position < self.end:
                self.log_end = max(reader.position, self.begin)
