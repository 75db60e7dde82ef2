"""What a suite's figures are held against, and what is refused before anything runs."""

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


def test_what_is_missed_is_told_with_limit_and_measurement() -> None:
    thresholds = [
        held("a is", 0.9, at_least=0.9),
        held("b is", 0.89, at_least=0.9),
        held("c is", 1.2, at_most=1.1),
        held("d is", 1.1, at_most=1.1),
        held("e is", None, at_most=1.0),
        held("f is shown", None),
        held("g is", 0.1, at_most=0.0),
    ]
    assert missed(thresholds) == [
        "missed: expected b is at least 0.90, got 0.890.",
        "missed: expected c is at most 1.10, got 1.200.",
        "missed: expected e is at most 1.00, got no measurement.",
        "missed: expected g is at most 0.00, got 0.100.",
    ]
    assert [threshold.row()[2] for threshold in thresholds] == ["met", "missed", "missed", "met", "-", "", "missed"]


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


def test_compiling_is_held_by_its_start_and_its_graphs() -> None:
    def found(cold: float, warm: float, breaks: int = 0, anew: int = 0) -> list[dict[str, Any]]:
        return timed(10.0, cold_s=cold, warm_s=warm, breaks=breaks, anew=anew)

    results = {
        "none": found(0.1, 0.1),
        "default": found(20.0, 5.0),
        "reduce-overhead": found(20.0, 7.0, breaks=1),
        "max-autotune": [{"error": "no result"}],
        "regional": found(9.0, 1.0),
        "step": found(30.0, 9.0, anew=2),
    }
    met = judged(("suite=compile", "accelerator=cpu"), results)
    assert [sentence.split(":")[0] for sentence, is_met in met.items() if not is_met] == [
        "reduce-overhead",
        "max-autotune",
        "reduce-overhead",
        "max-autotune",
        "step",
    ]
    assert met["regional: cold start over the whole net's at most 0.50"]


def test_precision_and_parallel_are_held_by_speed_up_and_memory() -> None:
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
