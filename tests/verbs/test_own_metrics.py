"""A run with a user's loss and torchmetrics: monitored, in result.json, evaluated from its directory."""

import json
from pathlib import Path

import pytest
from support.runs import SMALL, column, config, new_run

from lathe.config.metric_names import objective_of
from lathe.errors import UserError
from lathe.training.train import train
from lathe.trust.allowlist import findings
from lathe.verbs.evaluate import evaluate

GROUP = "task"
AUROC = "{_target_: torchmetrics.classification.MulticlassAUROC, num_classes: 10}"
ECE = "{_target_: torchmetrics.classification.MulticlassCalibrationError, num_classes: 10}"
MARGIN = "{_target_: lathe.tasks.Weighted, weight: 0.1, loss: {_target_: torch.nn.MultiMarginLoss}}"
LOSS = f"{{a: {{_target_: torch.nn.CrossEntropyLoss}}, b: {MARGIN}}}"
OWN = (*SMALL, f"+{GROUP}.loss={LOSS}", f"+{GROUP}.metrics=[accuracy,{ECE},{AUROC}]")


def test_a_torchmetric_is_monitored_reported_and_evaluated_from_the_run_directory(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *OWN, "callbacks.checkpoint.monitor=val/calibration_error")
    result = train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    values = column(run, "val/calibration_error")
    assert result["monitor"] == "val/calibration_error"
    assert result["val/calibration_error"] == pytest.approx(min(values))  # lower is better
    assert 0.5 < result["test/auroc"] <= 1
    assert len(column(run, "train/auroc_epoch")) == len(values) == 2
    assert json.loads((run / "result.json").read_text())["test/auroc"] == result["test/auroc"]
    assert not list(findings(cfg, [], {}))  # a recipient of the directory may build what it names
    request = {"run": str(run), "checkpoint": "best", "split": "test", "output": None, "precision": None}
    found = evaluate({**cfg, "request": request})
    assert {name: found[name] for name in ("test/auroc", "test/calibration_error", "test/loss")} == pytest.approx(
        {name: result[name] for name in ("test/auroc", "test/calibration_error", "test/loss")}
    )


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_does_not_fit_the_outputs_is_refused_before_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loss=MSELoss does not accept outputs"):
        train(new_run(tmp_path, *SMALL, f"+{GROUP}.loss={{_target_: torch.nn.MSELoss}}"))


def test_a_sweep_knows_which_way_a_torchmetric_goes() -> None:
    cfg = config(*OWN, "callbacks.checkpoint.monitor=val/auroc")
    assert objective_of(cfg) == ("val/auroc", False)
