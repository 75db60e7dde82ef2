"""channels_last: the same net in another memory format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.ranks import on_ranks
from support.runs import column, new_run, weights
from torch import nn

import lathe.training.train
from lathe.errors import ArgumentError
from lathe.nets import CifarResNet
from lathe.strategies import channels_last

RUN = (
    "model=resnet20",
    "model.net.depth=8",
    "model.net.width=16",
    "data.batch_size=16",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "precision=64-true",
    "test=false",
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return CifarResNet(depth=8, in_channels=3, num_classes=10)


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_convolutions_run_in_that_order(wanted: Any) -> None:
    plain, laid = net().eval(), net().eval()
    channels_last(laid, SingleDeviceStrategy(), wanted)
    orders = []
    for module in laid.modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
            module.register_forward_hook(
                lambda m, a, out: orders.append(out.is_contiguous(memory_format=torch.channels_last))
            )
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(laid(x), plain(x), rtol=1e-4, atol=1e-5)
    assert orders
    assert all(orders)


def test_narrow_strided_1x1_convolutions_stay_as_they_are_on_a_cpu() -> None:
    narrow = CifarResNet(depth=8, in_channels=3, num_classes=10, width=4)
    with pytest.raises(ArgumentError, match="channels_last=true is not safe for"):
        channels_last(narrow, SingleDeviceStrategy(), True)
    channels_last(narrow, SingleDeviceStrategy(), "auto")
    assert not narrow._forward_pre_hooks
    channels_last(narrow, SingleDeviceStrategy(torch.device("meta")), True)
    assert narrow._forward_pre_hooks


def _run(rank: int, cfg: dict[str, Any]) -> None:
    lathe.training.train.train(cfg)


def test_a_run_is_the_same_on_one_process_and_on_two(tmp_path: Path) -> None:
    found = []
    for name, words in {
        "first": (),
        "last": ("trainer.channels_last=true",),
        "two": ("trainer.channels_last=true", "strategy=ddp", "trainer.devices=2"),
    }.items():
        cfg = new_run(tmp_path / name, *RUN, *words)
        if name == "two":
            on_ranks(_run, cfg)
        else:
            lathe.training.train.train(cfg)
        found.append(Path(cfg["paths"]["run_dir"]))
    expected = weights(found[0])
    for run in found[1:]:
        assert column(run, "train/loss") == pytest.approx(column(found[0], "train/loss"), rel=1e-6)
        torch.testing.assert_close(weights(run), expected, rtol=1e-5, atol=1e-7)


def test_performance_fast_is_a_run_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = new_run(tmp_path, *[word for word in RUN if not word.startswith("precision")], "performance=fast")
    lathe.training.train.train(cfg)
    assert "precision=auto took " in capsys.readouterr().out
    assert column(Path(cfg["paths"]["run_dir"]), "train/loss")
