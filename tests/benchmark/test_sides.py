"""The suites that compare sides in one process and the bars for one GPU, each run once at its smallest size."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from suites import cases, int8, loaders, trainer
from suites.results import Facts, Results
from support.runs import ROOT, SMALL, config, new_run

from lathe.runs.rundir import RunDir
from lathe.training.train import train


def measured(suite: Any, output: Path, *words: str) -> tuple[Facts, Results]:
    request = cases.fill(config(f"suite={suite.__name__.rpartition('.')[2]}", *words, name="benchmark"))
    if suite is int8:
        request["export"] = config(*int8.EXPORT, name="export")["target"]
    with torch.random.fork_rng(devices=[]):
        facts, results = suite.measure(request, output)
    texts, drawing = suite.tables(facts, results, request)
    assert len(texts[0].splitlines()) == 2 + len(results)
    assert drawing.startswith("<svg")
    return facts, results


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the data so that a turn takes no time."""
    for kind in loaders.SIZES:
        monkeypatch.setitem(loaders.SIZES, kind, 120)
        monkeypatch.setitem(loaders.BATCHES, kind, 20)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_loaders(tmp_path: Path) -> None:
    facts, results = measured(loaders, tmp_path, "rounds=1", "seconds=0.001", "workers=[0]")
    ways = ("PIL", "PIL tuned", "resident, uint8", "resident", "resident, folded")
    assert [(about["kind"], about["how"]) for about in facts.values()] == [
        *(("images in memory", how) for how in ways),
        *(("image files", how) for how in ("JPEG, PIL", "data=image_folder", "data=shards")),
        *((f"dataset, {name}", how) for name in loaders.DATASETS for how in ("DataLoader", "data=dataset")),
        *(("tokens", how) for how in ("memory map", "data=tokens")),
    ]
    for name, rounds in results.items():
        assert [set(turn) for turn in rounds] == [{"samples_per_s"}], rounds
        assert min(turn["samples_per_s"] for turn in rounds) > 0
        assert set(facts[name]["usual"]) <= facts.keys()
        assert facts[name]["batch_size"] == 20
    claims = loaders.claims(results)
    assert len(claims) == 8
    assert all(claim.measured is not None and len(claim.measured.values) == 1 for claim in claims)


@pytest.mark.slow
def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(trainer.SIDES, trainer.COMPILED)  # compiling takes longer than the rest
    facts, results = measured(trainer, tmp_path, "rounds=1", "steps=4", "batch_size=8")
    assert list(results) == list(trainer.SIDES)
    for name, (turn,) in results.items():
        assert turn["us_per_step"] > 0
        assert turn["bit_equal"] is True
        assert facts[name]["updates"] == 16
    assert {claim.sentence: claim.measured is None for claim in trainer.claims(results)} == {
        "Lathe, full features: step over the hand-written loop's,": False,
        "Lathe, compile.scope=step: step over the hand-written loop's,": True,
        "Lathe, full features: weights bit-equal to the hand-written loop's (1 is yes),": False,
        "Lathe, steps_per_call=1: weights bit-equal to the hand-written loop's (1 is yes),": False,
    }


@pytest.mark.slow
def test_int8_of_a_finished_run(tmp_path: Path) -> None:
    cfg = new_run(tmp_path / "logs", *SMALL, "trainer.max_epochs=5")
    run = RunDir(cfg["paths"]["run_dir"])
    train(cfg)
    before = sorted(path.name for path in run.path.iterdir())
    words = (f"run={run.path}", "rounds=2", "steps=3", "warmup=1", "batches=[1,4]")
    facts, results = measured(int8, tmp_path / "out", *words)
    assert list(results) == [f"{form}, batch {n}" for n in (1, 4) for form in ("float32", "int8")]
    for name, about in facts.items():
        assert [turn["latency_ms"] > 0 for turn in results[name]] == [True, True]
        assert {turn["bytes"] for turn in results[name]} == {about["bytes"]}
        assert about["samples"] == 297
        assert about["ranges"] == ("calibrated" if name.startswith("int8") else "")
    assert facts["float32, batch 1"]["value"] == pytest.approx(run.result["test/accuracy"])
    assert facts["int8, batch 1"]["value"] == pytest.approx(run.result["test/accuracy"], abs=0.05)
    assert facts["int8, batch 1"]["bytes"] != facts["float32, batch 1"]["bytes"]
    assert sorted(path.name for path in run.path.iterdir()) == before
    assert len(int8.claims(results)) == 4


@pytest.mark.slow
def test_the_bars_of_a_gpu_with_tiny_nets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--accelerator", "cpu", "--tiny", "--rounds", "1", "--steps", "3", "--warmup", "1"]
    results = runpy.run_path(str(ROOT / "benchmarks" / "bench_gpu.py"))["main"](words)
    assert all(rounds[0]["step_ms"] > 0 for rounds in results.values())
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| resnet20")]
    assert len(rows) == 2
    assert all(row.endswith(("| met |", "| missed |")) for row in rows)
