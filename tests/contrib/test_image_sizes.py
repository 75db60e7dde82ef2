"""Progressive resizing: the image sizes that the net gets, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import SMALL, new_run
from torch import Tensor
from torch.nn import functional as F

import lathe.training.train
from lathe.errors import UserError
from lathe.nets import CifarResNet

NET = ("model=resnet20", "model.net.depth=8", "model.net.width=16", "trainer.channels_last=true")
FIRST_SMALL = (
    *(word for word in SMALL if not word.startswith("model")),
    "data.batch_size=100",
    "trainer.limit_train_batches=3",
    "trainer.log_every_n_steps=1",
    "callbacks=[default,image_sizes]",
    "callbacks.image_sizes.scales=[0.5,0.75]",
    "test=false",
)


def trained(folder: Path, *words: str) -> Any:
    cfg = new_run(folder, *FIRST_SMALL, *words)
    return lathe.training.train.train(cfg)


def test_the_net_sees_means_of_areas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[bool, Tensor]] = []
    forward = CifarResNet.forward

    def seeing(self: Any, x: Tensor) -> Tensor:
        seen.append((self.training, x.detach().clone()))
        return forward(self, x)

    monkeypatch.setattr(CifarResNet, "forward", seeing)
    trained(tmp_path / "small", "trainer.max_epochs=3", *NET)
    assert "image_sizes: sides of 4, 6 pixels by epoch, then of 8.\n" in capsys.readouterr().out
    small, seen[:] = list(seen), []
    trained(tmp_path / "whole", "trainer.max_epochs=3", "~callbacks.image_sizes", *NET)
    small = [(training, x) for training, x in small if len(x) > 2]  # two check the net's outputs
    seen = [(training, x) for training, x in seen if len(x) > 2]
    train = [x for training, x in small if training]
    assert [x.shape[-1] for x in train] == [4] * 3 + [6] * 3 + [8] * 3
    assert {x.shape[-1] for training, x in small if not training} >= {8}
    for mine, whole in zip(train, [x for training, x in seen if training], strict=True):
        assert torch.equal(mine, F.interpolate(whole, size=mine.shape[-2:], mode="area"))
    evaluated = [[x for training, x in side if not training and len(x) > 1] for side in (small, seen)]
    assert len(evaluated[0]) == len(evaluated[1]) > 0
    assert all(torch.equal(*pair) for pair in zip(*evaluated, strict=True))


def test_a_net_of_one_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="MLP takes no images of 4 x 4 pixels"):
        trained(tmp_path, "model=mlp")
