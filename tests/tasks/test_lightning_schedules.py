"""Schedules of a user's own module that are made for the length of the run, where that changes or is another."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from support.own_lightning import QUICK
from support.runs import column, new_run, rows, runs

from lathe.runs.rundir import RunDir
from lathe.training.train import train

Cli = Callable[..., tuple[int, str]]
# 26 batches of 50 in an epoch
WORDS = (*QUICK, "data.batch_size=50", "trainer.log_every_n_steps=1", "callbacks=[default,lr_monitor]", "test=false")


def planned(kind: str, length: int | None = None) -> str:
    given = "" if length is None else f", length: {length}"
    return f"model.net={{_target_: support.own_lightning.Planned, width: 4, kind: {kind}{given}}}"


def rates(directory: Path) -> list[float]:
    return [float(row["lr-SGD"]) for row in rows(directory) if row.get("lr-SGD")]


@pytest.mark.parametrize("kind", ["cycle", "cosine"])
def test_a_raised_end_plans_it_anew(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = new_run(tmp_path, *WORDS, planned(kind), "trainer.max_epochs=2")
    train(cfg)
    directory = Path(cfg["paths"]["run_dir"])
    short = rates(directory)
    cfg["trainer"]["max_epochs"] = 4
    capsys.readouterr()
    train(cfg)
    said = capsys.readouterr().out
    assert RunDir(directory).result["epochs"] == 4
    found = rates(directory)[len(short) :]
    if kind == "cosine":
        assert "CosineAnnealingLR is planned anew for this run's length: T_max=4 (was 2).\n" in said
        assert [found[0], found[26]] == pytest.approx(
            [0.1 * (1 + math.cos(math.pi * at / 4)) / 2 for at in (2, 3)], rel=1e-6
        )
    else:
        assert "OneCycleLR is planned anew for this run's length: total_steps=104 (was 52).\n" in said
        whole = new_run(tmp_path / "whole", *WORDS, planned(kind), "trainer.max_epochs=4")
        train(whole)
        assert found == pytest.approx(rates(Path(whole["paths"]["run_dir"]))[len(short) :], rel=1e-6)
    assert len(column(directory, "val_loss")) == 4


def test_a_schedule_that_would_end_in_an_error_is_told_before_the_work(tmp_path: Path, cli: Cli) -> None:
    """Nothing of a complete run is lost by asking for more than its schedule can do."""
    words = [*WORDS, planned("cycle", 52), "paths.log_dir=logs"]
    code, said = cli(*words, "trainer.max_epochs=3")
    assert code == 1
    assert said.splitlines()[-1] == (
        "Error: The learning rate's schedule refuses to go on after 52 more steps (OneCycleLR), and this run makes 78: "
        "plan it for them, as by total_steps=self.trainer.estimated_stepping_batches, or let the run end sooner "
        "(trainer.max_epochs, trainer.max_steps)."
    )
    assert cli(*words, "trainer.max_epochs=2")[0] == 0
    (directory,) = (path for path in runs(Path("logs")) if (path / "result.json").exists())
    before = {name: (directory / name).read_bytes() for name in ("result.json", "metrics.csv", "config.yaml")}
    code, said = cli(f"resume={directory}", "trainer.max_epochs=3", "trusted=[support]")
    assert code == 1
    assert "refuses to go on after 0 more steps (OneCycleLR), and this run makes 26:" in said
    assert {name: (directory / name).read_bytes() for name in before} == before
    assert cli(*words, "trainer.max_epochs=3", "trainer.max_steps=50")[0] == 0
