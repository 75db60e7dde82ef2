"""The learning-rate range test: the rates it sets, the rate it suggests, and that it leaves no run."""

import csv
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.commands import check, run
from support.runs import SMALL, config

from lathe.verbs import lr_find as verb

Cli = Callable[..., tuple[int, str]]


def found(folder: Path, *words: str) -> dict[str, Any]:
    cfg = config(*SMALL, *words, f"find.output={folder}", name="lr_find")
    told = verb.lr_find(cfg)
    assert told is not None
    return told


def test_the_rates_rise_by_equal_ratios_and_the_losses_say_which_train(tmp_path: Path) -> None:
    told = found(tmp_path / "out", "find.steps=120")
    with open(tmp_path / "out" / "lr_find.csv", newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert rows[0]["lr"] == 1e-6
    ratios = {round(b["lr"] / a["lr"], 9) for a, b in pairwise(rows)}
    assert ratios == {round(1e7 ** (1 / 119), 9)}
    assert rows[0]["loss"] == pytest.approx(math.log(10), rel=0.1)  # ten classes, untrained
    assert rows[0]["smoothed"] == pytest.approx(rows[0]["loss"])
    assert 0.01 < told["steepest"] < told["lowest"] < told["diverged"] <= 10
    kept = json.loads((tmp_path / "out" / "lr_find.json").read_text())
    assert kept == {key: told[key] for key in ("suggestion", "steepest", "lowest", "diverged")}
    assert kept["suggestion"] == float(f"{told['steepest']:.1e}")
    drawn = (tmp_path / "out" / "lr_find.svg").read_text()
    assert drawn.count("<polyline") == 2
    assert f"suggested: {kept['suggestion']:g}</text>" in drawn


def test_groups_keep_their_proportions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = verb.Rising.on_before_optimizer_step

    def spy(self: Any, trainer: Any, module: Any, optimizer: Any) -> None:
        real(self, trainer, module, optimizer)
        seen.append((self.rates[-1], sorted({group["lr"] for group in optimizer.param_groups})))

    monkeypatch.setattr(verb.Rising, "on_before_optimizer_step", spy)
    found(tmp_path, "find.steps=60", "optimizer.layer_decay=0.5", "model.net.depth=2")
    for rate, groups in seen[:3]:
        assert len(groups) > 1
        assert groups[-1] == pytest.approx(rate)
        assert all(b / a == pytest.approx(2) for a, b in pairwise(groups))


def test_a_range_that_does_not_rise_is_refused(cli: Cli) -> None:
    code, error = cli(*SMALL, "find.min_lr=1", "find.max_lr=0.1", script="scripts/lr_find.py")
    assert (code, error.startswith("Error: find.min_lr=1 is not below find.max_lr=0.1")) == (1, True), error
    assert not list(Path("logs").glob("lr_find"))


@pytest.mark.slow
def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    for devices in (1, 2):
        words = [f"trainer.devices={devices}", f"find.output=on{devices}", "find.steps=100", "precision=64-true"]
        check(run(*SMALL, *words, cwd=tmp_path, script="scripts/lr_find.py"))
    one, two = (json.loads((tmp_path / f"on{devices}" / "lr_find.json").read_text()) for devices in (1, 2))
    assert two == pytest.approx(one)


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    whole = found(tmp_path / "a", "find.steps=100", "find.max_lr=1")
    parts = found(
        tmp_path / "b", "find.steps=100", "find.max_lr=1", "data.batch_size=32", "trainer.accumulate_grad_batches=2"
    )
    assert parts["losses"][:20] == pytest.approx(whole["losses"][:20], rel=1e-5)
    assert len(parts["rates"]) == len(whole["rates"])
