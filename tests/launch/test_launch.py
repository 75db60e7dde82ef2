"""From what was typed to a job with the right configuration in the right directory; a mistake leaves nothing behind."""

import pytest
from support.typed import Command

from lathe.runs.rundir import RunDir


def test_a_run_gets_a_directory_and_what_was_typed(command: Command) -> None:
    assert command("model=mlp", "seed=5", "model.net.width=8", "resume=null") == 5  # the job's objective
    (run,) = command.runs
    assert run.config["paths"]["run_dir"] == str(run.path)
    assert (run.config["seed"], run.config["model"]["net"]["width"]) == (5, 8)
    text = (run.path / "overrides.yaml").read_text()
    assert text == f"- model=mlp\n- seed=5\n- model.net.width=8\n- paths.log_dir={command.log_dir}\n"
    assert run.complete


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (("data.batch_size=many",), "data.batch_size=many: "),
        (("trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=33"), "data.batch_size=33 "),
        (("trainer.num_nodes=2",), "trainer.num_nodes=2: "),
        (("resume=nowhere",), "resume=nowhere: "),
        (("resume=/tmp",), "resume=/tmp is not a run directory"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_directory(
    command: Command, capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], sentence: str
) -> None:
    assert command.fails(*typed, capsys=capsys).startswith(sentence)
    assert not list(command.log_dir.rglob("*.yaml"))


def test_a_run_that_never_began_leaves_nothing(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.fails(job="support.agent_jobs:never_begins", capsys=capsys) == "it never began."
    assert command.runs == []
    assert not (command.log_dir / "train").exists()


def test_a_run_that_began_is_kept(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.fails(job="support.agent_jobs:breaks_off", capsys=capsys) == "it broke off."
    assert len(command.runs) == 1


# resume


def test_resume_goes_on_in_the_same_directory_with_the_runs_own_configuration(command: Command, broken: RunDir) -> None:
    assert command(f"resume={broken.path}") == 7
    assert [run.path for run in command.runs] == [broken.path]
    assert broken.complete
    assert broken.config["trainer"]["max_epochs"] == 3
    assert broken.config["task"]["_target_"] == "lathe.tasks.ClassificationTask"


def test_a_run_may_be_made_longer(command: Command, broken: RunDir) -> None:
    command(f"resume={broken.path}", "trainer.max_epochs=5")
    assert broken.config["trainer"]["max_epochs"] == 5
    command(f"resume={broken.path}", "trainer.max_epochs=8")  # and again, when it is complete
    assert broken.config["trainer"]["max_epochs"] == 8
    assert len(command.runs) == 1


@pytest.mark.parametrize(
    ("typed", "difference"),
    [
        (("trainer.max_epochs=2",), "trainer.max_epochs: 3 -> 2"),
        (("seed=8",), "seed: 7 -> 8"),
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


@pytest.mark.parametrize(
    ("typed", "way"),
    [
        (["trainer.devices=2"], "ckpt_path={} ckpt_mode=trainer"),
        (["trainer.devices=2", "seed=8"], "ckpt_path={}"),
    ],
)
def test_other_devices_are_a_new_run_with_all_of_its_state(
    command: Command, broken: RunDir, capsys: pytest.CaptureFixture[str], typed: list[str], way: str
) -> None:
    told = command.fails(f"resume={broken.path}", *typed, capsys=capsys)
    assert told.endswith(f". Leave that out, or start a new run with {way.format(broken.path)}.")


def test_a_failed_continuation_keeps_the_run(
    command: Command, broken: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (broken.path / "metrics.csv").unlink()  # as if it had been killed before its first line
    command.fails(f"resume={broken.path}", job="support.agent_jobs:never_begins", capsys=capsys)
    assert broken.path.exists()


def test_a_run_that_is_being_written_to_is_refused(
    command: Command, broken: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with broken.locked():
        told = command.fails(f"resume={broken.path}", capsys=capsys)
    assert told == f"{broken.path} is being written to by another process: wait for it, or stop it first."


def test_auto_continues_the_newest_unfinished_run_of_the_same_configuration(command: Command, broken: RunDir) -> None:
    typed = ("model=mlp", "seed=7", "trainer.max_epochs=3", "resume=auto")
    assert command(*typed) == 7
    assert [run.path for run in command.runs] == [broken.path]
    command(*typed)  # nothing is left to continue: a new run
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
