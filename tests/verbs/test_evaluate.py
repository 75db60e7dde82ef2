"""A run is tested as it was trained, with a user's own metrics and callbacks, and evaluated from its directory only."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support import runs
from support.runs import SMALL, column, new_run, rows

from lathe import trust
from lathe.callbacks import EMA
from lathe.errors import UserError
from lathe.nets import MLP
from lathe.runs.checkpoints import load_weights, read_checkpoint
from lathe.runs.inference import open_data, open_run_net, score
from lathe.runs.instantiate import instantiate
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.trust.allowlist import findings
from lathe.verbs.evaluate import evaluate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A short run with sizes that are not the defaults."""
    words = ("model.net.width=24", "data.source.val_size=150", "trainer.max_epochs=3")
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL, *words)
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


def request(run: RunDir, *overrides: str) -> dict[str, Any]:
    cfg = runs.request(run, "evaluate", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", *overrides)
    if cfg["request"]["batch_size"] is not None:  # as `launch_on_run` does
        cfg["data"]["eval_batch_size"] = cfg["request"]["batch_size"]
    return cfg


def by_hand(run: RunDir, name: str, split: str) -> tuple[int, float, float]:
    """Return samples, accuracy and loss of the plain net on a split, without a Trainer."""
    cfg = run.config
    net = MLP(width=24, depth=1, dropout=0.0, channels=1, image_size=8, num_classes=10)
    load_weights(net, read_checkpoint(run.checkpoint(name))["state_dict"], name)
    data = instantiate(cfg["data"], "data")
    data.setup()
    with torch.no_grad():
        pairs = [(net.eval()(x)[y != -100], y[y != -100]) for x, y in data.eval_loader(split)]
    outputs, targets = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    loss = torch.nn.functional.cross_entropy(outputs, targets).item()
    return len(targets), (outputs.argmax(1) == targets).float().mean().item(), loss


@pytest.mark.parametrize(
    ("split", "checkpoint", "batch"), [("train", "last", "null"), ("val", "best", "null"), ("test", "best", "7")]
)
def test_figures_are_those_of_the_plain_net_on_every_sample(
    run: RunDir, split: str, checkpoint: str, batch: str
) -> None:
    metrics = evaluate(request(run, f"split={split}", f"checkpoint={checkpoint}", f"batch_size={batch}"))
    n, accuracy, loss = by_hand(run, checkpoint, split)
    assert n == {"train": 1797 - 150 - 297, "val": 150, "test": 297}[split]
    assert metrics == {
        f"{split}/accuracy": pytest.approx(accuracy, abs=1e-6),
        f"{split}/loss": pytest.approx(loss, rel=1e-5),
    }


def test_figures_are_those_that_training_reported(run: RunDir) -> None:
    assert evaluate(request(run))["test/accuracy"] == pytest.approx(run.result["test/accuracy"], abs=1e-7)
    best = evaluate(request(run, "split=val"))["val/accuracy"]
    assert best == pytest.approx(run.result["val/accuracy"], abs=1e-7)
    assert best == pytest.approx(max(column(run.path, "val/accuracy")), abs=1e-7)
    assert evaluate(request(run, "split=val", "checkpoint=last"))["val/accuracy"] == pytest.approx(
        column(run.path, "val/accuracy")[-1], abs=1e-7
    )


def test_metrics_go_to_the_output_and_the_screen_and_the_run_stays_as_it_was(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    metrics = evaluate(request(run, f"output={tmp_path / 'metrics.json'}"))
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert f"{metrics['test/accuracy']:.6f}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_weights_that_are_no_numbers_are_refused(run: RunDir, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder)
    broken = RunDir(folder)
    state = torch.load(broken.best, weights_only=True)
    state["state_dict"]["head.bias"][0] = torch.nan
    torch.save(state, broken.best)
    with pytest.raises(UserError, match=r"best\.ckpt holds weights that are not finite, head\.bias first"):
        evaluate(request(broken))
    assert evaluate(request(broken, "checkpoint=last"))["test/accuracy"] > 0


def test_validation_gives_a_tasks_own_metrics_too(tmp_path: Path) -> None:
    trust.allow({"trusted": ["support.own_parts"]})
    words = ("task._target_=support.own_parts.Logging", "trainer.max_epochs=1", "trainer.limit_val_batches=1")
    cfg = new_run(tmp_path, *SMALL, *words)
    train(cfg)
    run = RunDir(cfg["paths"]["run_dir"])
    metrics = evaluate(request(run, "split=val"))
    task, cfg = open_run_net(run.path)
    data = open_data(cfg)
    n = sum(int((y != -100).sum()) for _, y in data.eval_loader("val"))
    found = score(task, task.net, data.eval_loader("val"))
    # over the whole split, though training used one batch of it
    assert metrics["val/accuracy"] == pytest.approx(found["accuracy"], abs=1e-6)
    assert metrics["val/loss"] == pytest.approx(found["loss"], rel=1e-5)
    assert metrics["own/batches"] == -(-n // run.config["data"]["batch_size"])
    assert set(evaluate(request(run, "split=test"))) == {"test/accuracy", "test/loss"}


AUROC = "{_target_: torchmetrics.classification.MulticlassAUROC, num_classes: 10}"
ECE = "{_target_: torchmetrics.classification.MulticlassCalibrationError, num_classes: 10}"
MARGIN = "{_target_: lathe.tasks.Weighted, weight: 0.1, loss: {_target_: torch.nn.MultiMarginLoss}}"
LOSS = f"{{a: {{_target_: torch.nn.CrossEntropyLoss}}, b: {MARGIN}}}"
OWN = (*SMALL, f"+task.loss={LOSS}", f"+task.metrics=[accuracy,{ECE},{AUROC}]")


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
    metrics = evaluate(request(RunDir(run)))
    for name in ("test/auroc", "test/calibration_error", "test/loss"):
        assert metrics[name] == pytest.approx(result[name])


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_does_not_fit_the_outputs_is_refused_before_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loss=MSELoss does not accept outputs"):
        train(new_run(tmp_path, *SMALL, "+task.loss={_target_: torch.nn.MSELoss}"))


RUN = (*SMALL, "trainer.limit_train_batches=6", "compression.receipt=none", "callbacks.throughput=null")


class Own(Callback):
    """Count the test's batches, and report the run's step as a metric and to the loggers."""

    def __init__(self) -> None:
        self.batches = 0

    def on_test_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.logger is not None
        trainer.logger.log_metrics({"test/told": 1.0}, trainer.global_step)
        pl_module.log_dict({"test/step": float(trainer.global_step), "test/batches": float(self.batches)})


class OwnEMA(EMA):
    """A changed callback of Lathe's: it belongs to the trained net."""

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise AssertionError


@pytest.mark.parametrize("words", [(), ("compression=ptq_static",)], ids=["plain", "ptq_static"])
def test_it_is_seen_by_callbacks_and_loggers(words: tuple[str, ...], tmp_path: Path) -> None:
    own = f"+callbacks.own._target_={__name__}.Own"
    cfg = new_run(tmp_path, *RUN, own, *words)
    result = train(cfg)
    assert result["test/step"] == result["steps"] == 12
    assert result["test/batches"] == 5  # 297 images by 64
    *_, last = rows(Path(cfg["paths"]["run_dir"]))
    assert int(last["step"]) == 12
    assert float(last["test/told"]) == 1
    assert {name: float(last[name]) for name in result if name.startswith("test/")} == {
        name: value for name, value in result.items() if name.startswith("test/")
    }


def test_what_has_acted_on_the_trained_net_is_not_asked_for_another(tmp_path: Path) -> None:
    averaged = f"+callbacks.own={{_target_: {__name__}.OwnEMA, decay: 0.9}}"
    assert "test/accuracy" in train(new_run(tmp_path, *RUN, averaged, "compression=prune"))
