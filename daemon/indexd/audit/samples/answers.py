"""What sampled queries came to: how much of what is true the broker's own answers miss, and what they add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The ranges that are asked around a message: what they are called, and how long they are, ms; None has no bounds.
WIDTHS: dict[str, int | None] = {
    "millisecond": 1,
    "second": 1000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
    "all time": None,
}
_SHOWN = "minute"


@dataclass(slots=True)
class Share:
    """Queries in ranges of one width. ``hits`` are true ones: messages of the topic, the key and the range.

    Of these the answers lack those that no query finds (``hole``), those that the test of whole seconds or of a file's
    times leaves out (``time``), those behind an entry or file that ends the search early (``early_end``); these are
    ``missed``. ``cut_off`` are found only if more answers are asked for than the broker gives.
    Of the ``answers`` those are too many that are of another key, out of the range, repeated or dead: no message is
    there. ``wrong_queries`` miss something or have something too many.
    """

    width: str
    queries: int = 0
    wrong_queries: int = 0
    hits: int = 0
    hole: int = 0
    time: int = 0
    early_end: int = 0
    cut_off: int = 0
    answers: int = 0
    other_key: int = 0
    out_of_range: int = 0
    repeated: int = 0
    dead: int = 0

    @property
    def missed(self) -> int:
        """True hits that are missing for another reason than that there are too many."""
        return self.hole + self.time + self.early_end

    @property
    def added(self) -> int:
        """Answers that are none."""
        return self.other_key + self.out_of_range + self.repeated + self.dead

    def to_json(self) -> dict[str, Any]:
        """A line of ``--json``; ``rangeMs`` None: without bounds."""
        return {
            "kind": "answers",
            "width": self.width,
            "rangeMs": WIDTHS[self.width],
            "queries": self.queries,
            "wrongQueries": self.wrong_queries,
            "trueHits": self.hits,
            "missed": self.missed,
            "missedShare": round(self.missed / self.hits, 6) if self.hits else None,
            "missedByHole": self.hole,
            "missedByTime": self.time,
            "missedByEarlyEnd": self.early_end,
            "cutOff": self.cut_off,
            "answers": self.answers,
            "added": self.added,
            "addedShare": round(self.added / self.answers, 6) if self.answers else None,
            "addedOfOtherKey": self.other_key,
            "addedOutOfRange": self.out_of_range,
            "addedRepeated": self.repeated,
            "addedDead": self.dead,
        }


@dataclass(frozen=True, slots=True)
class Answers:
    """``shares`` are in the order of WIDTHS. Of ``drawn`` keys ``asked`` were asked for.

    The others: ``hot`` ones have more messages than are written down, ``long`` ones stand in chains too long to be
    walked, ``unseen`` ones the audit did not meet in the log or the log has lost since, ``late`` ones had no time left.
    ``max_num`` answers are the most that a query gets.
    """

    shares: tuple[Share, ...] = ()
    drawn: int = 0
    asked: int = 0
    hot: int = 0
    long: int = 0
    unseen: int = 0
    late: int = 0
    max_num: int = 64

    @property
    def queries(self) -> int:
        """How many were asked, in all widths."""
        return sum(share.queries for share in self.shares)

    def rows(self) -> list[dict[str, Any]]:
        """Lines of ``--json``: kind ``answers`` a width, and kind ``samples`` once."""
        names = ("drawn", "asked", "hot", "long", "unseen", "late")
        counts = {name: getattr(self, name) for name in names}
        return [*(share.to_json() for share in self.shares), {"kind": "samples", **counts, "maxNum": self.max_num}]

    def lines(self) -> list[str]:
        """What a person reads: two or three lines."""
        if not self.asked:
            return [
                "Queries: no key of the log could be asked for" + (f" ({self._left_out()})." if self.drawn else ".")
            ]
        shown = next(share for share in self.shares if share.width == _SHOWN)
        return [
            f"In time ranges of a minute the broker's own query misses {_missed(shown)}; {_added(shown)}.",
            self._others(shown),
            f"Asked: {_count(self.asked, 'key')} from all over the log{self._and_left_out()}.",
        ]

    def _others(self, shown: Share) -> str:
        others = [share for share in self.shares if share is not shown]
        words = ", ".join(f"{_article(share.width)} {_percent(share.missed, share.hits)}" for share in others)
        cut = max(share.cut_off for share in self.shares)
        more = f"; {cut:,} hits more are cut off, for {self.max_num} are the most it gives" if cut else ""
        return f"In other ranges it misses: {words}{more}."

    def _and_left_out(self) -> str:
        words = self._left_out()
        return f"; left out: {words}" if words else ""

    def _left_out(self) -> str:
        reasons = (
            (self.hot, "with too many messages"),
            (self.long, "in a chain too long"),
            (self.unseen, "not met in the log"),
            (self.late, "for want of time"),
        )
        return ", ".join(f"{count:,} {reason}" for count, reason in reasons if count)


def _missed(share: Share) -> str:
    if not share.missed:
        return f"none of {_count(share.hits, 'true hit')}"
    reasons = (
        (share.hole, "not findable at all"),
        (share.time, "by its test of times, which counts whole seconds"),
        (share.early_end, "where its search ends early"),
    )
    some = [(count, reason) for count, reason in reasons if count]
    words = [reason if len(some) == 1 else f"{_percent(count, share.hits)} {reason}" for count, reason in some]
    return f"{_percent(share.missed, share.hits)} of {_count(share.hits, 'true hit')} ({', '.join(words)})"


def _added(share: Share) -> str:
    if not share.added:
        return "no answer is wrong"
    reasons = (
        (share.other_key, "of another key"),
        (share.out_of_range, "out of the range"),
        (share.repeated, "repeated"),
        (share.dead, "without a message"),
    )
    words = ", ".join(f"{count:,} {reason}" for count, reason in reasons if count)
    return f"{_percent(share.added, share.answers)} of its {_count(share.answers, 'answer')} are wrong ({words})"


def _article(width: str) -> str:
    return (
        width
        if width not in ("millisecond", "second", "hour", "day")
        else f"{'an' if width == 'hour' else 'a'} {width}"
    )


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _percent(count: int, whole: int) -> str:
    # Never 0 % of what is there, nor all of what is not.
    if not count:
        return "0 %"
    share = 100 * count / whole
    if share < 0.1:
        return "under 0.1 %"
    return f"{share:.1f} %" if count < whole and share < 99.95 else "100 %" if count == whole else "over 99.9 %"
