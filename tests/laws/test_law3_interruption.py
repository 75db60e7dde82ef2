"""Law 3: an interruption changes nothing: weights, best weights and metrics.csv equal an uninterrupted run's."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from support.commands import check, command, run, start
from support.interruptions import Interruption, compare, interruption, kill_when, same, train_through
from support.runs import QUIET, column, new_run, rows, runs, weights

__all__ = ["interruption"]  # a fixture

# Dropout draws from the global generators; validation is twice an epoch, so that checkpoints fall before, at and after
# one.
STEPPED = (
    *(*QUIET, "trainer.max_epochs=3", "data.batch_size=128", "trainer.log_every_n_steps=1"),
    *("trainer.val_check_interval=4", "callbacks.checkpoint.every_n_train_steps=3", "callbacks.throughput=null"),
)
MLP = ("model=mlp", "model.net.width=16", "model.net.depth=1", "model.net.dropout=0.2")
TRAIN = (*STEPPED, *MLP)  # 1300 samples, 10 batches of 128 in each of 3 epochs


# Each is reached after the one before, also by a run that was resumed there.
MOMENTS = [
    *(("on_train_batch_start", step) for step in (0, 1, 3, 4)),
    ("on_validation_start", 4),
    ("on_validation_end", 4),
    *(("on_train_batch_start", step) for step in (5, 8)),
    ("on_validation_start", 8),
    *(("on_train_batch_start", step) for step in (9, 10)),
    ("on_train_epoch_end", 10),
    ("on_train_batch_start", 11),
    ("on_validation_start", 18),
    ("on_train_batch_start", 20),
    ("on_train_epoch_end", 20),
    ("on_validation_end", 24),
    ("on_train_batch_start", 29),
    ("on_train_epoch_end", 30),
    ("on_test_start", 30),
]
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "16-true", "bf16-true")


@pytest.mark.parametrize("first", [0, 1])
def test_every_kind_of_moment(tmp_path: Path, interruption: Interruption, first: int) -> None:
    """Every other moment in one run."""
    compare(tmp_path, interruption, MOMENTS[first::2], *TRAIN)


@pytest.mark.parametrize(
    "parts",
    [
        (
            *(*MLP, "data.batch_size=64", "trainer.accumulate_grad_batches=2"),
            *("trainer.gradient_clip_val=0.1", "trainer.log_every_n_steps=2"),
        ),
        ("model=resnet20", "model.net.width=4", "model.net.depth=8", "optimizer=adamw"),
        (*MLP, "optimizer=muon", "model.net.depth=3", "scheduler=one_cycle", "data.augment.mixup=0.5"),
        (*MLP, "data.loader=workers", "data.num_workers=0", "scheduler=cosine_restarts"),
        *((*MLP, "callbacks=[default,ema]", f"precision={name}") for name in PRECISIONS),
    ],
    ids=["accumulate", "resnet", "muon-mixup", "workers", *PRECISIONS],
)
def test_with_other_parts(tmp_path: Path, interruption: Interruption, parts: tuple[str, ...]) -> None:
    deaths = [("on_train_batch_start", step) for step in (5, 16)]
    compare(tmp_path, interruption, deaths, *STEPPED, *parts, "trainer.max_epochs=2")


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(tmp_path: Path, interruption: Interruption) -> None:
    """It continues in the same directory, with the longer run's schedule."""
    words, log_dir = (*TRAIN, "scheduler=constant"), tmp_path / "logs"
    check(run(*words, "trainer.max_epochs=1", f"paths.log_dir={log_dir}", cwd=tmp_path))
    (directory,) = runs(log_dir)
    assert "is complete" in check(run(f"resume={directory}", cwd=tmp_path)).stdout
    check(run(f"resume={directory}", "trainer.max_epochs=3", cwd=tmp_path))
    assert runs(log_dir) == [directory]
    ours, theirs = weights(directory), weights(train_through(new_run(tmp_path / "alone", *words), [], interruption))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_comparison_can_fail(tmp_path: Path, interruption: Interruption) -> None:
    one, other = (train_through(new_run(tmp_path, *TRAIN, f"seed={seed}"), [], interruption) for seed in (1, 7))
    with pytest.raises(AssertionError):
        same(one, other)


# Slowed down, so that a kill can fall anywhere: a wider net, more steps, and every step written.
KILLED = (*TRAIN, "data.batch_size=64", "trainer.val_check_interval=7", "model.net.width=512", "model.net.depth=3")


def _left_alone(folder: Path, *extra: str) -> Path:
    check(run(*KILLED, *extra, f"paths.log_dir={folder / 'alone'}", cwd=folder))
    (alone,) = runs(folder / "alone")
    return alone


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of one process."""
    return _left_alone(tmp_path_factory.mktemp("left_alone"))


@pytest.mark.parametrize("devices", [pytest.param(1), pytest.param(2, marks=pytest.mark.slow)])
def test_kill_9_at_a_random_moment(tmp_path: Path, devices: int, request: pytest.FixtureRequest) -> None:
    extra = ("strategy=ddp", f"trainer.devices={devices}") if devices > 1 else ()
    alone = _left_alone(tmp_path, *extra) if extra else request.getfixturevalue("left_alone")
    moment = random.Random(os.environ.get("LATHE_KILL_SEED", time.time_ns())).randrange(2, 48)
    print(f"killed after {moment} lines")  # shown if the test fails
    log_dir = tmp_path / "killed"
    directory = kill_when(log_dir, moment, *KILLED, *extra, f"paths.log_dir={log_dir}")
    check(run(f"resume={directory}", cwd=tmp_path))
    assert (directory / "result.json").exists()
    assert runs(log_dir) == [directory]
    same(alone, directory)


@pytest.mark.slow
def test_kill_9_where_the_net_is_spread(tmp_path: Path) -> None:
    """The kill falls between two writes of last.ckpt, or into one. See test_faults.py for each strategy."""
    extra = ("strategy=fsdp", "trainer.devices=2", "callbacks.checkpoint.every_n_train_steps=5")
    alone = _left_alone(tmp_path, *extra)
    directory = kill_when(tmp_path / "killed", 27, *KILLED, *extra, f"paths.log_dir={tmp_path / 'killed'}")
    assert (directory / "checkpoints" / "last.ckpt").exists()
    check(run(f"resume={directory}", cwd=tmp_path))
    same(alone, directory)


@pytest.mark.slow
def test_kill_9_amid_an_epoch_of_torchmetrics(tmp_path: Path) -> None:
    """The checkpoint has each process's metric states of the interrupted epoch."""
    kind = "torchmetrics.classification.Multiclass"
    scores = ",".join(f"{{_target_: {kind}{name}, num_classes: 10}}" for name in ("AUROC", "F1Score"))
    metrics = f"task.metrics=[accuracy,{scores}]"
    extra = (metrics, "callbacks.checkpoint.monitor=val/auroc", "strategy=ddp", "trainer.devices=2")
    alone = _left_alone(tmp_path, *extra)
    directory = kill_when(tmp_path / "killed", 30, *KILLED, *extra, f"paths.log_dir={tmp_path / 'killed'}")
    step = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert step % 20, "the kill has to fall into an epoch, or the test shows nothing"
    check(run(f"resume={directory}", cwd=tmp_path))
    same(alone, directory)
    assert [len(column(directory, f"{name}")) for name in ("train/auroc_epoch", "val/auroc")] == [3, 6]


def _terminated(log_dir: Path, arguments: list[str]) -> tuple[list[Path], str]:
    """Send SIGTERM to a command in training; return its run directories and what it prints."""
    process = start(command(*arguments), log_dir.parent)
    while not (found := runs(log_dir)) or not (found[0] / "metrics.csv").exists() or len(rows(found[0])) < 4:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert (found[0] / "checkpoints" / "last.ckpt").exists()
    return found, errors


def test_sigterm_leaves_a_resumable_run(left_alone: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "stopped"
    arguments = [*KILLED, "callbacks.checkpoint.every_n_train_steps=null", f"paths.log_dir={log_dir}"]
    found, errors = _terminated(log_dir, arguments)
    assert f"resume={found[0]}" in errors
    check(run("resume=auto", *arguments, cwd=tmp_path))
    assert runs(log_dir) == found
    same(left_alone, found[0])


@pytest.mark.slow
def test_sigterm_ends_the_sweep_and_not_one_job_of_it(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    arguments = ["-m", "seed=1,2", *KILLED, f"paths.log_dir={log_dir}"]
    found, errors = _terminated(log_dir, arguments)
    assert "Error: stopped by SIGTERM; the same command takes the sweep up again" in errors
    assert runs(log_dir) == found
