"""SearchForm: what the page's form says, as it stands in the page's address, and what it means."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as clock_time
from typing import Literal
from urllib.parse import urlencode

from indexd.errors import UsageError
from indexd.query import TIME_MAX, TIME_MIN

#: How one may search, and what the field is called then.
WAYS = {
    "key": "Key or unique key",
    "unique": "Unique key",
    "tags": "Tags",
    "id": "Message id (offset)",
    "offset": "Physical offset",
    "queue": "Queue id / offset",
    "time": "Time in the log",
}
#: Those that are asked within a topic, and those that know a range of time.
OF_TOPIC = frozenset({"key", "unique", "tags", "queue"})
BY_INDEX = frozenset({"key", "unique", "tags"})
INDEX_TYPES: dict[str, Literal["U", "T"] | None] = {"key": None, "unique": "U", "tags": "T"}
MODES = {"exact": "every message that matches", "rocketmq": "what the broker would answer"}
MOST_DEFAULT = 64

_HINT = "write 2026-11-22 03:15, 03:15, -15m, -1h, -7d, or milliseconds since 1970"
_RELATIVE = re.compile(r"-([0-9]{1,9})\s*(ms|s|m|min|h|d)", re.ASCII)
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_ZONE = re.compile(r"([+-])([0-9]{2}):([0-9]{2})", re.ASCII)
_QUEUE = re.compile(r"\s*([0-9]{1,10})\s*[/: ]\s*([0-9]{1,19})\s*", re.ASCII)
_OFFSET_ID = re.compile(r"(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56})")
# Names in the address -> fields.
_PARAMETERS = {
    "by": "by", "topic": "topic", "q": "q", "from": "begin", "to": "end", "max": "most", "mode": "mode",
    "before": "before", "view": "view", "at": "at", "zone": "zone",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SearchForm:
    """Each field is the text that was typed; the properties read it and raise UsageError where it means nothing.

    ``view`` and ``at``: how a body is shown, and from which byte on. ``zone`` is what times without one are in.
    """

    by: str = "key"
    topic: str = ""
    q: str = ""
    begin: str = ""
    end: str = ""
    most: str = ""
    mode: str = "exact"
    before: str = ""
    view: str = ""
    at: str = ""
    zone: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> SearchForm:
        """From the address; what is not known there is passed over."""
        given = {field: parameters[key].strip() for key, field in _PARAMETERS.items() if parameters.get(key)}
        asked = cls(**given)
        return replace(asked, by=asked.by if asked.by in WAYS else "key")

    @property
    def is_anything(self) -> bool:
        """Whether a search was asked for at all."""
        return bool(self.q or self.topic)

    def link(self, **changes: str) -> str:
        """The address of this search with some fields changed."""
        asked = replace(self, **changes)
        pairs = {key: getattr(asked, field) for key, field in _PARAMETERS.items()}
        given = {key: text for key, text in pairs.items() if text and (key, text) != ("mode", "exact")}
        return "?" + urlencode(given, errors="replace")

    def message_link(self, phy_offset: int) -> str:
        """The address of one message of the answer."""
        return SearchForm(by="offset", topic=self.topic, q=str(phy_offset), zone=self.zone).link()

    def check(self) -> None:
        """UsageError for a form that was not filled in."""
        if self.by in OF_TOPIC and not self.topic:
            raise UsageError(
                "which topic?", f"a {WAYS[self.by].lower()} is looked for within one topic; write its name"
            )
        if not self.q:
            raise UsageError("what is to be found?", f"write the {WAYS[self.by].lower()}")

    def number(self, field: str, least: int = 0) -> int:
        """A field as a whole number of 64 bits."""
        text = getattr(self, field).replace(",", "").replace(" ", "")
        if not _NUMBER.fullmatch(text) or not least <= int(text) < 2**63:
            raise UsageError(f"{getattr(self, field)[:80]!r} is no whole number from {least} on", "correct it")
        return int(text)

    @property
    def max_num(self) -> int:
        """Most hits."""
        return self.number("most", 1) if self.most else MOST_DEFAULT

    @property
    def queue(self) -> tuple[int, int]:
        """Queue id and queue offset."""
        found = _QUEUE.fullmatch(self.q)
        if found is None or int(found[1]) >= 2**31 or int(found[2]) >= 2**63:
            raise UsageError(f"{self.q[:80]!r} is no queue id and offset", "write them as 0/123")
        return int(found[1]), int(found[2])

    @property
    def offset_id(self) -> str:
        """An offset message id."""
        if not _OFFSET_ID.fullmatch(self.q):
            raise UsageError(
                f"{self.q[:80]!r} is no offset message id: 32 or 56 hex digits",
                f"if it is what a producer printed, search for it as {WAYS['unique'].lower()}",
            )
        return self.q

    def times(self, now: int | None = None) -> tuple[int, int]:
        """First and last store time in ms, both included."""
        now = int(time.time() * 1000) if now is None else now
        begin = TIME_MIN if not self.begin else self.moment(self.begin, now)
        end = TIME_MAX if not self.end else self.moment(self.end, now)
        if begin > end:
            raise UsageError("the time range ends before it begins", "exchange From and To, or leave one empty")
        return begin, end

    def moment(self, text: str, now: int) -> int:
        """One time in ms."""
        found = self._moment(text, now)
        if found < 0:
            raise UsageError(f"{text[:80]!r} is before 1970, where no message was stored", _HINT)
        return found

    def _moment(self, text: str, now: int) -> int:
        if text.lower() == "now":
            return now
        if found := _RELATIVE.fullmatch(text):
            return now - int(found[1]) * _UNITS[found[2]]
        if _NUMBER.fullmatch(text):
            if -(2**63) <= int(text) < 2**63:
                return int(text)
            raise UsageError(f"{text!r} is no time in milliseconds", _HINT)
        zone = self._zone()
        try:
            return _millis(datetime.fromisoformat(text), zone)
        except (ValueError, OverflowError):
            return self._clock(text, now, zone)

    def _clock(self, text: str, now: int, zone: timezone) -> int:
        # 03:15 is the last time that it was so late.
        try:
            clock = clock_time.fromisoformat(text)
            today: date = datetime.fromtimestamp(now / 1000, tz=zone).date()
            found = _millis(datetime.combine(today, clock), zone)
            return found if found <= now else found - _UNITS["d"]
        except (ValueError, OverflowError, OSError):
            raise UsageError(f"{text[:80]!r} is no time", _HINT) from None

    def _zone(self) -> timezone:
        found = _ZONE.fullmatch(self.zone)
        if found is None or int(found[2]) > 23 or int(found[3]) > 59:
            return UTC
        offset = timedelta(hours=int(found[2]), minutes=int(found[3]))
        return timezone(-offset if found[1] == "-" else offset)


def _millis(moment: datetime, zone: timezone) -> int:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)
    return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
