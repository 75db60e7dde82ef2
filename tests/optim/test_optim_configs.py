"""Every file of configs/optimizer and configs/scheduler builds its optimizer or schedule."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.optim.lr_scheduler import LambdaLR

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


def read(group: str, name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        facts = ["+data.batch_size=256"] if group == "optimizer" else []
        return compose(overrides=[f"+{group}={name}", *facts, *overrides])[group]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = instantiate(read("scheduler", name))(optimizer, 100)
    assert isinstance(schedule, LambdaLR)
    taken = []
    for _ in range(100):
        taken.append(optimizer.param_groups[0]["lr"] / 2)
        optimizer.step()
        schedule.step()
    assert [taken[step] for step in (0, 50, 99)] == pytest.approx(SCHEDULERS[name], rel=2e-3)
