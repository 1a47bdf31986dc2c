"""Which stage moves, by a clock of its own: an announced wait is no stall, nor is a long step that gets further."""

from __future__ import annotations

import pytest

from indexd.service.instance import Pulse, RunningClock


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    return Pulse(10.0, clock)


def test_each_stage_has_its_own_limit(pulse: Pulse, clock: Clock) -> None:
    pulse.sign("read")
    pulse.sign("build")
    clock.now += 5.1
    assert pulse.stalled() == {"read": 5.1}
    clock.now += 5
    assert pulse.stalled() == {"read": 10.1, "build": 10.1}
    pulse.sign("read")
    assert pulse.stalled() == {"build": 10.1}
    pulse.sign("build")
    assert pulse.stalled() == {}


def test_signs_of_one_stage_do_not_speak_for_another(pulse: Pulse, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 1
        pulse.sign("build")
    assert list(pulse.stalled()) == ["read"]


def test_an_announced_wait_is_no_stall_until_it_is_over(pulse: Pulse, clock: Clock) -> None:
    pulse.sign("build")
    pulse.sign("read", 60.0)
    for _ in range(65):
        clock.now += 1
        pulse.sign("build")
        assert pulse.stalled() == {}
    clock.now += 0.5
    assert pulse.stalled() == {"read": 65.5}


def test_a_step_is_alive_as_long_as_it_gets_further(pulse: Pulse, clock: Clock) -> None:
    pulse.begin("flush", 0)
    for files in range(1, 50):
        clock.now += 9
        pulse.sign("read")
        pulse.sign("build")
        pulse.watch("flush", files)
        assert pulse.stalled() == {}
    clock.now += 9
    pulse.watch("flush", 49)
    clock.now += 2
    pulse.watch("flush", 49)
    assert pulse.stalled()["flush"] == 11


def test_nothing_is_asked_of_a_stage_at_rest(pulse: Pulse, clock: Clock) -> None:
    pulse.sign("read", 1e9)
    pulse.sign("build", 1e9)
    clock.now += 1e6
    assert pulse.stalled() == {}, "no flush has begun"
    pulse.begin("flush", 3)
    pulse.rest("flush")
    pulse.watch("flush", 9)
    clock.now += 1e6
    assert pulse.stalled() == {}


def test_without_a_watchdog_there_is_a_limit_all_the_same(clock: Clock) -> None:
    pulse = Pulse(None, clock)
    clock.now += 61
    assert set(pulse.stalled()) == {"read", "build"}


def test_a_clock_that_does_not_run_while_the_process_is_stopped(clock: Clock) -> None:
    running = RunningClock(clock)
    began = running()
    clock.now += 4.0
    assert running() - began == 4.0, "somebody reads it often"
    clock.now += 3600.0
    assert running() - began == 4.0, "nobody did for an hour"
    clock.now += 1.0
    assert running() - began == 5.0
