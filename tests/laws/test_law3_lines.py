"""Law 3 for loggers: after any deaths, metrics.csv has the lines and columns of an uninterrupted run."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from support.interruptions import Interruption, interruption, train_through
from support.ranks import on_ranks
from support.runs import new_run, rows

import lathe.training.train
from lathe.errors import Stopped

__all__ = ["interruption"]  # a fixture

BASE = (
    "model=mlp",
    "model.net.width=8",
    "model.net.depth=1",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=3",
    "data.batch_size=64",
    "test=false",
    "callbacks=[default,device_stats]",
    "callbacks.lr_monitor.log_momentum=true",
)
STEPS = 60  # batches: 1300 samples, 20 batches of 64 in each of 3 epochs
HOOKS = (
    "on_train_batch_start",
    "on_train_batch_start",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
)
VARIANTS = {
    "each_step": ("trainer.log_every_n_steps=1", "callbacks.throughput.skip_steps=1"),
    "window": (
        "trainer.log_every_n_steps=4",
        "callbacks.throughput.window=3",
        "callbacks.checkpoint.every_n_train_steps=2",
    ),
    "accumulate": (
        "trainer.log_every_n_steps=2",
        "trainer.accumulate_grad_batches=3",
        "trainer.val_check_interval=7",
        "callbacks.throughput.window=5",
        "callbacks.checkpoint.every_n_train_steps=1",
    ),
    "val_check": (
        "trainer.log_every_n_steps=3",
        "trainer.val_check_interval=7",
        "callbacks.throughput.skip_steps=4",
        "callbacks.checkpoint.every_n_train_steps=5",
    ),
    "epochs": ("trainer.log_every_n_steps=7", "callbacks.lr_monitor.logging_interval=epoch"),
}
MEASURED = ("throughput/", "device/", "seconds")  # times and hardware measurements


def lines(directory: Path) -> dict[str, dict[str, str | None]]:
    """Return the filled columns of each step, with None for measurements, which vary."""
    found: dict[str, dict[str, str | None]] = {}
    for row in rows(directory):
        found.setdefault(row["step"], {}).update(
            {key: None if key.startswith(MEASURED) else value for key, value in row.items() if value}
        )
    return found


def moments(seed: object, steps: int) -> list[tuple[str, int]]:
    chance = random.Random(seed)
    found = [(chance.choice(HOOKS), chance.randrange(1, steps)) for _ in range(chance.choice((1, 1, 3)))]
    return sorted(found, key=lambda item: item[1])


def compare(tmp_path: Path, name: str, cases: int, interruption: Interruption) -> None:
    seed = os.environ.get("LATHE_KILL_SEED", "1")
    steps = STEPS // 3 if name == "accumulate" else STEPS
    alone = lines(train_through(new_run(tmp_path / "alone", *BASE, *VARIANTS[name]), [], interruption))
    assert any("throughput/step_ms" in row for row in alone.values()) or name == "epochs"
    for case in range(cases):
        deaths = moments(f"{seed} {name} {case}", steps)
        again = lines(train_through(new_run(tmp_path / str(case), *BASE, *VARIANTS[name]), deaths, interruption))
        assert again == alone, f"LATHE_KILL_SEED={seed}, case {case}: {deaths}"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_lines_after_random_deaths(tmp_path: Path, name: str, interruption: Interruption) -> None:
    compare(tmp_path, name, 2, interruption)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_lines_after_many_random_deaths(tmp_path: Path, name: str, interruption: Interruption) -> None:
    compare(tmp_path, name, 20, interruption)


@pytest.mark.parametrize("step", [19, 20, 21, 60])
def test_the_same_lines_after_a_signal_at_the_end_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: Interruption, step: int
) -> None:
    """A checkpoint before the end of an epoch lacks what that end writes."""
    alone = lines(train_through(new_run(tmp_path / "alone", *BASE), [], interruption))
    told: list[int] = []

    def tell(trainer: Any, *_: Any) -> None:
        if trainer.global_step == step - 1 and not told:
            told.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    make = lathe.training.train.make_callbacks
    monkeypatch.setattr(
        lathe.training.train, "make_callbacks", lambda *args: [*make(*args), LambdaCallback(on_train_batch_start=tell)]
    )
    cfg = new_run(tmp_path / "told", *BASE)
    with pytest.raises(Stopped):
        lathe.training.train.train(cfg)
    assert lines(train_through(cfg, [], interruption)) == alone


def _on_two(rank: int, cfgs: list[dict[str, Any]], deaths: list[list[tuple[str, int]]]) -> None:
    callback, make = Interruption(), lathe.training.train.make_callbacks
    lathe.training.train.make_callbacks = lambda cfg, task: [*make(cfg, task), callback]
    for cfg, moments_of_one in zip(cfgs, deaths, strict=True):
        train_through(cfg, moments_of_one, callback)


@pytest.mark.slow
def test_the_same_lines_on_two_ranks(tmp_path: Path) -> None:
    """With windows of one batch, whose lines all have the wait for the other rank, and of several."""
    seed = os.environ.get("LATHE_KILL_SEED", "1")
    for name in ("each_step", "val_check"):
        # at 1, a resumed run sees the first line first
        deaths = [
            [],
            [("on_train_batch_start", 1)],
            *(moments(f"{seed} two {name} {case}", STEPS) for case in range(2)),
        ]
        options = (
            *BASE,
            *VARIANTS[name],
            "strategy=ddp",
            "trainer.devices=2",
            "callbacks.checkpoint.every_n_train_steps=1",
        )
        cfgs = [new_run(tmp_path / name / str(case), *options) for case in range(len(deaths))]
        on_ranks(_on_two, cfgs, deaths, timeout=180)
        alone, *others = [lines(Path(cfg["paths"]["run_dir"])) for cfg in cfgs]
        assert any("throughput/grad_sync" in row for row in alone.values())
        for moment, again in zip(deaths[1:], others, strict=True):
            assert again == alone, f"LATHE_KILL_SEED={seed}, {name}: {moment}"
