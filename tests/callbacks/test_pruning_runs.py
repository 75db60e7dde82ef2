"""Masks survive interruptions and do not depend on the number of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.net_state import assert_same, copy_of
from support.prune_fit import WEIGHTS, Loader, Task, Watch, fit
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from support.tiny import save_after
from torch import Tensor, nn

from lathe.callbacks.ema import EMA
from lathe.compression.pruning.callback import Lottery, Prune, RigL
from lathe.nets import ViT


@pytest.mark.filterwarnings("ignore:.*training ended at step.*")  # the stop simulates a kill
@pytest.mark.parametrize("criterion", ["taylor", "wanda"])
def test_resume_is_bit_for_bit(tmp_path: Path, criterion: str) -> None:
    def run(resume: str | None, steps: int) -> tuple[dict[str, Tensor], Prune]:
        prune = Prune(0.6, criterion=criterion, start=0.1, end=0.75, every_n_steps=4, batches=3)
        (tmp_path / str(steps)).mkdir(exist_ok=True)

        def stop(trainer: Any, *_: Any) -> None:  # the schedule's steps are shares of the run's intended length
            trainer.should_stop = trainer.global_step >= steps

        stops = LambdaCallback(on_train_batch_end=stop)
        task = fit(prune, EMA(decay=0.5), Watch(prune, tmp_path / str(steps), steps), stops, resume=resume)
        return copy_of(task.net), prune

    expected, whole = run(None, 24)
    run(None, 11)
    resumed, again = run(f"{tmp_path}/11/step=11.ckpt", 24)
    assert_same(resumed, expected)
    assert_same(again.masks, whole.masks)
    assert sum(int((resumed[name] == 0).sum()) for name in whole.masks) == round(0.6 * WEIGHTS)
    assert again.updates == whole.updates > 3


def test_a_run_that_goes_on_from_a_dense_checkpoint_is_pruned_at_once(tmp_path: Path) -> None:
    fit(save_after(18, tmp_path / "dense.ckpt"))
    prune = Prune(0.5, start=0.1, end=0.6)
    watch = Watch(prune)
    fit(prune, watch, resume=str(tmp_path / "dense.ckpt"))
    assert watch.zeros == dict.fromkeys(range(19, 25), 60)


# -- processes


SOON: dict[str, Any] = {"start": 0.1, "end": 0.75, "every_n_steps": 4, "batches": 2}
METHODS = {
    "lottery": lambda: Lottery(0.6, rounds=3, rewind=2),
    "rigl": lambda: RigL(0.6, every_n_steps=3, fraction=0.5),
}


def on_a_rank(rank: int, folder: str, criterion: str, strategy: str, resume: str | None) -> Any:
    from lathe.strategies import DDP
    from lathe.strategies.fsdp import FSDP

    prune: Any = METHODS.get(criterion, lambda: Prune(0.6, criterion=criterion, **SOON))()
    watch = Watch(prune, Path(folder), 11)
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Identity(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(0)
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    made: Any = {"ddp": DDP, "fsdp": lambda: FSDP(min_params=10), "auto": lambda: "auto"}[strategy]()
    fit(prune, EMA(decay=0.5), watch, task=Task(net), rank=rank, strategy=made, resume=resume)
    return watch.seen[24], prune.masks, watch.zeros


def twice_on_a_rank(rank: int, folder: str, criterion: str, strategy: str) -> list[Any]:
    """An uninterrupted run, and one that resumes from its checkpoint."""
    whole = on_a_rank(rank, f"{folder}/two", criterion, strategy, None)
    return [whole, on_a_rank(rank, f"{folder}/again", criterion, strategy, f"{folder}/two/step=11.ckpt")]


@pytest.mark.parametrize(
    ("strategy", "criterion"),
    [
        ("fsdp", "taylor"),
        pytest.param("fsdp", "wanda", marks=pytest.mark.slow),
        pytest.param("ddp", "rigl", marks=pytest.mark.slow),
        pytest.param("fsdp", "lottery", marks=pytest.mark.slow),
    ],
)
def test_two_processes_hold_the_masks_of_one_and_resume(tmp_path: Path, strategy: str, criterion: str) -> None:
    alone, masks, zeros = on_a_rank(0, str(tmp_path), criterion, "auto", None)
    (tmp_path / "two").mkdir()
    (tmp_path / "again").mkdir()
    first, again = zip(*on_ranks(twice_on_a_rank, str(tmp_path), criterion, strategy), strict=True)
    for weights, own, counts in first:
        assert counts == zeros
        assert_same(own, masks)
        for name in alone:
            torch.testing.assert_close(weights[name], alone[name], rtol=1e-4, atol=1e-5)
    for (weights, own, counts), (resumed, own_resumed, rest) in zip(first, again, strict=True):
        assert_same(resumed, weights)
        assert_same(own_resumed, own)
        assert rest == {step: zero for step, zero in counts.items() if step > 11}
    saved = torch.load(tmp_path / "two" / "step=11.ckpt", weights_only=True)
    (state,) = [value for key, value in saved["callbacks"].items() if key.startswith(("Prune", "Lottery", "RigL"))]
    for name, mask in state["masks"].items():
        assert mask.shape == masks[name].shape
        assert (saved["state_dict"][name][~mask] == 0).all()


class Images(Loader):
    """The same batches as squares of 4x4 pixels, whole on every process."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.batches = [(torch.randn(8, 1, 4, 4, generator=generator), y) for _, y in self.batches]


def cut_layers(rank: int, criterion: str, devices: int) -> Any:
    from lathe.strategies.tensor import TensorParallel

    torch.manual_seed(0)
    task = Task(ViT(width=16, depth=2, heads=2, patch_size=2, channels=1, image_size=4, num_classes=3))
    prune = Prune(0.6, criterion=criterion, **SOON)
    made: Any = TensorParallel(tensor=2) if devices == 2 else "auto"
    trainer = quiet_trainer(prune, EMA(decay=0.5), devices=devices, strategy=made, max_epochs=4)
    trainer.fit(task, Images(), Images())
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in task.net.named_parameters()}
    return {name: weight.detach() for name, weight in weights.items()}, prune.masks


@pytest.mark.slow
def test_layers_that_processes_share_have_the_masks_of_one() -> None:
    alone, masks = cut_layers(0, "wanda", 1)
    for weights, own in on_ranks(cut_layers, "wanda", 2, timeout=120):
        assert sum(int((~mask).sum()) for mask in own.values()) == round(
            0.6 * sum(mask.numel() for mask in masks.values())
        )
        assert_same(own, masks)
        # The gradient of the keys' biases is zero up to rounding, which AdamW amplifies.
        for name in [name for name in alone if not name.endswith("k.bias")]:
            torch.testing.assert_close(weights[name], alone[name], rtol=1e-3, atol=1e-4)
        assert all((weights[name][~own[name]] == 0).all() for name in own)
