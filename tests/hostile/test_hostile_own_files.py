"""Every file of a run directory, damaged: a command reports it or continues, and never waits or writes outside."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import in_process
from support.hostile_runs import copied

from lathe.launch.error_reporting import explain_error
from lathe.launch.sweep.sweeper import keep_output
from lathe.loggers import CSVLogger, run_log
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.inference import open_run_net
from lathe.runs.run_discovery import RunEntry, seconds_since_write
from lathe.runs.rundir import RunDir, open_run
from lathe.verbs.load import load
from lathe.verbs.report.page import curves
from lathe.verbs.runs.command import common_points
from lathe.verbs.runs.reader import Run


def linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def writes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Write the changed content of the file `good`, which is next to the path."""
    return lambda path: path.write_bytes(change(path.with_name("good").read_bytes()))


FILES = (
    ".lock",
    "run.log",
    "metrics.csv",
    "result.json",
    "config.yaml",
    "overrides.yaml",
    "environment.json",
    "checkpoints/last.ckpt",
    "checkpoints/best.ckpt",
)
DAMAGES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "nowhere": linked("../outside/target"),
    "zero": linked("/dev/zero"),
    "empty": writes(lambda good: b""),
    "nulls": writes(lambda good: bytes(len(good) or 9)),
    "nulls behind": writes(lambda good: good + bytes(300)),
    "no UTF-8": writes(lambda good: b"\xff\xfe" + good),
    "byte order mark": writes(lambda good: b"\xef\xbb\xbf" + good),
    "cut": writes(lambda good: good[: len(good) // 2]),
    "garbage": writes(lambda good: good + b"hello, world\n"),
}


@pytest.fixture
def foreign(good: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("LATHE_FULL_ERROR", "0")
    (tmp_path / "outside").mkdir()
    return copied(good, tmp_path)


def damage(run: RunDir, name: str, kind: str) -> None:
    path = run.path / name
    (kept := path.with_name("good")).write_bytes(path.read_bytes() if path.exists() else b"")
    path.unlink(missing_ok=True)
    DAMAGES[kind](path)
    kept.unlink()


@contextmanager
def in_time() -> Iterator[None]:
    """An error where what is within takes as long as waiting for ever."""

    def late(*_: Any) -> None:
        raise AssertionError("it waits, or reads without end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def resume(path: Path) -> None:
    """What train.py with resume opens, in the order in which it does."""
    run = open_run(path, "resume")
    if run.complete:
        assert run.result["steps"] == 1
    with run.locked(), run.reopened(run.config), run_log(run.path, {}):
        start = read_checkpoint(run.last)["global_step"] if run.last.exists() else 0
        logger = CSVLogger(run.path / "metrics.csv", start)
        logger.begin()
        logger.log_metrics({"late": 1.0}, 2)
        logger.save()
        run.finish({"steps": 2, "seconds": 1.0})


def listed(path: Path) -> None:
    run = Run(RunEntry(path))
    _ = run.state, run.steps, run.tags, run.objective, run.busy, run.size, seconds_since_write(path)
    common_points(path, path, 8)


def reported(path: Path) -> None:
    _ = (run := Run(RunEntry(path))).environment, run.receipt, run.sentence
    curves(run)


OPENING: dict[str, Callable[[Path], object]] = {
    "runs": listed,
    "report": reported,
    "load": lambda path: load(path).metrics,
    "evaluate": lambda path: open_run_net(path),
    "resume": resume,
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_in_every_shape(name: str, good: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").mkdir()
    wrong = []
    for kind in [kind for kind in DAMAGES if kind not in ("nulls", "nulls behind", "byte order mark")]:
        home = tmp_path / kind.replace(" ", "-")
        home.mkdir()
        run = copied(good, home)
        damage(run, name, kind)
        for verb, opened in OPENING.items():
            sentence: str | None = ""
            try:
                with in_time():
                    opened(run.path)
            except Exception as error:
                explained = explain_error(error)
                sentence = None if explained is None else str(explained)
                if sentence is None or "\n" in sentence or not sentence:
                    wrong.append(f"{kind}, {verb}: {error!r}")
            if verb in ("runs", "report") and sentence:
                wrong.append(f"{kind}, {verb}, which continue with the others: {sentence}")
        if list((tmp_path / "outside").iterdir()) or {path.name for path in home.iterdir()} - {"foreign"}:
            wrong.append(f"{kind}: something was written outside")
    assert wrong == []


def test_what_a_job_printed_goes_through_no_link(foreign: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    log = Path("job.log").absolute()
    log.write_text("said")
    job: Any = SimpleNamespace(run_dir=str(foreign.path), number=0)
    folder: Any = SimpleNamespace(file=lambda number, suffix: log)
    damage(foreign, "output.log", "nowhere")
    keep_output(folder, job)
    assert list(Path("outside").iterdir()) == []
    assert log.read_text() == "said"
    assert "output.log is a link" in capsys.readouterr().err
    (foreign.path / "output.log").unlink()
    keep_output(folder, job)
    assert (foreign.path / "output.log").read_text() == "said"


@pytest.mark.parametrize("kind", ["nulls behind", "byte order mark"])
def test_a_loss_of_power_and_an_editor_cost_no_line(kind: str, foreign: RunDir) -> None:
    damage(foreign, "metrics.csv", kind)
    resume(foreign.path)
    assert (foreign.path / "metrics.csv").read_text() == "step,train/loss,late\n1,2.0,\n2,,1.0\n"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("metrics.csv", "pipe", "metrics.csv is a pipe, where a plain file belongs: move it away."),
        ("metrics.csv", "garbage", "metrics.csv can't be read (invalid literal for int() with base 10: 'hello')"),
    ],
)
def test_the_command_says_one_sentence(
    name: str, kind: str, words: str, foreign: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    (foreign.path / "result.json").unlink()
    damage(foreign, name, kind)
    with in_time():
        code = in_process("train.py", f"resume={foreign.path}")
    assert code == 1
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("Error: ")
    assert words in told
    assert list(Path("outside").iterdir()) == []
