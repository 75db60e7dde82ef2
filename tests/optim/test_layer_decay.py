"""Layer-wise learning-rate decay: each layer's factor, kept by schedules, refused for unknown layers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import SMALL, column, new_run
from torch import nn

from lathe.errors import UserError
from lathe.nets import ViT
from lathe.optim import build_optimizer
from lathe.optim.build import layer_numbers
from lathe.tasks.scheduler import build_scheduler
from lathe.training.train import train


def vit() -> ViT:
    return ViT(channels=1, image_size=8, num_classes=3, width=8, depth=3, heads=2, patch_size=4)


def test_a_transformer_is_numbered_from_its_embeddings_to_its_head() -> None:
    numbers = layer_numbers(vit())
    for name, number in numbers.items():
        block = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else None
        assert number == (block or (4 if name.startswith(("head", "norm")) else 0)), name
    assert set(numbers.values()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_each_layer_has_its_share(kind: type[torch.optim.Optimizer]) -> None:
    net = vit()
    optimizer = build_optimizer(net, kind=kind, lr=1.0, weight_decay=0.1, no_decay=["norm", "bias"], layer_decay=0.5)
    rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    for layer in range(5):
        assert rates[f"layer_{layer:02}/no_decay"] == (0.5 ** (4 - layer), 0.0)
        assert rates[f"layer_{layer:02}/decay"] == (0.5 ** (4 - layer), 0.1)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    numbers = layer_numbers(net)
    found = {names[id(p)]: group["layer"] for group in optimizer.param_groups for p in group["params"]}
    assert found == numbers


def test_a_run_keeps_the_shares_along_its_schedule(tmp_path: Path) -> None:
    cfg = new_run(
        tmp_path, *SMALL, "model.net.depth=2", "optimizer.layer_decay=0.5", "trainer.max_epochs=1", "test=false"
    )
    train(cfg)
    directory = Path(cfg["paths"]["run_dir"])
    head, stem = column(directory, "lr-SGD/layer_02/decay"), column(directory, "lr-SGD/layer_00/decay")
    assert head
    assert stem == pytest.approx([rate / 4 for rate in head])


def test_what_has_no_layers_is_refused() -> None:
    for net in (nn.Linear(2, 2), type("Empty", (nn.Module,), {"blocks": []})()):
        with pytest.raises(UserError, match=r"^layer_decay numbers the layers by the `blocks` of the net, and "):
            layer_numbers(net)


def test_a_schedule_with_one_rate_for_all_is_refused() -> None:
    optimizer = build_optimizer(vit(), kind=torch.optim.SGD, lr=1.0, weight_decay=0.1, momentum=0.9, layer_decay=0.5)
    cycle: Any = torch.optim.lr_scheduler.OneCycleLR
    with pytest.raises(UserError, match=r"^_target_=OneCycleLR gives all groups one rate, and theirs differ"):
        build_scheduler(partial(cycle, max_lr=1.0), optimizer, 10)
