"""Any optimizer class by its `_target_`, as Lightning users write it: it steps and resumes by Lathe's rules for groups,
or costs one sentence before training."""

import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_object
from support.interruptions import Interrupted, Interruption, interruption, same
from support.runs import SMALL, config, new_run
from torch import nn
from torch.optim import Optimizer

import lathe.training.train
from lathe.config.composed import check
from lathe.errors import UserError, refuse, under
from lathe.optim.build import factory_of
from lathe.runs.build import make_task

__all__ = ["interruption"]  # a fixture
TORCHS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
)
OFTEN = ("callbacks.checkpoint.every_n_train_steps=5", "callbacks.throughput=null", "test=false")
REFUSED = {
    "LBFGS": "optimizer._target_=LBFGS computes the loss several times in a step, and a batch is counted once",
    "Muon": "optimizer._target_=Muon refused its defaults (Muon only supports 2D parameters",
    "SparseAdam": "optimizer._target_=SparseAdam refused its defaults (SparseAdam does not support dense gradients",
}


def with_optimizer(target: str, **keys: Any) -> dict[str, Any]:
    cfg = config("model=mlp", "model.net.width=4", "model.net.depth=1")
    cfg["optimizer"] = {"_target_": target, "_partial_": True, **keys}
    return cfg


def steps(net: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        net(x).logsumexp(1).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", TORCHS)
def test_each_of_torchs_classes_steps_and_resumes_or_is_refused(name: str) -> None:
    cfg = with_optimizer(f"torch.optim.{name}", lr=0.01)
    torch.manual_seed(0)
    if name in REFUSED:
        with pytest.raises(UserError) as caught, under("optimizer"):
            factory_of(get_object(f"torch.optim.{name}"))(make_task(cfg, train=False).net)
        assert str(caught.value).startswith(REFUSED[name])
        assert "\n" not in str(caught.value)
        return
    refuse(check(cfg))
    task = make_task(cfg)
    start = {key: value.clone() for key, value in task.net.state_dict().items()}
    optimizer = task._make_optimizer(task.net)
    decays = "weight_decay" in optimizer.defaults
    assert [group["name"] for group in optimizer.param_groups] == (["decay", "no_decay"] if decays else ["all"])
    if decays:
        assert [g["weight_decay"] for g in optimizer.param_groups] == [optimizer.defaults["weight_decay"], 0]
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    steps(task.net, optimizer, 0, 3)
    assert all(not torch.equal(value, start[key]) for key, value in task.net.state_dict().items())
    file = io.BytesIO()
    torch.save({"net": task.net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    steps(task.net, optimizer, 3, 6)

    again = make_task(cfg)
    resumed = again._make_optimizer(again.net)
    again.net.load_state_dict(saved["net"])
    resumed.load_state_dict(saved["optimizer"])
    steps(again.net, resumed, 3, 6)
    for key, value in task.net.state_dict().items():
        assert torch.equal(value, again.net.state_dict()[key]), key


@pytest.mark.parametrize(
    "name", ["Adafactor", "Adagrad", "Rprop"]
)  # a file of many pieces; state before a step; no decay
def test_a_run_that_is_killed_goes_on_bit_equal(name: str, tmp_path: Any, interruption: Interruption) -> None:
    left = []
    for hook in ("", "on_train_batch_start"):
        cfg = new_run(tmp_path / (hook or "alone"), *SMALL, *OFTEN)
        cfg["optimizer"] = {"_target_": f"torch.optim.{name}", "_partial_": True, "lr": 0.01}
        interruption.hook, interruption.step = hook, 33
        if hook:
            with pytest.raises(Interrupted):
                lathe.training.train.train(cfg)
            interruption.hook = ""
        lathe.training.train.train(cfg)
        left.append(Path(cfg["paths"]["run_dir"]))
    same(*left)


class Mine(torch.optim.SGD):
    """A class of the user's own, which hands its options on."""

    def __init__(self, params: Any, **options: Any) -> None:
        assert options.get("lr", 1) < 10, "lr is too large for me"
        super().__init__(params, **options)


class Rateless(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"speed": 1.0})


class Counted(torch.optim.SGD):
    def __init__(self, params: Any, cycle: int) -> None:
        super().__init__(params, lr=0.1)


HERE = "test_classes"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def test_rules_and_options_of_a_users_own_class() -> None:
    task = make_task(with_optimizer(f"{HERE}.Mine", lr=0.2, weight_decay=0.1, momentum=0.5, no_decay=["head.*"]))
    optimizer = task._make_optimizer(task.net)
    assert type(optimizer).__name__ == "Mine"
    shown = [(g["name"], g["weight_decay"], g["lr"], g["momentum"]) for g in optimizer.param_groups]
    assert shown == [("decay", 0.1, 0.2, 0.5), ("no_decay", 0.0, 0.2, 0.5)]
    assert len(optimizer.param_groups[1]["params"]) == 2
    scaled = make_task(
        with_optimizer("torch.optim.Adam", lr=0.1, scale_lr="linear", reference_batch_size=32, batch_size=1)
    )
    assert scaled._make_optimizer(scaled.net).param_groups[0]["lr"] == pytest.approx(0.2)  # a batch of 64


@pytest.mark.parametrize(
    ("target", "keys", "sentence"),
    [
        (
            "torch.nn.Linear",
            {"lr": 1.0},
            "optimizer._target_=torch.nn.modules.linear.Linear: expected the class of an op",
        ),
        ("torch.optim.RAdam", {"betaz": [0.9, 0.9]}, "optimizer.betaz: RAdam takes no such option; "),
        ("torch.optim.RAdam", {"betas": [0.9, 1.5]}, "optimizer._target_=RAdam refused betas=(0.9, 1.5) (Invalid beta"),
        (
            "torch.optim.Rprop",
            {"weight_decay": 0.1},
            "optimizer.weight_decay is not an option of Rprop: set weight_decay",
        ),
        ("torch.optim.RAdam", {"lr": -1.0}, "optimizer.lr=-1.0: expected a number above 0"),
        ("torch.optim.RAdam", {"scale_lr": "sqrt", "batch_size": 4}, "optimizer.scale_lr=sqrt needs lr, the rate at "),
        (f"{HERE}.Mine", {"lr": 11.0}, "optimizer._target_=Mine refused its defaults (AssertionError: lr is too large"),
        (f"{HERE}.Rateless", {}, "optimizer._target_=Rateless keeps no lr in its groups"),
        (f"{HERE}.Counted", {}, "optimizer.cycle: Counted needs a value for it; add one."),
    ],
)
def test_what_cant_work_is_one_sentence_before_training(target: str, keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make_task(with_optimizer(target, **keys))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_known_class_is_held_by_its_table_at_launch() -> None:
    (sentence,) = check(with_optimizer("torch.optim.RAdam", lr=0.1, betas=[0.9]))
    assert sentence.startswith("optimizer.betas=[0.9]: expected a list of 2")
    assert check(with_optimizer("torch.optim.RAdam", lr=0.1, kind=None))[0].startswith(
        "optimizer.kind: torch.optim.RAdam"
    )


def test_a_class_from_python() -> None:
    net = nn.Linear(2, 2)
    optimizer = factory_of(torch.optim.RAdam)(net)
    assert [group["name"] for group in optimizer.param_groups] == ["decay", "no_decay"]
    assert optimizer.param_groups[0]["lr"] == 0.001
