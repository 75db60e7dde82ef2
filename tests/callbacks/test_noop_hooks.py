"""Lightning's LearningRateMonitor with cached names of parameter groups."""

from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from lathe.callbacks import skip_empty_hooks


def trainer_of(optimizers: list[Any], configs: list[Any]) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(lr_scheduler_configs=configs, optimizers=optimizers, strategy=strategy, callback_metrics={})


def rates_of(monitor: LearningRateMonitor) -> tuple[list[Any], dict[str, list[float]], dict[str, Any]]:
    """Return its rates at four moments, between which a scheduler steps and a group is added, and its records."""
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    scheduled = SGD([{"params": weights[:1], "name": "decay"}], lr=0.5)
    other = AdamW([weights[1]], lr=0.125)
    config = LRSchedulerConfig(LambdaLR(scheduled, lambda step: 0.5**step), interval="step")
    trainer, rates = trainer_of([scheduled, other], [config]), []
    for moment in range(4):
        if moment == 2:
            other.add_param_group({"params": [weights[2]], "lr": 1.0})
        rates.append(monitor._extract_stats(trainer, "any"))
        scheduled.step()
        config.scheduler.step()
    return rates, monitor.lrs, {name: value.item() for name, value in trainer.callback_metrics.items()}


def patched() -> LearningRateMonitor:
    monitor = LearningRateMonitor(logging_interval="step")
    skip_empty_hooks([monitor])
    assert "_extract_stats" in vars(monitor)
    return monitor


def test_rates_are_those_of_lightnings_monitor() -> None:
    rates = rates_of(patched())
    assert rates == rates_of(LearningRateMonitor(logging_interval="step"))
    assert len(rates[0][3]) == 3


def test_a_rate_that_is_a_tensor_is_copied() -> None:
    """It changes in place before the row of its step is written."""
    monitor, rate = patched(), torch.tensor(0.5)
    trainer = trainer_of([SGD([nn.Parameter(torch.zeros(2))], lr=rate)], [])
    rows = []
    for later in (0.25, 0.125):
        rows.append(monitor.deferred_row_at_start(trainer))
        rate.fill_(later)
    monitor.complete_deferred_rows(trainer)
    assert [float(row["lr-SGD"]) for row in rows] == [0.5, 0.25]
    assert float(trainer.callback_metrics["lr-SGD"]) == 0.25
