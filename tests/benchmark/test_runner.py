"""Turns in one process and in launched processes, and what a rank measures."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from suites import cases, runner, worker
from suites.cases import Case
from support.runs import ROOT, config

SMALL = (
    *("model=mlp", "model.net.width=32", "model.net.depth=3", "optimizer=adamw", "data=synthetic"),
    *("data.batch_size=16", "data.source.train_size=64", "data.source.val_size=16", "data.source.test_size=16"),
)
REQUEST: dict[str, Any] = {
    **{"rounds": 2, "warmup": 2, "steps": 4, "threads": 1},
    **{"timeout": 120.0, "accelerator": "cpu", "overrides": []},
}
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
    started = time.monotonic()
    every = [
        case("one"),
        case("two", "strategy=ddp", processes=2),
        case("two, no sync", "strategy=ddp", processes=2, sync=False),
        case("refused", "trainer.activation_checkpointing=sqr"),
        case("dies", "trainer.gradient_clip_algorithm=nothing", processes=2),
    ]
    results = runner.run(every, composed(*every), REQUEST)
    assert [len(rounds) for rounds in results.values()] == [2, 2, 2, 1, 1]
    for name in ("one", "two", "two, no sync"):
        assert all(result["step_ms"] > 0 for result in results[name])
    assert results["two"][0]["grad_sync"] is not None
    assert results["two, no sync"][0]["grad_sync"] is None
    assert results["refused"][0]["error"] == "trainer.activation_checkpointing=sqr: did you mean sqrt?"
    assert "gradient_clip_algorithm" in results["dies"][0]["error"] or "nothing" in results["dies"][0]["error"]
    assert len(capfd.readouterr().out.strip().splitlines()) == 5
    assert time.monotonic() - started < 240


@pytest.mark.slow
def test_a_missed_threshold_is_the_exit_code(tmp_path: Path) -> None:
    words = ["suite=scaling", "experiment=digits_quickstart", "strategies=[ddp]", "rounds=1", "warmup=1", "steps=3"]
    more = ["assert=true", "thresholds={2: 50}", f"output={tmp_path / 'out'}"]
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *words, *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    # the measured value depends on what else the machine runs
    assert re.fullmatch(r"Error: missed: expected ddp, 2, weak: efficiency at least 50\.00, got \d+\.\d+\.", said)
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    first = {one["name"]: one["rounds"][0] for one in written["cases"]}
    assert first["auto, 1, weak"]["peak"] > 0
    assert "threshold" in (tmp_path / "out" / "results.md").read_text()
    bars = [sys.executable, str(ROOT / "benchmarks" / "bars.py"), str(tmp_path / "out")]
    assert "ddp, 2, weak: efficiency at least 0.90" in subprocess.run(bars, capture_output=True, text=True).stdout
