"""The curves themselves, at points whose value is known."""

import math

import pytest

from lathe.optim.factors import cosine_factor, half_cosine, one_cycle_factor, restarts_factor, step_factor


def test_half_cosine() -> None:
    assert half_cosine(0, start=1, end=0.2) == 1
    assert half_cosine(0.5, start=1, end=0.2) == pytest.approx(0.6)
    assert half_cosine(1, start=1, end=0.2) == 0.2
    assert half_cosine(2, start=1, end=0.2) == 0.2
    assert half_cosine(-1, start=1, end=0.2) == 1


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1 / 11),
        (9, 10 / 11),
        (10, 1),
        (40, 0.1 + 0.9 * 0.75),
        (55, 0.55),
        (70, 0.1 + 0.9 * 0.25),
        (100, 0.1),
        (101, 0.1),
        (500, 0.1),
    ],
)
def test_cosine(step: int, expected: float) -> None:
    assert cosine_factor(step, total=100, warmup=10, min_ratio=0.1) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.5),
        (1, 1),
        (6, 0.5),
        (10, 0.5 + 0.5 * math.cos(0.9 * math.pi)),
        (11, 1),
        (21, 0.5),
        (31, 1),
        (51, 0.5),
        (71, 1),
    ],
)
def test_restarts_double(step: int, expected: float) -> None:
    assert restarts_factor(step, warmup=1, period=10, period_growth=2, min_ratio=0) == pytest.approx(
        expected, abs=1e-15
    )


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.04), (15, 0.52), (30, 1), (65, 0.5005), (100, 0.001), (120, 0.001)]
)
def test_one_cycle(step: int, expected: float) -> None:
    assert one_cycle_factor(step, total=100, warmup=30, start_ratio=0.04, end_ratio=0.001) == pytest.approx(
        expected, abs=1e-15
    )


def test_steps() -> None:
    values = [step_factor(step, warmup=1, milestones=[3, 5], gamma=0.1) for step in range(7)]
    assert values == pytest.approx([0.5, 1, 1, 0.1, 0.1, 0.01, 0.01], rel=1e-12)
