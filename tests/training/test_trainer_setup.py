"""The Trainer, callbacks, compression methods and loggers of a configuration."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from support.own_parts import Logging
from support.runs import SMALL, config, new_run, rows

import lathe.receipt
from lathe import trust
from lathe.compression.pruning.callback import Prune
from lathe.compression.quantization.callback import QAT
from lathe.errors import UserError
from lathe.runs.build import make_data, make_task
from lathe.runs.rundir import RunDir
from lathe.strategies import DDP
from lathe.training.train import train
from lathe.training.trainer_setup import make_callbacks, make_loggers, make_methods, make_trainer, world_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_prints_the_device_of_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(new_run(tmp_path, *SMALL, "trainer.accelerator=auto", "trainer.max_steps=2"))
    message = f"trainer.accelerator=auto took the CPU: torch {torch.__version__} "
    assert capsys.readouterr().out.count(message) == 1


def test_several_processes_get_ddp_and_synchronised_batchnorm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert world_size() == 1  # WORLD_SIZE without LOCAL_WORLD_SIZE is not torchrun's
    cfg = new_run(tmp_path, *SMALL)
    assert not isinstance(make_trainer(cfg, tmp_path, []).strategy, DDP)
    ranks = {"LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for key, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    assert world_size() == 2
    cfg["trainer"]["devices"] = 2
    trainer = make_trainer(cfg, tmp_path, [])
    assert isinstance(trainer.strategy, DDP)
    assert type(trainer.strategy._layer_sync).__name__ == "SyncBatchNorm"
    cfg["trainer"]["sync_batchnorm"] = False
    assert make_trainer(cfg, tmp_path, []).strategy._layer_sync is None


def test_one_process_ignores_the_variables_of_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script with --ntasks=2 may call python without srun."""
    for key in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in {"JOB_ID": "5", "JOB_NAME": "x", "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    trainer = make_trainer(new_run(tmp_path, *SMALL), tmp_path, [])
    assert (trainer.world_size, trainer.global_rank) == (1, 0)


OWN = "task._target_=support.own_parts.Logging"
STOP = "callbacks=[default,early_stopping]"


@pytest.fixture(autouse=True)
def _trusted() -> None:
    trust.allow({"trusted": ["support.own_parts"]})


def callbacks(*words: str, **nodes: Any) -> list[Any]:
    cfg = config("model=mlp", "model.net.width=4", *words)
    cfg["callbacks"] |= nodes
    return make_callbacks(cfg, make_task(cfg))


WRONG = [
    ("data", "lathe.data.Digits", "expected a lightning LightningDataModule, got the class Digits."),
    ("task", "lightning.pytorch.demos.boring_classes.BoringModel", "is a plain LightningModule"),
    ("callbacks.x", "lightning.pytorch.callbacks.LearningRateFinder", "use scripts/lr_find.py"),
    ("callbacks.x", "lathe.callbacks.Throughput", "callbacks.throughput and callbacks.x are both Throughput"),
    ("optimizer", "torch.optim.lr_scheduler.StepLR", "StepLR: expected the class of an optimizer"),
]


def build(cfg: dict[str, Any], folder: Path, group: str) -> None:
    if group == "data":
        make_data(cfg)
    task = make_task(cfg)
    make_loggers(cfg, folder, 0)
    make_callbacks(cfg, task)
    make_trainer(cfg, folder, [])


@pytest.mark.parametrize(("key", "target", "message"), WRONG)
def test_a_component_of_another_class_is_refused(tmp_path: Path, key: str, target: str, message: str) -> None:
    cfg = config("model=mlp", "model.net.width=4")
    group, _, name = key.partition(".")
    node = {"_target_": target}
    cfg[group] = {**cfg[group], name: node} if name else node
    with pytest.raises(UserError) as caught:
        build(cfg, tmp_path, group)
    assert message in str(caught.value)
    assert key in str(caught.value)


def test_callbacks_that_are_switched_off_are_left_out() -> None:
    kinds = {type(callback).__name__ for callback in callbacks("trainer.fast_dev_run=true", "callbacks.nan_guard=null")}
    assert not kinds & {"Checkpoint", "NanGuard"}
    cfg = config("model=mlp")
    kinds = {type(callback).__name__ for callback in make_callbacks(cfg, make_task(cfg))}
    assert kinds == {node["_target_"].rpartition(".")[2] for node in cfg["callbacks"].values()} | {"ExactResume"}


# monitors


def test_the_direction_of_an_undeclared_metric_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"^callbacks\.checkpoint\.mode=auto: nothing says whether a higher own/worse is better"
    ):
        callbacks(OWN, "callbacks.checkpoint.monitor=own/worse")
    monkeypatch.setattr(Logging, "logged", ("own/worse",))  # declared
    found = callbacks(OWN, "callbacks.checkpoint.monitor=own/worse")
    assert next(callback.mode for callback in found if hasattr(callback, "every_n_epochs")) == "max"


def test_any_logged_metric_can_choose_the_best_epoch(tmp_path: Path) -> None:
    """`own/worse` is 0 in the first epoch and -1 in the second."""
    cfg = new_run(tmp_path, *SMALL, OWN, "callbacks.checkpoint.monitor=own/worse", "callbacks.checkpoint.mode=max")
    result = train(cfg)
    assert (result["best_step"], result["objective"]) == (20, 0.0)
    assert result["own/worse"] == result["objective"]


def test_early_stopping_takes_the_monitor_of_the_checkpoint() -> None:
    def watched(*words: str) -> tuple[Any, Any]:
        (stopping,) = [callback for callback in callbacks(STOP, *words) if isinstance(callback, EarlyStopping)]
        return stopping.monitor, stopping.mode

    assert watched() == ("val/accuracy", "max")
    assert watched("callbacks.checkpoint.monitor=val/loss") == ("val/loss", "min")
    assert watched("callbacks.checkpoint.monitor=own/x", "callbacks.checkpoint.mode=min") == ("own/x", "min")
    assert watched("callbacks.checkpoint.monitor=val/loss", "callbacks.early_stopping.mode=max") == ("val/loss", "max")
    assert watched("callbacks.checkpoint.monitor=null") == ("val/accuracy", "max")
    named = "callbacks.early_stopping.monitor=val/accuracy"
    assert watched("callbacks.checkpoint.monitor=val/loss", named) == ("val/accuracy", "max")


def test_early_stopping_ends_a_run_by_a_metric_of_training(tmp_path: Path) -> None:
    key = "callbacks.early_stopping"
    words = (f"{key}.patience=2", f"{key}.monitor=train/loss", f"{key}.check_on_train_epoch_end=true")
    cfg = new_run(tmp_path, *SMALL, STOP, "trainer.max_epochs=9", *words, f"{key}.min_delta=100")
    assert train(cfg)["epochs"] == 3


def test_a_metric_that_nothing_logs_ends_the_run_after_the_first_validation(tmp_path: Path) -> None:
    words = ("callbacks.checkpoint.monitor=own/wors", "callbacks.checkpoint.mode=max")
    cfg = new_run(tmp_path, *SMALL, OWN, *words)
    with pytest.raises(UserError, match=r"^callbacks\.checkpoint.*own/wors\b.*own/worse"):
        train(cfg)
    assert int(rows(Path(cfg["paths"]["run_dir"]))[-1]["step"]) <= 20


# compression


def test_methods_are_in_order_with_their_window_of_the_run() -> None:
    found = make_methods(config("compression=[prune,qat]", "compression.stages=[prune,qat]"))
    assert [type(method) for method in found] == [Prune, QAT]
    assert [method.window for method in found] == [(0.0, 0.5), (0.5, 1.0)]
    assert make_methods(config()) == []


def test_the_best_epoch_is_one_with_all_masks(tmp_path: Path) -> None:
    """Masks grow until 0.7 of the run, and earlier epochs are more accurate."""
    prune = ("compression=prune", "compression.prune.sparsity=0.99", "compression.prune.end=0.7")
    result = train(new_run(tmp_path, *SMALL, "trainer.max_epochs=4", *prune, "compression.receipt=none"))
    assert result["best_step"] > 0.7 * 80
    assert result["prune/sparsity"] == pytest.approx(0.99, abs=0.01)


def test_a_receipt_that_fails_leaves_a_complete_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(lathe.receipt, "write", fail)
    cfg = new_run(tmp_path, *SMALL, "compression=prune")
    with pytest.warns(UserWarning, match=r"receipt failed \(RuntimeError: no clock\): python scripts/receipt\.py run="):
        train(cfg)
    assert RunDir(cfg["paths"]["run_dir"]).complete
