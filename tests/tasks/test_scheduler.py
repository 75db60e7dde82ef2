"""torch's schedulers in every form of Lightning's, equal on two processes and after a kill."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import Interrupted, Interruption, interruption, same
from support.ranks import on_ranks
from support.runs import SMALL, column, config, new_run

import lathe.training.train
from lathe.config.validate import check
from lathe.errors import Stopped, UserError, collect_errors, refuse
from lathe.runs.build import make_task
from lathe.trust.allowlist import findings

__all__ = ["interruption"]  # a fixture
TORCH = "torch.optim.lr_scheduler."
PARTS = (*SMALL, "test=false", "callbacks.throughput=null", "callbacks.checkpoint.every_n_train_steps=5")


def node(name: str, **keys: Any) -> dict[str, Any]:
    return {"_target_": TORCH + name, "_partial_": True, **keys}


STEP = node("StepLR", step_size=1, gamma=0.5)
WARM = node("LinearLR", start_factor=0.5, total_iters=2)
FORMS: dict[str, dict[str, Any]] = {
    "by epoch": {"scheduler": STEP, "interval": "epoch"},  # Lightning's mapping
    "every other epoch": {**STEP, "interval": "epoch", "frequency": 2},
    "every fifth step": {**STEP, "interval": "step", "frequency": 5},
    "one after the other": {**node("SequentialLR", schedulers=[WARM, STEP], milestones=[2]), "interval": "epoch"},
    "chained": {**node("ChainedScheduler", schedulers=[WARM, STEP]), "interval": "epoch"},
    "planned for epochs": {"_target_": "lathe.optim.step", "_partial_": True, "milestones": [0.5], "interval": "epoch"},
    "on a plateau": node("ReduceLROnPlateau", monitor="val/loss", patience=0, threshold=10.0, threshold_mode="abs"),
}
RATES = {  # for the four epochs, ten optimizer steps each
    "by epoch": [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125],
    "every other epoch": [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5],
    "every fifth step": [0.5**k for k in range(8)],
    "one after the other": [0.5, 0.5, 0.75, 0.75, 1, 1, 0.5, 0.5],
    "chained": [0.5, 0.5, 0.375, 0.375, 0.25, 0.25, 0.125, 0.125],
    "planned for epochs": [1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1],
    "on a plateau": [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01],  # the first validation is the best there can be
}


def run_of(folder: Path, form: dict[str, Any], *overrides: str) -> dict[str, Any]:
    cfg = new_run(folder, *PARTS, "data.batch_size=128", "trainer.max_epochs=4", *overrides)
    cfg["scheduler"] = form
    refuse(check(config() | {"scheduler": form}))
    return cfg


@pytest.mark.parametrize("name", FORMS)
def test_rates_are_the_same_alone_and_after_deaths(name: str, tmp_path: Path, interruption: Interruption) -> None:
    """At an epoch's end, in its middle, and around a validation."""
    alone = run_of(tmp_path / "alone", FORMS[name], "callbacks.lr_monitor.logging_interval=step")
    lathe.training.train.train(alone)
    directory = Path(alone["paths"]["run_dir"])
    assert column(directory, "lr-SGD/decay") == pytest.approx([0.1 * rate for rate in RATES[name]])
    if name not in ("every fifth step", "on a plateau", "one after the other"):
        return  # stepped like these
    cfg = run_of(tmp_path / "died", FORMS[name], "callbacks.lr_monitor.logging_interval=step")
    for hook, step in (
        ("on_train_epoch_end", 10),
        ("on_validation_end", 20),
        ("SIGTERM on_validation_start", 30),
        ("on_validation_start", 30),
        ("on_train_batch_start", 30),
    ):
        interruption.hook, interruption.step = hook, step
        with pytest.raises(Stopped if " " in hook else Interrupted):
            lathe.training.train.train(cfg)
    interruption.hook = ""
    lathe.training.train.train(cfg)
    same(directory, Path(cfg["paths"]["run_dir"]))


def test_a_run_with_a_scheduler_is_read_again() -> None:
    """By commands on a run directory of unknown origin: reading it must not run code."""
    for form in FORMS.values():
        assert list(findings(config() | {"scheduler": form}, [], {})) == []
    function = node("LambdaLR", lr_lambda={"_target_": "os.system", "_partial_": True})
    assert len(list(findings(config() | {"scheduler": node("SequentialLR", schedulers=[function])}, [], {}))) == 2


def _train(rank: int, cfg: dict[str, Any]) -> None:
    lathe.training.train.train(cfg)


@pytest.mark.slow
def test_two_processes_reduce_as_one(tmp_path: Path) -> None:
    rates = []
    for world, words in ((1, ()), (2, ("strategy=ddp", "trainer.devices=2"))):
        form = node("ReduceLROnPlateau", monitor="val/loss", patience=0, threshold=0.5)
        cfg = run_of(tmp_path / str(world), form, "callbacks.lr_monitor.logging_interval=step", *words)
        on_ranks(_train, cfg, world=world)
        rates.append(column(Path(cfg["paths"]["run_dir"]), "lr-SGD/decay"))
    assert rates[0] == rates[1]
    assert 1 < len(set(rates[0])) < len(rates[0])


def test_a_plateau_follows_the_tasks_metric_each_validation(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *PARTS, "scheduler=plateau", "scheduler.patience=0", "scheduler.threshold_mode=abs")
    cfg["scheduler"].update(threshold=0.5)  # accuracy can't rise by this much after the first
    cfg["trainer"].update(val_check_interval=0.5, log_every_n_steps=10)
    cfg["callbacks"]["lr_monitor"]["logging_interval"] = "step"
    lathe.training.train.train(cfg)
    directory = Path(cfg["paths"]["run_dir"])
    assert column(directory, "lr-SGD/decay") == pytest.approx([0.1, 0.1, 0.01, 0.001])
    (state,) = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["lr_schedulers"]
    assert (state["mode"], state["validations"]) == ("max", 4)
    assert state["best"] == pytest.approx(column(directory, "val/accuracy")[0])


@pytest.mark.parametrize(
    ("form", "key"),
    [
        (node("ReduceLROnPlateau", monitor="val/acuracy"), "scheduler.monitor=val/acuracy"),
        (node("ReduceLROnPlateau", monitor="train/loss"), "scheduler.monitor=train/loss"),
        (node("StepLR", step_size=1, monitor="val/loss"), "scheduler.monitor=val/loss"),
        (node("SequentialLR", schedulers=[WARM, node("StepLR", step_sze=1)], milestones=[1]), "step_size?"),
    ],
)
def test_what_cant_be_stepped_is_refused(form: dict[str, Any], key: str) -> None:
    cfg = {**config("model=mlp", "model.net.width=4"), "scheduler": form}
    with pytest.raises(UserError, match=re.escape(key)):
        collect_errors(lambda: refuse(check(cfg)), lambda: make_task(cfg))
