"""Events are numbered without gaps, bounded, and do not depend on how much is logged."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from indexd.config import LogConfig
from indexd.serve.board import KINDS, Events
from indexd.service.log import configure_log

if TYPE_CHECKING:
    import pytest


def test_numbers_grow_by_one_whatever_the_kind() -> None:
    events = Events()
    assert events.since(0) == []
    for name in ("rolled", "flushed", "corrupt", "no event of ours", "flushed"):
        events.tell(name, {"offset": 1})
    assert [(event.number, event.kind, event.name) for event in events.since(0)] == [
        (1, "roll", "rolled"),
        (2, "flush", "flushed"),
        (3, "corrupt", "corrupt"),
        (4, "flush", "flushed"),
    ]
    assert events.last == 4
    assert [event.number for event in events.since(2)] == [3, 4]
    assert events.since(4) == events.since(99) == []
    assert events.since(0)[0].fields == {"offset": 1}
    assert events.since(0)[0].at > 1_600_000_000_000


def test_what_comes_every_few_seconds_does_not_push_out_what_comes_once_a_night() -> None:
    events = Events()
    events.tell("corrupt", {})
    for _ in range(5000):
        events.tell("flushed", {})
    kept = events.since(0)
    assert [event.number for event in kept if event.kind == "corrupt"] == [1]
    assert len(kept) == 101
    for _ in range(5000):
        events.tell("rolled", {})
    assert len(events.since(0)) == 1100
    assert [event.number for event in events.since(0)] == sorted(event.number for event in events.since(0))


def test_an_event_keeps_what_it_was_told() -> None:
    events, fields = Events(), {"files": 1}
    events.tell("rolled", fields)
    fields["files"] = 2
    assert events.since(0)[0].fields == {"files": 1}


def test_many_threads_tell_and_each_number_comes_once() -> None:
    events, seen, stop = Events(), [], threading.Event()

    def tell() -> None:
        for _ in range(200):
            events.tell("rolled", {})

    def read() -> None:
        number = 0
        while not stop.is_set() or number < events.last:
            for event in events.since(number):
                seen.append(event.number)
                number = event.number

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=tell) for _ in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert seen == list(range(1, 801))


def test_every_line_of_the_log_that_has_a_kind_becomes_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is not logged because of its level."""
    events = Events()
    log = configure_log(LogConfig(log_level="error", log_format="json"), events.tap)
    log.info("rolled", files=2, phy_offset=99)
    log.debug("drained", rows=1)
    log.error("degraded", stage="build", problem="disk full")
    log.warning("skipped", begin=1, end=2)
    told = [(event.kind, event.fields) for event in events.since(0)]
    assert told == [
        ("roll", {"files": 2, "phy_offset": 99}),
        ("disk", {"stage": "build", "problem": "disk full"}),
        ("hole", {"begin": 1, "end": 2}),
    ]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert '"event": "degraded"' in lines[0]


def test_the_kinds_that_others_subscribe_to() -> None:
    assert {"flush", "roll", "recover", "hole", "corrupt", "disk", "broker"} <= set(KINDS.values())
