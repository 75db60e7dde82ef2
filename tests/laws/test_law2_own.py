"""Law 2 for a user's torchmetrics, class weights and best epochs: equal on two processes, whatever the strategy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import SMALL, column, config, weights

from lathe.launch.elastic import run_job
from lathe.runs import rundir

AUROC = "{_target_: torchmetrics.classification.MulticlassAUROC, num_classes: 10}"
F1 = "{_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10, average: macro}"
ECE = "{_target_: torchmetrics.classification.MulticlassCalibrationError, num_classes: 10}"
NAMES = ("accuracy", "auroc", "f1_score", "calibration_error")
CASES = {
    "metrics": (
        f"task.metrics=[accuracy,{AUROC},{F1},{ECE}]",
        "callbacks.checkpoint.monitor=val/auroc",
        "callbacks.checkpoint.save_top_k=2",
    ),
    "weights": ("task.class_weights=[1,2,3,4,5,5,4,3,2,1]", "task.label_smoothing=0.1"),
}
TRAIN = (*SMALL, "model.net.width=32", "model.net.depth=4", "trainer.max_epochs=3", "data.batch_size=52")


def train(folder: Path, processes: int, *overrides: str) -> dict[str, Path]:
    """Train all cases in one launch; return the run directories by case."""
    cases, directories = [], {}
    for number, (name, words) in enumerate(CASES.items()):
        cfg = config(*TRAIN, *words, *overrides, f"trainer.devices={processes}", f"paths.log_dir={folder}")
        directories[name] = rundir.create(folder, cfg, []).path
        cases.append({**cfg, "case": number})
    notes = folder / "notes.jsonl"
    whole: dict[str, Any] = {**cases[0], "cases": cases, "notes": str(notes)}
    run_job("lathe.verbs.support:run_cases", whole, processes, whole["launch"])
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [line["refused"] for line in lines if "refused" in line] == [None] * len(CASES)
    return directories


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return train(tmp_path_factory.mktemp("alone"), 1)


def top(run: Path) -> list[dict[str, Any]]:
    return list(json.loads((run / "checkpoints" / "top.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline", "deepspeed_2", "3d"])
def test_two_processes_report_what_one_reports(tmp_path: Path, alone: dict[str, Path], strategy: str) -> None:
    found = train(tmp_path, 2, f"strategy={strategy}")
    one, two = alone["metrics"], found["metrics"]
    for name in NAMES:
        for logged in (f"train/{name}_epoch", f"val/{name}"):
            expected = column(one, logged)
            assert len(expected) == 3
            assert column(two, logged) == pytest.approx(expected, rel=1e-4), logged
    results = [json.loads((run / "result.json").read_text()) for run in (one, two)]
    for name in NAMES:
        assert results[1][f"test/{name}"] == pytest.approx(results[0][f"test/{name}"], rel=1e-4)
    assert [(row["name"], row["step"]) for row in top(two)] == [(row["name"], row["step"]) for row in top(one)]
    kept = weights(two, top(two)[0]["name"])
    assert all(torch.equal(kept[name], value) for name, value in weights(two, "best").items())
    assert len(list((two / "checkpoints").glob("epoch=*"))) == 2
    for name, value in weights(one, top(one)[1]["name"]).items():
        assert torch.allclose(weights(two, top(two)[1]["name"])[name], value, atol=1e-5), name
    one, two = alone["weights"], found["weights"]
    for logged in ("train/loss", "val/loss"):
        assert column(two, logged) == pytest.approx(column(one, logged), rel=1e-4), logged
