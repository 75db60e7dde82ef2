"""Optimizer classes by `_target_` step and resume with Lathe's group rules, or are refused at once."""

import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_object
from support.interruptions import Interruption, interruption, same, train_through
from support.runs import SMALL, config, new_run
from torch import nn
from torch.optim import Optimizer

from lathe.config.validate import check
from lathe.errors import UserError, refuse, under
from lathe.optim.build import factory_of
from lathe.runs.build import make_task
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture
TORCHS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and name not in ("Optimizer", "SparseAdam")
)
OFTEN = ("callbacks.checkpoint.every_n_train_steps=5", "callbacks.throughput=null", "test=false")
REFUSED = {
    "LBFGS": "optimizer._target_=LBFGS computes the loss several times in a step",
    "Muon": "optimizer._target_=Muon refused its defaults (ValueError: Muon only supports 2D parameters",
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


def test_an_interrupted_run_continues_bit_equal(tmp_path: Path, interruption: Interruption) -> None:
    """With Adagrad, which has a state before its first step."""
    alone, cut = (new_run(tmp_path / name, *SMALL, *OFTEN) for name in ("alone", "cut"))
    for cfg in (alone, cut):
        cfg["optimizer"] = {"_target_": "torch.optim.Adagrad", "_partial_": True, "lr": 0.01}
    train(alone)
    resumed = train_through(cut, [("on_train_batch_start", 33)], interruption)
    assert not interruption.hook  # it was interrupted
    same(resumed, Path(alone["paths"]["run_dir"]))


class Mine(torch.optim.SGD):
    """A user's class, which passes its options through."""

    def __init__(self, params: Any, **options: Any) -> None:
        assert options.get("lr", 1) < 10, "lr is too large for me"
        super().__init__(params, **options)


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
        with_optimizer("torch.optim.Adam", lr=0.1, scale_lr="linear", reference_batch_size=32, batch_size=64)
    )
    assert scaled._make_optimizer(scaled.net).param_groups[0]["lr"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("target", "keys", "words"),
    [
        ("torch.nn.Linear", {"lr": 1.0}, "expected the class of an op"),
        ("torch.optim.AdamW", {"betas": [0.9]}, r"optimizer\._target_=AdamW refused "),
        ("torch.optim.RAdam", {"betaz": [0.9, 0.9]}, r"optimizer\._target_=RAdam refused betaz=.*'betaz'"),
        (f"{HERE}.Mine", {"lr": 11.0}, "AssertionError: lr is too large"),
    ],
)
def test_classes_and_options_that_cant_work_are_refused_before_training(
    target: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        make_task(with_optimizer(target, **keys))
