"""The task and the data module of a configuration."""

import importlib
import sys
from pathlib import Path

import lightning.pytorch
import pytest
import torch
from support.runs import config

from lathe.errors import UserError
from lathe.runs.build import alias_pytorch_lightning, make_data, make_task


def test_a_task_has_its_optimizer_and_scheduler() -> None:
    """The scaled learning rate includes accumulated batches."""
    words = ("optimizer.scale_lr=linear", "optimizer.lr=0.1", "optimizer.reference_batch_size=128")
    task = make_task(config("model=mlp", *words, "data.batch_size=64", "trainer.accumulate_grad_batches=8"))
    optimizer = task._make_optimizer(task.net)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * 64 * 8 / 128] * 2)
    assert isinstance(task._make_scheduler(optimizer, total_steps=100), torch.optim.lr_scheduler.LRScheduler)


def test_class_weights_of_torchs_losses_are_lists() -> None:
    cfg = config("model=mlp")
    inner = {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 2, *[1] * 8]}
    cfg["task"]["loss"] = {"a": inner, "b": {"_target_": "lathe.tasks.Weighted", "weight": 0.5, "loss": inner}}
    task = make_task(cfg, train=False)
    outputs, labels = torch.randn(6, 10), torch.tensor([0, 1, 2, 1, 5, 9])
    plain = torch.nn.functional.cross_entropy(outputs, labels, weight=torch.tensor([1.0, 2.0, *[1.0] * 8]))
    found = task.train().losses(outputs, (outputs, labels))
    assert sum(found.values()).item() == pytest.approx(1.5 * plain.item(), rel=1e-6)


def test_a_function_is_not_a_net() -> None:
    cfg = config("model=mlp")
    cfg["model"]["net"] = {"_target_": "math.hypot"}
    with pytest.raises(UserError, match=r"^model\.net\._target_=math\.hypot: expected a torch Module, got a float\."):
        make_task(cfg)


def test_all_wrong_arguments_of_a_component_are_reported_by_key() -> None:
    with pytest.raises(UserError) as caught:
        make_data(config("data.augment.crop=8", "data.augment.cutout=99"))
    keys = [message.partition("=")[0] for message in caught.value.args]
    assert keys == ["data.augment.crop", "data.augment.cutout"]
    with pytest.raises(UserError, match=r"^data\.augment\[1\]\.size=99 is a square larger than"):
        make_data(config("data.augment=[{_target_: lathe.data.RandomFlip}, {_target_: lathe.data.Cutout, size: 99}]"))


PACKAGE = """
import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping


class Data(pl.LightningDataModule):
    pass
"""


def test_both_names_are_the_same_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if not k.startswith("pytorch_lightning")})
    (tmp_path / "older.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    alias_pytorch_lightning()
    older = importlib.import_module("older")
    assert issubclass(older.Data, lightning.pytorch.LightningDataModule)
    assert older.EarlyStopping is lightning.pytorch.callbacks.EarlyStopping
