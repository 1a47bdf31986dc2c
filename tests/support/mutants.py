"""One mutant: a log, its data directory, damage to the log, and whether any answer afterwards is silent about it.

Part of a log is written, perhaps indexed by a daemon that then runs on, stops or is killed; damage; the broker writes
on; the log is indexed by that daemon, another, ``--recover`` or ``rebuild``. After each step every intact message is
asked for.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from indexd.errors import DiskError, DisturbedError, IndexdError
from indexd.query import Data, open_data
from indexd.recovery.rebuild import rebuild
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles
from support.mutant_log import MutantLog, queue_of
from support.naive import NOT_INDEXED, NaiveMessage, split_keys
from support.sim_daemon import Shape, SimClock, SimDaemon, steered


class Question(NamedTuple):
    """``kind``: key, unique, queue; of the last ``number`` is the queue offset."""

    kind: str
    topic: str = ""
    key: str = ""
    queue_id: int = 0
    number: int = 0


class Reply:
    """The physical offsets of the messages found, and which part of the log the answer says it speaks for."""

    def __init__(self, row: dict[str, Any]) -> None:
        coverage, rows = row["coverage"], row.get("messages", [])
        # A unit that names what is not its message has a problem, and says so.
        sound = [one["phyOffset"] for one in rows if not one.get("problem")]
        self.found: list[int] = row.get("phyOffsets", sound)
        self.complete = coverage["complete"]
        self.next_offset = row.get("nextOffset", 0)
        self.words = {key: row.get(key) for key in ("why", "status", "problems", "coverage") if key in row}
        self._gaps = [range(gap[0], gap[1]) for gap in coverage["uncovered"]]
        self._covered = range(coverage["begin"], coverage["end"])
        has_problems = "phyOffsets" not in row and len(sound) < len(rows)
        self._is_cut_off = has_problems or any(row.get(key) for key in ("unreadable", "truncatedBy"))

    def claims(self, phy_offset: int) -> bool:
        """Whether it says that what stands there would have been found."""
        if self._is_cut_off or any(phy_offset in gap for gap in self._gaps):
            return False
        return phy_offset in self._covered or (phy_offset >= self._covered.stop and self.complete)


def ask(data: Data, question: Question) -> Reply | None:
    """None for a refusal: an error that says what is wrong."""
    kind, topic, key, queue, number = question
    try:
        if kind in ("key", "unique"):
            answer: Any = data.by_key(topic, key, max_num=10_000, index_type=kind[0].upper())
        else:
            answer = data.by_queue(topic, queue, number, max_num=1000)
    except IndexdError:
        return None
    return Reply(answer.to_dict())


class MutantOracle:
    """``wanted`` are the intact messages, ``removed`` those that were cut off and must be gone.

    ``written`` are all that the log should hold: one that is damaged may be found, even in the place of a removed one.
    ``is_outdated``: no daemon has looked since the log was cut, so an answer that is not complete says all it can.
    """

    def __init__(
        self,
        data: Data,
        wanted: list[NaiveMessage],
        removed: Iterable[NaiveMessage],
        written: Iterable[NaiveMessage],
        flavour: str,
        tally: Counter[str],
        *,
        is_outdated: bool,
    ) -> None:
        self._data, self._wanted, self._flavour, self._tally = data, wanted, flavour, tally
        self._is_outdated = is_outdated
        here = {message.phy_offset for message in wanted}
        self._removed = {message.phy_offset: message for message in removed if message.phy_offset not in here}
        self._newer = {one.phy_offset: self._asking(one) for one in written if one.phy_offset in self._removed}

    def _asking(self, message: NaiveMessage) -> list[Question]:
        keys: list[tuple[str, str]] = []
        if message.sys_flag & 0xC not in NOT_INDEXED[self._flavour]:
            keys = [("key", key) for key in split_keys(message.keys)]
            keys += [("unique", message.uniq_key)] if message.uniq_key and self._flavour != "3.x" else []
        found = [Question(kind, message.topic, key) for kind, key in keys]
        return found + ([Question("queue", message.topic, "", message.queue_id)] if queue_of(message) else [])

    def check(self) -> None:
        """Ask every question that has a message as an answer; AssertionError at one that is wrong and silent."""
        asked: dict[Question, list[NaiveMessage]] = defaultdict(list)
        for message in (*self._wanted, *self._removed.values()):
            for question in self._asking(message):
                asked[question] += [message] * (message.phy_offset not in self._removed)
        for question, messages in asked.items():
            found: set[int] = set()
            for reply in self._pages(question):
                self._check_removed(question, reply)
                found |= set(reply.found)
            self._tally["found"] += len(found)
            for message in messages:
                if message.phy_offset not in found:
                    again = question._replace(number=message.cq_offset) if question.kind == "queue" else question
                    self._check_found(again, ask(self._data, again), message.phy_offset)

    def _pages(self, question: Question) -> Iterator[Reply]:
        for _ in range(50):
            reply = ask(self._data, question)
            self._tally["questions"] += 1
            if reply is None:
                return
            yield reply
            if question.kind != "queue" or not reply.found or reply.next_offset <= question.number:
                return
            question = question._replace(number=reply.next_offset)

    def _claims(self, reply: Reply, offset: int) -> bool:
        return reply.claims(offset) and (reply.complete or not self._is_outdated)

    def _check_removed(self, question: Question, reply: Reply) -> None:
        found = [offset for offset in reply.found if offset in self._removed and self._claims(reply, offset)]
        gone = [offset for offset in found if question._replace(number=0) not in self._newer.get(offset, ())]
        assert not gone, f"{question} finds the removed messages {gone[:5]}: {reply.words}"
        is_once = question.kind == "queue" or len(reply.found) == len(set(reply.found))
        assert is_once, f"{question} finds a message twice: {reply.found}"

    def _check_found(self, question: Question, reply: Reply | None, offset: int) -> None:
        if reply is None:
            self._tally["refused"] += 1
        elif offset not in reply.found:
            is_said = not self._claims(reply, offset)
            assert is_said, f"{question} does not find the intact message at {offset}: {reply.words}"
            self._tally["said to be missing"] += 1


_STARTS_MAX = 4


class MutantRun:
    """``go`` raises whatever comes out that is no IndexdError; ``history`` says what was done."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rand = rand = random.Random(seed)
        self.data = root / "data"
        self.shape = replace(Shape.draw(rand), recheck_size=64 << 20)  # as by default: a log may be cut
        self.policy = rand.choice(["stop", "skip"])
        config = self.shape.config(root / "store", self.data)
        reader = config.reader.model_copy(update={"on_corrupt": self.policy, "corrupt_after_ms": 5})
        self.config = config.model_copy(update={"reader": reader})
        self.log = MutantLog(root / "store" / "commitlog", self.shape.segment_size, rand)
        self.history = [f"{self.shape}, on_corrupt = {self.policy}"]
        self.tally: Counter[str] = Counter(mutants=1)
        self._clock = SimClock(seed)
        self._daemon: SimDaemon | None = None
        self._lock = DirectoryLock(DataFiles(self.data).lock)
        #: No daemon has looked since the log was cut: what it has removed is still in the index.
        self._is_outdated = False

    def go(self) -> None:
        """Run it to its end."""
        try:
            self._go()
        finally:
            self._leave("over")
            self.log.close()

    def _go(self) -> None:
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

    def _append(self, count: int) -> None:
        self.log.append(count)
        self.history.append(f"{count} messages written")

    def _index(self, *, forced: bool = False) -> None:
        """Catch up, with the daemon that runs or a new one, as often as something disturbs it."""
        for _ in range(_STARTS_MAX):
            try:
                with steered(self._clock, os.getpid(), self.shape):
                    if self._daemon is None:
                        Disk().make_dir(self.data)
                        self._lock.acquire()
                        self._daemon = SimDaemon(self.config, Disk(), pid=os.getpid(), forced=forced)
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
        raise AssertionError("every opening is disturbed again")

    def _rebuild(self) -> None:
        try:
            found = rebuild(self.config, Disk(), self.data, lambda *_: None)
        except IndexdError as error:
            self.history.append(f"rebuild ends with {error.exit_code}: {error.line()}")
            return
        self.history.append(f"rebuilt: {found.messages} messages, unreadable: {found.unreadable}")
        lost = [m.phy_offset for m in self.log.intact() if m.phy_offset >= found.phy_offset]
        assert not lost or self.policy == "skip", (
            f"rebuild ends with 0, {found}, without the intact messages {lost[:5]}"
        )

    def _end(self, *, may_stay: bool = False) -> None:
        """The daemon stops, is killed, or runs on."""
        how = self.rand.choice(["stopped", "killed"] + ["runs on"] * may_stay)
        if how == "stopped" and self._daemon is not None:
            try:
                with steered(self._clock, os.getpid(), self.shape):
                    self._daemon.stop()
                self._daemon = None
            except IndexdError as error:
                how = f"stops with {error.line()}"
        if how != "runs on":
            self._leave(how)

    def _leave(self, why: str) -> None:
        # As the kernel does it with a process that is gone.
        self.history.append(why)
        if self._daemon is not None:
            with suppress(DiskError):
                self._daemon.give_way()
            self._daemon = None
        self._lock.release()

    def _ask(self, when: str) -> None:
        self.history.append(when)
        intact, written = self.log.intact(), [frame.message for frame in self.log.frames]
        with suppress(IndexdError), open_data(self.data) as data:
            data.index.look_seconds = 60.0
            known = intact, self.log.removed, written, self.shape.flavour, self.tally
            MutantOracle(data, *known, is_outdated=self._is_outdated).check()
