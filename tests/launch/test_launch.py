"""From a command to a job with the right configuration and directory; a mistake leaves no files."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.types import RunMode
from support.commands import check, run
from support.runs import ROOT, SMALL, runs
from support.typed import Command

from lathe.config.schema import commands
from lathe.launch.command_checks import IGNORE_LOG_DIR
from lathe.runs.rundir import RunDir


def test_a_run_gets_a_directory_and_what_was_typed(command: Command) -> None:
    assert command("model=mlp", "seed=5", "model.net.width=8", "resume=null") == 5  # the job's objective
    (run,) = command.runs
    assert run.config["paths"]["run_dir"] == str(run.path)
    assert (run.config["seed"], run.config["model"]["net"]["width"]) == (5, 8)
    text = (run.path / "overrides.yaml").read_text()
    assert text == f"- model=mlp\n- seed=5\n- model.net.width=8\n- paths.log_dir={command.log_dir}\n"
    assert run.complete


ELASTIC = ("launch.nodes=1:3", "launch.endpoint=localhost:29400", "launch.id=x", "launch.max_restarts=1")


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (("trainer.num_nodes=2",), "trainer.num_nodes=2: "),
        ((*ELASTIC, "data.batch_size=64"), "data.batch_size=64 is the global batch and does not divide"),
    ],
)
def test_a_mistake_is_one_sentence(
    command: Command, capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], sentence: str
) -> None:
    assert command.fails(*typed, capsys=capsys).startswith(sentence)


def test_a_run_that_never_began_leaves_nothing(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.fails(job="support.agent_jobs:never_begins", capsys=capsys) == "it never began."
    assert command.runs == []
    assert not (command.log_dir / "train").exists()


# resume


def test_resume_goes_on_in_the_same_directory_with_the_runs_own_configuration(
    command: Command, broken: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (broken.path / "metrics.csv").unlink()  # as if killed before its first line
    command.fails(f"resume={broken.path}", job="support.agent_jobs:never_begins", capsys=capsys)
    assert command(f"resume={broken.path}") == 7
    assert [run.path for run in command.runs] == [broken.path]
    assert broken.complete
    assert broken.config["trainer"]["max_epochs"] == 3
    assert broken.config["task"]["_target_"] == "lathe.tasks.ClassificationTask"


@pytest.mark.parametrize(
    ("typed", "difference"),
    [
        (("optimizer.lr=0.5", "model.net.width=4"), "model.net.width: 256 -> 4; optimizer.lr: 0.1 -> 0.5"),
        (("+optimizer.dampening=0.1", "optimizer.nesterov=false"), "optimizer.dampening: absent -> 0.1"),
    ],
)
def test_any_other_change_is_refused_with_a_diff(
    command: Command, broken: RunDir, capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], difference: str
) -> None:
    before = (broken.path / "config.yaml").read_bytes()
    told = command.fails(f"resume={broken.path}", *typed, capsys=capsys)
    assert told.startswith(f"resume={broken.path} keeps the run's own configuration, but the command changes ")
    assert difference in told
    assert (broken.path / "config.yaml").read_bytes() == before
    assert not broken.complete


def test_auto_continues_the_newest_unfinished_run_of_the_same_configuration(command: Command, broken: RunDir) -> None:
    typed = ("model=mlp", "seed=7", "trainer.max_epochs=3", "resume=auto")
    assert command(*typed) == 7
    assert [run.path for run in command.runs] == [broken.path]
    command(*typed)  # no run is left to resume: a new run
    assert len(command.runs) == 2
    command("model=mlp", "seed=8", "trainer.max_epochs=3", "resume=auto")
    assert len(command.runs) == 3
    assert [run.config["resume"] for run in command.runs[1:]] == [None, None]


# jobs on a run directory


def test_a_job_on_a_run_gets_its_configuration_with_what_was_asked(command: Command) -> None:
    command("model=mlp", "data.batch_size=32", "precision=bf16-mixed", "trainer.max_epochs=9", "strategy=ddp")
    (run,) = command.runs
    before = (run.path / "config.yaml").read_bytes()
    cfg = command(
        f"run={run.path}", "split=val", "trainer.accelerator=cpu", name="evaluate", job="support.agent_jobs:reads"
    )
    assert cfg["request"]["split"] == "val"
    assert cfg["trainer"]["accelerator"] == "cpu"
    assert cfg["trainer"]["max_epochs"] == 9
    assert cfg["precision"]["name"] == "bf16-mixed"
    assert cfg["strategy"]["_target_"] == "lathe.strategies.auto"
    assert cfg["data"]["batch_size"] == 32
    cfg = command(
        f"run={run.path}", "batch_size=10", "precision=64-true", name="evaluate", job="support.agent_jobs:reads"
    )
    assert cfg["data"]["eval_batch_size"] == 10
    assert cfg["precision"]["name"] == "64-true"
    assert (run.path / "config.yaml").read_bytes() == before


def test_a_value_may_follow_another_key(tmp_path: Path) -> None:
    """In a run, and in its resume."""
    words = [word for word in SMALL if not word.startswith(("model.net.width", "data.batch_size"))]
    check(run(*words, "model.net.width=${data.batch_size}", "data.batch_size=24", cwd=tmp_path))
    (made,) = runs(tmp_path / "logs")
    assert "width: 24" in (made / "config.yaml").read_text()
    assert "model.net.width=24" in RunDir(made).overrides
    check(run(f"resume={made}", "trainer.max_epochs=3", cwd=tmp_path))
    assert json.loads((made / "result.json").read_text())["epochs"] == 3


def test_a_log_directory_without_effect_is_refused(cli: Callable[..., tuple[int, str]]) -> None:
    texts = {verb: (ROOT / "configs" / f"{verb}.yaml").read_text() for verb in commands()}
    assert {verb for verb, text in texts.items() if re.search(r"log_dir: .* # used only by Hydra", text)} == set(
        IGNORE_LOG_DIR
    )
    for verb in IGNORE_LOG_DIR:
        keys = re.findall(r"^(\w+): \?\?\?", texts[verb], re.MULTILINE)
        code, said = cli(*(f"{key}=x" for key in keys), "paths.log_dir=other", script=f"scripts/{verb}.py")
        assert code == 1
        assert said.startswith(f"Error: paths.log_dir=other has no effect on {verb}.py")
        assert len(said.splitlines()) == 1
    assert not list(Path().iterdir())


def newer(command: Command, *known: RunDir) -> list[RunDir]:
    """Return the runs that are not `known`; those of the same second have no order."""
    return [run for run in command.runs if run.path not in [other.path for other in known]]


def test_a_link_to_the_newest_run_keeps_its_meaning_once_the_run_has_begun(command: Command, broken: RunDir) -> None:
    latest = command.log_dir / "latest"
    latest.symlink_to(broken.path)
    typed = (
        "model=mlp",
        f"ckpt_path={latest}",
        "compression=distill",
        f"compression.distill.teacher=[{latest},nowhere]",
    )
    command(*typed)
    (run,) = newer(command, broken)
    assert run.config["ckpt_path"] == str(broken.path)
    assert run.config["compression"]["distill"]["teacher"] == [str(broken.path), "nowhere"]
    (run.path / "result.json").unlink()
    command(*typed, "resume=auto")  # the same command, with the previous link
    typed = ("model=mlp", f"ckpt_path={latest}")
    command(*typed)
    (other,) = newer(command, broken, run)
    (other.path / "result.json").unlink()
    latest.unlink()
    latest.symlink_to(other.path)  # as a run does at its start
    count = len(command.runs)
    command(*typed, "resume=auto")
    assert (len(command.runs), other.complete, run.complete) == (count, True, True)
    assert other.config["ckpt_path"] == str(broken.path)


def test_a_complete_run_that_lost_its_receipt_gets_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lathe.receipt

    measured: list[tuple[Path, str]] = []
    monkeypatch.setattr(lathe.receipt, "write", lambda run, cfg, baseline, effort: measured.append((run.path, effort)))
    typed = ("seed=4", "compression=prune", "compression.receipt=full")
    command(*typed)
    (run,) = command.runs
    run.best.parent.mkdir()
    run.best.touch()
    assert command(*typed, "resume=auto", job="support.agent_jobs:never_begins") == 4
    assert measured == [(run.path, "full")]
    assert f"{run.path} is complete but for its receipt, which is measured now." in capsys.readouterr().out
    (run.path / "receipt.json").touch()
    assert command(f"resume={run.path}", job="support.agent_jobs:never_begins") == 4
    assert len(measured) == len(command.runs) == 1
    for key in ("compression=none", "compression.receipt=none"):  # these need no receipt
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
