"""The table of layers."""

import pytest
from lightning.pytorch import LightningModule
from torch import nn

from lathe.callbacks.model_summary import ModelSummary
from lathe.trainer import Trainer


class Task(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False), nn.ReLU())
        self.net[1].requires_grad_(False)
        self.meters = nn.ModuleDict({"val": nn.Identity()})  # without parameters, as torchmetrics are


def test_counts_and_no_figure_that_was_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    ModelSummary(max_depth=2).setup(trainer, Task(), "fit")
    text = capsys.readouterr().out
    assert "24 parameters, 16 of them trainable" in text
    assert "net.0" in text
    assert "FLOPs" not in text
    assert "net.1" in text
    assert "net.2" not in text
    assert "│ meters" not in text
