"""Nodes become objects, and one that can't is a sentence with its key."""

from typing import Any

import pytest
import torch
from support.runs import ROOT, config
from torch import nn

from lathe.errors import UserError
from lathe.runs.build import call_factory, make_data, make_task
from lathe.runs.instantiate import instantiate, instantiate_as
from lathe.tasks import ClassificationTask


def test_a_node_becomes_an_object_with_what_is_added() -> None:
    layer = instantiate({"_target_": "torch.nn.Linear", "in_features": 3}, "model.net", out_features=2, bias=False)
    assert isinstance(layer, nn.Linear)
    assert (layer.weight.shape, layer.bias) == ((2, 3), None)
    assert instantiate({"_target_": "builtins.pow"}, "x", 2, 5) == 32


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (
            {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2, "biass": True},
            "model.biass: torch.nn.Linear takes no such argument; did you mean bias?",
        ),
        (
            {
                "_target_": "torch.nn.Sequential",
                "_args_": [{"_target_": "torch.nn.Linear", "in_features": "three", "out_features": 2}],
            },
            "model._args_[0] can't be built: ",
        ),
        (
            {"_target_": "torch.nn.Linearr", "in_features": 3},
            "model can't be built: the module torch.nn has no Linearr; did you mean Linear?",
        ),
        (
            {"_target_": "lathe.data.digits.Digitz"},
            "model can't be built: the module lathe.data.digits has no Digitz; did you mean Digits?",
        ),
        (
            {"_target_": "torch.nnn.Linear"},
            "model can't be built: the module torch has no nnn.Linear; did you mean nn?",
        ),
        (
            {"_target_": "lathe.data.Digits.loads"},
            "model can't be built: the class lathe.data.Digits has no loads; did you mean load?",
        ),
        (
            {"_target_": "hydra.utils.get_class", "path": "torch.optim.Adamm"},
            "model can't be built: the module torch.optim has no Adamm; did you mean Adam?",
        ),
        (
            {"_target_": "no_such_package.Thing"},
            f"model can't be built: No module named 'no_such_package': a module of your own lies in {ROOT}/src/",
        ),
        ({"_target_": "torch.nn.Linear"}, "model can't be built: "),
        (
            {"_target_": "torch.nn.Conv2d", "in_channels": 3, "out_channels": 4, "kernel_size": 3, "groups": 2},
            "model can't be built: in_channels",
        ),
    ],
)
def test_a_node_that_cant_be_built_is_one_sentence(node: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        instantiate(node, "model")
    assert str(caught.value).startswith(sentence)


def test_the_key_of_an_inner_node_is_whole() -> None:
    node = {
        "_target_": "torch.nn.Sequential",
        "_args_": [],
        "net": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1, "widht": 3},
    }
    with pytest.raises(
        UserError, match=r"^model\.net\.widht: torch\.nn\.Linear takes no such argument; choose one of bias"
    ):
        instantiate(node, "model")


def test_what_a_part_says_itself_is_passed_on() -> None:
    with pytest.raises(UserError, match=r"^task\.label_smoothing=2\.0: expected a number from 0 and below 1"):
        make_task(config("model=mlp", "task.label_smoothing=2.0"))


def test_call_factory_names_the_key() -> None:
    with pytest.raises(UserError, match=r"^trainer can't be built: .*unexpected keyword argument 'devicess'"):
        call_factory(lambda devices: devices, "trainer", devicess=1)


def test_a_task_has_its_net_and_what_trains_it() -> None:
    cfg = config("model=mlp", "model.net.width=16", "optimizer=adamw", "optimizer.lr=0.01")
    task = make_task(cfg)
    assert isinstance(task, ClassificationTask)
    optimizer = task._make_optimizer(task.net)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    scheduler = task._make_scheduler(optimizer, total_steps=100)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)


def test_a_task_for_evaluation_has_no_optimizer() -> None:
    task = make_task(config("model=mlp"), train=False)
    assert task.configure_optimizers() is None


def test_the_scaled_learning_rate_sees_accumulated_batches() -> None:
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


def test_a_task_without_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("model=mlp")
    del cfg["scheduler"]
    task = make_task(cfg)
    assert isinstance(task.configure_optimizers(), torch.optim.Optimizer)


def test_a_part_that_does_not_fit_into_memory_is_a_sentence() -> None:
    node = {"_target_": "torch.nn.Linear", "in_features": 10**8, "out_features": 10**8}
    with pytest.raises(UserError, match=r"^model\.net can't be built: .*memory"):
        instantiate(node, "model.net")


def test_weights_of_torchs_losses_are_lists_in_a_file() -> None:
    cfg = config("model=mlp")
    inner = {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 2, *[1] * 8]}
    cfg["task"]["loss"] = {"a": inner, "b": {"_target_": "lathe.tasks.Weighted", "weight": 0.5, "loss": inner}}
    task = make_task(cfg, train=False)
    outputs, labels = torch.randn(6, 10), torch.tensor([0, 1, 2, 1, 5, 9])
    plain = torch.nn.functional.cross_entropy(outputs, labels, weight=torch.tensor([1.0, 2.0, *[1.0] * 8]))
    found = task.train().losses(outputs, (outputs, labels))
    assert sum(found.values()).item() == pytest.approx(1.5 * plain.item(), rel=1e-6)


def test_a_target_that_is_not_there_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        UserError, match=r"^callbacks\.x can't be built: the module torch\.nn has no Linearr; did you mean Linear\?$"
    ):
        instantiate_as({"_target_": "torch.nn.Linearr"}, "callbacks.x", nn.Module)
    assert caplog.records == []  # Hydra has lines of its own for it


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("data.augment.crop=8", "data.augment.crop=8 leaves nothing in some windows of images of 8 x 8 pixels"),
        ("data.augment.cutout=99", "data.augment.cutout=99 is a square larger than images of 8 x 8 pixels"),
        ("data.augment=[{_target_: lathe.data.Cutout, size: 99}]", "data.augment[0].size=99 is a square larger than"),
    ],
)
def test_a_refused_argument_goes_by_the_key_that_was_typed(word: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make_data(config(word))
    assert str(caught.value).startswith(sentence)


def test_refused_arguments_of_one_part_are_told_together() -> None:
    with pytest.raises(UserError) as caught:
        make_data(config("data.augment.crop=8", "data.augment.cutout=99"))
    assert [sentence.partition("=")[0] for sentence in caught.value.args] == [
        "data.augment.crop",
        "data.augment.cutout",
    ]
