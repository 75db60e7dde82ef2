"""Law 3 in Lightning's loops, whatever ends a run, whenever it validates and wherever it checkpoints."""

import itertools
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from support.interruptions import QUICK, SEED, Interruption, equal, interruption, lines, same, train_through
from support.ranks import on_ranks
from support.runs import new_run

import lathe.training.train
from lathe.errors import Stopped

__all__ = ["interruption"]  # a fixture

BATCHES = 6  # 1300 samples in batches of 256
HOOKS = (*["on_train_batch_start"] * 2, "on_validation_start", "on_validation_end", "on_train_epoch_end")
Deaths = list[tuple[str, int]]


RUN = tuple(word for word in QUICK if not word.startswith("callbacks.throughput"))
LOGGED = (
    ("callbacks.throughput=null",),
    ("callbacks.throughput.skip_steps=1",),
    ("callbacks.throughput.skip_steps=2", "callbacks.throughput.window=3"),
)


def drawn(seed: object) -> tuple[tuple[str, ...], list[Deaths]]:
    """Draw the run's end, validations, checkpoints and logging, and deaths, one right after the end of an epoch."""
    chance = random.Random(f"{SEED} {seed}")
    accumulate, epochs = chance.choice((1, 1, 2, 3)), chance.choice((-1, 3, 9))
    each = -(-BATCHES // accumulate)
    steps = chance.choice((-1, 2 * each, 3 * each - 1)) if epochs == 3 else chance.choice((3 * each - 1, 3 * each))
    counted = chance.choice(("1", "2", "null"))
    every = chance.choice(("2", "4", "5", *(("8", "13") if counted == "null" else ("0.5", "0.34", "1.0"))))
    options = (
        f"trainer.max_epochs={epochs}",
        f"trainer.max_steps={steps}",
        f"trainer.check_val_every_n_epoch={counted}",
        f"trainer.val_check_interval={every}",
        f"trainer.accumulate_grad_batches={accumulate}",
        f"trainer.steps_per_call={chance.choice(('1', 'null'))}",
        f"callbacks.checkpoint.every_n_train_steps={chance.choice(('null', '1', '2', '3'))}",
        f"callbacks.checkpoint.every_n_epochs={chance.choice((1, 1, 2))}",
        f"trainer.log_every_n_steps={chance.choice((1, 1, 2, 3, 4))}",
        "callbacks=[default,device_stats]",
        "callbacks.lr_monitor.log_momentum=true",
        f"callbacks.lr_monitor.logging_interval={chance.choice(('step', 'epoch'))}",
        *chance.choice(LOGGED),
    )
    anywhere = (chance.choice(HOOKS), chance.randrange(1, 2 * each))
    deaths = [("on_train_batch_start", each), anywhere, ("on_train_batch_start", 2 * each)]
    return options, [sorted(deaths, key=lambda death: death[1])]


# validations counted across epochs, without an upper limit of epochs: a resumed run added an epoch of one step
ACROSS = (
    *("trainer.max_epochs=-1", "trainer.max_steps=18", "trainer.check_val_every_n_epoch=null"),
    "trainer.val_check_interval=4",
)
AT_ENDS: list[Deaths] = [[("on_train_batch_start", 6)], [("on_train_batch_start", 7), ("on_train_epoch_end", 12)]]


def hold(folder: Path, interruption: Interruption, options: tuple[str, ...], cases: list[Deaths]) -> None:
    def trained(name: str, deaths: Deaths) -> Path:
        return train_through(new_run(folder / name, *RUN, *options), deaths, interruption)

    alone = trained("alone", [])
    for number, deaths in enumerate(cases):
        print(f"LATHE_KILL_SEED={SEED}, {' '.join(options)}: {deaths}")  # shown if the test fails
        equal(alone, trained(str(number), deaths))


def test_at_the_end_of_an_epoch(tmp_path: Path, interruption: Interruption) -> None:
    hold(tmp_path, interruption, ACROSS, AT_ENDS)


def test_a_validation_amid_accumulation(tmp_path: Path, interruption: Interruption) -> None:
    """The first validation of an epoch comes before its first step, so it belongs to the step before."""
    options = ("trainer.max_epochs=2", "trainer.val_check_interval=2", "trainer.accumulate_grad_batches=3")
    hold(tmp_path, interruption, options, [[("on_train_batch_start", 3)]])


def test_drawn_runs(tmp_path: Path, interruption: Interruption) -> None:
    for case in range(3):
        hold(tmp_path / str(case), interruption, *drawn(case))


@pytest.mark.slow
def test_many_drawn_runs(tmp_path: Path, interruption: Interruption) -> None:
    for case in range(3, 25):
        hold(tmp_path / str(case), interruption, *drawn(case))


def through_signals(cfg: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train with a signal within each of `steps`, resume, and train to the end."""
    pending = list(steps)

    def terminate(trainer: Any, *_: Any) -> None:
        if pending and trainer.global_step >= pending[0] - 1:
            pending.pop(0)
            os.kill(os.getpid(), signal.SIGTERM)

    make = lathe.training.train.make_callbacks
    with monkeypatch.context() as patch:
        added = LambdaCallback(on_train_batch_start=terminate)
        patch.setattr(lathe.training.train, "make_callbacks", lambda *args: [*make(*args), added])
        for _ in steps:
            with pytest.raises(Stopped):
                lathe.training.train.train(dict(cfg))
    lathe.training.train.train(dict(cfg))
    return Path(cfg["paths"]["run_dir"])


SIGNALLED = {
    "accumulate": ("trainer.accumulate_grad_batches=2", "trainer.val_check_interval=0.5"),
    "across": ("trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=4", "trainer.steps_per_call=1"),
    # ends the run within an epoch: neither a validation nor the stop after it may be lost
    "stopped": ("trainer.val_check_interval=2", "callbacks.early_stopping.patience=1", "optimizer.lr=1e-12"),
}


@pytest.mark.parametrize("name", SIGNALLED)
def test_a_signal_within_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A validation that is due after the step is completed before the run stops."""
    options = (
        *RUN,
        "trainer.max_epochs=2",
        "callbacks.throughput.skip_steps=1",
        "data.eval_batch_size=100",  # so that a validation has several batches
        "callbacks=[default,early_stopping]",
        "callbacks.checkpoint.every_n_train_steps=3",
        "callbacks.checkpoint.save_top_k=3",
        *SIGNALLED[name],
    )
    alone = through_signals(new_run(tmp_path / "alone", *options), [], monkeypatch)
    steps = range(1, json.loads((alone / "result.json").read_text())["steps"] + 1)
    for first in (0, 1):  # every other step of one run
        signalled = through_signals(new_run(tmp_path / str(first), *options), list(steps[first::2]), monkeypatch)
        equal(alone, signalled)


def test_the_draws_reach_what_they_are_for() -> None:
    options = set(itertools.chain(*(drawn(case)[0] for case in range(25))))
    ends = ("trainer.max_epochs=-1", "trainer.max_steps=-1", "trainer.check_val_every_n_epoch=null")
    assert options >= {*ends, *itertools.chain(*LOGGED)}
    assert len(options) > 20


def _on_two(rank: int, cfgs: list[dict[str, Any]], deaths: list[Deaths]) -> None:
    callback, make = Interruption(), lathe.training.train.make_callbacks
    lathe.training.train.make_callbacks = lambda cfg, task: [*make(cfg, task), callback]
    for cfg, moments in zip(cfgs, deaths, strict=True):
        train_through(cfg, moments, callback)


@pytest.mark.slow
@pytest.mark.parametrize("logged", LOGGED[1:])
def test_two_ranks(tmp_path: Path, logged: tuple[str, ...]) -> None:
    """With windows of one batch, whose lines all have the wait for the other rank, and of several."""
    options = ("trainer.max_epochs=3", "callbacks=[default,device_stats]", *logged, "strategy=ddp", "trainer.devices=2")
    # after the first step, a resumed run sees the first line first
    deaths: list[Deaths] = [[], [("on_train_batch_start", 1)], [("on_validation_end", 6), ("on_train_batch_start", 9)]]
    words = (*RUN, *options, "callbacks.checkpoint.every_n_train_steps=1")
    cfgs = [new_run(tmp_path / str(case), *words) for case in range(len(deaths))]
    on_ranks(_on_two, cfgs, deaths, timeout=180)
    alone, *others = [Path(cfg["paths"]["run_dir"]) for cfg in cfgs]
    assert any("throughput/grad_sync" in row for row in lines(alone).values())
    for other in others:
        same(alone, other)
