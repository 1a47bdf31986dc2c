"""Names for the files of a repair: times, strictly between those of the files that stay, in the order of the log.

A broker sorts its files by name and asks them from the last to the first. What it makes later is named by its clock in
its own time zone, so a name without a neighbour is written in the time zone that is the furthest behind. Times are
counted here in milliseconds since the year 1, so that every one of them has a name and names have one order.
"""

from __future__ import annotations

import datetime
import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_UTC = datetime.UTC
_BEGIN = datetime.datetime(1, 1, 1, tzinfo=_UTC)
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=_UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_TIMES = range((_END - _BEGIN) // _MILLISECOND + 1)
# The first millisecond of Unix time, in UTC-12.
_EPOCH = (datetime.datetime(1970, 1, 1, tzinfo=_UTC) - datetime.timedelta(hours=12) - _BEGIN) // _MILLISECOND


@dataclass(frozen=True, slots=True)
class Wanted:
    """``count`` names for one range, if possible ``own`` ones: those of the files that it replaces."""

    count: int
    own: tuple[str, ...] = ()


def names_between(
    low: str | None, high: str | None, wanted: Sequence[Wanted], taken: Collection[str], store_timestamp: int
) -> list[tuple[str, ...]] | None:
    """Names for ranges that follow one another in the log, behind ``low`` and before ``high``; None without room.

    ``taken`` are names of other files. ``store_timestamp``, ms, of the first message says where names begin that have
    no file before them. If there is room, a range's new names lie behind the own ones of the ranges before it.
    """
    digits = _Digits(low or high)
    if high is not None and not digits.have(high):
        high = None  # another script: it sorts behind all of these
    count = sum(one.count for one in wanted)
    first = _first(digits, low, high, count + len(taken), store_timestamp)
    for found in (_beside_own(digits, low, first, wanted, taken), _from(digits, first, wanted, taken)):
        names = [name for one in found for name in one]
        if len(names) == count and (not names or high is None or names[-1] < high):
            return found
    return None


class _Digits:
    """Names in the digits of one script, that of ``like``: a broker writes those of its locale."""

    def __init__(self, like: str | None) -> None:
        self._zero = ord(like[0]) - unicodedata.decimal(like[0]) if like else ord("0")

    def name(self, at: int) -> str:
        time = _BEGIN + at * _MILLISECOND
        fields = time.year, time.month, time.day, time.hour, time.minute, time.second, time.microsecond // 1000
        text = "{:04d}{:02d}{:02d}{:02d}{:02d}{:02d}{:03d}".format(*fields)
        return text if self._zero == ord("0") else "".join(chr(self._zero + int(digit)) for digit in text)

    def behind(self, name: str) -> int:
        """The first time whose name sorts behind ``name``, be that a time or not."""
        return bisect_right(_TIMES, name, key=self.name)

    def have(self, name: str) -> bool:
        return ord(name[0]) - unicodedata.decimal(name[0]) == self._zero

    def is_time(self, name: str) -> bool:
        at = self.behind(name)
        return at > 0 and self.name(at - 1) == name

    def free(self, at: int, taken: Collection[str]) -> Iterator[str]:
        return (name for time in _TIMES[at:] if (name := self.name(time)) not in taken)


def _first(digits: _Digits, low: str | None, high: str | None, count: int, store_timestamp: int) -> int:
    # The first time to be used where no name of its own serves.
    at = min(max(_EPOCH + store_timestamp, 0), len(_TIMES) - 1)
    if low is not None:
        return digits.behind(low) if high is not None else max(at, digits.behind(low))
    # Without a file before it, so much room is left to the one behind it as is needed.
    return at if high is None else max(min(at, digits.behind(high) - 2 - count), 0)


def _beside_own(
    digits: _Digits, low: str | None, first: int, wanted: Sequence[Wanted], taken: Collection[str]
) -> list[tuple[str, ...]]:
    found, last = [], low
    for one in wanted:
        own = sorted(name for name in one.own if (last is None or name > last) and digits.is_time(name))
        names = own[: one.count]
        last = max((name for name in (last, *own) if name is not None), default=None)
        free = digits.free(first if last is None else max(first, digits.behind(last)), taken)
        names += [name for name, _ in zip(free, range(one.count - len(names)), strict=False)]
        last = max((name for name in (last, *names) if name is not None), default=None)
        found.append(tuple(names))
    return found


def _from(digits: _Digits, first: int, wanted: Sequence[Wanted], taken: Collection[str]) -> list[tuple[str, ...]]:
    # One behind the other from the first one on: there is no room behind their own. Those of older ranges are still
    # there while the newer ones are built.
    found, names, used = [], digits.free(first, taken), set[str]()
    for one in wanted:
        free = (name for name in names if name not in used)
        found.append(tuple(name for _, name in zip(range(one.count), free, strict=False)))
        used.update(one.own)
    return found
