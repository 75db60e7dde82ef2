"""Steps that nobody looks at are made several at once, and whoever wants to see each sees each."""

import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.quick_steps import STEPS, OwnThroughput, Sees, SeesEach, SeesEveryThird, quick, train
from support.runs import column
from torch.nn.modules.module import register_module_forward_hook

from lathe.tasks import ClassificationTask
from lathe.tasks.loops import quick as loops_quick

__all__ = ["quick"]  # a fixture


class Hiccup(SeesEach):
    """The clock jumps by a second in the second step, as on a machine that had something else to do."""

    late = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.late += self.steps[-1] == 2


class Sees2(SeesEveryThird):
    """Overrides a hook of which the word of its parent knows nothing."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pass


def test_a_default_run_makes_most_of_its_steps_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]
) -> None:
    run = train(tmp_path, monkeypatch)
    assert sum(quick) > STEPS * 0.6
    assert len(column(run, "train/loss")) == STEPS / 5
    assert column(run, "throughput/samples_per_s")


def test_one_slow_step_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]) -> None:
    hiccup, clock = Hiccup(), loops_quick.perf_counter
    monkeypatch.setattr(loops_quick, "perf_counter", lambda: clock() / 1000 + hiccup.late)
    train(tmp_path, monkeypatch, hiccup)
    assert hiccup.late == 1
    assert sum(quick) > STEPS * 0.4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("trainer.steps_per_call=1",), "Lightning's own"),
        (("trainer.accumulate_grad_batches=2",), "gradients are added up"),
        (("trainer.profiler=simple",), "what it measures is left out"),
    ],
)
def test_where_it_does_not(
    words: tuple[str, ...],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(tmp_path, monkeypatch, words=words)
    assert not quick, why
    assert capsys.readouterr().out.count("FIT Profiler Report") == ("trainer.profiler=simple" in words)


def test_whoever_does_not_say_sees_each_step_and_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    sees = Sees()
    train(tmp_path, monkeypatch, sees)
    assert sees.steps == list(range(1, STEPS + 1))
    assert not quick
    assert capsys.readouterr().out.count("Sees.on_train_batch_end may want to see every step") == 1


class Hooks(Callback):
    """Looks at the net, or at a gradient, where it is, and notes the batch."""

    def __init__(self, kind: str) -> None:
        self.kind, self.batches, self.handle = kind, list[int](), None

    def look(self, trainer: Any, *_: Any) -> None:
        if trainer.training:
            self.batches.append(trainer.fit_loop.batch_idx)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.kind == "log":
            hook: Any = lambda module, inputs, output: pl_module.log("mean", output.mean())  # noqa: E731
        else:
            hook = partial(self.look, trainer)
        first = next(pl_module.net.parameters())
        self.handle = {
            "forward": torch.nn.Module.register_forward_hook,
            "log": torch.nn.Module.register_forward_hook,
            "before": torch.nn.Module.register_forward_pre_hook,
            "backward": lambda net, made: [*net.modules()][-1].register_full_backward_hook(made),
            "gradient": lambda net, made: first.register_hook(made),
            "gathered": lambda net, made: first.register_post_accumulate_grad_hook(made),
            "everywhere": lambda net, made: register_module_forward_hook(
                lambda module, *_: made() if module is net else None
            ),
        }[self.kind](pl_module.net, hook)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.handle.remove()


@pytest.mark.parametrize("kind", ["forward", "log", "before", "backward", "gradient", "gathered", "everywhere"])
def test_a_hook_of_the_users_own_sees_each_step_and_is_named_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = Hooks(kind)
    run = train(tmp_path, monkeypatch, hooks)
    assert not quick
    told = "a hook on every module" if kind == "everywhere" else "a hook on net"
    assert capsys.readouterr().out.count(told) == 1
    if kind == "log":
        assert len(column(run, "mean")) == STEPS // 5
    else:
        assert hooks.batches == [*range(STEPS // 2)] * 2


def test_hooks_of_lathe_and_torch_leave_steps_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]
) -> None:
    class Normed(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            linear = next(module for module in pl_module.net.modules() if isinstance(module, torch.nn.Linear))
            with warnings.catch_warnings(action="ignore"):
                torch.nn.utils.spectral_norm(linear)  # by a forward hook

    train(tmp_path, monkeypatch, Normed(), words=("trainer.max_epochs=1",))
    assert quick


def test_whoever_says_sees_those_that_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    some, each = SeesEveryThird(), SeesEach()
    train(tmp_path, monkeypatch, some, each)
    assert each.steps == list(range(1, STEPS + 1))
    assert set(range(3, STEPS, 3)) <= set(some.steps) < set(each.steps)
    assert quick
    assert "may want to see every step" not in capsys.readouterr().out


@pytest.mark.parametrize("own", [Sees2(), OwnThroughput()])
def test_the_word_of_a_parent_does_not_hold_for_another_hook(
    own: Callback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]
) -> None:
    train(tmp_path, monkeypatch, own)
    assert not quick
    if isinstance(own, OwnThroughput):
        assert own.seen == STEPS


def test_a_stop_that_one_of_them_asks_for_is_at_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]
) -> None:
    class Stops(SeesEach):
        def quiet_steps(self, trainer: Any) -> float:
            return 100

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            trainer.should_stop = trainer.global_step == 13

    stops = Stops()
    train(tmp_path, monkeypatch, stops)
    assert stops.steps == list(range(1, 14))
    assert quick


class SeesNone(Sees):
    """Says a number that makes no sense."""

    def quiet_steps(self, trainer: Any) -> float:
        return -3


def test_less_than_none_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[int]) -> None:
    sees = SeesNone()
    train(tmp_path, monkeypatch, sees)
    assert sees.steps == list(range(1, STEPS + 1))
    assert not quick


def test_inputs_do_not_wait_with_the_metrics() -> None:
    """Only logits, targets and losses do: those of images would be the memory of sixteen batches."""
    task = ClassificationTask(torch.nn.Linear(4, 3))
    inputs = []
    for _ in range(5):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        inputs.append(weakref.ref(x))
        task.training_loss(task.net(x), (x, y)).backward()
    del x
    assert len(task._waiting) == 4
    assert [one() for one in inputs] == [None] * 5
    task._settle()
    assert task._sums["train"][2] == 30
