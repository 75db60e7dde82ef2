"""Packed curves, unpacked as the page does it."""

import math
from typing import Any

import pytest

from lathe.verbs.report.curves import FORMS, NO_NUMBER, Form, packed


def unpacked(told: dict[str, Any], points: bytes, run: int, name: str) -> tuple[list[float], list[float]]:
    half = len(points) // 2
    steps, first, level, offset = told["runs"][run]["curves"][name]
    here, values = 0, []
    for i in range(offset, offset + len(told["steps"][steps])):
        change = int.from_bytes(bytes([points[i], points[half + i]]), "little", signed=True)
        here += 0 if change == NO_NUMBER else change
        values.append(math.nan if change == NO_NUMBER else first + level * here)
    return told["steps"][steps], values


def pack(*curves: tuple[list[Any], list[Any]], form: Form = FORMS[0]) -> Any:
    return packed({"runs": [{"curves": {"a": [*curve]}} for curve in curves]}, form)


def test_values_come_back_to_a_fraction_of_their_middle_range() -> None:
    values = [2.3 * math.exp(-i / 9) + 0.01 * (i % 3) for i in range(100)]
    told, points = pack((list(range(100)), values))
    steps, found = unpacked(told, points, 0, "a")
    middle = sorted(values)[89] - sorted(values)[9]
    assert steps == list(range(100))
    assert max(abs(a - b) for a, b in zip(found, values, strict=True)) <= middle / 400
    assert told["thinned"] is None


def test_what_is_no_number_stays_none_and_constants_are_exact() -> None:
    told, points = pack(
        ([1, 2, 3, 4], [0.5, math.nan, None, 0.75]), ([1, 2], [math.inf, math.nan]), ([7], [3.0]), ([], [])
    )
    assert unpacked(told, points, 0, "a")[1] == pytest.approx([0.5, math.nan, math.nan, 0.75], nan_ok=True, abs=1e-3)
    assert all(map(math.isnan, unpacked(told, points, 1, "a")[1]))
    assert unpacked(told, points, 2, "a") == ([7], [3.0])
    assert told["runs"][3]["curves"] == {}


def test_a_single_leap_does_not_hide_the_rest() -> None:
    values = [1e30, *[0.1 + i / 1000 for i in range(98)], -1e30]
    told, points = pack((list(range(100)), values))
    found = unpacked(told, points, 0, "a")[1]
    assert found[0] == pytest.approx(1e30)
    assert found[-1] == pytest.approx(-1e30, rel=1e-3)
    told, points = pack((list(range(100)), [7.0, *values[1:-1], 0.1]))
    assert unpacked(told, points, 0, "a")[1][1:] == pytest.approx([*values[1:-1], 0.1], abs=2.5e-4)


def test_steps_are_shared_and_long_curves_keep_both_ends() -> None:
    steps = list(range(1000))
    told, points = pack((steps, steps), (steps, steps[::-1]), form=Form(50, 200))
    assert len(told["steps"]) == 1
    found = unpacked(told, points, 1, "a")
    assert (len(found[0]), found[0][0], found[0][-1]) == (50, 0, 999)
    assert found[1][-1] == pytest.approx(0, abs=5)
    assert told["thinned"] == "So that it stays small, curves have at most 50 points and 200 levels."
