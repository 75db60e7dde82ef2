"""Performance advice: given if measured faster, and the run itself is unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import SMALL, new_run, rows, weights

from lathe.contrib.what_if import WhatIf
from lathe.training.train import train

ASKED = ("callbacks=[default,what_if]", "callbacks.what_if.steps=2")
CONVOLVED = ("model=resnet20", "model.net.depth=8", "model.net.width=4")
RUN = (*SMALL, "trainer.max_epochs=1", "callbacks.throughput=null")
CLOCK = ("seconds", "name")


def run(folder: Path, *words: str) -> tuple[Path, dict[str, Any]]:
    cfg = new_run(folder, *RUN, *words)
    return Path(cfg["paths"]["run_dir"]), train(cfg)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("callbacks.what_if: ")]
    return line.removeprefix("callbacks.what_if: ")


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[bool, bool, bool], list[float]]:
    """Return each change's speed-up, by whether it has bf16, channels last and a fused optimizer."""
    given: dict[tuple[bool, bool, bool], list[float]] = {}

    def ratios(self: WhatIf, trainer: Any, task: Any, change: dict[str, Any], batch: Any) -> list[float]:
        return given["bf16" in change, "last" in change, "fused" in change]

    monkeypatch.setattr(WhatIf, "_ratios", ratios)
    return given


def test_a_run_is_what_it_would_be_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dropout = ("model.net.dropout=0.2", "trainer.gradient_clip_val=0.5", "callbacks.lr_monitor=null")
    (plain, result), (asked, other) = run(tmp_path / "a", *dropout), run(tmp_path / "b", *dropout, *ASKED)
    assert "measured on 2 steps" in said(capsys)
    ours, theirs = weights(asked), weights(plain)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert rows(asked) == rows(plain)
    states = [torch.load(path / "checkpoints" / "last.ckpt", weights_only=True) for path in (plain, asked)]
    assert {key for state in states for key in state["callbacks"] if "WhatIf" in key} == set()
    assert {k: v for k, v in result.items() if k not in CLOCK} == {k: v for k, v in other.items() if k not in CLOCK}
    assert json.loads((asked / "result.json").read_text())["test/accuracy"] == result["test/accuracy"]


def test_what_would_have_been_faster_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ratios: dict[tuple[bool, bool, bool], list[float]]
) -> None:
    ratios |= {
        (True, False, False): [2.0, 2.1],
        (False, True, False): [1.2, 0.9],  # one of them disagrees
        (False, False, True): [1.05, 1.08],
        (True, True, True): [2.5, 3.0],
    }
    cfg = new_run(tmp_path, *RUN[3:], *CONVOLVED, *ASKED, "test=false", "trainer.limit_train_batches=5")
    train(cfg)
    assert said(capsys) == (
        "all of these would have been 2.8 x as fast here (measured on 2 steps, 2.5 to 3.0); bf16 would have been 2.0 x "
        "as fast here (measured on 2 steps, 2.0 to 2.1): precision=bf16-mixed."
    )


def test_hooks_of_the_users_own_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = WhatIf.on_train_start, []

    def start(self: WhatIf, trainer: Any, pl_module: Any) -> None:
        made(self, trainer, pl_module)
        pl_module.net.register_forward_hook(lambda *_: calls.append(trainer.training))

    monkeypatch.setattr(WhatIf, "on_train_start", start)
    _, result = run(tmp_path, *ASKED, "test=false")
    assert said(capsys).startswith("nothing was measured: ")
    assert calls.count(True) == result["steps"]
