"""The broker asked for the sampled keys in ranges of time, and what is true held beside its answers.

The truth are the messages that the audit wrote down, read again from the log: the hash may be another key's. A broker
may be writing and expiring all the while: what is not there any more, or came behind what was audited, does not count.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from indexd.audit.covered import log_bounds
from indexd.audit.part import Part
from indexd.audit.plan import AuditPlan, layout_of
from indexd.audit.samples.answers import WIDTHS, Answers, Share
from indexd.audit.samples.broker_query import TIME_MAX, BrokerFiles, BrokerQuery, TooLongError
from indexd.audit.samples.draw import Sample, flavour_at
from indexd.audit.samples.kernel import ROWS_MAX
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.evidence import MessageLookup
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.recovery.open import frame_size_max
from indexd.storage.disk import Disk

# What mqadmin and the dashboard ask for.
_MAX_NUM = 64
# Each chain is a read or more at random places of the disk.
_SECONDS_MAX = 60.0


def ask(
    disk: Disk,
    config: Config,
    plan: AuditPlan,
    samples: Sequence[Sample],
    parts: Sequence[Part],
    *,
    seconds_max: float = _SECONDS_MAX,
) -> Answers:
    """Ask for each sample in ranges of all widths around its message, and hold the answers against ``part.sampled``.

    After ``seconds_max`` no further sample is asked. Raises DiskError for what cannot be read.
    """
    asking = _Asking(disk, config, plan, parts)
    deadline = time.monotonic() + seconds_max
    try:
        # In no order of the log, so that those which are asked in time stand for all.
        for sample in sorted(samples, key=lambda sample: sample.key_hash):
            how = asking.ask(sample) if time.monotonic() <= deadline else "late"
            asking.counts[how] += 1
    finally:
        asking.close()
    return Answers(tuple(asking.shares.values()), len(samples), max_num=asking.max_num, **asking.counts)


def range_around(timestamp: int, width: int | None) -> tuple[int, int]:
    """First and last millisecond of the range of ``width`` ms with the timestamp in its middle; None: all time."""
    if width is None:
        return 0, TIME_MAX
    begin = max(timestamp - width // 2, 0)
    return begin, begin + width - 1


class _Asking:
    def __init__(self, disk: Disk, config: Config, plan: AuditPlan, parts: Sequence[Part]) -> None:
        self._disk, self._store, self._plan = disk, config.store, plan
        self.max_num = min(_MAX_NUM, config.query.max_msgs_num_batch)
        self.shares = {name: Share(name) for name in WIDTHS}
        self.counts: dict[str, int] = defaultdict(int)
        self._sampled: dict[int, dict[int, int]] = defaultdict(dict)
        for part in parts:
            for key_hash, phy_offset, timestamp in part.sampled:
                self._sampled[key_hash][phy_offset] = timestamp
        self._gaps = [gap for part in parts for gap in part.gaps]
        # What has expired since it was listed, read or not, says nothing against an answer.
        self._log_begin, (_, self._log_end, _) = plan.log_begin, log_bounds(plan, parts)
        self._files = BrokerFiles(disk, plan, layout_of(config))
        options = DecoderOptions(frame_size_max=frame_size_max(config), check_crc=False)
        self._lookup = MessageLookup(disk, self._store.commit_log_directories, self._store.segment_size, options)

    def close(self) -> None:
        self._files.close()
        self._lookup.close()

    def ask(self, sample: Sample) -> str:
        """The name of the count of Answers that the sample goes into."""
        rows = self._sampled.get(sample.key_hash, {})
        if len(rows) > ROWS_MAX:
            return "hot"
        if sample.phy_offset not in rows:
            return "unseen"
        search = BrokerQuery(self._files, sample.key_hash)
        ranges = {name: range_around(sample.store_timestamp, width) for name, width in WIDTHS.items()}
        try:
            answers = {name: search.query(*bounds, self.max_num) for name, bounds in ranges.items()}
            truth = _Truth(sample, self._plan, self._lookup)
            # Read after they were asked for: a broker deletes log before it deletes index.
            true = {phy_offset: at for phy_offset, at in rows.items() if truth.is_hit(phy_offset)}
            if sample.phy_offset not in true:
                return "unseen"
            found = [self._judge(name, bounds, answers[name], true, truth, search) for name, bounds in ranges.items()]
        except TooLongError:
            return "long"
        for share in found:
            self._add(share)
        return "asked"

    def _judge(
        self,
        width: str,
        bounds: tuple[int, int],
        answer: list[int],
        true: dict[int, int],
        truth: _Truth,
        search: BrokerQuery,
    ) -> Share:
        begin, end = bounds
        share = Share(width, queries=1)
        hits = {phy_offset for phy_offset, timestamp in true.items() if begin <= timestamp <= end}
        self._judge_answer(share, begin, end, answer, hits, truth)
        missed = hits - set(answer)
        if missed:
            log_begin = self._log_begin_now()
            hits = {phy_offset for phy_offset in hits if phy_offset >= log_begin}
            self._judge_missed(share, begin, end, missed & hits, len(answer) >= self.max_num, search)
        share.hits = len(hits)
        share.wrong_queries = int(share.missed + share.added > 0)
        return share

    def _judge_answer(
        self, share: Share, begin: int, end: int, answer: list[int], hits: set[int], truth: _Truth
    ) -> None:
        met: set[int] = set()
        for phy_offset in answer:
            message = truth.at(phy_offset)
            if phy_offset not in hits and not self._counts(phy_offset, message, begin, end, truth):
                continue
            share.answers += 1
            if phy_offset in met:
                share.repeated += 1
            elif message is None:
                share.dead += 1
            elif not truth.is_hit(phy_offset):
                share.other_key += 1
            elif phy_offset not in hits:
                share.out_of_range += 1
            met.add(phy_offset)

    def _counts(self, phy_offset: int, message: Message | None, begin: int, end: int, truth: _Truth) -> bool:
        # Whether the audit can say anything of an answer that is no hit it knows.
        if message is None:
            is_expired = self._log_begin <= phy_offset < self._log_begin_now()
            return not is_expired and not any(gap.begin <= phy_offset < gap.end for gap in self._gaps)
        is_true = truth.is_hit(phy_offset) and begin <= message.store_timestamp <= end
        return not is_true and phy_offset < self._log_end

    def _judge_missed(
        self, share: Share, begin: int, end: int, missed: set[int], is_full: bool, search: BrokerQuery
    ) -> None:
        if is_full:
            cut_off = missed.intersection(search.query(begin, end, None))
            share.cut_off, missed = len(cut_off), missed - cut_off
        findable, timely = search.reach(missed, begin, end)
        share.hole = len(missed - findable)
        share.time = len(findable - timely)
        share.early_end = len(timely)

    def _log_begin_now(self) -> int:
        log = list_segments(self._disk, self._store.commit_log_directories, self._store.segment_size)
        return log.min_offset or 0

    def _add(self, share: Share) -> None:
        total = self.shares[share.width]
        for name in Share.__slots__:
            if name != "width":
                setattr(total, name, getattr(total, name) + getattr(share, name))


class _Truth:
    # Messages of one sample's answers, each read once.
    def __init__(self, sample: Sample, plan: AuditPlan, lookup: MessageLookup) -> None:
        self._sample, self._plan, self._lookup = sample, plan, lookup
        self._messages: dict[int, Message | None] = {}

    def at(self, phy_offset: int) -> Message | None:
        if phy_offset not in self._messages:
            found = self._lookup.at(phy_offset) if phy_offset >= 0 else None
            self._messages[phy_offset] = found if isinstance(found, Message) else None
        return self._messages[phy_offset]

    def is_hit(self, phy_offset: int) -> bool:
        message = self.at(phy_offset)
        return message is not None and self._sample.is_key_of(message, flavour_at(self._plan, phy_offset))
