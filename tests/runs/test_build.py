"""The task and the data module of a configuration."""

import pytest
import torch
from support.runs import config

from lathe.errors import UserError
from lathe.runs.build import make_data, make_task
from lathe.tasks import ClassificationTask


def test_a_task_has_its_net_optimizer_and_scheduler() -> None:
    task = make_task(config("model=mlp", "model.net.width=16", "optimizer=adamw", "optimizer.lr=0.01"))
    assert isinstance(task, ClassificationTask)
    optimizer = task._make_optimizer(task.net)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    assert isinstance(task._make_scheduler(optimizer, total_steps=100), torch.optim.lr_scheduler.LRScheduler)


def test_the_scaled_learning_rate_includes_accumulated_batches() -> None:
    cfg = config(
        "model=mlp",
        "optimizer.scale_lr=linear",
        "optimizer.lr=0.1",
        "optimizer.reference_batch_size=128",
        "data.batch_size=64",
        "trainer.accumulate_grad_batches=8",
    )
    task = make_task(cfg)
    for group in task._make_optimizer(task.net).param_groups:
        assert group["lr"] == pytest.approx(0.1 * 64 * 8 / 128)


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
    with pytest.raises(UserError, match=r"^data\.augment\[0\]\.size=99 is a square larger than"):
        make_data(config("data.augment=[{_target_: lathe.data.Cutout, size: 99}]"))
