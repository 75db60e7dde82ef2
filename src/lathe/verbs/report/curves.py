"""Compress learning curves: shared steps are stored once, values as integer differences."""

import math
from array import array
from dataclasses import dataclass
from typing import Any

NO_NUMBER = -32768  # marks a value that is nan or infinite


@dataclass(frozen=True)
class Form:
    """The resolution of curves: at most `points`, and `levels` between the 10th and 90th percentile."""

    points: int
    levels: int


# from the finest, which looks like the original in a plot of 400 pixels, to the one for thousands of runs
FORMS = (Form(100, 400), Form(100, 200), Form(50, 200), Form(25, 100), Form(10, 50))


def packed(data: dict[str, Any], form: Form) -> tuple[dict[str, Any], bytes]:
    """Return `data` with compressed curves, and the differences of all curves as bytes.

    A curve is [index into data["steps"], first value, value of one level, offset]. A difference has 16 bits; all low
    bytes precede all high ones, which compresses better.
    """
    steps: dict[tuple[Any, ...], int] = {}
    points = array("h")
    runs = [{**run, "curves": _curves(run.get("curves") or {}, form, steps, points)} for run in data["runs"]]
    told = {**data, "runs": runs, "steps": [list(shared) for shared in steps], "thinned": _says(form)}
    low = bytes(point & 255 for point in points)
    return told, low + bytes((point >> 8) & 255 for point in points)


def _says(form: Form) -> str | None:
    if form == FORMS[0]:
        return None
    return f"So that it stays small, curves have at most {form.points} points and {form.levels} levels."


def _curves(
    curves: dict[str, Any], form: Form, steps: dict[tuple[Any, ...], int], points: "array[int]"
) -> dict[str, list[Any]]:
    found = {}
    for name, (xs, ys) in curves.items():
        kept = _kept(min(len(xs), len(ys)), form.points)
        if kept:
            place = steps.setdefault(tuple(xs[i] for i in kept), len(steps))
            low, level, differences = _levels([ys[i] for i in kept], form.levels)
            found[name] = [place, low, level, len(points)]
            points.extend(differences)
    return found


def _kept(length: int, most: int) -> list[int]:
    """Return the indices of at most `most` of `length` points, evenly spaced, with both ends."""
    if length <= most:
        return list(range(length))
    return sorted({round(i * (length - 1) / (most - 1)) for i in range(most)})


def _levels(values: list[float | None], levels: int) -> tuple[float, float, list[int]]:
    """Return the first value, the size of a level, and the differences in levels."""
    known = sorted(value for value in values if value is not None and math.isfinite(value))
    if not known:
        return 0.0, 0.0, [NO_NUMBER] * len(values)
    first = _short(next(value for value in values if value is not None and math.isfinite(value)))
    middle = known[int(0.9 * (len(known) - 1))] - known[int(0.1 * (len(known) - 1))]
    level = _short(max(middle / levels, (known[-1] - known[0]) / 30000))
    found, before = [], 0
    for value in values:
        if value is None or not math.isfinite(value):
            found.append(NO_NUMBER)
            continue
        here = round((value - first) / level) if level else 0
        found.append(here - before)
        before = here
    return first, level, found


def _short(value: float) -> float:
    return float(f"{value:.6g}")
