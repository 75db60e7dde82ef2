"""Sparse from the first step to the last, with the paper's exchanges, and equal after an interruption."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.net_state import assert_same
from support.tiny import save_after
from torch import nn

from lathe.callbacks import ExactResume
from lathe.compression.pruning.callback import RigL
from lathe.compression.pruning.masks import erdos_renyi_kernel

NAMES = ["0.weight", "3.weight"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 2))


def fit(tiny: SimpleNamespace, rigl: RigL, *more: Any, epochs: int = 3, **options: Any) -> tuple[Any, SimpleNamespace]:
    """Return the task, and by step its weights, masks, gradients and momenta after the method."""
    task, record = tiny.Task(net()), SimpleNamespace(masks={}, weights={}, gradients={}, momenta={})

    def note(trainer: Any, module: Any, *_: Any) -> None:
        step, weights = trainer.global_step, {name: module.net.get_parameter(name) for name in NAMES}
        record.masks[step] = {name: mask.clone() for name, mask in rigl.masks.items()}
        record.weights[step] = {name: weight.detach().clone() for name, weight in weights.items()}
        if step and weights[NAMES[0]].grad is not None:  # not after a resume
            state = trainer.optimizers[0].state
            record.gradients[step] = {name: weight.grad.clone() for name, weight in weights.items()}
            record.momenta[step] = {n: state[weight]["momentum_buffer"].clone() for n, weight in weights.items()}

    recorder = LambdaCallback(on_train_start=note, on_train_batch_end=note)
    tiny.trainer(ExactResume(0), rigl, *more, recorder, max_epochs=epochs).fit(task, tiny.Loader(), **options)
    return task, record


def test_exchanges_are_those_of_the_paper_and_keep_sparsity_and_densities(tiny: SimpleNamespace) -> None:
    """18 steps, end 0.75: exchanges after steps 4, 8 and 12, of a decreasing share."""
    rigl = RigL(sparsity=0.7, every_n_steps=4, fraction=0.5)
    _, record = fit(tiny, rigl)
    masks, densities = record.masks, erdos_renyi_kernel({"0.weight": (16, 3), "3.weight": (8, 16)}, 0.7)
    assert sorted(masks) == list(range(19))
    for step, name in itertools.product(range(19), NAMES):
        assert int(masks[step][name].sum()) == round(densities[name] * masks[step][name].numel())
        assert bool((record.weights[step][name][~masks[step][name]] == 0).all())
    assert rigl.report()["rigl/sparsity"] == pytest.approx(0.7, abs=0.01)
    changed = [s for s in range(1, 19) if any(not torch.equal(masks[s][name], masks[s - 1][name]) for name in NAMES)]
    assert changed == [4, 8]
    assert rigl.updates == 4  # plus the first masks, and an exchange of less than one weight after step 12
    grew = 0
    for step, name in itertools.product(changed, NAMES):
        before, after = masks[step - 1][name], masks[step][name]
        most = int(0.5 / 2 * (1 + math.cos(math.pi * step / 14)) * int(before.sum()))  # round(0.75 * 18) = 14
        grown, dropped = after & ~before, before & ~after
        assert int(grown.sum()) == int(dropped.sum()) <= most
        assert bool((record.weights[step][name][grown] == 0).all())
        assert bool((record.momenta[step][name][grown] == 0).all())
        gradient = record.gradients[step][name].abs()
        if grown.any():
            assert gradient[grown].min() >= gradient[~after & ~before].max()
            assert step == 8 or bool((record.weights[5][name][grown] != 0).any())  # trained immediately
        grew += int(grown.sum())
    assert grew > 5


def test_an_interruption_changes_nothing(tiny: SimpleNamespace, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sparsity": 0.7, "every_n_steps": 3, "fraction": 0.5, "growth": "random"}
    whole, first = fit(tiny, RigL(**options), save_after(11, tmp_path / "last.ckpt"))
    continued, second = fit(tiny, RigL(**options), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert_same(continued.net.state_dict(), whole.net.state_dict())
    assert_same(second.masks[18], first.masks[18])


def test_a_gradient_that_is_not_finite_changes_no_mask(tiny: SimpleNamespace) -> None:
    def overflow(trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 3:  # the fourth step
            for parameter in module.net.parameters():
                parameter.grad.fill_(float("inf"))

    breaks = LambdaCallback(on_before_optimizer_step=overflow)
    rigl = RigL(sparsity=0.7, every_n_steps=4, fraction=0.5)
    with pytest.warns(UserWarning, match="no weight was exchanged in 6 steps"):
        _, record = fit(tiny, rigl, breaks, epochs=1)
    assert_same(record.masks[4], record.masks[0])


def test_adam_keeps_second_moments_of_grown_weights(tiny: SimpleNamespace) -> None:
    class Adam(tiny.Task):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    rigl, task = RigL(sparsity=0.7, every_n_steps=5, fraction=0.5), Adam(net())
    masks, states = [], []

    def note(trainer: Any, *_: Any) -> None:
        masks.append(rigl.masks["3.weight"])
        state = trainer.optimizers[0].state[task.net[3].weight]
        states.append({name: value.clone() for name, value in state.items()})

    tiny.trainer(rigl, LambdaCallback(on_train_batch_end=note), max_epochs=2).fit(task, tiny.Loader())
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
