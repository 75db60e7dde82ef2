"""Several optimizer steps per call: what needs every step, and rows logged inside a group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from support.multi_step import STEPS, Sees, SeesEach, SeesEveryThird, groups, train
from support.runs import rows
from torch.nn.modules.module import register_module_forward_hook

import lathe.training.train
from lathe.callbacks import Throughput
from lathe.tasks import ClassificationTask

__all__ = ["groups"]  # a fixture


@pytest.mark.parametrize("words", [("trainer.accumulate_grad_batches=2",), ("trainer.profiler=simple",)])
def test_runs_that_do_not_group_steps(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(tmp_path, monkeypatch, words=words)
    assert not groups
    assert capsys.readouterr().out.count("FIT Profiler Report") == ("trainer.profiler=simple" in words)


def test_a_callback_without_skippable_steps_sees_each_step_and_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    sees = Sees()
    train(tmp_path, monkeypatch, sees)
    assert sees.steps == list(range(1, STEPS + 1))
    assert not groups
    assert capsys.readouterr().out.count("Sees.on_train_batch_end may need every step") == 1


# registers a hook on the net, one of its layers, a parameter or all modules
HOOKS: dict[str, Callable[[torch.nn.Module, Any], Any]] = {
    "forward": lambda net, hook: net.register_forward_hook(hook),
    "backward": lambda net, hook: [*net.modules()][-1].register_full_backward_hook(hook),
    "gradient": lambda net, hook: next(net.parameters()).register_hook(hook),
    "everywhere": lambda net, hook: register_module_forward_hook(lambda m, *_: hook() if m is net else None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_users_hook_on_the_net_sees_each_step_and_is_named_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    class Hooks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            def hook(*_: Any) -> None:
                if trainer.training:
                    batches.append(trainer.fit_loop.batch_idx)

            self.handle = HOOKS[kind](pl_module.net, hook)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.handle.remove()

    batches = list[int]()
    train(tmp_path, monkeypatch, Hooks())
    assert not groups
    name = "a hook on every module" if kind == "everywhere" else "a hook on net"
    assert capsys.readouterr().out.count(name) == 1
    assert batches == [*range(STEPS // 2)] * 2


def test_callbacks_see_the_steps_that_they_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    thirds, each = SeesEveryThird(), SeesEach()
    train(tmp_path, monkeypatch, thirds, each)
    assert each.steps == list(range(1, STEPS + 1))
    assert set(range(3, STEPS, 3)) <= set(thirds.steps) < set(each.steps)
    assert groups
    assert "may need every step" not in capsys.readouterr().out


class Grouped(SeesEach):
    def skippable_steps(self, trainer: Any) -> float:
        return 100


def test_a_stop_inside_a_group_is_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    class Stops(Grouped):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            trainer.should_stop = trainer.global_step == 13

    stops = Stops()
    train(tmp_path, monkeypatch, stops)
    assert stops.steps == list(range(1, 14))
    assert groups


class OwnTask(ClassificationTask):
    """A user's task, which may log or look at anything in its steps."""

    def losses(self, outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        return super().losses(outputs, batch)


class StandardTask(OwnTask):
    """A user's task that states that it does not."""

    standard_step = True


class DerivedTask(StandardTask):
    """A task derived from that one."""


@pytest.mark.parametrize(("kind", "grouped"), [(OwnTask, False), (StandardTask, True), (DerivedTask, False)])
def test_a_task_states_that_its_steps_may_be_grouped(
    kind: type[ClassificationTask],
    grouped: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("lathe.tasks.ClassificationTask", kind)
    train(tmp_path, monkeypatch)
    assert bool(groups) is grouped
    assert capsys.readouterr().out.count(f"{kind.__name__}.training_step may need every step") == (not grouped)


class Rows(DummyLogger):
    """Records its rows in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def logged(folder: Path, monkeypatch: pytest.MonkeyPatch, *own: Callback, words: tuple[str, ...] = ()) -> Rows:
    """Return the rows of a logger in a run that logs every third step."""
    kept, make = Rows(), lathe.training.train.make_loggers
    monkeypatch.setattr(lathe.training.train, "make_loggers", lambda *args, **kw: [*make(*args, **kw), kept])
    train(folder, monkeypatch, *own, words=("trainer.log_every_n_steps=3", "callbacks.throughput.skip_steps=6", *words))
    return kept


class Windows(Callback):
    """Records the batches and samples of each window of throughput."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (throughput,) = (callback for callback in trainer.callbacks if isinstance(callback, Throughput))
        self.found = [window[:2] for window in throughput._windows]


def test_logged_steps_run_inside_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int]) -> None:
    """Every row is written, in order, with its step's learning rate."""
    windows = Windows()
    rows = logged(tmp_path / "groups", monkeypatch, windows, words=("scheduler=one_cycle",)).rows
    assert sum(groups) > STEPS * 0.6
    assert max(groups) > 6
    groups.clear()
    plain = logged(tmp_path / "plain", monkeypatch, words=("scheduler=one_cycle", "trainer.steps_per_call=1")).rows
    assert not groups

    def lines(rows: list[tuple[int | None, dict[str, Any]]]) -> dict[int | None, dict[str, Any]]:
        found: dict[int | None, dict[str, Any]] = {}
        for step, row in rows:
            found.setdefault(step, {}).update(row)
        return found

    ours, theirs = lines(rows), lines(plain)
    assert list(ours) == list(theirs)
    assert {step: row.keys() for step, row in ours.items()} == {step: row.keys() for step, row in theirs.items()}
    for step, row in theirs.items():
        for name, value in row.items():
            assert name.startswith("throughput/") or ours[step][name] == value
    rates = [row["throughput/samples_per_s"] for row in ours.values() if "throughput/samples_per_s" in row]
    assert all(rate > 0 for rate in rates)
    assert len(rates) == len(windows.found) - 1 == 11
    assert windows.found == [(3, 192)] * 11 + [(1, 64)]  # what is left at the end of training is one as well


def test_rows_before_an_exception_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    """Rows of complete steps are written when a hook raises inside a group."""

    class Dies(Grouped):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            assert trainer.global_step < 14

    with pytest.raises(AssertionError):
        train(tmp_path, monkeypatch, Dies(), words=("trainer.log_every_n_steps=3",))
    (file,) = tmp_path.rglob("metrics.csv")
    assert [row["step"] for row in rows(file.parent) if row.get("train/loss")] == ["3", "6", "9", "12"]
