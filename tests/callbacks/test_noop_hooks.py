"""Lightning's LearningRateMonitor with cached names of parameter groups."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from lathe.callbacks import skip_empty_hooks


def seen(monitor: LearningRateMonitor, interval: str) -> tuple[list[Any], dict[str, list[float]], dict[str, Any]]:
    """Return its rates at four moments, between which a scheduler steps and a group is added, and its records."""
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    scheduled = SGD([{"params": weights[:1], "name": "decay"}], lr=0.5)
    other = AdamW([weights[1]], lr=0.125)
    config = LRSchedulerConfig(LambdaLR(scheduled, lambda step: 0.5**step), interval="step")
    trainer: Any = SimpleNamespace(
        lr_scheduler_configs=[config],
        optimizers=[scheduled, other],
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        callback_metrics={},
    )
    found = []
    for moment in range(4):
        if moment == 2:
            other.add_param_group({"params": [weights[2]], "lr": 1.0})
        found.append(monitor._extract_stats(trainer, interval))
        scheduled.step()
        config.scheduler.step()
    return found, monitor.lrs, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("interval", ["step", "any", "epoch"])
def test_rates_are_those_of_lightnings_monitor(interval: str) -> None:
    patched = LearningRateMonitor(logging_interval="step")
    skip_empty_hooks([patched])
    assert "_extract_stats" in vars(patched)
    found, expected = seen(patched, interval), seen(LearningRateMonitor(logging_interval="step"), interval)
    assert found == expected
    assert len(found[0][3]) == (2 if interval == "epoch" else 3)


def test_a_rate_that_is_a_tensor_is_copied() -> None:
    """It changes in place before the row of its step is written."""
    monitor = LearningRateMonitor(logging_interval="step")
    skip_empty_hooks([monitor])
    rate = torch.tensor(0.5)
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=rate)
    trainer: Any = SimpleNamespace(
        lr_scheduler_configs=[],
        optimizers=[optimizer],
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        callback_metrics={},
    )
    rows = [monitor.deferred_row_at_start(trainer)]
    optimizer.param_groups[0]["lr"].fill_(0.25)
    rows.append(monitor.deferred_row_at_start(trainer))
    monitor.complete_deferred_rows(trainer)
    optimizer.param_groups[0]["lr"].fill_(0.125)
    assert [float(row["lr-SGD"]) for row in rows] == [0.5, 0.25]
    assert float(trainer.callback_metrics["lr-SGD"]) == 0.25
