"""A job script that is started twice: `resume=auto` never duplicates a run that is in progress."""

from pathlib import Path

import pytest
from support.commands import Started, command
from support.commands import start as started
from support.runs import SMALL, runs

SLOW = (*SMALL, "model.net.width=512", "trainer.max_epochs=4", "trainer.log_every_n_steps=1", "resume=auto")


def start(folder: Path, *arguments: str) -> Started:
    return started(command(*SLOW, *arguments), folder)


def refused(told: tuple[str, str], directory: Path) -> bool:
    return told[1] == f"Error: resume=auto: another process is at {directory}: wait for it, or leave resume out.\n"


@pytest.mark.slow
def test_of_several_commands_at_the_same_moment_one_trains_and_the_others_say_so(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(3)]
    told = [process.communicate(timeout=240) for process in processes]
    (directory,) = runs(tmp_path / "logs")
    assert sorted(process.returncode for process in processes) == [0, 1, 1], told
    assert sum(refused(texts, directory) for texts in told) == 2
    assert (directory / "result.json").exists()
