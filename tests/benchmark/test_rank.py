"""Measurements of a rank: real short runs of small cases."""

import time
from typing import Any

import pytest
from support.runs import config

from lathe.benchmark import rank, suites
from lathe.benchmark.cases import Case
from lathe.benchmark.crew import Crew, run

SMALL = (
    "model=mlp",
    "model.net.width=32",
    "model.net.depth=3",
    "data=synthetic",
    "data.batch_size=16",
    "data.source.train_size=64",
    "data.source.val_size=16",
    "data.source.test_size=16",
    "optimizer=adamw",
)
REQUEST: dict[str, Any] = {
    "rounds": 2,
    "warmup": 2,
    "steps": 4,
    "threads": 1,
    "timeout": 120.0,
    "accelerator": "cpu",
    "overrides": [],
}


def case(name: str, *overrides: str, processes: int = 1, **options: Any) -> Case:
    return Case(name, (*SMALL, f"trainer.devices={processes}", *overrides), processes, **options)


def composed(*cases: Case, **request: Any) -> dict[str, dict[str, Any]]:
    return {item.name: config(*suites.overrides_of(item, {**REQUEST, **request})) for item in cases}


def test_memory_of_one_process_is_that_of_arithmetic(tmp_path: Any) -> None:
    memory = case("m", kind="memory", alone=True)
    cfg = composed(memory, steps=3, warmup=0)["m"]
    cfg["paths"]["run_dir"] = str(tmp_path)
    found = rank.measure(
        {"cfg": cfg, "kind": "memory", "sync": True, "alone": True, "forward": False, "warmup": 0, "steps": 3}
    )
    weights = (256 + 1) * 32 + 2 * (32 + 1) * 32 + (32 + 1) * 10
    assert found["parameters"] == found["gradients"] == 4 * weights
    assert found["optimizer"] == pytest.approx(2 * 4 * weights, abs=100)  # plus a step count for each tensor
    assert 4 * 16 * (3 * 32 + 10) <= found["activations"] <= 4 * 16 * (3 * 32 + 2 * 10)  # ReLU's outputs, and the loss
    assert found["peak"] > found["parameters"] + found["gradients"] + found["optimizer"]


def test_times_are_those_of_the_steps_asked_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []

    def now() -> float:
        ticks.append(1.0 if not ticks else ticks[-1] + 0.001 * len(ticks))
        return ticks[-1]

    monkeypatch.setattr(rank.time, "perf_counter", now)
    timed = case("t")
    cfg = composed(timed)["t"]
    cfg["paths"]["run_dir"] = str(tmp_path)
    found = rank.measure(
        {"cfg": cfg, "kind": "time", "sync": True, "alone": True, "forward": False, "warmup": 2, "steps": 4}
    )
    assert len(ticks) == 5  # two of seven steps are warm-up
    assert found["step_ms"] == pytest.approx(2.5)  # of 1, 2, 3 and 4 ms
    assert found["samples_per_s"] == pytest.approx(16 / 0.0025)
    assert found["fastest_step_ms"] == pytest.approx(1)


def test_processes_that_end_report_their_last_error(tmp_path: Any) -> None:
    cfg = {"paths": {"run_dir": None}, "launch": {}}
    crew = Crew({"x": {"cfg": cfg}}, 1, 1)
    try:
        assert crew.measure("x", timeout=60)["error"].startswith("its processes ended: KeyError")
        assert not crew.alive
    finally:
        crew.dismiss()
    assert not crew.folder.exists()


@pytest.mark.slow
def test_crews_take_turns_and_a_failure_costs_its_case_alone() -> None:
    started = time.monotonic()
    cases = [
        case("one"),
        case("two", "strategy=ddp", processes=2),
        case("two, no sync", "strategy=ddp", processes=2, sync=False),
        case("refused", "trainer.activation_checkpointing=sqr"),
        case("dies", "trainer.gradient_clip_algorithm=nothing", processes=2),
    ]
    told: list[str] = []
    results = run(cases, composed(*cases), REQUEST, told.append)
    assert [len(rounds) for rounds in results.values()] == [2, 2, 2, 1, 1]
    for name in ("one", "two", "two, no sync"):
        assert all(result["step_ms"] > 0 for result in results[name])
    assert results["two"][0]["grad_sync"] is not None
    assert results["two, no sync"][0]["grad_sync"] is None
    assert results["refused"][0]["error"] == "trainer.activation_checkpointing=sqr: did you mean sqrt?"
    assert "gradient_clip_algorithm" in results["dies"][0]["error"] or "nothing" in results["dies"][0]["error"]
    assert len(told) == 5
    assert time.monotonic() - started < 240
