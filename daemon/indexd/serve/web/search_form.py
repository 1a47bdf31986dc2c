"""SearchForm: what the page's form says, as it stands in the page's address, and the question that it means."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from urllib.parse import urlencode

from indexd.errors import UsageError
from indexd.query.questions import ByKey, ByMessage, ByQueueOffset, ByTime, Question, make_question

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
MODES = {"exact": "every message that matches", "rocketmq": "what the broker would answer"}
MOST_DEFAULT = 64

_INDEX_TYPES: dict[str, Literal["U", "T"]] = {"unique": "U", "tags": "T"}
_TIME_HINT = "write 2026-11-22 03:15, -15m, -1h, -7d, or milliseconds since 1970"
_HINTS = {
    "queue": "write them as 0/123",
    "id": f"if it is what a producer printed, search for it as {WAYS['unique'].lower()}",
    "time": _TIME_HINT,
}
_RELATIVE = re.compile(r"-([0-9]{1,9})\s*(ms|s|m|min|h|d)", re.ASCII)
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
# Names in the address -> fields.
_PARAMETERS = {
    "by": "by", "topic": "topic", "q": "q", "from": "begin", "to": "end", "max": "most", "mode": "mode",
    "before": "before", "view": "view", "zone": "zone",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SearchForm:
    """Each field is the text that was typed. ``view``: how a body is shown; ``zone``: what times without one are in."""

    by: str = "key"
    topic: str = ""
    q: str = ""
    begin: str = ""
    end: str = ""
    most: str = ""
    mode: str = "exact"
    before: str = ""
    view: str = ""
    zone: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> SearchForm:
        """From the address; what is not known there is passed over."""
        given = {field: parameters[key].strip() for key, field in _PARAMETERS.items() if parameters.get(key)}
        if given.get("by") not in WAYS:
            given["by"] = "key"
        return cls(**given)

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

    def question(self) -> Question:
        """What is asked; UsageError says what to correct."""
        what = WAYS[self.by].lower()
        if self.by in OF_TOPIC and not self.topic:
            raise UsageError("which topic?", f"a {what} is looked for within one topic; write its name")
        if not self.q:
            raise UsageError("what is to be found?", f"write the {what}")
        number, most = self.q.replace(",", "").replace(" ", ""), self.most or MOST_DEFAULT
        if self.by == "offset":
            return self._make(ByMessage, offset=number)
        if self.by == "id":
            return self._make(ByMessage, id=self.q)
        if self.by == "time":
            return self._make(ByTime, time=self.moment(self.q))
        if self.by == "queue":
            queue, _, offset = number.partition("/")
            return self._make(ByQueueOffset, topic=self.topic, queue=queue, offset=offset, max=most)
        given: dict[str, Any] = {"begin": self.begin, "end": self.end}
        given = {name: self.moment(text) for name, text in given.items() if text}
        if self.before and self.mode == "exact":
            given["before"] = self.before
        mode = "rocketmq" if self.mode == "rocketmq" else "exact"
        index_type = _INDEX_TYPES.get(self.by)
        return self._make(ByKey, topic=self.topic, key=self.q, max=most, mode=mode, index_type=index_type, **given)

    def _make(self, model: type[Question], **given: Any) -> Question:
        try:
            return make_question(model, given)
        except UsageError as error:
            raise UsageError(str(error.args[0]), _HINTS.get(self.by, "correct it")) from None

    def moment(self, text: str, now: int | None = None) -> int:
        """A time in ms; UsageError if it is none."""
        now = int(time.time() * 1000) if now is None else now
        if text.lower() == "now":
            return now
        if found := _RELATIVE.fullmatch(text):
            return now - int(found[1]) * _UNITS[found[2]]
        try:
            if text.isascii() and text.isdigit():
                return int(text)
            moment = datetime.fromisoformat(text)
            zone = datetime.fromisoformat(f"2000-01-01T00:00{self.zone}").tzinfo or UTC
        except ValueError:
            raise UsageError(f"{text[:80]!r} is no time", _TIME_HINT) from None
        aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)
        return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
