"""Which stage moves, by a clock of its own: an announced wait is no stall, nor is a long step that gets further."""

from __future__ import annotations

import pytest

from indexd.service.instance import StageLiveness


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def liveness(clock: Clock) -> StageLiveness:
    return StageLiveness(10.0, clock)


def test_each_stage_has_its_own_limit(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("read")
    liveness.sign("build")
    clock.now += 5.1
    assert liveness.stalled() == {"read": 5.1}
    clock.now += 5
    assert liveness.stalled() == {"read": 10.1, "build": 10.1}
    liveness.sign("read")
    assert liveness.stalled() == {"build": 10.1}
    liveness.sign("build")
    assert liveness.stalled() == {}


def test_an_announced_wait_is_no_stall_until_it_is_over(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("build")
    liveness.sign("read", 60.0)
    for _ in range(65):
        clock.now += 1
        liveness.sign("build")
        assert liveness.stalled() == {}
    clock.now += 0.5
    assert liveness.stalled() == {"read": 65.5}


def test_a_step_is_alive_as_long_as_it_gets_further(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("flush", progress=0)
    for files in range(1, 50):
        clock.now += 9
        liveness.sign("read")
        liveness.sign("build")
        liveness.watch("flush", files)
        assert liveness.stalled() == {}
    clock.now += 9
    liveness.watch("flush", 49)
    clock.now += 2
    liveness.watch("flush", 49)
    assert liveness.stalled()["flush"] == 11


def test_nothing_is_asked_of_a_stage_at_rest(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("read", 1e9)
    liveness.sign("build", 1e9)
    clock.now += 1e6
    assert liveness.stalled() == {}, "no flush has begun"
    liveness.sign("flush", progress=3)
    liveness.rest("flush")
    liveness.watch("flush", 9)
    clock.now += 1e6
    assert liveness.stalled() == {}


def test_without_a_watchdog_there_is_a_limit_all_the_same(clock: Clock) -> None:
    liveness = StageLiveness(None, clock)
    clock.now += 61
    assert set(liveness.stalled()) == {"read", "build"}
