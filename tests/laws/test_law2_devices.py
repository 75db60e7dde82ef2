"""Law 2: devices do not change the experiment. Losses are compared by step; evaluation counts each sample once."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.ranks import on_ranks
from support.runs import QUIET, SMALL, column, new_run

import lathe.training.train

RESNET = (
    *("model=resnet20", "model.net.width=4", "model.net.depth=8", *QUIET, "trainer.max_epochs=2"),
    *("data.batch_size=100", "optimizer.lr=0.01", "data.augment.cutout=2"),
)
LISTED = ("RandomResizedCrop", "RandomFlip", "TrivialAugmentWide", "RandomErasing")
ITEMS = ",".join(f"{{_target_: lathe.data.{name}}}" for name in LISTED)
# overrides, and the relative difference of losses
CASES = {
    "accumulated": (
        (*SMALL, "data.eval_batch_size=33", "trainer.gradient_clip_val=0.5", "trainer.accumulate_grad_batches=2"),
        1e-5,
    ),
    "batchnorm": (RESNET, 1e-5),  # its norm layers see the global batch
    "mixed": ((*SMALL, "data.augment.mixup=0.4", "data.augment.cutmix=0.4"), 1e-5),
    "listed": ((*SMALL, f"data.augment=[{ITEMS},{{_target_: lathe.data.Mixup, alpha: 0.4}}]"), 1e-5),
}


def _train(rank: int, cfg: dict[str, Any]) -> None:
    lathe.training.train.train(cfg)


def _losses(folder: Path, *arguments: str, world: int = 1) -> tuple[list[float], dict[str, float]]:
    cfg = new_run(folder, *arguments, "trainer.log_every_n_steps=1", f"trainer.devices={world}")
    on_ranks(_train, cfg, world=world, timeout=120)
    directory = Path(cfg["paths"]["run_dir"])
    return column(directory, "train/loss"), json.loads((directory / "result.json").read_text())


@pytest.mark.parametrize(
    "name", [name if name == "accumulated" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_two_processes_have_the_losses_of_one(tmp_path: Path, name: str) -> None:
    arguments, tolerance = CASES[name]
    one, result_one = _losses(tmp_path / "one", *arguments)
    two, result_two = _losses(tmp_path / "two", *arguments, "strategy=ddp", world=2)
    assert len(one) == len(two) > 10
    assert two == pytest.approx(one, rel=tolerance)
    for metric in ("val/loss", "test/loss"):
        assert result_two[metric] == pytest.approx(result_one[metric], rel=10 * tolerance)
    # fractions of all samples: equal, unless one was counted twice or left out
    for metric in ("val/accuracy", "test/accuracy"):
        assert result_two[metric] == pytest.approx(result_one[metric], abs=1e-7)


@pytest.mark.slow
def test_another_seed_is_another_experiment(tmp_path: Path) -> None:
    """A control: the comparisons above can fail."""
    one, _ = _losses(tmp_path / "one", *SMALL, "seed=0")
    other, _ = _losses(tmp_path / "other", *SMALL, "seed=1")
    assert one != pytest.approx(other, rel=1e-3)
