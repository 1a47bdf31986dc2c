"""A broker that keeps an index of its log, as the naive service does, and to which all that can happen may happen."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from indexd.audit import Audit
from indexd.audit.causes import Cause, StoreState, hole_causes, look_at_store
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import audit, config_for, lost_keys
from support.data_directory import SEGMENT, T0, Store, spec
from support.naive import NaiveIndexService, NaiveMessage

#: Forty entries a file: twenty messages of two keys, somewhat less than a segment holds.
LAYOUT = IndexLayout(7, 41)


class Broker:
    """A store, and the index that a broker kept of it; ``stopped`` writes that down."""

    def __init__(self, root: Path, layout: IndexLayout = LAYOUT, messages: int = 90, seed: int | None = None) -> None:
        rand = random.Random(seed)
        self.store = Store(root, layout)
        for number in range(messages):
            size = 60 if seed is None else rand.randrange(200)
            time = 1700 * number if seed is None else 1700 * number + rand.randrange(1700)
            self.store.append(spec(T0 + time, size=size, KEYS=f"a{number} b{number % 3}"))
        self.messages = self.store.messages()
        self.service = NaiveIndexService(layout.hash_slot_num, layout.index_num)
        self.config = config_for(self.store.root, layout, SEGMENT)

    @classmethod
    def sound(cls, root: Path) -> Broker:
        """One that has indexed all, and was stopped."""
        made = cls(root)
        made.dispatch(made.messages)
        made.stopped()
        return made

    def dispatch(self, messages: Iterable[NaiveMessage]) -> None:
        for message in messages:
            self.service.build_index(message)

    def segment_at(self, number: int) -> int:
        """The first message of the segment that a message lies in."""
        base = self.messages[number].phy_offset // SEGMENT * SEGMENT
        return next(at for at, message in enumerate(self.messages) if message.phy_offset >= base)

    def killed(self) -> None:
        """The start after an unclean stop throws away what is newer than the checkpoint's time (spec 1.4)."""
        synced = self.service.index_msg_timestamp
        self.service.files = [file for file in self.service.files if file.end_timestamp <= synced]

    def stopped(self) -> None:
        folder = self.store.root / "index"
        folder.mkdir(exist_ok=True)
        size = self.store.layout.file_size
        for number, file in enumerate(self.service.files):
            (folder / f"{20260101000000000 + number}").write_bytes(file.to_bytes().ljust(size, b"\0"))
        (self.store.root / "lock").write_bytes(b"lock")

    @property
    def files(self) -> list[Path]:
        return sorted((self.store.root / "index").iterdir())


def checked(config: Config) -> Audit:
    """The audit, with its holes compared to what RocketMQ's own walk does not find."""
    found, lost = audit(config), lost_keys(config, "5.4")
    assert found.missing_keys == sum(hole.keys for hole in found.holes) == lost.total()
    return found


def causes(broker: Broker, state: StoreState | None = None, *, check: bool = True) -> list[Cause]:
    broker.store.root.joinpath("index").mkdir(exist_ok=True)
    state = state or look_at_store(Disk(), broker.config)
    found = checked(broker.config) if check else audit(broker.config)
    judged = list(hole_causes(found, state, broker.config))
    assert len(judged) == len(found.holes)
    # However the log is cut: what a cause is judged by must not depend on it.
    for cut in (broker.messages[17].phy_offset, broker.messages[-3].phy_offset):
        again = audit(broker.config, cuts=[cut])
        assert (again.holes, again.orphans) == (found.holes, found.orphans)
    return judged


def one(broker: Broker, state: StoreState | None = None) -> Cause:
    (cause,) = causes(broker, state)
    return cause


def says(cause: Cause, what: str, *texts: str) -> None:
    assert cause.what == what, cause
    evidence = "\n".join(cause.evidence)
    for text in texts:
        assert text in evidence, evidence


def state_of(broker: Broker, **changes: object) -> StoreState:
    """What stands around its index now, changed as a test wants it."""
    return replace(look_at_store(Disk(), broker.config), **changes)  # type: ignore[arg-type]  # as the tests name them
