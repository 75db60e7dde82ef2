"""Thresholds of the suites, and requests that are refused before anything runs."""

from typing import Any

import pytest
from support.runs import config

from lathe.benchmark import suites, tables
from lathe.benchmark.spread import Spread
from lathe.benchmark.thresholds import Threshold, missed
from lathe.errors import UserError


def plan(*words: str) -> tuple[Any, dict[str, Any]]:
    return suites.plan(config(*words, name="benchmark"))


def held(name: str, median: float | None, **limit: float) -> Threshold:
    return Threshold(name, None if median is None else Spread([median]), **limit)


def test_what_is_missed_is_reported_with_limit_and_measurement() -> None:
    thresholds = [held("a", 0.9, at_least=0.9), held("b", 0.89, at_least=0.9), held("c", 1.2, at_most=1.1)]
    thresholds += [held("d", None, at_most=1.0), held("e", None)]
    assert [threshold.row()[2] for threshold in thresholds] == ["met", "missed", "missed", "-", ""]
    assert missed(thresholds)[0] == "missed: expected b at least 0.90, got 0.890."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("suite=scaling", "thresholds={8:0.7}"), "thresholds.8: suite=scaling does not measure 8 as it is asked here"),
        (("suite=scaling", "processes=[1]", "assert=true"), "assert=true: suite=scaling has no thresholds of its own"),
    ],
)
def test_limits_without_a_measurement_are_refused_before_it(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{sentence}"):
        plan(*words)


def timed(*milliseconds: float, batch: int = 100, **more: Any) -> list[dict[str, Any]]:
    return [{"step_ms": ms, "samples_per_s": batch / ms * 1e3, **more} for ms in milliseconds]


def judged(words: tuple[str, ...], results: dict[str, Any]) -> dict[str, bool]:
    cases, full = plan(*words)
    return {threshold.full: threshold.met for threshold in tables.judge(cases, results, full)}


def test_efficiency_is_over_one_process_of_the_strategy_or_of_none() -> None:
    words = ("suite=scaling", "strategies=[ddp,pipeline]", "processes=[1,2]")
    results = {
        "auto, 1, weak": timed(10.0),
        "ddp, 1, weak": timed(20.0),
        "ddp, 2, weak": timed(20.0, batch=200),
        "ddp, 2, weak, no sync": timed(1.0),
        "ddp, 2, strong": timed(1.0),
        "pipeline, 2, weak": timed(12.5, batch=200),
    }
    assert judged(words, results) == {
        "ddp, 2, weak: efficiency at least 0.85": True,
        "pipeline, 2, weak: efficiency at least 0.85": False,
    }


def test_precision_and_parallel_are_judged_by_speed_up_and_memory() -> None:
    results = {
        "32-true": timed(20.0, peak=100),
        "bf16-mixed": timed(10.0, peak=70),
        "single": timed(20.0),
        "ddp_scaled": timed(20.0, batch=160),
    }
    words = ("suite=precision", "accelerator=cpu", "thresholds={bf16-mixed:2.0,bf16-mixed_memory:0.6}")
    assert judged(words, results) == {
        "bf16-mixed: speed-up over 32-true at least 2.00": True,
        "bf16-mixed: memory at the peak over 32-true's at most 0.60": False,
    }
    parallel = judged(("suite=parallel", "accelerator=cpu"), results)
    assert parallel == {"ddp_scaled: speed-up over single at least 1.70": False}
