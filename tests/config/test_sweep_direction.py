"""A sweeper that optimises has the direction of the objective."""

from enum import Enum
from typing import Any

import pytest
from support.runs import config

from lathe.config.sweep_direction import check_direction
from lathe.errors import UserError


class Direction(Enum):
    """As Optuna's plug-in has it."""

    minimize = 1
    maximize = 2


OPTUNA = "hydra.sweeper.direction"


def optuna(direction: Any) -> dict[str, Any]:
    return {"direction": direction, "sampler": {"seed": 1}}


@pytest.mark.parametrize("direction", ["minimize", Direction.minimize])
def test_accuracy_is_not_minimised(direction: Any) -> None:
    with pytest.raises(UserError) as caught:
        check_direction(config(), optuna(direction), [])
    assert str(caught.value) == (
        f"{OPTUNA}=minimize would look for the worst run, as higher val/accuracy is better: add {OPTUNA}=maximize."
    )


@pytest.mark.parametrize(
    ("overrides", "direction"),
    [
        ([], "maximize"),
        (["objective=val/loss"], "minimize"),
        (["objective=test/accuracy"], "maximize"),
        (["callbacks.checkpoint.monitor=val/loss"], "minimize"),
        (["callbacks.checkpoint.monitor=val/accuracy", "callbacks.checkpoint.mode=min"], "minimize"),
        (["model=gpt_nano", "data=synthetic_tokens"], "minimize"),
    ],
)
def test_the_direction_follows_what_the_run_returns(overrides: list[str], direction: str) -> None:
    cfg, other = config(*overrides), {"minimize": "maximize", "maximize": "minimize"}[direction]
    check_direction(cfg, optuna(direction), [])
    with pytest.raises(UserError, match=f"add {OPTUNA}={direction}"):
        check_direction(cfg, optuna(other), [])
    check_direction(cfg, optuna(other), [f"{OPTUNA}={other}"])  # typed: chosen


def test_sweepers_that_do_not_optimise_and_objectives_of_no_known_direction(capsys: pytest.CaptureFixture[str]) -> None:
    for sweeper in (
        {},
        {"direction": None},
        optuna(["minimize", "maximize"]),
        {"params": {"direction": 1}},
    ):
        check_direction(config(), sweeper, [])
    check_direction(config("callbacks=none"), optuna("minimize"), [])
    assert capsys.readouterr().out == ""
    check_direction(config("objective=step_ms"), optuna("minimize"), [])
    assert capsys.readouterr().out == f"The sweep takes lower step_ms for better: {OPTUNA}=minimize says so.\n"


def test_of_a_task_that_monitors_nothing_no_direction_is_asked() -> None:
    cfg = config("model=lightning", "model.net={_target_: support.own_lightning.LitNet}")
    check_direction(cfg, optuna("minimize"), [])
    named = config("model=lightning", "model.net={_target_: a.B}", "callbacks.checkpoint.monitor=val_loss")
    named["callbacks"]["checkpoint"]["mode"] = "min"
    with pytest.raises(UserError, match="would look for the worst run, as lower val_loss is better"):
        check_direction(named, optuna("maximize"), [])
