"""Law 2 if rounding grows: a narrow net with BatchNorm on mostly empty images has equal losses in 64-true."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import on_ranks
from support.runs import QUIET, column, new_run

import lathe.training.train
from lathe.data.synthetic import Synthetic

NARROW = (
    *("model=resnet20", "model.net.width=4", "model.net.depth=8", "optimizer.lr=0.1", "test=false", *QUIET),
    *("data=synthetic", "data.image_size=32", "data.source.train_size=320", "data.batch_size=64"),
    *("data.source.val_size=64", "data.source.test_size=64", "trainer.max_epochs=1", "trainer.log_every_n_steps=1"),
)


def train(rank: int, cfg: dict[str, Any]) -> None:
    """Train on images that are black outside a square of 6 x 6."""
    draw = Synthetic._draw

    def empty(self: Synthetic, *args: Any) -> Any:
        images, labels = draw(self, *args)
        black = np.zeros_like(images)
        black[..., 13:19, 13:19] = images[..., 13:19, 13:19]
        return black, labels

    Synthetic._draw = empty
    lathe.training.train.train(cfg)


@pytest.mark.slow
def test_two_processes_equal_one_to_nine_digits_in_64_true(tmp_path: Path) -> None:
    losses = []
    for world in (1, 2):
        several = ("strategy=ddp", "trainer.devices=2") if world == 2 else ()
        cfg = new_run(tmp_path / str(world), *NARROW, *several, "precision=64-true")
        on_ranks(train, cfg, world=world, timeout=200)
        losses.append(column(Path(cfg["paths"]["run_dir"]), "train/loss"))
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)  # in 32-true, 3.5e-6 apart at the fifth step
