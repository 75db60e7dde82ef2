"""The average of sharded weights, and its checkpoints in both directions, equal those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from support import prune_fit
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from support.tiny import save_after
from torch import Tensor, nn

from lathe.callbacks import EMA
from lathe.errors import UserError
from lathe.trainer import Trainer


class Task(prune_fit.Task):
    """Every process sees the same batches, so that steps do not depend on the number of processes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))  # shards of 3 and 2 rows

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class Saves(Callback):
    """Saves a checkpoint inside validation, when the net holds the average."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *a: Any
    ) -> None:
        if batch_idx == 0:
            trainer.save_checkpoint(f"{self.folder}/inside{trainer.global_step}.ckpt")


def fit(folder: str, strategy: Any = "auto", resume: str | None = None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the net's weights after fit, and the shapes of this rank's shards of the average."""
    Path(folder).mkdir(exist_ok=True)
    ema, task, shards = EMA(decay=0.5, warmup=False), Task(), list[Tensor]()

    def copy_shards(*_: Any) -> None:
        shards[:] = [average.clone() for average in ema._average.tensors]

    devices = 1 if strategy == "auto" else 2
    looks = LambdaCallback(on_train_epoch_end=copy_shards)
    options: dict[str, Any] = {"devices": devices, "strategy": strategy, "max_epochs": 2, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(looks, ema, save_after(4, Path(folder) / "middle.ckpt"), Saves(folder), **options)
    trainer.fit(task, prune_fit.Loader(), prune_fit.Loader(), ckpt_path=resume, weights_only=True)
    state = task.net.state_dict()
    return {n: value.full_tensor() if hasattr(value, "full_tensor") else value for n, value in state.items()}, shards


def fit_sharded(rank: int, folder: str, checkpoint: str, resume: str | None) -> Any:
    from lathe.strategies.fsdp import FSDP

    return fit(folder, FSDP(min_params=10, checkpoint=checkpoint), resume)


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


def test_two_shards_average_and_save_what_one_process_does(tmp_path: Path) -> None:
    whole, _ = fit(str(tmp_path / "one"))
    ranks = on_ranks(fit_sharded, str(tmp_path / "two"), "full", None)
    for shown, _ in ranks:
        assert_close(shown, whole)
    sizes = [[tuple(part.shape) for part in held if part.dim() == 2] for _, held in ranks]
    assert sizes == [[(3, 4), (2, 5)], [(2, 4), (1, 5)]]  # each holds its rows only
    for name in ("middle", "inside6"):
        one, two = (torch.load(tmp_path / folder / f"{name}.ckpt", weights_only=True) for folder in ("one", "two"))
        assert all(type(tensor) is Tensor for tensor in two["state_dict"].values())
        assert_close(two["state_dict"], one["state_dict"])
        assert_close(two["ema"]["raw"], one["ema"]["raw"])
        assert any(not torch.equal(two["ema"]["raw"][key], two["state_dict"][key]) for key in two["ema"]["raw"])
    # A run resumes under the other strategy, from either's checkpoint.
    there, _ = fit(str(tmp_path / "three"), resume=str(tmp_path / "two" / "middle.ckpt"))
    assert_close(there, whole)


@pytest.mark.slow
def test_a_checkpoint_in_parts_resumes_bit_for_bit(tmp_path: Path) -> None:
    first = on_ranks(fit_sharded, str(tmp_path / "a"), "sharded", None)
    again = on_ranks(fit_sharded, str(tmp_path / "b"), "sharded", str(tmp_path / "a" / "middle.ckpt"))
    for (one, held), (other, held_too) in zip(first, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(torch.equal(a, b) for a, b in zip(held, held_too, strict=True))


def test_parts_of_deepspeed_stage_3_are_refused() -> None:
    task = Task()
    task.net[0].weight.ds_id = 1
    with pytest.raises(UserError, match=r"callbacks\.ema cannot average weights that DeepSpeed keeps in parts"):
        EMA().on_fit_start(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), task)
