"""A kill or a second process does not change a distilled student."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from support.distillation import MLP, QUIET, TEACHER, distilled, run_of, slow
from support.interruptions import NEVER, Interrupted, Interruption, interruption, same
from support.ranks import on_ranks
from support.runs import column, new_run

import lathe.training.train

pytestmark = pytest.mark.law3

__all__ = ["interruption"]  # a fixture


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    GlobalHydra.instance().clear()
    return run_of(tmp_path_factory.mktemp("teacher"), *TEACHER)


@pytest.mark.parametrize(
    "overrides",
    [
        ("compression.distill.method=kd+crd", "compression.distill.crd_queue=150"),
        slow(("compression.distill.teacher=ema", "compression.distill.ema_decay=0.9")),
        slow(("compression.distill.method=fitnets+dist", "precision=bf16-mixed", "optimizer=adamw")),
    ],
    ids=["crd", "ema", "fitnets"],
)
def test_a_death_changes_nothing(
    tmp_path: Path, teacher: Path, interruption: Interruption, overrides: tuple[str, ...]
) -> None:
    def train(step: int) -> Path:
        cfg = new_run(
            tmp_path / str(step),
            *QUIET,
            *MLP,
            "callbacks.checkpoint.every_n_train_steps=3",
            "model.net.dropout=0.1",
            *distilled(teacher, "weight=0.1"),
            *overrides,
        )
        interruption.hook, interruption.step = "on_train_batch_start", step
        if step < NEVER:
            with pytest.raises(Interrupted):
                lathe.training.train.train(cfg)
            interruption.step = NEVER
        lathe.training.train.train(cfg)
        return Path(cfg["paths"]["run_dir"])

    alone, again = train(NEVER), train(8)
    same(alone, again)
    states = [
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]["Distill"]
        for run in (alone, again)
    ]
    assert_equal(*states)


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    else:
        assert left == right


def test_the_ema_teacher_is_the_average_of_the_student(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, *MLP, "trainer.max_epochs=1", "trainer.limit_train_batches=2", *distilled("ema", "ema_decay=0.15")
    )
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    first = run_of(
        tmp_path / "one",
        *MLP,
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=1",
        "scheduler=constant",
        *distilled("ema", "ema_decay=0.0"),
    )
    assert state["callbacks"]["Distill"]["average"]["updates"] == 2
    one = torch.load(first / "checkpoints" / "last.ckpt", weights_only=True)
    for name, value in one["callbacks"]["Distill"]["average"]["average"].items():
        assert torch.equal(value, one["state_dict"][name]), "a decay of 0 copies"


def _train(rank: int, cfg: dict[str, Any]) -> dict[str, Any]:
    lathe.training.train.train(cfg)
    return {}


@pytest.mark.parametrize(
    "settings",
    [
        ("method=kd+fitnets", "weight=0.5"),
        slow(("method=crd",)),
        slow(("teacher=ema", "ema_decay=0.5")),
    ],
    ids=["fitnets", "crd", "ema"],
)
def test_two_processes_have_the_losses_of_one(tmp_path: Path, teacher: Path, settings: tuple[str, ...]) -> None:
    short = (
        *MLP,
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=8",
        "optimizer.lr=0.02",
        "trainer.accumulate_grad_batches=2",
    )
    cfg = new_run(tmp_path / "two", *QUIET, *short, "strategy=ddp", "trainer.devices=2", *distilled(teacher, *settings))
    on_ranks(_train, cfg)
    two = Path(cfg["paths"]["run_dir"])
    one = run_of(tmp_path / "one", *short, *distilled(teacher, *settings))
    if settings != ("method=crd",):  # compares samples within one process's batch
        for name in ("train/loss", "train/hard_loss", "train/soft_loss"):
            assert column(two, name) == pytest.approx(column(one, name), rel=1e-4), name
    states = [
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]["Distill"] for run in (one, two)
    ]
    assert len(states[1]["sums"]) == 2
    if "average" in states[0]:
        for name, value in states[0]["average"]["average"].items():
            torch.testing.assert_close(states[1]["average"]["average"][name], value)
    if settings[0] == "method=kd+fitnets":
        for name, value in states[0]["comparisons"][0]["connectors"].items():
            torch.testing.assert_close(states[1]["comparisons"][0]["connectors"][name], value)
