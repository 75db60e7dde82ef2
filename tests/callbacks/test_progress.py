"""The progress bar on a terminal, and the rows of finished epochs."""

import io
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import rich
from lightning.pytorch import LightningModule
from torch import nn

from lathe.callbacks.progress import ModelSummary, Progress
from lathe.trainer import Trainer


def test_lines_for_a_pipe(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(Progress(), enable_progress_bar=True).fit(tiny.Task(), tiny.Loader())
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out
    assert len(lines) == 2
    pattern = r"epoch {0}/2 \| step {1} \| [\d.]+ s \| last batch's loss [\d.]+ \| val/accuracy [\d.]+"
    assert re.fullmatch(pattern.format(1, 6), lines[0])
    assert re.fullmatch(pattern.format(2, 12), lines[1])


def test_the_loss_shown_is_the_last_one(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of the batch, which Lightning divides by the number of accumulated batches."""
    losses: list[float] = []

    class Keeps(tiny.Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().training_step(batch, batch_idx)
            losses.append(float(out["loss"].detach()))
            return out

    options = {"enable_progress_bar": True, "max_epochs": 1, "accumulate_grad_batches": 3}
    tiny.trainer(Progress(), **options).fit(Keeps(), tiny.Loader())
    assert f"last batch's loss {losses[-1]:#.4g} |" in capsys.readouterr().out


@pytest.fixture
def screen() -> Iterator[io.StringIO]:
    """A terminal of 80 columns."""
    yield io.StringIO()
    rich.reconfigure()


def bar_on(screen: io.StringIO, **options: Any) -> Progress:
    bar = Progress(refresh_rate=2, plain=False, **options)
    bar._console_kwargs = {"file": screen, "force_terminal": True, "width": 80}
    return bar


def lines_of(screen: io.StringIO) -> list[str]:
    """Return all drawn lines, without control codes."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue().replace("\r", "\n")).splitlines()


def test_a_terminal_keeps_a_row_for_each_epoch(tiny: SimpleNamespace, screen: io.StringIO) -> None:
    tiny.trainer(bar_on(screen), enable_progress_bar=True, max_epochs=3).fit(tiny.Task(), tiny.Loader())
    rows = [line for line in lines_of(screen) if line.startswith("epoch ")]
    pattern = r"epoch {}/3 \| [\d.]+ s \| last batch's loss [\d.]+ \| val/accuracy [\d.]+"
    assert all(re.fullmatch(pattern.format(epoch), row) for epoch, row in zip((1, 2, 3), rows, strict=True))
    bars = {line.split("━")[0].strip() for line in lines_of(screen) if line.startswith("Epoch ")}
    assert bars == {"Epoch 1/3", "Epoch 2/3", "Epoch 3/3"}


def test_a_bar_has_at_most_so_many_metrics(tiny: SimpleNamespace, screen: io.StringIO) -> None:
    bar = bar_on(screen, max_metrics=1)
    tiny.trainer(bar, enable_progress_bar=True, max_epochs=2).fit(tiny.Task(), tiny.Loader())
    counts = {line.count(": ") for line in lines_of(screen) if line.startswith("Epoch ")}
    assert max(counts) == 1  # of train/loss and val/accuracy


def test_plain_overrules_the_terminal(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    tiny.trainer(Progress(plain=True), enable_progress_bar=True, max_epochs=1).fit(tiny.Task(), tiny.Loader())
    assert capsys.readouterr().out.startswith("epoch 1/1 | step 6 |")


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
