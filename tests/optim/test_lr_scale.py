"""A learning rate for the parameters of a rule, as a multiple of the run's."""

import pytest
import torch
from support.runs import config

from lathe.errors import UserError
from lathe.nets import CifarResNet
from lathe.optim import build_optimizer
from lathe.runs.build import make_task

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
    words = (
        *VIT,
        "optimizer=muon",
        "optimizer.lr=1.0",
        "optimizer.layer_decay=0.5",
    )
    plain, scaled = (
        {group["name"]: group["lr"] for group in task._make_optimizer(task.net).param_groups}
        for task in (make_task(config(*words)), make_task(config(*words, "optimizer.lr_scale={head.*: 4}")))
    )
    changed = [name for name in scaled if name.startswith("x4/")]
    assert changed
    for name in changed:
        assert scaled[name] == pytest.approx(4 * plain[name.removeprefix("x4/")])
    assert all(scaled[name] == plain[name] for name in scaled if name not in changed)


def test_a_rule_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"^lr_scale: the pattern 'haed\.\*' matches no parameter of CifarResNet"):
        rates(CifarResNet(depth=8, width=4), lr_scale={"haed.*": 2.0})
