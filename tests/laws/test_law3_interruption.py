"""Law 3: an interruption changes nothing: weights, best weights and metrics.csv equal an uninterrupted run's."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from support.commands import check, command, run, start
from support.interruptions import Interrupted, Interruption, interruption, kill_when, same
from support.runs import column, new_run, rows, runs, weights

import lathe.training.train

__all__ = ["interruption"]  # a fixture

# Dropout draws from the global generators; validation is twice an epoch, so that checkpoints fall before, at and after
# one.
STEPPED = (
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=3",
    "data.batch_size=128",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=4",
    "callbacks.checkpoint.every_n_train_steps=3",
    "callbacks.throughput=null",
)
MLP = ("model=mlp", "model.net.width=16", "model.net.depth=1", "model.net.dropout=0.2")
TRAIN = (*STEPPED, *MLP)
STEPS = 30  # 1300 samples, 10 batches of 128 in each of 3 epochs


def _train_through(folder: Path, interruption: Interruption, hook: str, step: int, *extra: str) -> Path:
    cfg = new_run(folder, *TRAIN, *extra)
    interruption.hook, interruption.step = hook, step
    try:
        lathe.training.train.train(cfg)
        died = False
    except Interrupted:
        died = True
    assert died == (step <= STEPS), "the interruption has to happen, or the test shows nothing"
    if died:
        interruption.step = STEPS + 1
        lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


MOMENTS = [
    (hook, step)
    for hook, steps in {
        "on_train_batch_start": (0, 1, 3, 4, 5, 8, 9, 10, 11, 12, 19, 20, 29),
        "on_validation_start": (4, 8, 18),
        "on_validation_end": (4, 11, 24),
        "on_train_epoch_end": (10, 20, 30),
        "on_test_start": (30,),
    }.items()
    for step in steps
]


PRECISIONS = ("64-true", "16-mixed", "16-true", "bf16-true")  # in addition to 32-true and bf16-mixed


def test_every_kind_of_moment(tmp_path: Path, interruption: Interruption) -> None:
    alone = _train_through(tmp_path / "alone", interruption, "", STEPS + 1)
    for hook, step in MOMENTS:
        same(alone, _train_through(tmp_path / f"{hook}{step}", interruption, hook, step))


@pytest.mark.parametrize(
    "parts",
    [
        (*MLP, "callbacks=[default,ema]"),
        (
            *MLP,
            "data.batch_size=64",
            "trainer.accumulate_grad_batches=2",
            "trainer.gradient_clip_val=0.1",
            "trainer.log_every_n_steps=2",
        ),
        ("model=resnet20", "model.net.width=4", "model.net.depth=8", "precision=bf16-mixed", "optimizer=adamw"),
        (*MLP, "optimizer=muon", "model.net.depth=3", "scheduler=one_cycle", "data.augment.mixup=0.5"),
        (*MLP, "data.loader=workers", "data.num_workers=0", "scheduler=cosine_restarts"),
        *((*MLP, "callbacks=[default,ema]", f"precision={name}") for name in PRECISIONS),
    ],
    ids=["ema", "accumulate", "resnet-bf16", "muon-mixup", "workers", *PRECISIONS],
)
def test_with_other_parts(tmp_path: Path, interruption: Interruption, parts: tuple[str, ...]) -> None:
    folder = tmp_path / "runs"

    def train(step: int) -> Path:
        cfg = new_run(folder / str(step), *STEPPED, *parts, "trainer.max_epochs=2")
        interruption.hook, interruption.step = "on_train_batch_start", step
        if step > STEPS:
            lathe.training.train.train(cfg)
        else:
            with pytest.raises(Interrupted):
                lathe.training.train.train(cfg)
            interruption.step = STEPS + 1
            lathe.training.train.train(cfg)
        return Path(cfg["paths"]["run_dir"])

    alone = train(STEPS + 1)
    for step in (5, 16):
        same(alone, train(step))


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    """It continues in the same directory, with the longer run's schedule."""
    log_dir = tmp_path / "logs"
    check(run(*TRAIN, "trainer.max_epochs=1", "scheduler=constant", f"paths.log_dir={log_dir}", cwd=tmp_path))
    (directory,) = runs(log_dir)
    done = check(run(f"resume={directory}", cwd=tmp_path))
    assert "is complete" in done.stdout
    check(run(f"resume={directory}", "trainer.max_epochs=3", cwd=tmp_path))
    check(run(*TRAIN, "scheduler=constant", f"paths.log_dir={tmp_path / 'alone'}", cwd=tmp_path))
    assert runs(log_dir) == [directory]
    (alone,) = runs(tmp_path / "alone")
    ours, theirs = weights(directory, "last"), weights(alone, "last")
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_comparison_can_fail(tmp_path: Path, interruption: Interruption) -> None:
    one = _train_through(tmp_path / "one", interruption, "", STEPS + 1)
    other = _train_through(tmp_path / "other", interruption, "", STEPS + 1, "seed=7")
    with pytest.raises(AssertionError):
        same(one, other)


# Slowed down, so that a kill can fall anywhere: a wider net, more steps, and every step written.
KILLED = (*TRAIN, "data.batch_size=64", "trainer.val_check_interval=7", "model.net.width=1024", "model.net.depth=3")


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
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_2", "pipeline"])
def test_kill_9_where_the_net_is_spread(tmp_path: Path, strategy: str) -> None:
    """The kill falls between two writes of last.ckpt, or into one. See test_faults.py for single workers."""
    extra = (f"strategy={strategy}", "trainer.devices=2", "callbacks.checkpoint.every_n_train_steps=5")
    alone = _left_alone(tmp_path, *extra)
    directory = kill_when(tmp_path / "killed", 27, *KILLED, *extra, f"paths.log_dir={tmp_path / 'killed'}")
    assert (directory / "checkpoints" / "last.ckpt").exists()
    check(run(f"resume={directory}", cwd=tmp_path))
    same(alone, directory)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_kill_9_amid_an_epoch_of_torchmetrics(tmp_path: Path, devices: int) -> None:
    """The checkpoint has each process's metric states of the interrupted epoch."""
    kind = "torchmetrics.classification.Multiclass"
    scores = ",".join(f"{{_target_: {kind}{name}, num_classes: 10}}" for name in ("AUROC", "F1Score"))
    metrics = f"task.metrics=[accuracy,{scores}]"
    extra = (metrics, "callbacks.checkpoint.monitor=val/auroc", "strategy=ddp", f"trainer.devices={devices}")
    alone = _left_alone(tmp_path, *extra)
    directory = kill_when(tmp_path / "killed", 30, *KILLED, *extra, f"paths.log_dir={tmp_path / 'killed'}")
    step = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert step % 20, "the kill has to fall into an epoch, or the test shows nothing"
    check(run(f"resume={directory}", cwd=tmp_path))
    same(alone, directory)
    assert [len(column(directory, f"{name}")) for name in ("train/auroc_epoch", "val/auroc")] == [3, 6]


def test_sigterm_leaves_a_resumable_run(left_alone: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "stopped"
    arguments = [*KILLED, "callbacks.checkpoint.every_n_train_steps=null", f"paths.log_dir={log_dir}"]
    process = start(command(*arguments), tmp_path)
    while not (found := runs(log_dir)) or not (found[0] / "metrics.csv").exists() or len(rows(found[0])) < 4:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"resume={found[0]}" in errors
    assert (found[0] / "checkpoints" / "last.ckpt").exists()
    check(run("resume=auto", *arguments, cwd=tmp_path))
    assert runs(log_dir) == found
    same(left_alone, found[0])


@pytest.mark.slow
def test_sigterm_ends_the_sweep_and_not_one_job_of_it(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    arguments = ["-m", "seed=1,2", *KILLED, f"paths.log_dir={log_dir}"]
    process = start(command(*arguments), tmp_path)
    while not (found := runs(log_dir)) or not (found[0] / "metrics.csv").exists() or len(rows(found[0])) < 4:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Error: stopped by SIGTERM; the same command takes the sweep up again" in errors
    assert runs(log_dir) == found
    assert (found[0] / "checkpoints" / "last.ckpt").exists()
