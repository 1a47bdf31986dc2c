"""Why the keys of a hole are not findable: its likely cause, and what in the store speaks for it.

RocketMQ begins an index file only behind a full one and counts its first time difference from the end of that one; it
passes over messages below the end of its last file; and after an unclean stop it throws the open file away and
dispatches again from the begin of a segment (spec rocketmq-store 3.4, 4.2, 4.4, 7.2). So a file that was thrown away,
one that was deleted, a log that was replaced and messages that nobody indexed leave different holes.
"""

from __future__ import annotations

from indexd.audit.causes.around import Around, Surroundings
from indexd.audit.causes.tail import tail_cause
from indexd.audit.causes.words import LOG_CAUSES, Cause, counted, make_cause
from indexd.audit.standing import Standing
from indexd.audit.whole import Audit
from indexd.config import Config

__all__ = ["Cause", "hole_causes"]

_NAMES_SHOWN = 3


def hole_causes(audit: Audit, standing: Standing, config: Config) -> tuple[Cause, ...]:
    """The cause of each hole of ``audit.holes``, in the same order; reads nothing."""
    ground = Surroundings(audit, standing, config)
    return tuple(_with_repairs(_cause(ground, ground.around(hole)), standing) for hole in audit.holes)


def _with_repairs(cause: Cause, standing: Standing) -> Cause:
    # Of what the log is the cause of, they say nothing.
    if not standing.repairs or cause.what in LOG_CAUSES:
        return cause
    name = standing.repairs[-1]
    many = f", and {len(standing.repairs) - 1:,} of earlier ones" if len(standing.repairs) > 1 else ""
    text = f"{name} lies beside the index{many}: indexd repair has exchanged the index, and the other one is in there"
    return Cause(cause.what, cause.words, (*cause.evidence, text))


def _cause(ground: Surroundings, around: Around) -> Cause:
    found = (
        _log_damaged(ground, around)
        or _behind_unreadable(ground, around)
        or _replaced(ground, around)
        or _damaged(ground, around)
        or _passed_over(around)
        or _unreadable(around)
    )
    if found is not None:
        return found
    return tail_cause(ground, around) if around.is_tail else _between(ground, around)


def _behind_unreadable(ground: Surroundings, around: Around) -> Cause | None:
    # Whatever else it comes from: it cannot be mended before the log is.
    cut, reason = ground.cut
    if around.hole.begin < cut or reason is None:
        return None
    return make_cause(
        "behind-unreadable",
        f"the log from byte {cut} on cannot be read ({reason}), and goes on behind that",
        "a broker that starts cuts its log there, so nobody indexes what is behind: the log wants a look first",
    )


def _log_damaged(ground: Surroundings, around: Around) -> Cause | None:
    # A frame whose own end was hit: its head is whole, so it is read as a message, and its keys are others now.
    hole = around.hole
    gap = next((gap for gap in ground.audit.gaps if gap.begin == hole.end and not gap.is_missing), None)
    if gap is None or hole.messages != 1 or not around.strays:
        return None
    return make_cause(
        "log-damaged",
        f"it ends where the log cannot be read, at {gap.begin} ({gap.reason})",
        "an entry of index/" + around.strays[0].name + " names another key of its message: what makes the log "
        "unreadable there begins inside that message, and the entry is likely right",
    )


def _replaced(ground: Surroundings, around: Around) -> Cause | None:
    hole, strays = around.hole, around.strays
    # The last file by name is the one that RocketMQ goes on with.
    last = ground.files[-1] if ground.files else None
    rule = "RocketMQ passes over a message below the end of its last file, without a word"
    if around.is_tail and last is not None and last.end >= ground.audit.log_end:
        text = f"index/{last.name} ends at log byte {last.end}, and the log ends at {ground.audit.log_end}"
        return make_cause("log-replaced", text, rule)
    if not strays or _is_one_wrong_entry(around):
        return None
    pointing = [
        f"{counted(one.count, 'entry', 'entries')} of index/{one.name} point to log bytes {one.low} to {one.high}, "
        "where the log holds other messages now"
        for one in strays[-_NAMES_SHOWN:]
    ]
    high = max(one.high for one in strays)
    ends = f"it ends at {hole.end}, and the last of these entries points to {high}"
    return make_cause("log-replaced", *pointing, ends, rule)


def _is_one_wrong_entry(around: Around) -> bool:
    # Its own message is the one whose key is missing.
    strays, hole = around.strays, around.hole
    return len(strays) == 1 and hole.messages == 1 and strays[0].low == strays[0].high == hole.begin


def _damaged(ground: Surroundings, around: Around) -> Cause | None:
    hole, cut = around.hole, around.cut
    evidence = []
    if hole.unreachable * 2 >= hole.keys:
        keys = counted(hole.keys, "key", "keys")
        evidence.append(f"{hole.unreachable:,} of its {keys} have an entry that no walk along the chains meets")
    if cut is not None:
        evidence.append(
            f"index/{cut.name} counts {cut.header_count:,} entries up to log byte {cut.header_end}, and behind entry "
            f"{cut.entries} there are only zeros"
        )
    if _is_one_wrong_entry(around):
        evidence.append(f"the entry of index/{around.strays[0].name} that points there is of no key of that message")
    touched = [file for file in (around.across, *around.inside) if file is not None and file.name in ground.broken]
    evidence += [f"the chains or slots of index/{file.name} do not hold: see its findings" for file in touched]
    return make_cause("file-damaged", *evidence[:_NAMES_SHOWN]) if evidence else None


def _passed_over(around: Around) -> Cause | None:
    if around.across is None:
        return None
    return make_cause(
        "index-off",
        f"index/{around.across.name} has entries of messages on both sides of it, so no file is missing: RocketMQ did "
        "not index these messages when it dispatched them",
    )


def _unreadable(around: Around) -> Cause | None:
    if not around.unreadable:
        return None
    names = ", ".join(f"index/{name}" for name in around.unreadable[:_NAMES_SHOWN])
    return make_cause(
        "file-unreadable", f"by its name {names} belongs there, and its size is not that of an index file"
    )


def _between(ground: Surroundings, around: Around) -> Cause:
    """A hole with other files before and behind it, or with none before it."""
    evidence = [*_begin(ground, around), *_end(around)]
    capacity = ground.config.index.index_num - 1
    files, rest = divmod(around.hole.keys, capacity)
    if around.before is not None and not around.before.is_full:
        return make_cause("unknown", *evidence)
    if files and not rest:
        evidence.append(f"{around.hole.keys:,} keys fill exactly {counted(files, 'index file', 'index files')}")
    if around.is_cut_message_behind:
        text = "some keys of its last message are in the file behind it: the others stood in a file that is gone"
        return make_cause("file-deleted", *evidence, text)
    if _is_gone(around):
        return make_cause("file-deleted", *evidence)
    if around.segment_begin is not None:
        return make_cause("unclean-stop", *evidence)
    if files and not rest:
        return make_cause("file-deleted", *evidence)
    if around.before is not None and around.behind is not None:
        return make_cause("roll-over-failure", *evidence)
    if around.behind is not None and around.behind.first_time_difference == 0:
        text = f"index/{around.behind.name} counts from the end of no file: the index was begun there"
        return make_cause("index-off", *evidence, text)
    return make_cause("unknown", *evidence)


def _is_gone(around: Around) -> bool:
    if around.counts_from_before is not None:
        return not around.counts_from_before
    # With nothing before it: a file that ended before the hole began has expired since.
    vanished = around.vanished_end
    return vanished is not None and vanished > around.hole.begin_timestamp


def _begin(ground: Surroundings, around: Around) -> list[str]:
    before = around.before
    if before is None:
        at_begin = "with the log" if around.hole.begin == ground.audit.log_begin else "at a message"
        return [f"it begins {at_begin}, and no index file stands before it"]
    if before.is_full:
        return [f"it begins right behind index/{before.name}, which is full"]
    return [
        f"it begins behind index/{before.name}, which is not full: RocketMQ would have gone on in that file, so files "
        "were put here or taken away by hand"
    ]


def _end(around: Around) -> list[str]:
    found = []
    behind = around.behind
    if around.segment_begin is not None:
        found.append(
            f"it ends where the segment at {around.segment_begin} begins: after an unclean stop RocketMQ throws the "
            "open file away and dispatches again from the begin of a segment"
        )
    elif behind is not None:
        found.append(f"it ends in the middle of a segment, at {around.hole.end}")
    if behind is not None and around.counts_from_before and around.before is not None:
        found.append(
            f"index/{behind.name} counts from the end of index/{around.before.name}: that was the last file when "
            "it was begun"
        )
    elif around.vanished_end is not None and behind is not None:
        found.append(
            f"index/{behind.name} counts from the end of a file that is not here, which ended "
            f"{behind.first_time_difference:,} s before it"
        )
    if around.empty:
        names = ", ".join(f"index/{name}" for name in around.empty[:_NAMES_SHOWN])
        found.append(
            f"{counted(len(around.empty), 'index file', 'index files')} between them without an entry: {names}"
        )
    return found
