"""Lightning's contracts for LightningModules, data modules and callbacks hold in a run of Lathe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import Interrupted, Interruption, interruption, same
from support.own_lightning import QUICK
from support.runs import column, new_run, rows, runs

from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.evaluate import evaluate

__all__ = ["interruption"]  # a fixture


def run(folder: Path, module: str, data: str, *words: str) -> dict[str, Any]:
    net = f"model.net={{_target_: support.own_contracts.{module}, features: 16, classes: 2, width: 4}}"
    cfg = new_run(folder, *QUICK, net, *words)
    cfg["data"] = {"_target_": f"support.own_{data}"}
    return cfg


def directory(cfg: dict[str, Any]) -> Path:
    return Path(cfg["paths"]["run_dir"])


def test_a_batch_of_several_steps_has_a_row_and_its_own_rate(tmp_path: Path, interruption: Interruption) -> None:
    """Optimizer steps end at 2, 3, 5, 6, 8, 9, 11, ... 18: a batch that passes a multiple counts as one that ends
    there, for rows and checkpoints.
    """
    judged = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min")
    words = ("callbacks.checkpoint.every_n_train_steps=4", *judged, "logger=tensorboard")
    whole, cut = (run(tmp_path / name, "Uneven", "parts.Table", *words) for name in ("whole", "cut"))
    train(whole)
    found = [row for row in rows(directory(whole)) if row["train_loss_step"]]
    assert [(row["step"], float(row["batches"])) for row in found] == [("5", 3.0), ("11", 7.0), ("15", 10.0)]
    for row in found:
        assert float(row["lr-SGD"]) == pytest.approx(float(row["rate"]))
        assert float(row["rate"]) == pytest.approx(0.1 * 0.9 ** (float(row["batches"]) - 1))
    assert len(column(directory(whole), "lr-SGD")) == 3
    interruption.hook, interruption.step = "on_train_batch_start", 14
    with pytest.raises(Interrupted):
        train(cut)
    last = torch.load(directory(cut) / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 12
    interruption.step = 10**9
    train(cut)
    same(directory(cut), directory(whole))


def test_gradients_that_wait_for_a_later_batch_are_kept(tmp_path: Path, interruption: Interruption) -> None:
    """Lightning drops them before each validation."""
    words = ("callbacks.checkpoint.monitor=null", "trainer.limit_val_batches=0", "trainer.max_epochs=4")
    whole, cut = (run(tmp_path / name, "Gathering", "parts.Table", *words) for name in ("whole", "cut"))
    train(whole)
    interruption.hook, interruption.step = "on_train_batch_start", 2
    with pytest.raises(Interrupted):
        train(cut)
    path = directory(cut) / "checkpoints" / "last.ckpt"
    last = torch.load(path, weights_only=True)
    assert (last["global_step"], last["epoch"]) == (1, 0)
    assert last["gradients"].keys() == last["state_dict"].keys()
    interruption.step = 10**9
    torch.save({**last, "gradients": {"fc.weight": torch.ones(3)}, "outline": {}}, path)
    with pytest.raises(UserError, match=r"saved gradient of fc\.weight"):
        train(cut)
    torch.save(last, path)
    train(cut)
    same(directory(cut), directory(whole))


def test_the_best_checkpoint_is_tested_with_the_states_it_holds(tmp_path: Path) -> None:
    """As Trainer.test(ckpt_path="best") does: the loss is largest in the first of two epochs."""
    words = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=max")
    own = "+callbacks.own._target_=support.own_contracts.Counting"
    cfg = run(tmp_path, "Stateful", "contracts.Counted", *words, own)
    result = train(cfg)
    assert (result["best_step"], result["epochs"]) == (6, 2)
    assert {result[name] for name in ("data_epochs", "callback_epochs", "callback_words")} == {1.0}
    request = {"batch_size": None, "output": None, "run": "x", "split": "test"}
    for checkpoint, epochs in (("best", 1.0), ("last", 2.0)):
        assert evaluate({**cfg, "request": {**request, "checkpoint": checkpoint}})["data_epochs"] == epochs


def test_a_module_clips_logs_and_shows_in_its_own_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("callbacks.checkpoint.monitor=null", "trainer.enable_progress_bar=true")
    cfg = run(tmp_path, "Clipping", "parts.Table", *words)
    train(cfg)
    told = capsys.readouterr().out
    assert column(directory(cfg), "largest") == pytest.approx([0.001] * 2)
    assert column(directory(cfg), "each_step") == [8.0, 8.0]
    assert told.count("self.log('each', on_step=True) in an evaluation: metrics.csv has one row for it") == 1
    lines = [line for line in told.splitlines() if line.startswith("epoch ")]
    assert ["shown " in line for line in lines] == [True, True]
    assert not any("train/loss" in line for line in lines)


Cli = Callable[..., tuple[int, str]]


# an epoch has 26 batches of 50
WORDS = (*QUICK, "data.batch_size=50", "trainer.log_every_n_steps=1", "callbacks=[default,lr_monitor]", "test=false")


def planned(words: str) -> str:
    return f"model.net={{_target_: support.own_lightning.Planned, width: 4, kind: {words}}}"


def test_a_raised_end_extends_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, whole = (new_run(tmp_path / name, *WORDS, planned("cycle")) for name in ("cfg", "whole"))
    for epochs in (1, 2):
        cfg["trainer"]["max_epochs"] = whole["trainer"]["max_epochs"] = epochs
        train(cfg)
    assert "OneCycleLR is adjusted to this run's length: total_steps=52 (was 26).\n" in capsys.readouterr().out
    assert RunDir(directory(cfg)).result["epochs"] == 2
    train(whole)
    found, expected = (column(directory(each), "lr-SGD") for each in (cfg, whole))
    assert len(expected) == 52
    assert found[26:] == pytest.approx(expected[26:], rel=1e-6)


def test_a_schedule_that_would_end_in_an_error_is_told_before_the_work(tmp_path: Path, cli: Cli) -> None:
    """A complete run is not lost if more is asked for than its schedule can do."""
    words = [*WORDS, planned("cycle, length: 52"), "paths.log_dir=logs"]
    code, said = cli(*words, "trainer.max_epochs=3")
    assert code == 1
    assert said.splitlines()[-1].startswith("Error: OneCycleLR ends after 52 more steps, and this run takes 78. ")
    assert cli(*words, "trainer.max_epochs=2")[0] == 0
    (directory,) = (path for path in runs(Path("logs")) if (path / "result.json").exists())
    before = {name: (directory / name).read_bytes() for name in ("result.json", "metrics.csv", "config.yaml")}
    code, said = cli(f"resume={directory}", "trainer.max_epochs=3", "trusted=[support]")
    assert code == 1
    assert "OneCycleLR ends after 0 more steps, and this run takes 26." in said
    assert {name: (directory / name).read_bytes() for name in before} == before
    assert cli(*words, "trainer.max_epochs=3", "trainer.max_steps=50")[0] == 0
