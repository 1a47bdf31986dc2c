"""What single messages say about the RocketMQ that indexed them, and the history that most likely made them say it.

A message that is whole in a file, between entries that are right themselves, would have other entries from another
RocketMQ, as a rule. One that is cut in two by the file's begin or end says only what its part says; and one beside an
entry that belongs to no message says nothing: that one may have been its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from indexd.commitlog.decoder import Message
from indexd.commitlog.evidence import MessageLookup
from indexd.index.format import FLAVOURS, index_key_hash

#: From the oldest to the newest: each indexes more than the one before. 4.0 indexes what 4.7 does.
NAMES = ("3.x", "4.7", "5.4")
_STATES = range(len(NAMES))

# What a history costs. An entry is never there by chance: taking it for one that its RocketMQ did not put is worst.
_TOO_OLD, _TOO_NEW = 8, 1
# Brokers are upgraded once or twice; that one went back is believed when many messages in a row say so.
_UPGRADE, _DOWNGRADE = 2, 32


@dataclass(frozen=True, slots=True)
class Vote:
    """A message at ``phy_offset`` .. ``end``: which of NAMES would have put its entries, not all of them and not none.

    ``number`` is that of its first entry in the file.
    """

    number: int
    phy_offset: int
    end: int
    fits: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Entries ``number`` .. ``number + len(hashes) - 1`` of a file, all that stand there of one message.

    ``message`` is None unless all of them are of keys that it has; ``keys`` are the hashes that each of NAMES puts.
    """

    number: int
    phy_offset: int
    hashes: tuple[int, ...]
    message: Message | None = None
    keys: tuple[tuple[int, ...], ...] = ()

    @property
    def behind(self) -> int:
        """The number of the entry behind it."""
        return self.number + len(self.hashes)


def runs_of(number: int, phy_offsets: Sequence[int], hashes: Sequence[int], lookup: MessageLookup) -> list[Run]:
    """Entries from ``number`` on by the messages that they point to. Raises DiskError."""
    found = []
    pairs = zip(phy_offsets, hashes, strict=True)
    for phy_offset, group in groupby(pairs, key=lambda pair: pair[0]):
        run = Run(number, phy_offset, tuple(key_hash for _, key_hash in group))
        message = lookup.at(phy_offset) if phy_offset >= 0 else None
        if isinstance(message, Message):
            keys = _keys(message)
            run = replace(run, message=message, keys=keys) if set(run.hashes) <= set(keys[-1]) else run
        found.append(run)
        number = run.behind
    return found


def votes_of(runs: Sequence[Run], *, begins: bool, ends: bool) -> list[Vote]:
    """The votes among ``runs``, which follow one another; whether the file ``begins`` or ``ends`` with them."""
    found = []
    for at, run in enumerate(runs):
        before, behind = at > 0, at < len(runs) - 1
        if run.message is None or not (before or begins) or not (behind or ends):
            continue
        beside = runs[at - before : at + behind + 1]
        if any(one.message is None for one in beside) or any(a.phy_offset >= b.phy_offset for a, b in pairwise(beside)):
            continue
        fits = tuple(_is_part(run.hashes, keys, has_begin=before, has_end=behind) for keys in run.keys)
        if any(fits) and not all(fits):
            found.append(Vote(run.number, run.phy_offset, run.phy_offset + run.message.size, fits))
    return found


def history(votes: Sequence[Vote]) -> list[int]:
    """For each of ``votes``, which follow one another in the log, the place in NAMES of what most likely indexed it.

    The newest that fits, where several do: it finds what older ones find.
    """
    best: list[tuple[int, int]] = [(0, 0) for _ in _STATES]
    steps: list[list[int]] = []
    for vote in votes:
        came = [min(_STATES, key=lambda old: _after(best[old], old, new)) for new in _STATES]
        steps.append(came)
        best = [_with(_after(best[came[new]], came[new], new), vote, new) for new in _STATES]
    state = min(_STATES, key=best.__getitem__)
    found = []
    for came in reversed(steps):
        found.append(state)
        state = came[state]
    return found[::-1]


def _after(cost: tuple[int, int], old: int, new: int) -> tuple[int, int]:
    change = 0 if new == old else _UPGRADE if new > old else _DOWNGRADE
    return cost[0] + change, cost[1]


def _with(cost: tuple[int, int], vote: Vote, state: int) -> tuple[int, int]:
    wrong = 0 if vote.fits[state] else _TOO_OLD if any(vote.fits[state:]) else _TOO_NEW
    return cost[0] + wrong, cost[1] + _STATES[-1] - state


def _is_part(held: tuple[int, ...], whole: tuple[int, ...], *, has_begin: bool, has_end: bool) -> bool:
    # Where the begin of a message may stand in another file, its end is enough, and the other way round.
    spare = len(whole) - len(held)
    firsts = [first for first in range(spare + 1) if whole[first : first + len(held)] == held]
    return any((first == 0 or not has_begin) and (first == spare or not has_end) for first in firsts)


def _keys(message: Message) -> tuple[tuple[int, ...], ...]:
    # In the order in which they are put (spec rocketmq-store 4.2, 4.3).
    uniq = [index_key_hash(message.topic, message.uniq_key)] if message.uniq_key is not None else []
    keys = [index_key_hash(message.topic, key) for key in message.keys]
    tags = [index_key_hash(message.topic, message.tags, "T")] if message.tags else []
    return tuple(
        (*(uniq if kind.uniq_key else ()), *keys, *(tags if kind.tags else ()))
        if message.sys_flag & 0xC not in kind.skipped_types
        else ()
        for kind in (FLAVOURS[name] for name in NAMES)
    )
