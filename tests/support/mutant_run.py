"""One mutant: a log and a data directory, damage to either, and whether any answer afterwards is silent.

A mutant of the log: part of it is written, perhaps indexed by a daemon that then runs on, stops or is killed; damage;
the broker writes on; the log is indexed by that daemon, another, ``--recover`` or ``rebuild``. A mutant of the data
directory: the same without damage to the log. After each step every intact message is asked for. Bytes that changed
in place are noticed by no start and no query (ARCHITECTURE.md, decision 8), but by the daemon's scrub: behind the first
one nothing may be left of them, whatever they were.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from indexd.cli.main import main
from indexd.errors import DiskError, DisturbedError, IndexdError
from indexd.index.format import IndexLayout
from indexd.query import Data, open_data
from indexd.recovery.rebuild import rebuild
from indexd.recovery.recover import NO_DAMAGE, Damage, DamagedError
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles
from indexd.verify.scrub import Scrub
from support.mutant_log import IN_PLACE, MutantLog, damage_data
from support.naive import NOT_INDEXED, NaiveMessage, split_keys
from support.serving import Serving
from support.sim_daemon import Shape, SimClock, SimDaemon, steered

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
                answer: Any = data.by_key(topic, key, max_num=_MOST, index_type=kind[0].upper())
            elif kind == "queue":
                answer = data.by_queue(topic, queue, number, max_num=1000)
            else:
                answer = data.at_time(topic, queue, number) if kind == "queue time" else data.log_at_time(number)
        except IndexdError:
            return None
        return _reply(answer.to_json())

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
        if got.status_code == 500 and got.json().get("type", "").endswith("internal"):
            raise SilentError(f"{question}: {got.json()}")
        return _reply(got.json()) if got.status_code == 200 else None

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
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as end:
            main([*words, "--json", "--data", str(data)])
        if int(end.value.code or 0) not in (0, 1, *_REFUSALS):
            raise SilentError(f"{question} ends with {end.value.code}")
        return _reply(json.loads(out.getvalue())) if out.getvalue() else None

    return ask


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
    ``is_outdated``: no daemon has looked since the log was cut, so an answer that is not complete says all it can.
    """

    def __init__(
        self,
        wanted: Iterable[NaiveMessage],
        removed: Iterable[NaiveMessage],
        flavour: str,
        written: Iterable[NaiveMessage] = (),
        *,
        is_outdated: bool = False,
    ) -> None:
        self._is_outdated = is_outdated
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

    def _claims(self, reply: Reply, offset: int) -> bool:
        return reply.claims(offset) and (reply.complete or not self._is_outdated)

    def _check_removed(self, question: Question, reply: Reply) -> None:
        found = [offset for offset in reply.found if offset in self.removed and self._claims(reply, offset)]
        about = question._replace(number=0)
        gone = [offset for offset in found if about not in self._newer.get(offset, ())]
        if gone:
            raise SilentError(f"{question} finds the removed messages {gone[:5]}: {reply.words}")
        if question.kind != "queue" and len(reply.found) != len(set(reply.found)):
            raise SilentError(f"{question} finds a message twice: {reply.found}")

    def _check_found(self, question: Question, reply: Reply | None, offset: int, tally: Counter[str]) -> None:
        if reply is None or offset in reply.found:
            tally["refused" if reply is None else "found"] += 1
        elif self._claims(reply, offset):
            raise SilentError(f"{question} does not find the intact message at {offset}: {reply.words}")
        else:
            tally["said to be missing"] += 1


_STARTS_MAX = 4
_SCRUBS_MAX = 10
_DRAINS = 4
#: One mutant in so many is also asked over HTTP, and one by the command line.
_HTTP_EVERY, _COMMAND_EVERY = 12, 25
_FEW = 4


class MutantRun:
    """``go`` raises SilentError, or whatever else comes out that is no IndexdError; ``history`` says what was done."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rand = rand = random.Random(seed)
        self.store, self.data = root / "store", root / "data"
        drawn = replace(Shape.draw(rand), recheck_size=64 << 20)  # as by default: a log may be cut
        self.policy = rand.choice(["stop", "skip"])
        self.config = drawn.config(self.store, self.data)
        reader = self.config.reader.model_copy(update={"on_corrupt": self.policy, "corrupt_after_ms": 5})
        self.config = self.config.model_copy(update={"reader": reader})
        self.shape = drawn
        self.log = MutantLog(self.store / "commitlog", drawn.segment_size, rand)
        self.history = [f"{drawn}, on_corrupt = {self.policy}"]
        self.counts: Counter[str] = Counter(mutants=1)
        self._clock = SimClock(seed)
        self._daemon: SimDaemon | None = None
        self._lock = DirectoryLock(DataFiles(self.data).lock)
        self._surfaces = [name for name, every in (("http", _HTTP_EVERY), ("command", _COMMAND_EVERY))
                          if rand.randrange(every) == 0]  # fmt: skip
        self._layout = IndexLayout(drawn.hash_slot_num, drawn.index_num)
        #: No daemon has looked since the log was cut: what it has removed is still in the index.
        self._is_outdated = False
        #: Bytes of a data directory were changed in place.
        self._is_in_place = False

    def go(self) -> None:
        """Run it to its end."""
        try:
            if self.rand.random() < 0.7:
                self._damage_log()
            else:
                self._damage_data()
        finally:
            self._leave()
            self.log.close()

    def tally(self) -> Counter[str]:
        """How many of what; ``silent`` is counted by whoever catches the error."""
        return self.counts

    # The two kinds.

    def _damage_log(self) -> None:
        count = self.rand.randrange(20, 220)
        early = self.rand.choice([0, 0, count // 2, count])
        if early:
            self._append(early)
            self._index()
            self.rand.choice([self._stop, self._kill, self._stay])()
        self._append(count - early)
        for _ in range(self.rand.choice([1, 1, 1, 2, 3])):
            self._say(self.log.damage())
        self._is_outdated = bool(self.log.removed)
        if early:
            self._ask("damaged, and nobody has looked yet")
        self._append(self.rand.choice([0, 0, 1, 10, 60]))
        if early or self.rand.random() < 0.6:
            self._index(forced=bool(early) and self.rand.random() < 0.2)
        else:
            self._rebuild()
        self._ask("indexed")
        self.rand.choice([self._stop, self._kill])()
        self._ask("stopped")
        self._append(self.rand.choice([0, 0, 30]))
        self._index()
        self._ask("indexed again")

    def _damage_data(self) -> None:
        self._append(self.rand.randrange(20, 220))
        self._index()
        self.rand.choice([self._stop, self._kill, self._stay])()
        for _ in range(self.rand.choice([1, 1, 2])):
            self._say(what := damage_data(self.data, self._layout, self.rand))
            self._is_in_place = self._is_in_place or what.startswith(IN_PLACE)
        if self._daemon is None:
            self._ask("damaged, and nobody has looked yet", is_scrubbed=False)
        self._append(self.rand.choice([0, 10]))
        self._index(forced=self._daemon is None and self.rand.random() < 0.3)
        self._ask("indexed, and not scrubbed yet", is_scrubbed=False)
        self._scrub()
        self._ask("scrubbed")
        self.rand.choice([self._stop, self._kill])()
        self._ask("stopped")
        self._index(forced=True)
        self._ask("recovered")

    # Steps.

    def _say(self, words: str) -> None:
        self.history.append(words)

    def _append(self, count: int) -> None:
        if count:
            self.log.append(count)
            self._say(f"{count} messages written")

    def _index(self, *, forced: bool = False, damage: Damage = NO_DAMAGE) -> None:
        """Catch up, with the daemon that runs or a new one, as often as something disturbs it."""
        for _ in range(_STARTS_MAX):
            try:
                with self._steered():
                    if self._daemon is None:
                        self._start(forced=forced, damage=damage)
                    for _ in range(_DRAINS):
                        self._catch_up()
                self._is_outdated = False
                return
            except DisturbedError as error:
                self._say(f"disturbed: {error}")
                if self._daemon is not None:
                    self._daemon.give_way()
                self._daemon = None
            except IndexdError as error:
                self._say(f"ends with {error.exit_code}: {error.line()}")
                self.counts[f"daemon ends with {error.exit_code}"] += 1
                self._leave()
                return
        self._say("disturbed again and again")
        raise SilentError("every opening is disturbed again")

    def _scrub(self) -> None:
        """As the daemon does it once a day: what is damaged ends it, and the opening that follows mends that."""
        for _ in range(_SCRUBS_MAX):
            if self._daemon is None:
                return
            try:
                _scrub(self._daemon)
                return
            except DamagedError as error:
                self._say(f"scrubbed: {error}")
                self.counts["mended by the scrub"] += 1
                self._daemon.give_way()
                self._daemon = None
                self._index(damage=error.damage)
        raise SilentError("every scrub finds damage")

    def _start(self, *, forced: bool, damage: Damage) -> None:
        disk = Disk()
        disk.make_dir(self.data)
        self._lock.release()
        self._lock.acquire()
        self._daemon = SimDaemon(self.config, disk, pid=os.getpid(), forced=forced, damage=damage)
        self._say("started with --recover" if forced else "started")

    def _catch_up(self) -> None:
        assert self._daemon is not None
        self._clock.advance(60)
        self._daemon.read()
        self._daemon.drain()
        self._daemon.send()
        self._daemon.persist()
        self._daemon.persisted()

    def _rebuild(self) -> None:
        try:
            found = rebuild(self.config, Disk(), self.data, lambda *_: None)
        except IndexdError as error:
            self._say(f"rebuild ends with {error.exit_code}: {error.line()}")
            self.counts[f"rebuild ends with {error.exit_code}"] += 1
            return
        self._say(f"rebuilt: {found.messages} messages, unreadable: {found.unreadable}")
        lost = [m.phy_offset for m in self.log.intact() if m.phy_offset >= found.phy_offset]
        if lost and self.policy == "stop":
            raise SilentError(f"rebuild ends with 0, {found}, and leaves out the intact messages {lost[:5]}")

    def _stop(self) -> None:
        if self._daemon is None:
            return
        self._say("stopped")
        try:
            with self._steered():
                self._daemon.stop()
            self._daemon = None
        except IndexdError as error:
            self._say(f"stops with {error.line()}")
        self._leave()

    def _kill(self) -> None:
        self._say("killed")
        self._leave()

    def _stay(self) -> None:
        """The daemon runs on."""

    def _leave(self) -> None:
        # As the kernel does it with a process that is gone.
        if self._daemon is not None:
            with suppress(DiskError):
                self._daemon.give_way()
            self._daemon = None
        self._lock.release()

    @contextmanager
    def _steered(self) -> Iterator[None]:
        with steered(self._clock, os.getpid(), self.shape):
            yield

    # Questions.

    def _ask(self, when: str, *, is_scrubbed: bool = True) -> None:
        written = [frame.message for frame in self.log.frames]
        oracle = Oracle(self.log.intact(), self.log.removed, self.shape.flavour, written, is_outdated=self._is_outdated)
        try:
            self._ask_all(oracle)
        except SilentError as error:
            if is_scrubbed or not self._is_in_place:
                raise SilentError(f"{when}: {error}") from None
            self._say(f"{when}: silent")
            self.counts["silent until it is scrubbed"] += 1

    def _ask_all(self, oracle: Oracle) -> None:
        few = self.rand.sample(oracle.wanted, min(_FEW, len(oracle.wanted))) + oracle.wanted[-1:]
        with ExitStack() as stack:
            try:
                data = stack.enter_context(open_data(self.data))
            except IndexdError as error:
                self.counts[f"no index to ask: {error.exit_code}"] += 1
                return
            data.index.look_seconds = 60.0
            surface = python_surface(data)
            oracle.check(surface, oracle.questions(), self.counts)
            oracle.check_times(surface, few, self.counts)
        if "command" in self._surfaces:
            oracle.check(command_surface(self.data), oracle.questions(few), self.counts)
            oracle.check_times(command_surface(self.data), few, self.counts)
            self.counts["asked by command"] += 1
        if "http" in self._surfaces:
            with Serving(self.data, self.store) as server:
                server.log.lines.clear()
                oracle.check(http_surface(server), oracle.questions(few), self.counts)
                oracle.check_times(http_surface(server), few, self.counts)
                server.log.lines.clear()
            self.counts["asked over HTTP"] += 1


def _scrub(daemon: SimDaemon) -> None:
    pipeline = daemon.pipeline
    Scrub(daemon.disk, daemon.files, pipeline.outputs, lambda: pipeline.frontier, lambda _: None, lambda _: None).run()
