"""The progress bar on a terminal, and the rows of finished epochs."""

import io
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import rich
from lightning.pytorch.callbacks import EarlyStopping

from lathe.callbacks.progress import Progress


def test_lines_for_a_pipe(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(Progress(), enable_progress_bar=True).fit(tiny.Task(), tiny.Loader())
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out
    assert len(lines) == 2
    pattern = r"epoch {0}/2 \| step {1} \| [\d.]+ s \| last batch's loss [\d.]+ \| val/accuracy [\d.]+"
    assert re.fullmatch(pattern.format(1, 6), lines[0])
    assert re.fullmatch(pattern.format(2, 12), lines[1])


def test_an_epoch_without_validation_has_no_metrics_of_the_one_before(
    tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_epochs": 4, "check_val_every_n_epoch": 2, "enable_progress_bar": True}
    tiny.trainer(Progress(), **options).fit(tiny.Task(), tiny.Loader())
    lines = capsys.readouterr().out.splitlines()
    assert ["val/accuracy" in line for line in lines] == [False, True, False, True]
    assert all("last batch's loss" in line for line in lines)


def test_what_a_callback_monitors_is_shown(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(tiny.Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("f1", 0.25)
            self.log("other", 0.5)

    tiny.trainer(Progress(), EarlyStopping("f1", mode="max"), enable_progress_bar=True, max_epochs=1).fit(
        Own(), tiny.Loader()
    )
    out = capsys.readouterr().out
    assert " | f1 0.2500" in out
    assert "other" not in out


@pytest.mark.parametrize("batches", [1, 3])
def test_the_loss_shown_is_the_last_one(
    batches: int, tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the batch has it, also where Lightning divides it by those of a step."""
    losses: list[float] = []

    class Keeps(tiny.Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().training_step(batch, batch_idx)
            losses.append(float(out["loss"].detach()))
            return out

    tiny.trainer(Progress(), enable_progress_bar=True, max_epochs=1, accumulate_grad_batches=batches).fit(
        Keeps(), tiny.Loader()
    )
    assert f"last batch's loss {losses[-1]:#.4g} |" in capsys.readouterr().out


def test_a_line_has_the_means_of_its_own_epoch(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    class Means(tiny.Task):
        def on_train_epoch_end(self) -> None:
            self.log("train/epoch", float(self.trainer.current_epoch + 1), prog_bar=True)

    tiny.trainer(Progress(), enable_progress_bar=True, max_epochs=3).fit(Means(), tiny.Loader())
    found = re.findall(
        r"^epoch (\d)/3 \| step (\d+) .* \| train/epoch (\d)\.000$", capsys.readouterr().out, flags=re.MULTILINE
    )
    assert found == [("1", "6", "1"), ("2", "12", "2"), ("3", "18", "3")]


@pytest.fixture
def screen() -> Iterator[io.StringIO]:
    """A terminal of 80 columns."""
    yield io.StringIO()
    rich.reconfigure()


def bar_on(screen: io.StringIO) -> Progress:
    bar = Progress(refresh_rate=2, plain=False)
    bar._console_kwargs = {"file": screen, "force_terminal": True, "width": 80}
    return bar


def lines_of(screen: io.StringIO) -> list[str]:
    """Everything that was drawn, without control codes."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue().replace("\r", "\n")).splitlines()


def test_a_terminal_keeps_a_row_for_each_epoch(tiny: SimpleNamespace, screen: io.StringIO) -> None:
    tiny.trainer(bar_on(screen), enable_progress_bar=True, max_epochs=3).fit(tiny.Task(), tiny.Loader())
    rows = [line for line in lines_of(screen) if line.startswith("epoch ")]
    pattern = r"epoch {}/3 \| [\d.]+ s \| last batch's loss [\d.]+ \| val/accuracy [\d.]+"
    assert all(re.fullmatch(pattern.format(epoch), row) for epoch, row in zip((1, 2, 3), rows, strict=True))
    bars = {line.split("━")[0].strip() for line in lines_of(screen) if line.startswith("Epoch ")}
    assert bars == {"Epoch 1/3", "Epoch 2/3", "Epoch 3/3"}


def test_bar_and_rows_fit_a_terminal_whatever_is_logged(tiny: SimpleNamespace, screen: io.StringIO) -> None:
    class Logs(tiny.Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({f"val_{name}": 0.5 for name in "abcdefghij"} | {"f1": 0.75}, prog_bar=True)
            return super().training_step(batch, batch_idx)

    tiny.trainer(bar_on(screen), EarlyStopping("f1", mode="max"), enable_progress_bar=True).fit(Logs(), tiny.Loader())
    lines = lines_of(screen)
    assert max(map(len, lines)) <= 80
    bars = [line for line in lines if line.startswith("Epoch 2/2")]
    assert max(line.count(":") for line in bars) <= 3 + 1  # of the time left
    assert "f1: 0.750" in bars[-1]  # what is monitored comes first
    assert all(line.startswith(("Epoch", "epoch")) for line in lines if line.strip())


def test_plain_overrules_the_terminal(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    tiny.trainer(Progress(plain=True), enable_progress_bar=True, max_epochs=1).fit(tiny.Task(), tiny.Loader())
    assert capsys.readouterr().out.startswith("epoch 1/1 | step 6 |")
