"""What Lightning promises a LightningModule, a data module and a callback holds in a run of Lathe."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interruptions import Interrupted, Interruption, interruption, same
from support.own_lightning import QUICK
from support.runs import column, new_run, rows

from lathe.errors import UserError
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


@pytest.mark.parametrize("monitor", ["named_1", "val_loss/dataloader_idx_1", "rounds", None])
def test_a_metric_of_each_loader_may_be_the_monitor(tmp_path: Path, monitor: str | None) -> None:
    words = f"callbacks.checkpoint.monitor={'null' if monitor is None else monitor}"
    cfg = run(tmp_path, "Several", "contracts.TwoTables", words, "callbacks.checkpoint.mode=min", "objective=named_0")
    result = train(cfg)
    found = {name: column(directory(cfg), name) for name in ("named_0", "named_1", "val_loss/dataloader_idx_1")}
    assert all(len(values) == 2 for values in found.values())
    best = -1 if monitor is None else found.get(monitor, [0, 1]).index(min(found.get(monitor, [0, 1])))
    for name, values in found.items():
        assert result[name] == values[best], name
    assert result["objective"] == result["named_0"]
    assert result["best_step"] == (6 if monitor == "rounds" else 12)
    assert {f"test_loss/dataloader_idx_{loader}" for loader in (0, 1)} <= result.keys()


def test_a_batch_of_several_steps_has_a_row_and_its_own_rate(tmp_path: Path, interruption: Interruption) -> None:
    """Optimizer steps end at 2, 3, 5, 6, 8, 9, 11, ... 18: a batch that passes a multiple counts as one that ends
    there, for rows and for checkpoints."""
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
    """Lightning itself drops them before each validation."""
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
    with pytest.raises(UserError, match=r"does not fit this run in `callbacks`: .*gradient of fc.weight is \[3\]"):
        train(cut)
    torch.save(last, path)
    train(cut)
    same(directory(cut), directory(whole))


@pytest.mark.parametrize("module", ["own_lightning.Manual", "own_lightning.Turns", "own_contracts.Gathering"])
def test_gradients_that_were_stepped_with_are_not_kept(tmp_path: Path, module: str) -> None:
    """Two epochs of six batches have three steps of four, so nothing waits for another."""
    net = f"model.net={{_target_: support.{module}, features: 16, classes: 2, width: 4}}"
    cfg = new_run(tmp_path, *QUICK, net, "callbacks.checkpoint.monitor=null")
    cfg["data"] = {"_target_": "support.own_parts.Table"}
    train(cfg)
    assert "gradients" not in torch.load(directory(cfg) / "checkpoints" / "last.ckpt", weights_only=True)


def test_the_best_checkpoint_is_tested_with_the_states_it_holds(tmp_path: Path) -> None:
    """As Trainer.test(ckpt_path="best") does: the loss is largest in the first epoch, and training ends with two."""
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
