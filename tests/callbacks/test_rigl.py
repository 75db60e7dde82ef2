"""Sparse from the first step to the last, with the paper's exchanges, and equal after an interruption."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.net_state import assert_same
from support.tiny import save_after
from torch import Tensor, nn

from lathe.callbacks import ExactResume
from lathe.compression.pruning.callback import RigL
from lathe.compression.pruning.masks import erdos_renyi_kernel

NAMES = ["0.weight", "3.weight"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 2))


class Recorder(Callback):
    """Records each step's gradients and masks, and weights and momentum before (`trained`) and after the method."""

    def __init__(self, rigl: RigL) -> None:
        self.rigl = rigl
        self.masks: dict[int, dict[str, Tensor]] = {}
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.gradients: dict[int, dict[str, Tensor]] = {}
        self.momenta: dict[int, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.note(trainer, pl_module)

    def note(self, trainer: Any, pl_module: Any) -> None:
        step, parameters = trainer.global_step, dict(pl_module.net.named_parameters())
        self.masks[step] = {name: mask.clone() for name, mask in self.rigl.masks.items()}
        self.weights[step] = {name: parameters[name].detach().clone() for name in NAMES}
        if step and parameters[NAMES[0]].grad is not None:  # not after a resume
            self.gradients[step] = {name: parameters[name].grad.clone() for name in NAMES}
            state = trainer.optimizers[0].state
            self.momenta[step] = {name: state[parameters[name]]["momentum_buffer"].clone() for name in NAMES}


def fit(tiny: SimpleNamespace, rigl: RigL, *more: Any, epochs: int = 3, **options: Any) -> tuple[Any, Recorder]:
    recorder, task = Recorder(rigl), tiny.Task(net())
    tiny.trainer(ExactResume(0), rigl, recorder, *more, max_epochs=epochs).fit(task, tiny.Loader(), **options)
    return task, recorder


def test_every_step_has_the_sparsity_and_the_densities(tiny: SimpleNamespace) -> None:
    rigl = RigL(sparsity=0.7, every_n_steps=2)
    _, recorder = fit(tiny, rigl)
    densities = erdos_renyi_kernel({"0.weight": (16, 3), "3.weight": (8, 16)}, 0.7)
    assert sorted(recorder.masks) == list(range(19))
    for step, masks in recorder.masks.items():
        for name, mask in masks.items():
            assert int(mask.sum()) == round(densities[name] * mask.numel())
            assert bool((recorder.weights[step][name][~mask] == 0).all())
    assert rigl.report()["rigl/sparsity"] == pytest.approx(0.7, abs=0.01)


def test_exchanges_are_those_of_the_paper(tiny: SimpleNamespace) -> None:
    """18 steps, end 0.75: exchanges after steps 4, 8 and 12, of a decreasing share."""
    rigl = RigL(sparsity=0.7, every_n_steps=4, fraction=0.5)
    _, recorder = fit(tiny, rigl)
    changed = [
        step
        for step in range(1, 19)
        if any(not torch.equal(recorder.masks[step][n], recorder.masks[step - 1][n]) for n in NAMES)
    ]
    assert changed == [4, 8]
    assert rigl.updates == 4  # plus the first masks, and an exchange of less than one weight after step 12
    grew = 0
    for step in changed:
        for name in NAMES:
            before, after = recorder.masks[step - 1][name], recorder.masks[step][name]
            moved = int(0.5 / 2 * (1 + math.cos(math.pi * step / 14)) * int(before.sum()))  # round(0.75 * 18) = 14
            grown, dropped = after & ~before, before & ~after
            assert int(grown.sum()) == int(dropped.sum()) <= moved
            assert bool((recorder.weights[step][name][grown] == 0).all())
            assert bool((recorder.momenta[step][name][grown] == 0).all())
            gradient = recorder.gradients[step][name].abs()
            if grown.any():
                assert gradient[grown].min() >= gradient[~after & ~before].max()
            grew += int(grown.sum())
    assert grew > 5
    # A grown weight is trained immediately.
    name = next(n for n in NAMES if bool((recorder.masks[4][n] & ~recorder.masks[3][n]).any()))
    grown = recorder.masks[4][name] & ~recorder.masks[3][name]
    assert bool((recorder.weights[5][name][grown] != 0).any())


def test_an_interruption_changes_nothing(tiny: SimpleNamespace, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sparsity": 0.7, "every_n_steps": 3, "fraction": 0.5, "growth": "random"}
    whole, first = fit(tiny, RigL(**options), save_after(11, tmp_path / "last.ckpt"))
    continued, second = fit(tiny, RigL(**options), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert_same(continued.net.state_dict(), whole.net.state_dict())
    assert_same(second.masks[18], first.masks[18])


def test_a_gradient_that_is_not_finite_changes_no_mask(tiny: SimpleNamespace) -> None:
    class Breaks(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 3:  # the fourth step
                for parameter in pl_module.net.parameters():
                    parameter.grad.fill_(float("inf"))

    rigl = RigL(sparsity=0.7, every_n_steps=4, fraction=0.5)
    recorder, task = Recorder(rigl), tiny.Task(net())
    with pytest.warns(UserWarning, match="no weight was exchanged in 6 steps"):
        tiny.trainer(rigl, recorder, Breaks(), max_epochs=1).fit(task, tiny.Loader())
    assert all(torch.equal(recorder.masks[4][name], recorder.masks[0][name]) for name in NAMES)


def test_adam_keeps_second_moments_of_grown_weights(tiny: SimpleNamespace) -> None:
    class Adam(tiny.Task):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    rigl, task = RigL(sparsity=0.7, every_n_steps=5, fraction=0.5), Adam(net())
    masks, states = [], []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            masks.append(rigl.masks["3.weight"])
            state = trainer.optimizers[0].state[task.net[3].weight]
            states.append({name: value.clone() for name, value in state.items()})

    tiny.trainer(rigl, Notes(), max_epochs=2).fit(task, tiny.Loader())
    grown = masks[4] & ~masks[3]  # after the fifth step
    assert bool(grown.any())
    assert bool((states[4]["exp_avg"][grown] == 0).all())
    assert bool((states[4]["exp_avg_sq"][grown] > 0).all())
    assert bool((states[4]["exp_avg"][~grown] != 0).any())


SHAPES = {"conv1": (16, 3, 3, 3), "conv2": (16, 16, 3, 3), "conv3": (64, 64, 3, 3), "head": (10, 64)}


def test_erk_is_in_proportion_to_sum_over_product() -> None:
    densities, sizes = erdos_renyi_kernel(SHAPES, 0.8), {name: math.prod(shape) for name, shape in SHAPES.items()}
    assert sum(densities[name] * size for name, size in sizes.items()) == pytest.approx(0.2 * sum(sizes.values()))
    assert densities["conv1"] == 1.0  # (16 + 3 + 3 + 3) / 432 exceeds its size
    ratio = {name: sum(shape) / sizes[name] for name, shape in SHAPES.items()}
    sparse = [name for name in SHAPES if densities[name] < 1]
    assert len(sparse) >= 2
    scale = densities[sparse[0]] / ratio[sparse[0]]
    assert all(densities[name] / ratio[name] == pytest.approx(scale) for name in sparse)
