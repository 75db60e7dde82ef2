"""Masked weights are exactly zero: in the net, checkpoints and the average, on every process."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.net_state import Saves
from support.tiny import save_after
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lathe.callbacks.ema import EMA
from lathe.compression.pruning.callback import Masking, Prune, PruneStructured
from lathe.errors import UserError
from lathe.strategies import precision_plugin


class At(Masking):
    """Masks that alternate at given optimizer steps."""

    name = "at"

    def __init__(self, *steps: int, **options: Any) -> None:
        super().__init__(**options)
        self.steps = steps
        self.called: list[int] = []

    def on_step(self, trainer: Any, pl_module: Any, step: int) -> None:
        self.called.append(step)
        if step in self.steps:
            first = self.steps.index(step) % 2
            masks = {name: torch.arange(p.numel()).reshape(p.shape) % 2 == first for name, p in self.parameters.items()}
            self.set_masks(masks)


class Watch(Callback):
    """Records the weight of the first layer after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.weights[trainer.global_step] = pl_module.net[0].weight.detach().clone()


EVEN = torch.arange(12).reshape(4, 3) % 2 == 0


def test_masked_weights_stay_zero_and_the_others_learn(tiny: SimpleNamespace) -> None:
    masking, watch, task = At(5), Watch(), tiny.Task()
    tiny.trainer(masking, watch).fit(task, tiny.Loader())
    assert masking.called == list(range(13))
    for step, weight in watch.weights.items():
        assert bool((weight[~EVEN] == 0).all()) == (step >= 5)
        assert (weight[EVEN] != 0).all()
    assert not torch.equal(watch.weights[11][EVEN], watch.weights[12][EVEN])
    assert not torch.signbit(watch.weights[12][~EVEN]).any()
    assert list(masking.masks) == ["0.weight"]  # not the norm, the biases or the head
    assert (task.net[2].weight != 0).all()
    assert masking.report() == {"at/sparsity": 0.5, "at/sparsity_net": 6 / (12 + 4 + 8 + 8 + 2)}


def test_steps_that_a_scaler_skips_leave_masks_and_schedule_alone(tiny: SimpleNamespace) -> None:
    masking, watch = At(5), Watch()
    options = precision_plugin("16-mixed", "cpu", init_scale=2.0**18)
    trainer = tiny.trainer(masking, watch, limit_val_batches=0, **options)
    trainer.fit(tiny.Task(), tiny.Loader())
    skipped = [step for step in range(2, 13) if torch.equal(watch.weights[step], watch.weights[step - 1])]
    assert skipped, "or the test shows nothing"
    assert len(skipped) < 8
    assert masking.called == list(range(13))
    assert (watch.weights[12][~EVEN] == 0).all()
    assert (watch.weights[12][EVEN] != 0).all()


def test_the_average_is_zero_where_the_weights_are(tiny: SimpleNamespace, tmp_path: Path) -> None:
    ema, task = EMA(decay=0.9, warmup=False), tiny.Task()
    tiny.trainer(At(5), ema, Saves(tmp_path)).fit(task, tiny.Loader())
    for step in (4, 5, 12):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        shown, raw = saved["state_dict"]["0.weight"], saved["ema"]["raw"]["0.weight"]
        for weight in (shown, raw):
            assert bool((weight[~EVEN] == 0).all()) == (step >= 5)
        assert not torch.equal(shown[EVEN], raw[EVEN])
    assert (task.net[0].weight[~EVEN] == 0).all()


# The saving callback precedes the deciding one, as a user's checkpoint callback might.
def test_a_checkpoint_between_a_step_and_its_decision_loses_nothing(tiny: SimpleNamespace, tmp_path: Path) -> None:
    whole, parts = tiny.Task(), tiny.Task()
    tiny.trainer(save_after(5, tmp_path / "step=5.ckpt"), At(5)).fit(whole, tiny.Loader())
    tiny.trainer(At(5)).fit(parts, tiny.Loader(), ckpt_path=str(tmp_path / "step=5.ckpt"))
    assert torch.equal(parts.net[0].weight, whole.net[0].weight)
    assert (parts.net[0].weight[~EVEN] == 0).all()


LITTLE = {
    "weight_norm": ([weight_norm(nn.Conv1d(4, 8, 3)), nn.Linear(6, 6), nn.Linear(6, 2)], 36 / (8 + 96 + 36 + 12), "1"),
    "attention": ([nn.MultiheadAttention(8, 2), nn.Linear(8, 2)], 64 / (192 + 64 + 16), "0.out_proj"),
}


@pytest.mark.parametrize(("method", "kind"), [(Prune, "weight_norm"), (PruneStructured, "attention")])
def test_a_method_that_masks_less_than_half_of_the_weights_warns(tiny: SimpleNamespace, method: Any, kind: str) -> None:
    layers, share, masked = LITTLE[kind]

    def setup(**options: Any) -> None:
        method(**options).setup(SimpleNamespace(callbacks=[]), tiny.Task(nn.Sequential(*layers)), "fit")

    with pytest.warns(UserWarning, match=rf"^compression\.{method.name} masks only {share:.1%} of the weights: 0\."):
        setup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setup(layers=[masked])  # all that was asked for


def test_a_checkpoint_of_other_layers_is_refused(tiny: SimpleNamespace, tmp_path: Path) -> None:
    tiny.trainer(At(2), save_after(3, tmp_path / "step=3.ckpt")).fit(tiny.Task(), tiny.Loader())
    trainer = tiny.trainer(At(2, exclude=["0"], head=True))
    with pytest.raises(UserError, match=r"compression\.at: the checkpoint masks 0\.weight"):
        trainer.fit(tiny.Task(), tiny.Loader(), ckpt_path=str(tmp_path / "step=3.ckpt"))
