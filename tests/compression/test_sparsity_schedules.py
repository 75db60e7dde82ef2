"""Schedules have their papers' values at the specified steps."""

from typing import Any

import pytest

from lathe.compression.pruning.masks import SparsitySchedule


def due(schedule: SparsitySchedule, steps: int = 60) -> list[int]:
    return [step for step in range(steps) if schedule.due(step)]


def test_cubic_is_zhu_and_gupta() -> None:
    schedule = SparsitySchedule(0.8, "cubic", 0.2, start=10, end=50, every_n_steps=10)
    assert due(schedule) == [10, 20, 30, 40, 50]
    # Their equation 1: s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 with n dt = 40.
    assert [schedule.at(step) for step in (10, 20, 30, 40, 50)] == pytest.approx(
        [0.2, 0.8 - 0.6 * 0.75**3, 0.8 - 0.6 * 0.5**3, 0.8 - 0.6 * 0.25**3, 0.8]
    )
    assert schedule.at(9) == 0.0
    assert schedule.at(1000) == 0.8
    assert schedule.last == 50


def test_linear_and_exponential() -> None:
    linear = SparsitySchedule(0.9, "linear", 0.1, start=0, end=40)
    assert [linear.at(step) for step in (0, 10, 20, 40)] == pytest.approx([0.1, 0.3, 0.5, 0.9])
    exponential = SparsitySchedule(0.96, "exponential", start=0, end=2)
    assert [exponential.at(step) for step in (0, 1, 2)] == pytest.approx([0.0, 0.8, 0.96])


@pytest.mark.parametrize("kind", ["linear", "cubic", "exponential", "stepped", "one_shot"])
def test_it_never_falls_and_ends_at_its_end(kind: Any) -> None:
    schedule = SparsitySchedule(0.83, kind, 0.1, start=3, end=20, every_n_steps=4)
    values = [schedule.at(step) for step in range(40)]
    assert values == sorted(values)
    assert values[-1] == 0.83
    assert due(schedule)[-1] == schedule.last
    assert SparsitySchedule(0.83, kind, start=5, end=5).at(5) == 0.83


def test_stepped_jumps_from_start_to_end() -> None:
    schedule = SparsitySchedule(0.8, "stepped", start=10, end=40, jumps=4)
    assert due(schedule) == [10, 20, 30, 40]
    assert [schedule.at(step) for step in (9, 10, 19, 20, 30, 39, 40)] == pytest.approx(
        [0, 0.2, 0.2, 0.4, 0.6, 0.6, 0.8]
    )
    once = SparsitySchedule(0.8, "stepped", start=10, end=40, jumps=1)
    assert due(once) == [40]
    assert (once.at(39), once.at(40)) == (0.0, 0.8)
