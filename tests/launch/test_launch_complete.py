"""Launching a run that is complete already."""

from pathlib import Path

import pytest
from hydra.types import RunMode
from support.typed import Command


@pytest.mark.parametrize("resume", ["path", "auto"])
def test_a_complete_run_that_lost_its_receipt_gets_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], resume: str
) -> None:
    import lathe.receipt

    measured: list[tuple[Path, str]] = []
    monkeypatch.setattr(lathe.receipt, "write", lambda run, cfg, baseline, effort: measured.append((run.path, effort)))
    typed = ("seed=4", "compression=prune", "compression.receipt=full")
    command(*typed)
    (run,) = command.runs
    run.best.parent.mkdir()
    run.best.touch()
    again = (f"resume={run.path}",) if resume == "path" else (*typed, "resume=auto")
    assert command(*again, job="support.agent_jobs:never_begins") == 4
    assert measured == [(run.path, "full")]
    assert f"{run.path} is complete but for its receipt, which is measured now." in capsys.readouterr().out
    (run.path / "receipt.json").touch()
    assert command(f"resume={run.path}", job="support.agent_jobs:never_begins") == 4
    assert len(measured) == len(command.runs) == 1
    for key in ("compression=none", "compression.receipt=none"):  # these owe none
        command("seed=5", "compression=prune", key)
        command(f"resume={command.runs[-1].path}", job="support.agent_jobs:never_begins")
    assert len(measured) == 1


def test_a_sweep_that_is_started_again_keeps_its_finished_jobs(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert [command("model=mlp", f"seed={seed}", "resume=auto", mode=RunMode.MULTIRUN) for seed in (1, 2, 3)] == [
            1,
            2,
            3,
        ]
        assert sorted(run.config["seed"] for run in command.runs) == [1, 2, 3]
    assert capsys.readouterr().out.count("is complete;") == 3
    command("model=mlp", "seed=1", "resume=auto")
    assert "is a complete run of this configuration; resume=auto starts another" in capsys.readouterr().out
    assert len(command.runs) == 4
