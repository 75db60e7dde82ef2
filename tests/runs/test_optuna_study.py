"""Samples of a search depend on its seed and the number of the trial, for every sampler."""

from typing import Any

import optuna
import pytest

from lathe.runs.optuna_study import SAMPLERS, prune_now, pruner_of, sampler_of, study_name


def drawn(name: str, seed: int, pruner: str = "none") -> list[float]:
    study = optuna.create_study(study_name="study")
    for number in range(12):  # the first ten of some samplers are random
        study.sampler, study.pruner = sampler_of({"sampler": name, "seed": seed}, number), pruner_of({"pruner": pruner})
        trial = study.ask()
        prune_now(study, number)
        trial.report(0, 9)
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_int("y", 1, 8)
        study.tell(trial, (x - 0.3) ** 2 + y)
    return [trial.params["x"] for trial in study.trials]


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_depend_on_trial_and_seed(name: str) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = drawn(name, 0)
    assert len(set(found)) > 8
    assert drawn(name, 0) == found
    assert drawn(name, 1) != found


def facts(*words: str) -> dict[str, Any]:
    return {"name": "train", "words": ["sweep=optuna", *words], "sweep": {"space": {"seed": [1]}, "pruner": "none"}}


def test_the_name_of_a_study_does_not_depend_on_folders() -> None:
    own = study_name(facts())
    assert own == study_name(facts("paths.log_dir=old")) == study_name(facts("sweep.storage=sqlite:///x.db"))
    assert own != study_name(facts("model=mlp"))
