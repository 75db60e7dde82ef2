"""Laws 2 and 4 for every strategy that shards a net: losses as in one process, which reads the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.runs import QUIET, SMALL, column, config, weights

from lathe.runs import rundir
from lathe.verbs.evaluate import evaluate
from lathe.verbs.support import run_cases

STEPS = (
    *(*QUIET, "optimizer.lr=0.05", "data.batch_size=32", "trainer.log_every_n_steps=1"),
    *("trainer.max_epochs=null", "trainer.max_steps=6", "trainer.check_val_every_n_epoch=null"),
    *("trainer.val_check_interval=12", "trainer.limit_val_batches=2", "trainer.limit_test_batches=2"),
    *("trainer.gradient_clip_val=0.5", "trainer.accumulate_grad_batches=2"),
)
SCORES = {"auroc": "AUROC", "f1_score": "F1Score", "calibration_error": "CalibrationError"}
METRICS = ",".join(
    f"{{_target_: torchmetrics.classification.Multiclass{name}, num_classes: 10}}" for name in SCORES.values()
)
CASES = {
    "resnet": (*STEPS, "model=resnet20", "model.net.width=4", "model.net.depth=14", "data.augment.cutout=2"),
    "vit": (*STEPS, "model=vit_tiny", "model.net.width=32", "model.net.heads=4", "model.net.depth=4"),
    "gpt": (*STEPS, "model=gpt_nano", "data=synthetic_tokens", "model.net.width=32", "model.net.depth=4"),
    # a user's torchmetrics, class weights and best epochs
    "metrics": (
        *(*SMALL, "model.net.width=32", "model.net.depth=4", "trainer.max_epochs=3", "data.batch_size=104"),
        f"task.metrics=[accuracy,{METRICS}]",
        *("task.class_weights=[1,2,3,4,5,5,4,3,2,1]", "task.label_smoothing=0.1"),
        *("callbacks.checkpoint.monitor=val/auroc", "callbacks.checkpoint.save_top_k=2"),
    ),
}
# tests/strategies compares an MLP under each of them, and every stage of DeepSpeed
TWO = {
    "ddp": ["vit", "metrics"],
    "fsdp": ["resnet", "gpt", "metrics"],
    "deepspeed_2": ["resnet", "gpt", "metrics"],
    "deepspeed_3": ["resnet", "gpt"],
    "tensor": ["vit", "gpt", "metrics"],
    "pipeline": ["resnet", "gpt", "metrics"],
    "3d": ["gpt"],  # on two processes the same as pipeline
}
FOUR = {
    "3d": ("strategy.tensor=2", "strategy.stages=2", "strategy.data=1"),
    "tensor": ("strategy.data=2", "strategy.tensor=2"),
    "fsdp": ("strategy.replicas=2",),
}


def _run(rank: int, whole: dict[str, Any]) -> None:
    run_cases(whole)


def _train(folder: Path, processes: int, names: list[str], *overrides: str) -> dict[str, Path]:
    """Train all cases in one launch; return the run directories by case."""
    cases, directories = [], {}
    for number, name in enumerate(names):
        cfg = config(*CASES[name], *overrides, f"trainer.devices={processes}", f"paths.log_dir={folder}")
        directories[name] = rundir.create(folder, cfg, []).path
        cases.append({**cfg, "case": number})
    notes = folder / "notes.jsonl"
    whole = {**cases[0], "cases": cases, "notes": str(notes)}
    _run(0, whole) if processes == 1 else on_ranks(_run, whole, world=processes, timeout=240)
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [line["refused"] for line in lines if "refused" in line] == [None] * len(names)
    return directories


def _result(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "result.json").read_text()))


def _evaluate_alone(directory: Path) -> dict[str, float]:
    cfg: dict[str, Any] = rundir.open_run(directory, "run").config
    cfg["trainer"]["devices"], cfg["strategy"] = 1, {"_target_": "lathe.strategies.auto"}
    cfg["request"] = {"run": str(directory), "split": "test", "checkpoint": "best", "batch_size": None, "output": None}
    return evaluate(cfg)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _train(tmp_path_factory.mktemp("alone"), 1, list(CASES))


def _compare(alone: dict[str, Path], spread: dict[str, Path]) -> None:
    for name, directory in spread.items():
        one, several = column(alone[name], "train/loss"), column(directory, "train/loss")
        assert len(one) >= 6, name
        assert several == pytest.approx(one, rel=1e-4 if name == "metrics" else 1e-5), name
        result, reference = _result(directory), _result(alone[name])
        for metric, value in _evaluate_alone(directory).items():
            assert value == pytest.approx(result[metric], rel=1e-5), (name, metric)
        assert result["test/loss"] == pytest.approx(reference["test/loss"], rel=1e-4), name
        assert result["parameters"] == reference["parameters"], name
        if name == "metrics":
            _compare_metrics(alone[name], directory)


def _compare_metrics(one: Path, two: Path) -> None:
    for name in ("accuracy", *SCORES):
        for logged in (f"train/{name}_epoch", f"val/{name}"):
            expected = column(one, logged)
            assert len(expected) == 3
            assert column(two, logged) == pytest.approx(expected, rel=1e-4), logged
        assert _result(two)[f"test/{name}"] == pytest.approx(_result(one)[f"test/{name}"], rel=1e-4)
    tops = [json.loads((run / "checkpoints" / "top.json").read_text()) for run in (one, two)]
    assert [(row["name"], row["step"]) for row in tops[1]] == [(row["name"], row["step"]) for row in tops[0]]
    assert len(list((two / "checkpoints").glob("epoch=*"))) == 2
    best, second = (weights(two, row["name"]) for row in tops[1][:2])
    assert all(torch.equal(best[name], value) for name, value in weights(two, "best").items())
    for name, value in weights(one, tops[0][1]["name"]).items():
        assert torch.allclose(second[name], value, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TWO)
def test_two_processes_have_the_losses_of_one(tmp_path: Path, alone: dict[str, Path], strategy: str) -> None:
    _compare(alone, _train(tmp_path, 2, TWO[strategy], f"strategy={strategy}"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", FOUR)
def test_four_processes_have_the_losses_of_one(tmp_path: Path, alone: dict[str, Path], strategy: str) -> None:
    _compare(alone, _train(tmp_path, 4, ["gpt"], f"strategy={strategy}", *FOUR[strategy]))
