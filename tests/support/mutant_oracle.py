"""Whether an answer is silent: it lacks an intact message, or holds a removed one, of log that it says it covers.

Questions and answers are plain: the Python API, HTTP and the command line are each a ``Surface``.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from indexd.cli.main import main
from indexd.errors import IndexdError
from indexd.query import Data
from support.naive import NOT_INDEXED, NaiveMessage, split_keys
from support.serving import Serving

_MOST = 10_000
_PAGES_MAX = 50
_REFUSALS = (1, 2, 3, 4, 5)


class Question(NamedTuple):
    """``kind``: key, unique, queue, queue time, log time. ``number`` is the queue offset or the time."""

    kind: str
    topic: str = ""
    key: str = ""
    queue_id: int = 0
    number: int = 0


class Reply(NamedTuple):
    """The physical offsets of the messages found, and which part of the log the answer says it speaks for."""

    found: tuple[int, ...]
    begin: int
    end: int
    complete: bool
    uncovered: tuple[tuple[int, int], ...]
    is_cut_off: bool
    next_offset: int
    words: str

    def claims(self, phy_offset: int) -> bool:
        """Whether it says that what stands there would have been found."""
        if self.is_cut_off or any(begin <= phy_offset < end for begin, end in self.uncovered):
            return False
        return self.begin <= phy_offset < self.end or (phy_offset >= self.end and self.complete)


#: None for a refusal: an error that says what is wrong.
Surface = Callable[[Question], Reply | None]


class SilentError(AssertionError):
    """An answer is wrong and does not say that it may be."""


def python_surface(data: Data) -> Surface:
    """The methods of ``open_data``."""

    def ask(question: Question) -> Reply | None:
        kind, topic, key, queue, number = question
        try:
            if kind in ("key", "unique"):
                return _reply(data.by_key(topic, key, max_num=_MOST, index_type=kind[0].upper()).to_json())
            if kind == "queue":
                return _reply(data.by_queue(topic, queue, number, max_num=1000).to_json())
            if kind == "queue time":
                return _reply(data.at_time(topic, queue, number).to_json())
            return _reply(data.log_at_time(number).to_json())
        except IndexdError:
            return None

    return ask


def http_surface(server: Serving) -> Surface:
    """The same over HTTP."""

    def ask(question: Question) -> Reply | None:
        kind, topic, key, queue, number = question
        where, parameters = {
            "key": ("by-key", {"topic": topic, "key": key, "max": 1000, "indexType": "K"}),
            "unique": ("by-unique-key", {"topic": topic, "id": key, "max": 1000}),
            "queue": ("by-queue-offset", {"topic": topic, "queue": queue, "offset": number, "max": 1000}),
            "queue time": ("by-time", {"topic": topic, "queue": queue, "time": number}),
            "log time": ("by-time", {"time": number}),
        }[kind]
        got = server.get(f"/api/v1/messages/{where}", params=parameters)
        row = got.json()
        if got.status_code == 500 and row.get("type", "").endswith("internal"):
            raise SilentError(f"{question}: {row}")
        return _reply(row) if got.status_code == 200 else None

    return ask


def command_surface(data: Path) -> Surface:
    """The same by the command line, in this process."""

    def ask(question: Question) -> Reply | None:
        kind, topic, key, queue, number = question
        words = {
            "key": ["query-key", f"--topic={topic}", f"--key={key}", "--index-type=K", "--max=10000"],
            "unique": ["query-unique-key", f"--topic={topic}", f"--msg-id={key}", "--max=10000"],
            "queue": ["query-offset", f"--topic={topic}", f"-i{queue}", f"--offset={number}", "--max=1000"],
            "queue time": ["query-time", f"--topic={topic}", f"-i{queue}", f"--timestamp={number}"],
            "log time": ["query-time", "--log", f"--timestamp={number}"],
        }[kind]
        code, out = run_command(*words, "--json", "--data", str(data))
        if code in (0, 1) and out:
            return _reply(json.loads(out))
        if code not in _REFUSALS:
            raise SilentError(f"{question} ends with {code}")
        return None

    return ask


def run_command(*words: str) -> tuple[int, str]:
    """The exit code and standard output of ``indexd`` in this process."""
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue()


def _reply(row: dict[str, Any]) -> Reply:
    coverage = row["coverage"]
    found = row.get("phyOffsets")
    has_problems = False
    if found is None and "messages" in row:
        # A unit that names what is not its message has a problem, and says so.
        found = [one["phyOffset"] for one in row["messages"] if not one.get("problem")]
        has_problems = len(found) < len(row["messages"])
    if found is None:
        found = [] if row["phyOffset"] is None else [row["phyOffset"]]
    gaps = [tuple(gap.values())[:2] if isinstance(gap, dict) else gap[:2] for gap in coverage["uncovered"]]
    return Reply(
        found=tuple(int(one) for one in found),
        begin=int(coverage["begin"]),
        end=int(coverage["end"]),
        complete=coverage["complete"],
        uncovered=tuple((int(begin), int(end)) for begin, end in gaps),
        is_cut_off=has_problems or any(row.get(key) for key in ("unreadable", "truncatedBy")),
        next_offset=int(row.get("nextOffset") or 0),
        words=json.dumps({key: row.get(key) for key in ("why", "status", "problems", "coverage") if key in row}),
    )


def _queue_of(message: NaiveMessage) -> tuple[str, int] | None:
    return (message.topic, message.queue_id) if message.sys_flag & 0xC in (0x0, 0x8) else None


class Oracle:
    """``wanted`` are the intact messages, ``removed`` those that were cut off and must be gone.

    ``written`` are all that the log should hold: one that is damaged may be found, even in the place of a removed one.
    """

    def __init__(
        self,
        wanted: Iterable[NaiveMessage],
        removed: Iterable[NaiveMessage],
        flavour: str,
        written: Iterable[NaiveMessage] = (),
    ) -> None:
        self.wanted = list(wanted)
        here = {message.phy_offset for message in self.wanted}
        self.removed = {message.phy_offset: message for message in removed if message.phy_offset not in here}
        self._left_out = NOT_INDEXED[flavour]
        self._has_unique_keys = flavour != "3.x"
        newer = (message for message in written if message.phy_offset in self.removed)
        self._newer = {message.phy_offset: set(self._asking(message)) for message in newer}

    def questions(self, messages: Collection[NaiveMessage] | None = None) -> dict[Question, set[int]]:
        """Every question that has one of the messages as an answer (by default all), with all the intact answers."""
        asked: dict[Question, set[int]] = defaultdict(set)
        chosen = None if messages is None else {message.phy_offset for message in messages}
        for message in (*self.wanted, *self.removed.values()):
            for question in self._asking(message):
                if message.phy_offset in self.removed:
                    asked[question] |= set()
                else:
                    asked[question].add(message.phy_offset)
        if chosen is None:
            return asked
        few = {question for message in messages or () for question in self._asking(message)}
        return {question: offsets for question, offsets in asked.items() if question in few}

    def _asking(self, message: NaiveMessage) -> list[Question]:
        found = []
        if message.sys_flag & 0xC not in self._left_out:
            found += [Question("key", message.topic, key) for key in split_keys(message.keys)]
            if message.uniq_key and self._has_unique_keys:
                found.append(Question("unique", message.topic, message.uniq_key))
        if _queue_of(message) is not None:
            found.append(Question("queue", message.topic, "", message.queue_id))
        return found

    def check(self, surface: Surface, asked: dict[Question, set[int]], tally: Counter[str]) -> None:
        """Ask them all; SilentError at the first answer that is wrong and says nothing of it."""
        by_place = {(m.topic, m.queue_id, m.phy_offset): m.cq_offset for m in self.wanted}
        for question, offsets in asked.items():
            found: set[int] = set()
            for reply in self._pages(surface, question, tally):
                self._check_removed(question, reply)
                found |= set(reply.found)
            for offset in sorted(offsets - found):
                again = question
                if question.kind == "queue":
                    again = question._replace(number=by_place[question.topic, question.queue_id, offset])
                self._check_found(again, surface(again), offset, tally)
            tally["found"] += len(offsets & found)

    def check_times(self, surface: Surface, messages: Iterable[NaiveMessage], tally: Counter[str]) -> None:
        """Ask where in the log, and in its queue, the time of each message begins: there, or before."""
        for message in messages:
            questions = [Question("log time", number=message.store_timestamp)]
            if self._is_rising(message):
                queue = message.topic, "", message.queue_id
                questions.append(Question("queue time", *queue, message.store_timestamp))
            for question in questions:
                reply = surface(question)
                tally["questions"] += 1
                if reply is not None and (not reply.complete or any(at <= message.phy_offset for at in reply.found)):
                    continue
                self._check_found(question, reply, message.phy_offset, tally)

    def _is_rising(self, message: NaiveMessage) -> bool:
        # A broker halves a queue: where times fall it may come out anywhere, and so does the daemon.
        queue = _queue_of(message)
        times = [one.store_timestamp for one in self.wanted if _queue_of(one) == queue]
        return queue is not None and times == sorted(times)

    def _pages(self, surface: Surface, question: Question, tally: Counter[str]) -> Iterable[Reply]:
        for _ in range(_PAGES_MAX):
            reply = surface(question)
            tally["questions"] += 1
            if reply is None:
                tally["refused"] += 1
                return
            yield reply
            if question.kind != "queue" or not reply.found or reply.next_offset <= question.number:
                return
            question = question._replace(number=reply.next_offset)

    def _check_removed(self, question: Question, reply: Reply) -> None:
        found = [offset for offset in reply.found if offset in self.removed and reply.claims(offset)]
        about = question._replace(number=0)
        gone = [offset for offset in found if about not in self._newer.get(offset, ())]
        if gone:
            raise SilentError(f"{question} finds the removed messages {gone[:5]}: {reply.words}")
        if question.kind != "queue" and len(reply.found) != len(set(reply.found)):
            raise SilentError(f"{question} finds a message twice: {reply.found}")

    def _check_found(self, question: Question, reply: Reply | None, offset: int, tally: Counter[str]) -> None:
        if reply is None or offset in reply.found:
            tally["refused" if reply is None else "found"] += 1
        elif reply.claims(offset):
            raise SilentError(f"{question} does not find the intact message at {offset}: {reply.words}")
        else:
            tally["said to be missing"] += 1
