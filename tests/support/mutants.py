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
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
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
from support.mutant_log import IN_PLACE, MutantLog, damage_data, queue_of
from support.naive import NOT_INDEXED, NaiveMessage, split_keys
from support.serving import Serving
from support.sim_daemon import Shape, SimClock, SimDaemon, steered


class Question(NamedTuple):
    """``kind``: key, unique, queue, queue time, log time. ``number`` is the queue offset or the time."""

    kind: str
    topic: str = ""
    key: str = ""
    queue_id: int = 0
    number: int = 0


class Reply:
    """The physical offsets of the messages found, and which part of the log the answer says it speaks for."""

    def __init__(self, row: dict[str, Any]) -> None:
        coverage, rows = row["coverage"], row.get("messages", [])
        places = [] if row.get("phyOffset") is None else [row["phyOffset"]]
        # A unit that names what is not its message has a problem, and says so.
        sound = [one["phyOffset"] for one in rows if not one.get("problem")] if "messages" in row else places
        self.found = [int(offset) for offset in row.get("phyOffsets", sound)]
        self.complete = coverage["complete"]
        self.next_offset = int(row.get("nextOffset") or 0)
        self.words = {key: row.get(key) for key in ("why", "status", "problems", "coverage") if key in row}
        gaps = [list(gap.values()) if isinstance(gap, dict) else gap for gap in coverage["uncovered"]]
        self._gaps = [range(int(gap[0]), int(gap[1])) for gap in gaps]
        self._covered = range(int(coverage["begin"]), int(coverage["end"]))
        has_problems = "phyOffsets" not in row and len(sound) < len(rows)
        self._is_cut_off = has_problems or any(row.get(key) for key in ("unreadable", "truncatedBy"))

    def claims(self, phy_offset: int) -> bool:
        """Whether it says that what stands there would have been found."""
        if self._is_cut_off or any(phy_offset in gap for gap in self._gaps):
            return False
        return phy_offset in self._covered or (phy_offset >= self._covered.stop and self.complete)


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
                answer: Any = data.by_key(topic, key, max_num=10_000, index_type=kind[0].upper())
            elif kind == "queue":
                answer = data.by_queue(topic, queue, number, max_num=1000)
            else:
                answer = data.at_time(topic, queue, number) if kind == "queue time" else data.log_at_time(number)
        except IndexdError:
            return None
        return Reply(answer.to_json())

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
        return Reply(got.json()) if got.status_code == 200 else None

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
        if int(end.value.code or 0) > 5:
            raise SilentError(f"{question} ends with {end.value.code}")
        return Reply(json.loads(out.getvalue())) if out.getvalue() else None

    return ask


class MutantOracle:
    """``wanted`` are the intact messages, ``removed`` those that were cut off and must be gone.

    ``written`` are all that the log should hold: one that is damaged may be found, even in the place of a removed one.
    ``is_outdated``: no daemon has looked since the log was cut, so an answer that is not complete says all it can.
    """

    def __init__(
        self,
        wanted: list[NaiveMessage],
        removed: Iterable[NaiveMessage],
        written: Iterable[NaiveMessage],
        flavour: str,
        tally: Counter[str],
        *,
        is_outdated: bool,
    ) -> None:
        self.wanted, self._flavour, self._tally, self._is_outdated = wanted, flavour, tally, is_outdated
        here = {message.phy_offset for message in wanted}
        self.removed = {message.phy_offset: message for message in removed if message.phy_offset not in here}
        self._newer = {one.phy_offset: self._asking(one) for one in written if one.phy_offset in self.removed}

    def _asking(self, message: NaiveMessage) -> list[Question]:
        keys: list[tuple[str, str]] = []
        if message.sys_flag & 0xC not in NOT_INDEXED[self._flavour]:
            keys = [("key", key) for key in split_keys(message.keys)]
            keys += [("unique", message.uniq_key)] if message.uniq_key and self._flavour != "3.x" else []
        found = [Question(kind, message.topic, key) for kind, key in keys]
        return found + ([Question("queue", message.topic, "", message.queue_id)] if queue_of(message) else [])

    def check(self, surface: Surface, few: Collection[NaiveMessage] | None = None) -> None:
        """Ask every question that has one of the messages as an answer, of all or of a few.

        SilentError at the first answer that is wrong and says nothing of it.
        """
        asked: dict[Question, list[NaiveMessage]] = defaultdict(list)
        for message in (*self.wanted, *self.removed.values()):
            for question in self._asking(message):
                asked[question] += [message] * (message.phy_offset not in self.removed)
        for question in asked if few is None else {one for message in few for one in self._asking(message)}:
            found: set[int] = set()
            for reply in self._pages(surface, question):
                self._check_removed(question, reply)
                found |= set(reply.found)
            for message in asked[question]:
                if message.phy_offset in found:
                    self._tally["found"] += 1
                    continue
                again = question._replace(number=message.cq_offset) if question.kind == "queue" else question
                self._check_found(again, surface(again), message.phy_offset)

    def check_times(self, surface: Surface, messages: Iterable[NaiveMessage]) -> None:
        """Ask where in the log, and in its queue, the time of each message begins: there, or before."""
        for message in messages:
            questions = [Question("log time", number=message.store_timestamp)]
            # A broker halves a queue: where times fall it may come out anywhere, and so does the daemon.
            queue = queue_of(message)
            times = [one.store_timestamp for one in self.wanted if queue_of(one) == queue]
            if queue is not None and times == sorted(times):
                questions.append(Question("queue time", queue[0], "", queue[1], message.store_timestamp))
            for question in questions:
                reply = surface(question)
                self._tally["questions"] += 1
                if reply is None or (reply.complete and all(at > message.phy_offset for at in reply.found)):
                    self._check_found(question, reply, message.phy_offset)

    def _pages(self, surface: Surface, question: Question) -> Iterator[Reply]:
        for _ in range(50):
            reply = surface(question)
            self._tally["questions"] += 1
            if reply is None:
                self._tally["refused"] += 1
                return
            yield reply
            if question.kind != "queue" or not reply.found or reply.next_offset <= question.number:
                return
            question = question._replace(number=reply.next_offset)

    def _claims(self, reply: Reply, offset: int) -> bool:
        return reply.claims(offset) and (reply.complete or not self._is_outdated)

    def _check_removed(self, question: Question, reply: Reply) -> None:
        found = [offset for offset in reply.found if offset in self.removed and self._claims(reply, offset)]
        gone = [offset for offset in found if question._replace(number=0) not in self._newer.get(offset, ())]
        if gone:
            raise SilentError(f"{question} finds the removed messages {gone[:5]}: {reply.words}")
        if question.kind != "queue" and len(reply.found) != len(set(reply.found)):
            raise SilentError(f"{question} finds a message twice: {reply.found}")

    def _check_found(self, question: Question, reply: Reply | None, offset: int) -> None:
        if reply is None or offset in reply.found:
            self._tally["refused" if reply is None else "found"] += 1
        elif self._claims(reply, offset):
            raise SilentError(f"{question} does not find the intact message at {offset}: {reply.words}")
        else:
            self._tally["said to be missing"] += 1


_STARTS_MAX = 4
_SCRUBS_MAX = 10
#: One seed in so many is also asked over HTTP, and one by the command line, about a few messages.
_HTTP_EVERY, _COMMAND_EVERY = 12, 25
_FEW = 4


class MutantRun:
    """``go`` raises SilentError, or whatever else comes out that is no IndexdError; ``history`` says what was done."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rand = rand = random.Random(seed)
        self.store, self.data = root / "store", root / "data"
        self.shape = replace(Shape.draw(rand), recheck_size=64 << 20)  # as by default: a log may be cut
        self.policy = rand.choice(["stop", "skip"])
        self.config = self.shape.config(self.store, self.data)
        reader = self.config.reader.model_copy(update={"on_corrupt": self.policy, "corrupt_after_ms": 5})
        self.config = self.config.model_copy(update={"reader": reader})
        self.log = MutantLog(self.store / "commitlog", self.shape.segment_size, rand)
        self.history = [f"{self.shape}, on_corrupt = {self.policy}"]
        #: How many of what; ``silent`` is counted by whoever catches the error.
        self.tally: Counter[str] = Counter(mutants=1)
        self._clock = SimClock(seed)
        self._daemon: SimDaemon | None = None
        self._lock = DirectoryLock(DataFiles(self.data).lock)
        self._by_http, self._by_command = seed % _HTTP_EVERY == 0, seed % _COMMAND_EVERY == 0
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
            self._leave("over")
            self.log.close()

    # The two kinds.

    def _damage_log(self) -> None:
        count = self.rand.randrange(20, 220)
        early = self.rand.choice([0, 0, count // 2, count])
        if early:
            self._append(early)
            self._index()
            self._end(may_stay=True)
        self._append(count - early)
        for _ in range(self.rand.choice([1, 1, 1, 2, 3])):
            self.history.append(self.log.damage())
        self._is_outdated = bool(self.log.removed)
        if early:
            self._ask("damaged, and nobody has looked yet")
        self._append(self.rand.choice([0, 0, 1, 10, 60]))
        if early or self.rand.random() < 0.6:
            self._index(forced=bool(early) and self.rand.random() < 0.2)
        else:
            self._rebuild()
        self._ask("indexed")
        self._end()
        self._ask("stopped")
        self._append(self.rand.choice([0, 0, 30]))
        self._index()
        self._ask("indexed again")

    def _damage_data(self) -> None:
        self._append(self.rand.randrange(20, 220))
        self._index()
        self._end(may_stay=True)
        for _ in range(self.rand.choice([1, 1, 2])):
            layout = IndexLayout(self.shape.hash_slot_num, self.shape.index_num)
            self.history.append(damage_data(self.data, layout, self.rand))
            self._is_in_place |= self.history[-1].startswith(IN_PLACE)
        if self._daemon is None:
            self._ask("damaged, and nobody has looked yet", is_scrubbed=False)
        self._append(self.rand.choice([0, 10]))
        self._index(forced=self._daemon is None and self.rand.random() < 0.3)
        self._ask("indexed, and not scrubbed yet", is_scrubbed=False)
        self._scrub()
        self._ask("scrubbed")
        self._end()
        self._ask("stopped")
        self._index(forced=True)
        self._ask("recovered")

    # Steps.

    def _append(self, count: int) -> None:
        self.log.append(count)
        self.history.append(f"{count} messages written")

    def _index(self, *, forced: bool = False, damage: Damage = NO_DAMAGE) -> None:
        """Catch up, with the daemon that runs or a new one, as often as something disturbs it."""
        for _ in range(_STARTS_MAX):
            try:
                with steered(self._clock, os.getpid(), self.shape):
                    if self._daemon is None:
                        Disk().make_dir(self.data)
                        self._lock.acquire()
                        self._daemon = SimDaemon(self.config, Disk(), pid=os.getpid(), forced=forced, damage=damage)
                    for _ in range(4):
                        self._clock.advance(60)
                        self._daemon.read()
                        self._daemon.drain()
                        self._daemon.send()
                        self._daemon.persist()
                        self._daemon.persisted()
                self._is_outdated = False
                return
            except DisturbedError as error:
                self._leave(f"disturbed: {error}")
            except IndexdError as error:
                self._leave(f"ends with {error.exit_code}: {error.line()}")
                self.tally[f"daemon ends with {error.exit_code}"] += 1
                return
        raise SilentError("every opening is disturbed again")

    def _scrub(self) -> None:
        """As the daemon does it once a day: what is damaged ends it, and the opening that follows mends that."""
        for _ in range(_SCRUBS_MAX):
            if (daemon := self._daemon) is None:
                return
            pipeline, nothing = daemon.pipeline, lambda _: None
            try:
                Scrub(daemon.disk, daemon.files, pipeline.outputs, lambda: pipeline.frontier, nothing, nothing).run()  # noqa: B023 - called here
                return
            except DamagedError as error:
                self.tally["mended by the scrub"] += 1
                self._leave(f"scrubbed: {error}")
                self._index(damage=error.damage)
        raise SilentError("every scrub finds damage")

    def _rebuild(self) -> None:
        try:
            found = rebuild(self.config, Disk(), self.data, lambda *_: None)
        except IndexdError as error:
            self.history.append(f"rebuild ends with {error.exit_code}: {error.line()}")
            self.tally[f"rebuild ends with {error.exit_code}"] += 1
            return
        self.history.append(f"rebuilt: {found.messages} messages, unreadable: {found.unreadable}")
        lost = [m.phy_offset for m in self.log.intact() if m.phy_offset >= found.phy_offset]
        if lost and self.policy == "stop":
            raise SilentError(f"rebuild ends with 0, {found}, and leaves out the intact messages {lost[:5]}")

    def _end(self, *, may_stay: bool = False) -> None:
        """The daemon stops, is killed, or runs on."""
        how = self.rand.choice(["stopped", "killed"] + ["runs on"] * may_stay)
        if how == "runs on":
            return
        if how == "stopped" and self._daemon is not None:
            try:
                with steered(self._clock, os.getpid(), self.shape):
                    self._daemon.stop()
                self._daemon = None
            except IndexdError as error:
                how = f"stops with {error.line()}"
        self._leave(how)

    def _leave(self, why: str) -> None:
        # As the kernel does it with a process that is gone.
        self.history.append(why)
        if self._daemon is not None:
            with suppress(DiskError):
                self._daemon.give_way()
            self._daemon = None
        self._lock.release()

    # Questions.

    def _ask(self, when: str, *, is_scrubbed: bool = True) -> None:
        written = [frame.message for frame in self.log.frames]
        known = self.log.intact(), self.log.removed, written, self.shape.flavour, self.tally
        try:
            self._ask_all(MutantOracle(*known, is_outdated=self._is_outdated))
        except SilentError as error:
            if is_scrubbed or not self._is_in_place:
                raise SilentError(f"{when}: {error}") from None
            self.history.append(f"{when}: silent")
            self.tally["silent until it is scrubbed"] += 1

    def _ask_all(self, oracle: MutantOracle) -> None:
        few = self.rand.sample(oracle.wanted, min(_FEW, len(oracle.wanted))) + oracle.wanted[-1:]
        with ExitStack() as stack:
            try:
                data = stack.enter_context(open_data(self.data))
            except IndexdError as error:
                self.tally[f"no index to ask: {error.exit_code}"] += 1
                return
            data.index.look_seconds = 60.0
            oracle.check(python_surface(data))
            oracle.check_times(python_surface(data), few)
            surfaces = {"command": command_surface(self.data)} if self._by_command else {}
            if self._by_http:
                server = stack.enter_context(Serving(self.data, self.store))
                surfaces["HTTP"] = http_surface(server)
                stack.callback(server.log.lines.clear)
            for name, surface in surfaces.items():
                oracle.check(surface, few)
                oracle.check_times(surface, few)
                self.tally[f"asked by {name}"] += 1
