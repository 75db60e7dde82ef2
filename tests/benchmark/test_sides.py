"""The suites that compare sides in one process and the bars for one GPU, each run once at its smallest size."""

from pathlib import Path
from typing import Any

import bench_gpu
import pytest
import torch
from suites import cases, int8, loaders, trainer
from suites.results import Facts, Results
from support.runs import SMALL, config, new_run

from lathe.runs.rundir import RunDir
from lathe.training.train import train


def measured(suite: Any, output: Path, *overrides: str) -> tuple[Facts, Results]:
    request = cases.fill(config(f"suite={suite.__name__.rpartition('.')[2]}", *overrides, name="benchmark"))
    if suite is int8:
        request["export"] = config(*int8.EXPORT, name="export")["target"]
    with torch.random.fork_rng(devices=[]):
        facts, results = suite.measure(request, output)
    texts, drawing = suite.tables(facts, results, request)
    assert len(texts[0].splitlines()) == 2 + len(results)
    assert drawing.startswith("<svg")
    return facts, results


@pytest.mark.slow
def test_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in loaders.SIZES:  # so few samples that a turn takes no time
        monkeypatch.setitem(loaders.SIZES, kind, 120)
        monkeypatch.setitem(loaders.BATCHES, kind, 20)
    facts, results = measured(loaders, tmp_path, "rounds=1", "seconds=0.001", "workers=[0]")
    ways = ("PIL", "PIL tuned", "resident, uint8", "resident")
    assert [(about["kind"], about["how"]) for about in facts.values()] == [
        *(("images in memory", how) for how in ways),
        *(("image files", how) for how in ("JPEG, PIL", "data=image_folder")),
        *((f"dataset, {name}", how) for name in loaders.DATASETS for how in ("DataLoader", "data=dataset")),
        *(("tokens", how) for how in ("memory map", "data=tokens")),
    ]
    for name, (turn,) in results.items():
        assert turn["samples_per_s"] > 0
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
    assert [claim.measured is None for claim in trainer.claims(results)] == [False, True, False, False]


@pytest.mark.slow
def test_int8_of_a_finished_run(tmp_path: Path) -> None:
    cfg = new_run(tmp_path / "logs", *SMALL, "trainer.max_epochs=5")
    run = RunDir(cfg["paths"]["run_dir"])
    train(cfg)
    before = sorted(path.name for path in run.path.iterdir())
    overrides = (f"run={run.path}", "rounds=2", "steps=3", "warmup=1", "batches=[1,4]")
    facts, results = measured(int8, tmp_path / "out", *overrides)
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
def test_the_bars_of_a_gpu_with_tiny_nets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    eager = [side for side in bench_gpu.SIDES if side[1] in ("TF32", "eager")]  # compiling takes minutes
    monkeypatch.setattr(bench_gpu, "SIDES", eager)
    results = bench_gpu.main(["--accelerator", "cpu", "--tiny", "--rounds", "1", "--steps", "3", "--warmup", "1"])
    assert all(rounds[0]["step_ms"] > 0 for rounds in results.values())
    verdicts = [
        line.split("|")[-2].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| res")
    ]
    assert verdicts[:-1] == ["-"] * 3  # need compiled sides
    assert verdicts[-1] in ("met", "missed")
