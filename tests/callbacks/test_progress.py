"""A cheap bar on a terminal, readable lines elsewhere."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import rich
from lightning.pytorch.callbacks import EarlyStopping

from lathe.callbacks.progress import Progress
from lathe.callbacks.throughput import Throughput


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_for_a_pipe(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(Progress(), enable_progress_bar=True).fit(tiny.Task(), tiny.Loader())
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out
    assert len(lines) == 2
    pattern = r"epoch {0}/2 \| step {1} \| [\d.]+ it/s \| loss of the last batch [\d.]+ \| val/accuracy [\d.]+"
    assert re.fullmatch(pattern.format(1, 6), lines[0])
    assert re.fullmatch(pattern.format(2, 12), lines[1])


def test_a_line_says_what_its_epoch_took(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    throughput = Throughput()
    tiny.trainer(Progress(), throughput, enable_progress_bar=True).fit(tiny.Task(), tiny.Loader())
    lines = capsys.readouterr().out.splitlines()
    told = [re.search(r" \| epoch_s (\S+) \| resident_gib ([\d.]+)$", line) for line in lines]
    assert [line and line[1] for line in told] == [f"{seconds:.4g}" for seconds in throughput._epochs.whole]
    peak = throughput.summary()["peak_resident_bytes"] / 2**30
    assert [line and float(line[2]) for line in told] == pytest.approx([peak] * 2, rel=0.1)


def test_an_epoch_that_was_cut_has_not_the_seconds_of_another(
    tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.trainer(Progress(), Throughput(), enable_progress_bar=True, max_steps=8).fit(tiny.Task(), tiny.Loader())
    assert ["epoch_s" in line for line in capsys.readouterr().out.splitlines()] == [True, False]


@pytest.mark.parametrize("name", ["val_acc", "valid/acc", "validation_acc"])
def test_a_modules_own_names_of_validation(
    name: str, tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    class Own(tiny.Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log(name, 0.25)

    tiny.trainer(Progress(), enable_progress_bar=True, max_epochs=1).fit(Own(), tiny.Loader())
    assert f" | {name} 0.25" in capsys.readouterr().out


def test_an_epoch_without_validation_has_no_metrics_of_the_one_before(
    tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_epochs": 4, "check_val_every_n_epoch": 2, "enable_progress_bar": True}
    tiny.trainer(Progress(), **options).fit(tiny.Task(), tiny.Loader())
    lines = capsys.readouterr().out.splitlines()
    assert ["val/accuracy" in line for line in lines] == [False, True, False, True]
    assert all("loss of the last batch" in line for line in lines)


def test_what_a_callback_monitors_is_shown(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(tiny.Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("f1", 0.25)
            self.log("other", 0.5)

    tiny.trainer(Progress(), EarlyStopping("f1", mode="max"), enable_progress_bar=True, max_epochs=1).fit(
        Own(), tiny.Loader()
    )
    out = capsys.readouterr().out
    assert " | f1 0.25" in out
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
    assert f"loss of the last batch {losses[-1]:.4g} |" in capsys.readouterr().out


def test_a_loss_that_the_module_logs_by_that_name_is_the_one_shown(
    tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    class Logs(tiny.Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train/loss", 7.0 + batch_idx, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    tiny.trainer(Progress(), enable_progress_bar=True, max_epochs=1).fit(Logs(), tiny.Loader())
    assert "train/loss 9.5 |" in capsys.readouterr().out


def test_a_line_has_the_means_of_its_own_epoch(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    class Means(tiny.Task):
        def on_train_epoch_end(self) -> None:
            self.log("train/epoch", float(self.trainer.current_epoch + 1), prog_bar=True)

    tiny.trainer(Progress(), enable_progress_bar=True, max_epochs=3).fit(Means(), tiny.Loader())
    found = re.findall(
        r"^epoch (\d)/3 \| step (\d+) .* \| train/epoch (\d)$", capsys.readouterr().out, flags=re.MULTILINE
    )
    assert found == [("1", "6", "1"), ("2", "12", "2"), ("3", "18", "3")]


def test_the_line_of_an_epoch_after_which_the_run_ends_badly_is_printed(
    tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    class Breaks(tiny.Task):
        def on_train_epoch_end(self) -> None:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        tiny.trainer(Progress(), enable_progress_bar=True).fit(Breaks(), tiny.Loader())
    assert capsys.readouterr().out.count("epoch 1/2 | step 6") == 1


def test_a_bar_for_a_terminal_reaches_its_end(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    rich.reconfigure(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(
        "lathe.callbacks.progress.perf_counter", lambda: 1.0
    )  # no draw is ever due again after the first
    bar, draws = Progress(refresh_rate=2), []
    bar._console_kwargs = {"file": screen, "force_terminal": True, "width": 120}
    update = bar._update
    monkeypatch.setattr(bar, "_update", lambda *args, **kwargs: (draws.append(args), update(*args, **kwargs)))
    try:
        tiny.trainer(bar, enable_progress_bar=True, max_epochs=20, limit_val_batches=0).fit(
            tiny.Task(), tiny.Loader(50)
        )
    finally:
        rich.reconfigure()
    text = screen.getvalue()
    assert "\x1b" in text
    assert "50/50" in text
    assert "train/loss" in text
    # 1000 batches: the first, and the end of each epoch.
    assert len(draws) == 1 + 20


def test_plain_overrules_the_terminal(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    tiny.trainer(Progress(plain=True), enable_progress_bar=True, max_epochs=1).fit(tiny.Task(), tiny.Loader())
    assert capsys.readouterr().out.startswith("epoch 1/1 | step 6 |")
