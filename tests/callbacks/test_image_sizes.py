"""Small images in the first epochs: what the net sees, and what can't see them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from support.runs import SMALL, config, new_run
from torch import Tensor
from torch.nn import functional as F

import lathe.training.train
from lathe.callbacks import ImageSizes
from lathe.config.composed import check
from lathe.errors import UserError
from lathe.nets import CifarResNet
from lathe.nets.airbench import Airbench

NET = ("model=resnet20", "model.net.depth=8", "model.net.width=4")
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


@pytest.mark.parametrize(
    "words", [(), ("trainer.steps_per_call=1", "trainer.channels_last=true", "model.net.width=16")]
)
def test_the_net_sees_means_of_areas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    seen: list[tuple[bool, Tensor]] = []
    forward = CifarResNet.forward

    def seeing(self: Any, x: Tensor) -> Tensor:
        seen.append((self.training, x.detach().clone()))
        return forward(self, x)

    monkeypatch.setattr(CifarResNet, "forward", seeing)
    trained(tmp_path / "small", "trainer.max_epochs=3", *NET, *words)
    assert "image_sizes: sides of 4, 6 pixels by epoch, then of 8.\n" in capsys.readouterr().out
    small, seen[:] = list(seen), []
    trained(tmp_path / "whole", "trainer.max_epochs=3", "~callbacks.image_sizes", *NET, *words)
    small = [(training, x) for training, x in small if len(x) > 2]  # two try what the net returns
    seen = [(training, x) for training, x in seen if len(x) > 2]
    train = [x for training, x in small if training]
    assert [x.shape[-1] for x in train] == [4] * 3 + [6] * 3 + [8] * 3
    assert {x.shape[-1] for training, x in small if not training} >= {8}
    for mine, whole in zip(train, [x for training, x in seen if training], strict=True):
        assert torch.equal(mine, F.interpolate(whole, size=mine.shape[-2:], mode="area"))
    evaluated = [[x for training, x in side if not training and len(x) > 1] for side in (small, seen)]
    assert len(evaluated[0]) == len(evaluated[1]) > 0
    assert all(torch.equal(*pair) for pair in zip(*evaluated, strict=True))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model=mlp",), r"MLP takes no images of 4 x 4 pixels \(\w+\)"),
        ((*NET, "trainer.max_epochs=9", "trainer.max_steps=6"), "this run of 6 batches ends before an epoch of whole"),
        ((*NET, "trainer.max_epochs=2"), "this run of 6 batches ends before an epoch of whole images"),
    ],
)
def test_what_can_not_be_is_told(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    if "ends before" in sentence:
        with pytest.warns(UserWarning, match=sentence):
            trained(tmp_path, *words)
        return
    with pytest.raises(UserError, match=sentence):
        trained(tmp_path, *words)


def test_a_side_has_a_pixel_at_least(tmp_path: Path) -> None:
    net = Airbench(width=4, growth=1, in_channels=1, image_size=8, num_classes=10)
    with pytest.raises(RuntimeError):
        net(torch.zeros(1, 1, 1, 1))
    with pytest.raises(UserError, match="Airbench takes no images of 1 x 1 pixels"):
        trained(
            tmp_path,
            "model=airbench",
            "model.net.width=4",
            "model.net.growth=1",
            "callbacks.image_sizes.scales=[0.01]",
        )


def test_a_lightning_module_as_it_is_is_told() -> None:
    told = check(config("model=lightning", "model.net={_target_:mine.Lit}", "callbacks=[default,image_sizes]"))
    assert any("task=lightning has a LightningModule as it is: leave image_sizes out" in one for one in told)
    module = LightningModule()
    vars(module)["lathe_task"] = object()
    data = SimpleNamespace(channels=1, image_size=8)
    with pytest.raises(UserError, match="LightningModule is a LightningModule as it is"):
        ImageSizes([0.5]).setup(SimpleNamespace(datamodule=data), module, "fit")  # type: ignore[arg-type]


def test_a_whole_epoch_among_the_scales_is_one(tmp_path: Path) -> None:
    words = (*NET, "trainer.max_epochs=2", "callbacks.image_sizes.scales=[0.5,1]")  # a warning is an error
    assert trained(tmp_path, *words)["epochs"] == 2
