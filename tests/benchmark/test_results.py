"""Tables and thresholds whose figures can be computed by hand."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from suites import cases, loaders, tables, thresholds, trainer
from suites.results import Facts, Results, Spread, write
from suites.thresholds import Threshold, missed
from support.runs import config

from lathe.errors import UserError

REQUEST = {"suite": "scaling", "processes": [2], "strategies": ["ddp"], "batch_size": 100, "rounds": 3, "threads": 1}


def timed(*milliseconds: float, batch: int = 100, **more: Any) -> list[dict[str, Any]]:
    return [{"step_ms": ms, "samples_per_s": batch / ms * 1e3, **more} for ms in milliseconds]


def facts_of(every: list[cases.Case]) -> Facts:
    return {case.name: {"processes": case.processes, **case.facts} for case in every}


def cells(text: str) -> list[list[str]]:
    """Return the rows of the first table."""
    lines = text.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line]


def test_ratios_are_taken_round_by_round_though_the_machine_drifts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(
        {
            "auto, 1, weak": timed(20.0, 40.0, 10.0, peak=3 * 2**20),
            "ddp, 1, weak": timed(21.0, 42.0, 10.5),
            "ddp, 2, weak": timed(25.0, 50.0, 10.0, batch=200, grad_sync=0.12),
            "ddp, 2, weak, no sync": timed(20.0, 50.0, 10.0, batch=200),
            "ddp, 2, strong": [{"error": "no result within timeout=300 seconds"}],
        }
    )
    facts = facts_of(cases.scaling({**REQUEST, "accelerator": "cpu"}))
    text = write(tmp_path, *tables.scaling(facts, results), facts, results, REQUEST, 61.0)
    auto, alone, pair, _, strong = cells(text)
    assert alone[4:] == ["21.00 (10.50 to 42.00)", "4,762", "1.050 (1.050 to 1.050)", "", "", ""]
    assert auto[-1] == "3.0"
    # Of 2 x 21/25, 2 x 42/50 and 2 x 10.5/10, half.
    assert pair[4:] == ["25.00 (10.00 to 50.00)", "8,000", "", "0.840 (0.840 to 1.050)", "12.0%", ""]
    assert strong[4] == "no result within timeout=300 seconds"
    assert "n = 3 rounds" in text
    assert text in capsys.readouterr().out
    assert (tmp_path / "results.md").read_text() == text
    written = json.loads((tmp_path / "results.json").read_text())
    assert [case["rounds"] for case in written["cases"]] == list(results.values())
    assert written["request"] == REQUEST
    assert written["environment"]["packages"]["torch"]
    drawing = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    assert len(drawing.findall(".//{*}polyline")) == 2


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


def test_missed_thresholds_are_reported_with_limit_and_measurement() -> None:
    limits: list[tuple[str, float | None, dict[str, float]]] = [
        ("a", 0.9, {"at_least": 0.9}),
        ("b", 0.89, {"at_least": 0.9}),
        ("c", 1.2, {"at_most": 1.1}),
        ("d", None, {"at_most": 1.0}),
        ("e", None, {}),
    ]
    found = [Threshold(name, value and Spread([value]), **limit) for name, value, limit in limits]  # type: ignore[arg-type]
    assert [one.verdict for one in found] == ["met", "missed", "missed", "-", ""]
    assert missed(found)[0] == "missed: expected b at least 0.90, got 0.890."
    assert len(missed(found)) == 3


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


def test_precision_parallel_and_compile_are_judged_by_their_own_figures() -> None:
    results = {
        "32-true": timed(20.0, peak=100),
        "bf16-mixed": timed(10.0, peak=70),
        "single": timed(20.0),
        "ddp_scaled": timed(20.0, batch=160),
    }
    words = "suite=precision accelerator=cpu thresholds={bf16-mixed:2.0,bf16-mixed_memory:0.6}"
    assert judged(words, results) == {
        "bf16-mixed: speed-up over 32-true at least 2.00": True,
        "bf16-mixed: memory at the peak over 32-true's at most 0.60": False,
    }
    assert judged("suite=parallel accelerator=cpu", results) == {
        "ddp_scaled: speed-up over single at least 1.70": False
    }
    started = {"default": (10.0, 2.0, 0), "regional": (4.0, 2.0, 1)}
    results = {name: [{"cold_s": c, "warm_s": w, "breaks": n, "anew": 0}] for name, (c, w, n) in started.items()}
    found = judged("suite=compile accelerator=cpu", results)
    assert {name: met for name, met in found.items() if name.startswith(("default", "regional"))} == {
        "default: warm start over the cold one at most 0.30": True,
        "regional: warm start over the cold one at most 0.30": False,
        "regional: cold start over the whole net's at most 0.50": True,
        "default: graph breaks and graphs made after the warm-up at most 0.00": True,
        "regional: graph breaks and graphs made after the warm-up at most 0.00": False,
    }


def written(suite: Any, facts: Facts, results: dict[str, Any], words: str, folder: Path) -> list[list[str]]:
    """Return the rows of a suite's table as cells."""
    request = cases.fill(config(*words.split(), name="benchmark"))
    found = Results(results)
    return cells(write(folder, *suite.tables(facts, found, request), facts, found, request, 61.0))


def test_the_fastest_usual_loader_is_the_base(tmp_path: Path) -> None:
    names = ["images in memory: PIL, 0 workers", "images in memory: PIL, 2 workers"]
    mine, broken = "images in memory: resident, 0 workers", "dataset, table: data=dataset, 0 workers"
    results = {
        names[0]: [{"samples_per_s": v} for v in (100.0, 100.0, 300.0)],
        names[1]: [{"samples_per_s": v} for v in (200.0, 200.0, 100.0)],
        mine: [{"samples_per_s": v} for v in (2000.0, 4000.0, 3000.0)],
        broken: [{"error": "OSError: no"}],
    }
    about = {"kind": "images in memory", "workers": 0, "samples": 6000, "batch_size": 8, "usual": names}
    facts = {name: {**about, "how": name} for name in results}
    facts[broken] |= {"kind": "dataset, table", "usual": ["dataset, table: DataLoader, 0 workers"]}
    rows = written(loaders, facts, results, "suite=loaders rounds=3", tmp_path)
    assert [row[4:] for row in rows] == [
        ["100 (100 to 300)", "60.000", "0.500 (0.500 to 3.000)"],
        ["200 (100 to 200)", "30.000", "1.000 (1.000 to 1.000)"],
        ["3,000 (2,000 to 4,000)", "2.000", "20.000 (10.000 to 30.000)"],
        ["OSError: no", "", ""],
    ]
    bars = {
        one.sentence: (one.measured and one.measured.values, one.at_least) for one in loaders.claims(Results(results))
    }
    assert bars["images in memory, resident: samples/s over PIL's,"] == ([10.0, 20.0, 30.0], 15.0)
    assert bars["images in memory, resident, uint8: samples/s over PIL's,"] == (None, 40.0)
    assert bars[f"{broken}: samples/s over DataLoader's,"] == (None, 1.0)


def test_nothing_is_written_where_nothing_was_measured(tmp_path: Path) -> None:
    results = {trainer.HAND: [{"error": "MemoryError: no"}]}
    with pytest.raises(UserError, match=r"^suite=trainer: nothing could be measured \(MemoryError: no\)\.$"):
        write(tmp_path / "out", [], "", {trainer.HAND: {}}, Results(results), {"suite": "trainer"}, 1.0)
    assert not (tmp_path / "out").exists()
