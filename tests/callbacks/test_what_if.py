"""What a run left lying: told where it was measured, and the run itself is what it would be without."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import SMALL, new_run, rows, weights

from lathe.callbacks.what_if import Step, WhatIf
from lathe.nets import MLP
from lathe.tasks import ClassificationTask
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
    """How many times as fast each change is, by whether it has bf16, channels last and a fused optimizer."""
    given: dict[tuple[bool, bool, bool], list[float]] = {}

    def ratios(self: WhatIf, own: Step, other: Step, batch: Any) -> list[float]:
        return given[other.format is not own.format, other.last, other.kernels is None]

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


def test_random_numbers_go_on_as_if_nothing_had_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    end = WhatIf.on_fit_end

    def spy(self: WhatIf, *args: Any) -> None:
        before = [copy.deepcopy(value) for value in args[1].state_dict().values()]
        states.append(torch.get_rng_state())
        end(self, *args)
        states.append(torch.get_rng_state())
        assert all(map(torch.equal, before, args[1].state_dict().values()))

    monkeypatch.setattr(WhatIf, "on_fit_end", spy)
    run(tmp_path, *ASKED, "model.net.dropout=0.2", "test=false")
    assert states[0].equal(states[1])


def test_one_thread_is_tried_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def ratios(self: WhatIf, own: Step, other: Step, batch: Any) -> list[float]:
        for step in (own, other):
            step.ready()(batch)
            threads.append(torch.get_num_threads())
        alone = other.format is own.format and other.kernels is not None
        return [3.0, 3.2] if threads[-2:] == [2, 1] and alone else [1.0, 1.0]

    monkeypatch.setattr(WhatIf, "_ratios", ratios)
    torch.set_num_threads(2)
    try:
        run(tmp_path, *ASKED, "test=false")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert said(capsys) == (
        "one thread would have been 3.1 x as fast here (measured on 2 steps, 3.0 to 3.2): launch.threads=1."
    )
    assert threads.count(1) == 1  # alone, and not among all of these


def test_what_would_have_been_faster_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ratios: dict[tuple[bool, bool, bool], list[float]]
) -> None:
    ratios |= {
        (True, False, False): [2.0, 2.1],
        (False, True, False): [1.2, 0.9],  # one of them says otherwise
        (False, False, True): [1.05, 1.08],
        (True, True, True): [2.5, 3.0],
    }
    cfg = new_run(tmp_path, *RUN[3:], *CONVOLVED, *ASKED, "test=false", "trainer.limit_train_batches=5")
    train(cfg)
    assert said(capsys) == (
        "all of these would have been 2.8 x as fast here (measured on 2 steps, 2.5 to 3.0); bf16 would have been 2.0 x "
        "as fast here (measured on 2 steps, 2.0 to 2.1): precision=bf16-mixed."
    )


def test_what_a_run_has_is_not_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ratios: dict[tuple[bool, bool, bool], list[float]]
) -> None:
    ratios[True, False, False] = [1.0, 0.9]
    run(tmp_path / "a", *ASKED, "optimizer.fused=true", "test=false")
    assert said(capsys) == ("nothing of bf16 would have been 1.1 x as fast here (measured on 2 steps of each).")
    run(tmp_path / "b", *ASKED, "optimizer.fused=true", "precision=bf16-mixed", "test=false")
    assert said(capsys) == "the run has all of bf16, channels_last, fused optimizer, one thread that there are for it."


def test_a_long_run_tells_what_is_faster_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ratios: dict[tuple[bool, bool, bool], list[float]]
) -> None:
    """The default set measures from callbacks.what_if.min_steps on."""

    def lines(name: str, least: int, *words: str) -> list[str]:
        run(tmp_path / name, f"callbacks.what_if.min_steps={least}", "test=false", *words)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("callbacks.what_if: ")]

    steps = run(tmp_path / "default", "test=false")[1]["steps"]
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("callbacks.what_if: ")]
    ratios |= {(True, False, False): [2.0, 2.1], (False, False, True): [1.0, 1.0], (True, False, True): [1.0, 3.0]}
    assert lines("at", steps) == [
        "callbacks.what_if: bf16 would have been 2.0 x as fast here (measured on 5 steps, 2.0 to 2.1): "
        "precision=bf16-mixed."
    ]
    assert lines("below", steps + 1) == []
    assert lines("unrepeatable", steps // 2, "trainer.accumulate_grad_batches=2") == []
    ratios[True, False, False] = [1.0, 1.0]
    assert lines("slower", steps) == []


def test_the_steps_before_the_one_whose_batch_is_kept_are_no_concern(tmp_path: Path) -> None:
    part, trainer = WhatIf(min_steps=8), SimpleNamespace(global_step=3)
    part.on_train_start(trainer, None)  # type: ignore[arg-type]
    asked = []
    for _ in range(10):
        asked.append(part.skippable_steps(trainer))  # type: ignore[arg-type]
        part.on_train_batch_start(trainer, None, (torch.ones(2), "name"), 0)  # type: ignore[arg-type]
        trainer.global_step += 1
    assert asked == [7, 6, 5, 4, 3, 2, 1, 0, math.inf, math.inf]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("trainer.accumulate_grad_batches=2",), "trainer.accumulate_grad_batches=2 makes a step of several batches"),
        (("precision=16-mixed",), "the steps of precision=16-mixed depend on what its scaler finds"),
        (("compile=default", "compile.backend=eager"), "a copy of a compiled net is not compiled"),
    ],
)
def test_what_can_not_be_repeated_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    run(tmp_path, *ASKED, *words, "test=false")
    assert said(capsys) == f"nothing was measured: {reason}."


def test_a_step_of_the_users_own_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.training_loss(self.net(batch[0]), batch)

    monkeypatch.setattr(ClassificationTask, "training_step", training_step)
    run(tmp_path, *ASKED, "test=false")
    assert said(capsys) == "nothing was measured: ClassificationTask makes its steps in its own way."


class Annealed(torch.nn.Module):
    """A loss that changes with each call."""

    calls = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.nn.functional.cross_entropy(outputs, targets) * 0.9**self.calls


def test_a_loss_that_moves_on_is_copied_with_the_net(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"task.loss={{_target_: {__name__}.Annealed}}", "task.metrics=[accuracy]")
    (_, result), (_, other) = run(tmp_path / "a", *words), run(tmp_path / "b", *words, *ASKED)
    assert "measured on 2 steps" in said(capsys)
    assert {k: v for k, v in result.items() if k not in CLOCK} == {k: v for k, v in other.items() if k not in CLOCK}


def test_hooks_of_the_users_own_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = WhatIf.on_train_start, []

    def start(self: WhatIf, trainer: Any, pl_module: Any) -> None:
        made(self, trainer, pl_module)
        pl_module.net.register_forward_hook(lambda *_: calls.append(trainer.training))

    monkeypatch.setattr(WhatIf, "on_train_start", start)
    _, result = run(tmp_path, *ASKED, "test=false")
    assert said(capsys).startswith("nothing was measured: test_hooks_of_the_users_own_are_left_alone.<locals>.start.")
    assert calls.count(True) == result["steps"]


def test_no_copies_are_made_without_room_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1210 * 4 * 10 - 1))
    run(tmp_path, *ASKED, "test=false")
    assert said(capsys) == ("nothing was measured: copies of the net may take 0.0 GiB, and 0.0 GiB of memory are free.")


def test_a_net_that_can_not_be_copied_ends_its_run_as_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, memo: Any) -> Any:
        raise TypeError("holds a file")

    monkeypatch.setattr(MLP, "__deepcopy__", refuse, raising=False)
    path, _ = run(tmp_path, *ASKED, "test=false")
    assert said(capsys) == "nothing was measured (TypeError: holds a file)."
    assert (path / "result.json").exists()
