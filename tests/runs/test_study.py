"""What a search draws follows from its seed and the number of the trial, whichever of Optuna's samplers draws."""

import optuna
import pytest

from lathe.runs.study import SAMPLERS, sampler_of


def drawn(name: str, seed: int) -> list[float]:
    study = optuna.create_study()
    for number in range(12):  # the first ten of some samplers are random
        study.sampler = sampler_of({"sampler": name, "seed": seed}, number)
        trial = study.ask()
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_int("y", 1, 8)
        study.tell(trial, (x - 0.3) ** 2 + y)
    return [trial.params["x"] for trial in study.trials]


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_anew_for_each_trial_and_the_same_from_the_same_seed(name: str) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = drawn(name, 0)
    assert len(set(found)) > 8
    assert drawn(name, 0) == found
    assert drawn(name, 1) != found
