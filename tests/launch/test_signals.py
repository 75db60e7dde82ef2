"""A signal ends a command that does not train, removes its temporary files and prints one line."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import SMALL, new_run

from lathe.errors import Stopped
from lathe.files import scratch
from lathe.launch.signals import raise_on_signal
from lathe.training.train import train

Cli = Callable[..., tuple[int, str]]


def kills(folder: Path, number: int, seen: list[Path]) -> Callable[[Any], None]:
    """A job that receives a signal while it has a temporary folder."""

    def job(request: Any) -> None:
        with scratch(folder) as place:
            seen.append(place)
            os.kill(os.getpid(), number)
            time.sleep(5)

    return job


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_is_one_line_and_leaves_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    number, seen = getattr(signal, name), []
    (tmp_path / "logs").mkdir()
    before = signal.signal(number, signal.SIG_DFL)  # an elastic agent of an earlier test may have changed it
    try:
        monkeypatch.setattr("lathe.verbs.runs.command.runs", kills(tmp_path, number, seen))
        assert cli(script="scripts/runs.py") == (128 + number, f"Error: stopped by {name}\n")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert [place.exists() for place in seen] == [False]


def test_a_signal_means_all_jobs_of_a_sweep(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path, *SMALL, "trainer.max_epochs=1")
    train(run)

    asked: list[Any] = []

    def ended(job: str, cfg: Any, *_: Any) -> None:
        asked.append(cfg["request"]["split"])
        raise Stopped("SIGTERM", None)

    monkeypatch.setattr("lathe.launch.run_commands.run_job", ended)
    code, told = cli("-m", f"run={run['paths']['run_dir']}", "split=val,test", script="scripts/evaluate.py")
    assert (code, told, asked) == (128 + signal.SIGTERM, "Error: stopped by SIGTERM\n", ["val"])


def test_a_second_one_waits_until_all_is_taken_back() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    taken_back = []

    def twice() -> None:
        with raise_on_signal():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
                taken_back.append(True)

    try:
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM$"):
            twice()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert taken_back
