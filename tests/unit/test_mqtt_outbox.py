"""Events that wait for MQTT, and how often something is tried, published and said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from indexd.serve.board import Events
from indexd.serve.mqtt.link import PAUSE_SECONDS, Backoff, Outbox, Said, StatePace

steps = st.lists(
    st.one_of(
        st.tuples(st.just("tell"), st.integers(1, 30)),
        st.tuples(st.just("collect"), st.just(0)),
        st.tuples(st.sampled_from(["confirm", "give back"]), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(st.integers(1, 20), steps)
def test_each_event_is_published_waits_or_is_counted_as_dropped(
    waiting_max: int, script: list[tuple[str, int]]
) -> None:
    events, outbox = Events(), Outbox(waiting_max)
    published: list[int] = []
    for step, count in script:
        if step == "tell":
            for _ in range(count):
                events.tell("rolled", {})
        elif step == "collect":
            outbox.collect(events)
        else:
            taken = outbox.take(count)
            events.tell("skipped", {})
            outbox.collect(events)
            assert outbox.waiting <= waiting_max + len(taken)
            if step == "confirm":
                outbox.confirm(taken)
                published += [event.number for event in taken]
            else:
                outbox.give_back(taken)
        assert outbox.waiting <= waiting_max
        assert outbox.published + outbox.waiting + outbox.dropped == outbox.last
    outbox.collect(events)
    rest = [event.number for event in outbox.take(1000)]
    # In order, each once, and of what has been dropped nothing but the oldest: the newest are all there.
    assert published + rest == sorted({*published, *rest})
    assert rest == list(range(events.last - len(rest) + 1, events.last + 1))


def test_what_the_board_could_not_keep_is_dropped_too() -> None:
    events, outbox = Events(), Outbox(2000)
    for _ in range(1500):
        events.tell("rolled", {})
    outbox.collect(events)
    assert (outbox.waiting, outbox.dropped, outbox.last) == (1000, 500, 1500)


def test_a_flush_is_no_news() -> None:
    events, outbox = Events(), Outbox(10)
    events.tell("rolled", {})
    events.tell("flushed", {})
    outbox.collect(events)
    assert (outbox.notable, outbox.last) == (1, 2)


@given(st.lists(st.floats(0, 59.9), min_size=1, max_size=50))
def test_pauses_grow_between_their_bounds_and_begin_anew(connected: list[float]) -> None:
    backoff = Backoff()
    last = PAUSE_SECONDS[0]
    for seconds in connected:
        pause = backoff.pause(seconds)
        assert PAUSE_SECONDS[0] <= pause <= min(3 * last, PAUSE_SECONDS[1])
        last = pause
    assert backoff.pause(60) <= 3


def test_many_nodes_do_not_come_back_together_and_soon_come_rarely() -> None:
    nodes = [Backoff() for _ in range(200)]
    firsts = {round(node.pause(0), 2) for node in nodes}
    assert len(firsts) > 50
    for _ in range(12):
        pauses = [node.pause(0) for node in nodes]
    assert sum(pauses) / len(pauses) > 15


def test_a_state_is_due_at_the_interval_and_soon_after_a_change() -> None:
    pace = StatePace(10)
    assert pace.is_due("a", 100)
    pace.published("a", 100)
    assert not pace.is_due("a", 109.9)
    assert pace.is_due("a", 110)
    assert not pace.is_due("b", 100.9)  # however much happens
    assert pace.is_due("b", 101)


def test_a_reason_is_said_once_and_again_when_it_is_another_or_long_ago() -> None:
    said = Said()
    assert said.is_worth("refused", 0)
    assert not said.is_worth("refused", 599)
    assert said.is_worth("refused", 600)
    assert said.is_worth("timed out", 601)
    assert said.is_worth("refused", 602)
    said.forget()
    assert said.is_worth("refused", 603)
