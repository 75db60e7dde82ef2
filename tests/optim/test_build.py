"""Parameter groups follow the rules exactly; learning rates are scaled as configured."""

import io
import math
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.runs import SMALL, config
from torch import nn

from lathe.errors import UserError
from lathe.nets import MLP, CifarResNet, ViT
from lathe.optim import build_optimizer
from lathe.optim.build import layer_numbers, parameter_groups
from lathe.runs.build import make_task
from lathe.tasks.scheduler import build_scheduler

BASE = {
    "kind": torch.optim.SGD,
    "lr": 0.1,
    "weight_decay": 5e-4,
    "no_decay": ["norm", "bias"],
    "scale_lr": "none",
    "reference_batch_size": 128,
    "batch_size": 512,
}


def names_by_group(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {group["name"]: [names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups}


def small_net() -> CifarResNet:
    return CifarResNet(depth=8, width=4)


def test_norms_and_biases_do_not_decay() -> None:
    net = small_net()
    optimizer = build_optimizer(net, **BASE, momentum=0.9, nesterov=True)
    names = [name for name, _ in net.named_parameters()]
    decay = [name for name in names if name == "head.weight" or name.endswith(("conv.weight", "1.weight", "2.weight"))]
    decay = [name for name in decay if ".bn" not in name]
    rest = [name for name in names if name not in decay]
    assert names_by_group(net, optimizer) == {"decay": decay, "no_decay": rest}
    assert (len(decay), len(rest)) == (10, 19)  # 9 norms with weight and bias, and the bias of the head
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 0.0]
    assert [(group["lr"], group["momentum"], group["nesterov"]) for group in optimizer.param_groups] == [
        (0.1, 0.9, True)
    ] * 2


@pytest.mark.parametrize(
    ("no_decay", "expected"),
    [
        (None, []),
        ([], []),
        (["bias"], ["stem.linear.bias", "blocks.0.linear.bias", "head.bias"]),
        ("head.*", ["head.weight", "head.bias"]),
        (["*.0.linear.weight", "head.bias"], ["blocks.0.linear.weight", "head.bias"]),
        (["norm"], []),  # a net without norms has none to exclude
    ],
)
def test_rules_pick_exactly_these_names(no_decay: list[str] | None, expected: list[str]) -> None:
    net = MLP(channels=1, image_size=2, num_classes=3, width=4, depth=2)
    groups = names_by_group(net, build_optimizer(net, **{**BASE, "no_decay": no_decay}))
    assert groups.get("no_decay", []) == expected
    assert sorted(groups["decay"] + expected) == sorted(name for name, _ in net.named_parameters())


@pytest.mark.parametrize(
    ("scale_lr", "batch_size", "expected"),
    [
        ("none", 512, 0.1),
        ("linear", 512, 0.4),
        ("sqrt", 64, 0.1 / math.sqrt(2)),
    ],
)
def test_learning_rate_follows_the_batch(scale_lr: str, batch_size: int, expected: float) -> None:
    optimizer = build_optimizer(small_net(), **{**BASE, "scale_lr": scale_lr, "batch_size": batch_size})
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected] * 2, rel=1e-12)


def test_options_arrive_as_plain_values() -> None:
    options = OmegaConf.create({"betas": [0.8, 0.9], "eps": 1e-6, "foreach": None})
    optimizer = build_optimizer(small_net(), **{**BASE, "kind": torch.optim.AdamW}, **options)
    assert type(optimizer.param_groups[0]["betas"]) is tuple
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["eps"] == 1e-6
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"no_decay": ["norms"]},
            "no_decay: the pattern 'norms' matches no parameter of CifarResNet; did you mean norm",
        ),
        ({"momentun": 0.9}, "kind=SGD refused .* unexpected keyword argument 'momentun'"),
    ],
)
def test_misspelt_rules_and_options_are_refused(change: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_optimizer(small_net(), **{**BASE, **change})


class Scaled(nn.Linear):
    never_decayed = ("scale",)

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.ones(2, 1))


def test_a_module_names_what_must_not_decay() -> None:
    net = nn.Sequential(Scaled(), nn.Linear(2, 2))
    groups = parameter_groups(net, weight_decay=0.1, no_decay=["bias"], roles={})
    found = {group["name"]: [tuple(parameter.shape) for parameter in group["params"]] for group in groups}
    assert found == {"decay": [(2, 3), (2, 2)], "no_decay": [(2,), (2, 1), (2,)]}


OWN = {
    "_target_": "lathe.optim.build_optimizer",
    "_partial_": True,
    "lr": 0.1,
    "weight_decay": 0.0,
    "kind": {"_target_": "hydra.utils.get_class", "path": "torch.optim.SGD"},
}


def test_a_rate_that_follows_the_batch_needs_the_batch() -> None:
    with pytest.raises(UserError, match=r"^optimizer\.scale_lr=linear needs batch_size"):
        make_task(config("model=mlp", "model.net.width=4") | {"optimizer": OWN | {"scale_lr": "linear"}})


def test_norms_are_found_by_their_modules_and_biases_by_their_names() -> None:
    class ScaleNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

    norms = nn.ModuleDict(
        {"norm": nn.LayerNorm(4), "group": nn.GroupNorm(2, 4), "rms": nn.RMSNorm(4), "own": ScaleNorm()}
    )
    net = nn.ModuleDict({**norms, "linear": nn.Linear(4, 4), "attention": nn.MultiheadAttention(4, 2)})
    found = names_by_group(net, build_optimizer(net, **{**BASE, "no_decay": ["norm"]}))["no_decay"]
    assert sorted(found) == sorted(name for name, _ in norms.named_parameters())
    biases = names_by_group(net, build_optimizer(net, **{**BASE, "no_decay": ["bias"]}))["no_decay"]
    expected = ["norm.bias", "group.bias", "linear.bias", "attention.in_proj_bias", "attention.out_proj.bias"]
    assert sorted(biases) == sorted(expected)


VIT = ("model=vit_tiny", "model.net.depth=2", "model.net.width=24")
OPTIONS = {"kind": torch.optim.SGD, "lr": 0.1, "weight_decay": 0.01, "no_decay": ["norm", "bias"]}


def rates(net: CifarResNet, **more: object) -> dict[str, tuple[float, float]]:
    optimizer = build_optimizer(net, **OPTIONS, **more)  # type: ignore[arg-type]
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def test_each_rule_multiplies_and_the_last_one_counts() -> None:
    net = CifarResNet(depth=8, width=4)
    found = rates(net, lr_scale={"bias": 2.0, "head.*": 10})
    for name, (rate, decay) in found.items():
        scale = 10 if name.startswith("head.") else 2 if name.endswith("bias") else 1
        assert rate == pytest.approx(0.1 * scale), name
        assert decay == (0.0 if net.get_parameter(name).ndim < 2 else 0.01), name


def test_it_multiplies_what_layers_and_roles_have() -> None:
    words = (*VIT, "optimizer=muon", "optimizer.lr=1.0", "optimizer.layer_decay=0.5")
    plain, scaled = (
        {group["name"]: group["lr"] for group in task._make_optimizer(task.net).param_groups}
        for task in (make_task(config(*words)), make_task(config(*words, "optimizer.lr_scale={head.*: 4}")))
    )
    changed = [name for name in scaled if name.startswith("x4/")]
    assert changed
    for name in changed:
        assert scaled[name] == pytest.approx(4 * plain[name.removeprefix("x4/")])
    assert all(scaled[name] == plain[name] for name in scaled if name not in changed)


def vit() -> ViT:
    return ViT(channels=1, image_size=8, num_classes=3, width=8, depth=3, heads=2, patch_size=4)


def test_a_transformer_is_numbered_from_its_embeddings_to_its_head() -> None:
    numbers = layer_numbers(vit())
    for name, number in numbers.items():
        block = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else None
        assert number == (block or (4 if name.startswith(("head", "norm")) else 0)), name
    assert set(numbers.values()) == {0, 1, 2, 3, 4}


def test_each_layer_has_its_share() -> None:
    net = vit()
    optimizer = build_optimizer(
        net, kind=torch.optim.AdamW, lr=1.0, weight_decay=0.1, no_decay=["norm", "bias"], layer_decay=0.5
    )
    rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    for layer in range(5):
        assert rates[f"layer_{layer:02}/no_decay"] == (0.5 ** (4 - layer), 0.0)
        assert rates[f"layer_{layer:02}/decay"] == (0.5 ** (4 - layer), 0.1)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    numbers = layer_numbers(net)
    found = {names[id(p)]: group["layer"] for group in optimizer.param_groups for p in group["params"]}
    assert found == numbers


def test_a_schedule_with_one_rate_for_all_is_refused() -> None:
    optimizer = build_optimizer(vit(), kind=torch.optim.SGD, lr=1.0, weight_decay=0.1, momentum=0.9, layer_decay=0.5)
    cycle: Any = torch.optim.lr_scheduler.OneCycleLR
    with pytest.raises(UserError, match=r"^_target_=OneCycleLR gives all groups one rate, and theirs differ"):
        build_scheduler(partial(cycle, max_lr=1.0), optimizer, 10)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_a_warm_up_begins_at_zero(layer_decay: float | None) -> None:
    optimizer = build_optimizer(vit(), kind=torch.optim.SGD, lr=1.0, weight_decay=0.1, layer_decay=layer_decay)
    build_scheduler(partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: step / 5), optimizer, 10)
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}


def test_a_typed_batch_size_of_the_optimizer_counts() -> None:
    """Else it is the data's, times the accumulated batches."""
    words = (*SMALL, "optimizer.scale_lr=linear", "optimizer.reference_batch_size=64", "data.batch_size=64")
    rates = []
    for more in ((), ("trainer.accumulate_grad_batches=2",), ("optimizer.batch_size=640",)):
        task = make_task(config(*words, "optimizer.lr=0.1", *more))
        rates.append(task._make_optimizer(task.net).param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.2, 1.0])
