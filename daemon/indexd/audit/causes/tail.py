"""Why nothing is findable from some message on to the end of the log: the broker is about to index it, or it is not.

How far the broker has dispatched stands in the checkpoint: it builds its ConsumeQueues and its index in one go, and
writes down the store time of the newest message in a queue (spec rocketmq-store 4.1, 6.1).
"""

from __future__ import annotations

from indexd.audit.causes.around import Around, Surroundings
from indexd.audit.causes.words import Cause, make_cause
from indexd.audit.crash import dispatch_start
from indexd.config.load import index_key, writes_index
from indexd.flush.frontier import StoreCheckpoint

# A message as young as this (ms), when the store was looked at, may just not have been dispatched.
_FRESH = 30_000
# How far apart the parts of one copy may be, ms.
_COPY = 60_000


def tail_cause(ground: Surroundings, around: Around) -> Cause:
    """Of a hole behind which no key is findable."""
    standing = ground.standing
    if not writes_index(ground.config.broker, ground.flavour):
        return make_cause("index-off", f"{index_key(ground.flavour)} is false in broker.conf", *_begin(around))
    if standing.is_live:
        return _live(ground, around)
    return _killed(ground, around) if standing.has_abort else _stopped(ground, around)


def _live(ground: Surroundings, around: Around) -> Cause:
    standing, hole = ground.standing, around.hole
    pid = "" if standing.lock.pid is None else f" (pid {standing.lock.pid})"
    evidence = [f"a broker runs{pid}", *_begin(around)]
    age = max(standing.looked_at - hole.begin_timestamp, 0)
    if age < _FRESH:
        return make_cause("not-dispatched-yet", *evidence, f"its first message was {age / 1000:.0f} s old")
    if around.before is not None and around.before.is_full:
        empty = [f"{len(around.empty):,} index files behind it have no entry"] if around.empty else []
        return make_cause("roll-over-failure", *evidence, *empty, *_dispatched(ground, around))
    if _is_dispatched(ground, around) is False:
        return make_cause("not-dispatched-yet", *evidence, *_dispatched(ground, around))
    return make_cause("index-off", *evidence, *_dispatched(ground, around))


def _killed(ground: Surroundings, around: Around) -> Cause:
    evidence = ["no broker runs, and there is an abort file: it ended without a clean stop", *_begin(around)]
    evidence += [*_dispatched(ground, around), _mended(ground, around)]
    if around.before is None or around.before.is_full:
        return make_cause("unclean-stop", *evidence)
    return make_cause("index-off" if _is_dispatched(ground, around) else "not-dispatched-yet", *evidence)


def _stopped(ground: Surroundings, around: Around) -> Cause:
    standing, hole, before = ground.standing, around.hole, around.before
    evidence = ["no broker runs, and there is no abort file: it was stopped cleanly, when all was dispatched"]
    if not standing.has_lock_file:
        evidence = ["there is no lock file and no abort file: this is a copy"]
        if before is not None and not before.is_full and hole.end_timestamp - hole.begin_timestamp < _COPY:
            text = "it spans less than a minute: the index was copied before the log"
            return make_cause("not-dispatched-yet", *evidence, *_begin(around), text)
    full_end = standing.checkpoint.index_msg_timestamp if standing.checkpoint is not None else 0
    if before is None and full_end:
        text = "by the checkpoint there was a full index file"
        return make_cause("file-deleted", *evidence, *_begin(around), text)
    if before is not None and before.is_full:
        return make_cause("file-deleted", *evidence, *_begin(around), *_dispatched(ground, around))
    if not ground.files:
        # Whether it was never written or taken away, nothing here tells.
        none = "index file" if standing.has_index_folder else "index folder"
        return make_cause("unknown", *evidence, f"there is no {none}", *_dispatched(ground, around))
    return make_cause("index-off", *evidence, *_begin(around), *_dispatched(ground, around))


def _begin(around: Around) -> list[str]:
    before = around.before
    if before is None:
        return ["no index file points before it"]
    fill = "is full" if before.is_full else "is not full"
    return [f"it begins right behind the last index file, index/{before.name}, which {fill}"]


def _is_dispatched(ground: Surroundings, around: Around) -> bool | None:
    # Whether the ConsumeQueues have the hole's first message; None without a checkpoint.
    checkpoint = ground.standing.checkpoint
    if checkpoint is None or checkpoint.logics_msg_timestamp == 0:
        return None
    return checkpoint.logics_msg_timestamp > around.hole.begin_timestamp


def _dispatched(ground: Surroundings, around: Around) -> list[str]:
    is_dispatched = _is_dispatched(ground, around)
    if is_dispatched is None:
        return []
    if is_dispatched:
        return ["by the checkpoint messages of it are in the ConsumeQueues: only the index was not written"]
    return ["by the checkpoint the ConsumeQueues end there, too"]


def _mended(ground: Surroundings, around: Around) -> str:
    standing, hole = ground.standing, around.hole
    checkpoint = standing.checkpoint or StoreCheckpoint()
    start = dispatch_start(standing.segments, checkpoint, ground.config, ground.flavour)
    begin = start.begin if start is not None else hole.begin
    cut, reason = ground.cut
    if begin < cut <= hole.last and reason is not None:
        return (
            f"the broker's next start dispatches again from log byte {begin} on, and cuts its log at {cut}, where it "
            "cannot be read: what is behind is not mended"
        )
    if begin <= hole.begin:
        return f"the broker's next start dispatches again from log byte {begin} on: that mends it"
    if begin < hole.end:
        return f"the broker's next start dispatches again from log byte {begin} on: that mends it from there on only"
    return f"the broker's next start dispatches again only from log byte {begin} on: that does not mend it"
