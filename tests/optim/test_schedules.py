"""Schedules follow their curves, resume from their state, and refuse positions outside the run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from lathe.errors import UserError
from lathe.optim import schedules

ALL: dict[str, Callable[..., LRScheduler]] = {
    "constant": lambda optimizer, total: schedules.constant(optimizer, total, warmup=0.1),
    "cosine": lambda optimizer, total: schedules.cosine(optimizer, total, warmup=0.1, min_ratio=0.01),
    "cosine_restarts": lambda optimizer, total: schedules.cosine_restarts(
        optimizer, total, warmup=3, period=0.2, period_growth=1.5
    ),
    "linear": lambda optimizer, total: schedules.linear(optimizer, total, warmup=0.1, end_ratio=0.01),
    "one_cycle": lambda optimizer, total: schedules.one_cycle(optimizer, total),
    "step": lambda optimizer, total: schedules.step(optimizer, total, milestones=[0.5, 0.75], warmup=2),
}


def make_optimizer() -> SGD:
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.02)], lr=1.0)


def rates(schedule: LRScheduler, steps: int) -> list[list[float]]:
    """Return the rate of each of the next `steps` optimizer steps."""
    taken = []
    for _ in range(steps):
        taken.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return taken


def flat(taken: list[list[float]]) -> list[float]:
    return [rate for pair in taken for rate in pair]


def test_constant() -> None:
    taken = rates(schedules.constant(make_optimizer(), 8, warmup=3), 8)
    assert [first for first, _ in taken] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert rates(schedules.constant(make_optimizer(), 3), 3) == [[0.1, 0.02]] * 3


def test_each_group_keeps_its_own_peak() -> None:
    for name, make in ALL.items():
        taken = rates(make(make_optimizer(), 40), 40)
        assert [second / first for first, second in taken] == pytest.approx([0.2] * 40), name
        assert max(first for first, _ in taken) == pytest.approx(0.1, rel=1e-12), name


def test_cosine_without_warm_up_is_torch_s() -> None:
    ours = rates(schedules.cosine(make_optimizer(), 20, min_ratio=0), 20)
    theirs = rates(CosineAnnealingLR(make_optimizer(), T_max=20), 20)
    assert flat(ours) == pytest.approx(flat(theirs), rel=1e-9)


def test_one_cycle_is_torch_s() -> None:
    ours = rates(schedules.one_cycle(make_optimizer(), 100, warmup=30), 100)
    # torch ends one step earlier and counts the peak from one: our equivalent is 101 steps with the peak at step 31
    theirs = OneCycleLR(make_optimizer(), max_lr=[0.1, 0.02], total_steps=101, pct_start=31 / 101, cycle_momentum=False)
    assert flat(ours) == pytest.approx(flat(rates(theirs, 100)), rel=1e-9)
    assert ours[30] == [0.1, 0.02]
    assert ours[0] == pytest.approx([0.004, 0.0008])


def test_milestones_as_shares_and_as_steps_agree() -> None:
    shares = rates(schedules.step(make_optimizer(), 40, milestones=[0.5, 0.75], warmup=0.1), 40)
    steps = rates(schedules.step(make_optimizer(), 40, milestones=[20, 30], warmup=4), 40)
    assert shares == steps
    assert [shares[index][0] for index in (0, 4, 19, 20, 29, 30, 39)] == pytest.approx(
        [0.02, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_restarts_as_shares_and_as_steps_agree() -> None:
    shares = rates(schedules.cosine_restarts(make_optimizer(), 50, period=0.2, warmup=0.1), 50)
    steps = rates(schedules.cosine_restarts(make_optimizer(), 50, period=10, warmup=5), 50)
    assert shares == steps
    assert [index for index, (first, _) in enumerate(shares) if first == 0.1] == [5, 15, 25, 35, 45]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda optimizer: schedules.cosine(optimizer, 10, warmup=10), "warmup=10 is not below the run's 10"),
        (lambda optimizer: schedules.step(optimizer, 10, milestones=[0.75, 0.5]), "must rise"),
    ],
)
def test_schedules_that_do_not_fit_the_run_are_refused(make: Callable[[SGD], LRScheduler], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(make_optimizer())


CONFIGS = Path(__file__).parents[2] / "configs"
# The factors at the steps 0, 50 and 99 of 100, by hand: warm-up over 5 steps, 30 for one-cycle.
SCHEDULERS = {
    "constant": [1, 1, 1],
    "cosine": [1 / 6, 0.5413, 0.000273],
    "cosine_restarts": [1 / 6, 0.095492, 0.135516],
    "linear": [1, 0.5, 0.01],
    "one_cycle": [0.04, 0.811746, 0.000507],
    "step": [1, 0.1, 0.01],
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    cfg = OmegaConf.load(CONFIGS / "scheduler" / f"{name}.yaml")
    schedule = instantiate(cfg)(make_optimizer(), 100)
    assert isinstance(schedule, LambdaLR)
    taken = [first / 0.1 for first, _ in rates(schedule, 100)]
    assert [taken[step] for step in (0, 50, 99)] == pytest.approx(SCHEDULERS[name], rel=2e-3)
