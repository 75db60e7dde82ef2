"""Suites of trainings: every case composes, figures are those of arithmetic, and what can't be measured is refused."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from suites import cases, runner, worker
from suites.cases import Case
from suites.results import TABLES, Results, judge
from support.commands import run
from support.runs import config

from lathe.config.validate import check
from lathe.errors import UserError, refuse


def plan(*words: str) -> tuple[list[Case], dict[str, Any]]:
    return cases.plan(config(*words, name="benchmark"))


@pytest.mark.parametrize(
    ("suite", "override"),
    [
        ("scaling", "strategies=[pipeline,3d]"),
        ("memory", "rounds=1"),
        ("precision", "accelerator=gpu"),
        ("compile", "accelerator=cpu"),
        ("parallel", "accelerator=gpu"),
    ],
)
def test_cases_compose_and_have_names_of_their_own(suite: str, override: str) -> None:
    suite_cases, full = plan(f"suite={suite}", override, 'overrides=["seed=7"]')
    assert len({case.name for case in suite_cases}) == len(suite_cases)
    for case in suite_cases[::4]:
        cfg = config(*cases.overrides_of(case, full))
        refuse(check(cfg))
        assert (cfg["seed"], cfg["trainer"]["accelerator"]) == (7, full["accelerator"])
        assert cfg["trainer"]["devices"] == case.processes
        assert cfg["data"]["batch_size"] % case.processes == 0


def test_requests_that_cannot_be_measured_are_refused() -> None:
    for overrides, message in (
        ("suite=parallel accelerator=cpu processes=[3]", "batch_size=50 does not divide by processes=3"),
        ("suite=memory assert=true", "assert=true has no meaning for suite=memory"),
        ("suite=inference", "suite=inference measures a finished run"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            plan(*overrides.split())


def timed(*milliseconds: float, batch: int = 100, **more: Any) -> list[dict[str, Any]]:
    return [{"step_ms": ms, "samples_per_s": batch / ms * 1e3, **more} for ms in milliseconds]


def test_every_suite_of_trainings_has_a_table() -> None:
    counted = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "peak"), 2**20)
    figures = {"mean_step_ms": 2.0, "forward_ms": 1.0, "mfu": 0.5, "epoch_s": 1.0, "metric": "m"}
    compiled = {"cold_s": 4.0, "warm_s": 1.0, "breaks": 0, "anew": 1}
    result = {**timed(10.0)[0], **counted, **figures, **compiled, "reached": None}
    for suite in ("memory", "overhead", "precision", "compile", "parallel"):
        suite_cases, _ = plan(f"suite={suite}", *(["accelerator=cpu"] * (suite != "memory")))
        results = Results({case.name: [result] for case in suite_cases})
        results[suite_cases[-1].name] = [{"error": "no memory left"}]
        texts, drawing = TABLES[suite](cases.facts_of(suite_cases), results)
        text = "\n".join(texts)
        assert "no memory left" in text
        assert all(case.name.split(", ")[0] in text for case in suite_cases)
        ElementTree.fromstring(drawing)


def test_efficiency_is_over_one_process_of_the_strategy_or_of_none() -> None:
    results = {
        "auto, 1, weak": timed(10.0),
        "ddp, 1, weak": timed(20.0),
        "ddp, 2, weak": timed(20.0, batch=200),
        "ddp, 2, weak, no sync": timed(1.0),
        "ddp, 2, strong": timed(1.0),
        "pipeline, 2, weak": timed(12.5, batch=200),
    }
    suite_cases, full = plan("suite=scaling", "strategies=[ddp,pipeline]", "processes=[1,2]")
    thresholds = judge(full, cases.facts_of(suite_cases), Results(results))
    assert {threshold.full: threshold.met for threshold in thresholds} == {
        "ddp, 2, weak: efficiency at least 0.85": True,
        "pipeline, 2, weak: efficiency at least 0.85": False,
    }


SMALL = (
    *("model=mlp", "model.net.width=32", "model.net.depth=3", "optimizer=adamw", "data=synthetic"),
    *("data.batch_size=16", "data.source.train_size=64", "data.source.val_size=16", "data.source.test_size=16"),
)
REQUEST: dict[str, Any] = {"rounds": 2, "warmup": 2, "steps": 4, "threads": 1, "timeout": 120.0}
REQUEST |= {"accelerator": "cpu", "overrides": []}
JOB = {"kind": "time", "sync": True, "fresh": True, "forward": False, "warmup": 2, "steps": 4}


def case(name: str, *overrides: str, processes: int = 1, **options: Any) -> Case:
    return Case(name, (*SMALL, f"trainer.devices={processes}", *overrides), processes, **options)


def composed(*every: Case, **request: Any) -> dict[str, dict[str, Any]]:
    return {item.name: config(*cases.overrides_of(item, {**REQUEST, **request})) for item in every}


def test_memory_of_one_process_is_that_of_arithmetic(tmp_path: Path) -> None:
    memory = case("m", kind="memory", fresh=True)
    cfg = composed(memory, steps=3, warmup=0)["m"]
    cfg["paths"]["run_dir"] = str(tmp_path)
    found = worker.measure({**JOB, "cfg": cfg, "kind": "memory", "warmup": 0, "steps": 3})
    weights = (256 + 1) * 32 + 2 * (32 + 1) * 32 + (32 + 1) * 10
    assert found["parameters"] == found["gradients"] == 4 * weights
    assert found["optimizer"] == pytest.approx(2 * 4 * weights, abs=100)  # plus a step count for each tensor
    assert 4 * 16 * (3 * 32 + 10) <= found["activations"] <= 4 * 16 * (3 * 32 + 2 * 10)  # ReLU's outputs, and the loss
    assert found["peak"] > found["parameters"] + found["gradients"] + found["optimizer"]


def test_times_are_those_of_the_steps_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []

    def now() -> float:
        ticks.append(1.0 if not ticks else ticks[-1] + 0.001 * len(ticks))
        return ticks[-1]

    monkeypatch.setattr(worker.time, "perf_counter", now)
    cfg = composed(case("t"))["t"]
    cfg["paths"]["run_dir"] = str(tmp_path)
    found = worker.measure({**JOB, "cfg": cfg})
    assert len(ticks) == 5  # two of seven steps are warm-up
    assert found["step_ms"] == pytest.approx(2.5)  # of 1, 2, 3 and 4 ms
    assert found["samples_per_s"] == pytest.approx(16 / 0.0025)


@pytest.mark.slow
def test_processes_take_turns_and_a_failure_costs_its_case_alone(capfd: pytest.CaptureFixture[str]) -> None:
    sides = [
        case("one"),
        case("two", "strategy=ddp", processes=2),
        case("two, no sync", "strategy=ddp", processes=2, sync=False),
        case("refused", "trainer.activation_checkpointing=sqr"),
        case("dies", "trainer.gradient_clip_algorithm=nothing", processes=2),
    ]
    results = runner.run(sides, composed(*sides), REQUEST)
    assert [len(rounds) for rounds in results.values()] == [2, 2, 2, 1, 1]
    for name in ("one", "two", "two, no sync"):
        assert all(result["step_ms"] > 0 for result in results[name])
    assert results["two"][0]["grad_sync"] is not None
    assert results["two, no sync"][0]["grad_sync"] is None
    assert results["refused"][0]["error"] == "trainer.activation_checkpointing=sqr: did you mean sqrt?"
    assert "gradient_clip_algorithm" in results["dies"][0]["error"] or "nothing" in results["dies"][0]["error"]
    assert len(capfd.readouterr().out.strip().splitlines()) == 5


@pytest.mark.slow
def test_a_missed_threshold_is_the_exit_code(tmp_path: Path) -> None:
    overrides = ["suite=scaling", "experiment=digits_quickstart", "strategies=[ddp]", "rounds=1", "warmup=1", "steps=3"]
    overrides += ["assert=true", "thresholds={2: 50}", f"output={tmp_path / 'out'}", 'overrides=["model=mlp"]']
    done = run(*overrides, script="scripts/benchmark.py", cwd=tmp_path)
    assert done.returncode == 1
    # the measured value depends on what else the machine runs
    message = r"Error: missed: expected ddp, 2, weak: efficiency at least 50\.00, got \d+\.\d+\."
    assert re.fullmatch(message, done.stderr.strip().splitlines()[-1])
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    first = {case["name"]: case["rounds"][0] for case in written["cases"]}
    assert first["auto, 1, weak"]["peak"] > 0
    tables = (tmp_path / "out" / "results.md").read_text()
    assert "ddp, 2, weak: efficiency at least 50.00" in tables
    assert "ddp, 2, weak: efficiency at least 0.90" in tables
