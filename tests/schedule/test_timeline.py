"""What can be read from a timeline, simulated or measured."""

from fractions import Fraction

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.timeline import Event, bubble, busy_time, makespan


def event(rank: int, action: str, start: float, end: float) -> Event:
    return Event(rank, Action.parse(action), start, end)


MEASURED = [
    event(0, "0F0.0", 10.0, 11.0),
    event(0, "0SEND_F0.0", 11.0, 11.5),
    event(1, "1RECV_F0.0", 10.0, 11.5),
    event(1, "1F0.0", 11.5, 13.0),
    event(1, "1B0.0", 13.0, 15.0),
    event(0, "0B0.0", 15.5, 18.0),
]


def test_only_computing_is_busy() -> None:
    assert busy_time(MEASURED) == {0: 3.5, 1: 3.5}


def test_clock_need_not_start_at_zero() -> None:
    assert makespan(MEASURED) == 8.0
    assert bubble(MEASURED) == 4.5


def test_bubble_is_that_of_the_idlest_rank() -> None:
    assert bubble([*MEASURED, event(0, "0F1.0", 16.0, 17.0)]) == 4.5
    assert bubble([event(0, "0F0.0", 0, 4), event(1, "1F0.0", 4, 5)]) == 4
    assert bubble([event(0, "0F0.0", 0, 4), event(1, "1RECV_F0.0", 0, 4)]) == 4


def test_a_generator_will_do() -> None:
    assert bubble(iter(MEASURED)) == 4.5


def test_fractions_stay_exact() -> None:
    third = Fraction(1, 3)
    assert busy_time([event(0, "0F0.0", third, 2 * third), event(0, "0B0.0", 2 * third, 1)]) == {0: 2 * third}


def test_nothing_takes_no_time() -> None:
    assert busy_time([]) == {}
    assert makespan([]) == 0
    assert bubble([]) == 0
