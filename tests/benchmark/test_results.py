"""Tables and thresholds whose figures can be computed by hand."""

from typing import Any
from xml.etree import ElementTree

from suites import cases, tables, thresholds
from suites.results import Facts, Results
from support.runs import config

REQUEST = {"suite": "scaling", "processes": [2], "strategies": ["ddp"], "batch_size": 100, "rounds": 3, "threads": 1}


def timed(*milliseconds: float, batch: int = 100, **more: Any) -> list[dict[str, Any]]:
    return [{"step_ms": ms, "samples_per_s": batch / ms * 1e3, **more} for ms in milliseconds]


def facts_of(every: list[cases.Case]) -> Facts:
    return {case.name: {"processes": case.processes, **case.facts} for case in every}


def test_every_suite_of_trainings_has_a_table() -> None:
    counted = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "peak"), 2**20)
    figures = {"mean_step_ms": 2.0, "forward_ms": 1.0, "mfu": 0.5, "epoch_s": 1.0, "updates": 3, "metric": "m"}
    compiled = {"cold_s": 4.0, "warm_s": 1.0, "breaks": 0, "anew": 1}
    result = {**timed(10.0)[0], **counted, **figures, **compiled, "reached": None}
    for suite in ("memory", "overhead", "precision", "compile", "parallel"):
        every, _ = cases.plan(config(f"suite={suite}", *(["accelerator=cpu"] * (suite != "memory")), name="benchmark"))
        results = Results({case.name: [result] for case in every})
        results[every[-1].name] = [{"error": "no memory left"}]
        texts, drawing = tables.TABLES[suite](facts_of(every), results)
        text = "\n".join(texts)
        assert "no memory left" in text
        assert all(case.name.split(", ")[0] in text for case in every)
        ElementTree.fromstring(drawing)


def judged(words: str, results: dict[str, Any]) -> dict[str, bool]:
    every, full = cases.plan(config(*words.split(), name="benchmark"))
    return {one.full: one.met for one in thresholds.judge(full, facts_of(every), Results(results))}


def test_efficiency_is_over_one_process_of_the_strategy_or_of_none() -> None:
    results = {
        "auto, 1, weak": timed(10.0),
        "ddp, 1, weak": timed(20.0),
        "ddp, 2, weak": timed(20.0, batch=200),
        "ddp, 2, weak, no sync": timed(1.0),
        "ddp, 2, strong": timed(1.0),
        "pipeline, 2, weak": timed(12.5, batch=200),
    }
    assert judged("suite=scaling strategies=[ddp,pipeline] processes=[1,2]", results) == {
        "ddp, 2, weak: efficiency at least 0.85": True,
        "pipeline, 2, weak: efficiency at least 0.85": False,
    }
