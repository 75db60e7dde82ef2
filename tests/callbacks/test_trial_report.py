"""Reports to an Optuna trial: each validation has its number, whatever the interval."""

from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from lathe.callbacks import TrialReport


@pytest.mark.parametrize(
    ("options", "reports"),
    [
        ({}, 5),
        ({"check_val_every_n_epoch": 2}, 2),
        ({"val_check_interval": 4}, 5),  # after 4 of 6 batches
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, 7),  # 30 batches
    ],
)
def test_validations_are_numbered_from_one(tiny: SimpleNamespace, options: dict[str, Any], reports: int) -> None:
    trial = optuna.create_study().ask()
    tiny.trainer(TrialReport(trial, "val/accuracy"), max_epochs=5, **options).fit(tiny.Task(), tiny.Loader())
    assert list(trial.storage.get_trial(trial._trial_id).intermediate_values) == list(range(1, reports + 1))
