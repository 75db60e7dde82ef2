"""Reports of mistakes, of errors in a user's code and of bugs; closed and small terminals; signals."""

import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import command, start
from support.runs import ROOT, SMALL, new_run
from torch import Tensor, nn
from torch.utils.data import Dataset

from lathe.config.schema import key_schemas
from lathe.data.order import Reader
from lathe.errors import Stopped, UserError
from lathe.files import scratch
from lathe.launch import process_group
from lathe.launch.error_reporting import FULL_ERROR, explain_error, raise_on_signal, report_error, report_errors
from lathe.runs.instantiate import instantiate
from lathe.training.train import train

HINT = "HYDRA_FULL_ERROR=1 shows the full traceback."


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key in (FULL_ERROR, "HYDRA_FULL_ERROR", "RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(key, "x")  # so that what the code sets is removed after the test
        monkeypatch.delenv(key)
    monkeypatch.setattr("sys.argv", [str(ROOT / "train.py")])
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_bug_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError) as caught:
        key_schemas(3, "train")  # type: ignore[arg-type]
    assert report_error(caught.value) == 1
    assert "Traceback" in (text := capsys.readouterr().err)
    assert "AttributeError: 'int' object has no attribute" in text


@pytest.mark.parametrize("keys", [("RANK", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_LOCALID")])
def test_a_mistake_is_reported_once_for_each_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, keys: tuple[str, str]
) -> None:
    for rank, local_rank, printed in ((0, 0, "Error: "), (1, 1, ""), (2, 0, "Error of rank 2: "), (3, 1, "")):
        for key, value in zip(keys, (rank, local_rank), strict=True):
            monkeypatch.setenv(key, str(value))
        assert report_error(UserError("a message.")) == 1
        assert capsys.readouterr().err == (f"{printed}a message.\n" if printed else "")
    assert report_error(KeyError("a bug")) == 1
    assert "KeyError" in capsys.readouterr().err


def test_an_error_of_one_rank_is_reported_by_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the ranks share a process group; one that rank 0 has met too is not repeated."""
    monkeypatch.setattr(process_group, "_store", torch.distributed.HashStore())
    monkeypatch.setattr(process_group, "ERROR_PATIENCE", timedelta(seconds=0.1))
    monkeypatch.setenv("RANK", "1")
    assert report_error(UserError("its disk is full.")) == 1
    assert capsys.readouterr().err == "Error of rank 1: its disk is full.\n"
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        report_error(UserError("a message."))
    assert capsys.readouterr().err == "Error: a message.\n"


# the user's own code


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(3, 3)

    def bug(self) -> None:
        key_schemas(3, "train")  # type: ignore[arg-type]  # where Lathe's own code fails


class Unbuildable(nn.Module):
    def __init__(self) -> None:
        self.width = width  # type: ignore[name-defined]  # noqa: F821


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> Tensor:
        raise OSError(f"sample {row} is gone")


def raised(call: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of many kinds)
        call()
    assert isinstance(caught.value, Exception)
    return caught.value


@pytest.mark.parametrize(
    ("call", "message", "place"),
    [
        (lambda: Net()(torch.zeros(2, 2)), "RuntimeError: mat1 and mat2 shapes", "return x @ torch.zeros(3, 3)"),
        (
            lambda: instantiate({"_target_": f"{__name__}.Unbuildable"}, "model.net"),
            "model.net: NameError: name 'width' is not defined",
            "self.width = width",
        ),
        (
            lambda: next(iter(Reader(Samples(), num_workers=1))),
            "OSError: sample 0 is gone",
            'raise OSError(f"sample {row} is gone")',
        ),
    ],
    ids=["a step", "a constructor", "a worker"],
)
def test_an_error_in_the_users_code_is_reported_with_its_lines(
    call: Any, message: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(raised(call)) == 1
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith(f"Error: {message}")
    assert f'  File "{__file__}", line ' in "\n".join(lines)
    assert any(line.strip().startswith(place) for line in lines)
    assert lines[-1] == HINT


# other libraries


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "x", "/a"), "/a: the disk is full"),
        (torch.OutOfMemoryError("x"), "GPU out of memory. Lower data.batch_size"),
        (RuntimeError("parameters that were not used in producing the loss"), "strategy=ddp: some parameters"),
        (
            RuntimeError("gloo: Timed out waiting 2000ms for recv operation to complete"),
            "rank 0 waited longer than launch.timeout=2 seconds in a collective",
        ),
        (ValueError("a bug"), None),
    ],
)
def test_errors_of_libraries_that_users_can_fix(error: Exception, message: str | None) -> None:
    explained = explain_error(error)
    assert explained is None if message is None else str(explained).startswith(message)


# commands


@pytest.mark.parametrize(
    ("words", "merged"),
    [
        (("--help",), False),
        (("model=mlp", "trainer.max_epochs=1"), True),  # rich prints first, and exits by itself
    ],
    ids=["help", "table"],
)
def test_a_closed_standard_output_ends_a_command(words: tuple[str, ...], merged: bool, tmp_path: Path) -> None:
    """As with `| head`: exit code 141, as from a shell."""
    process = start(command(*words), tmp_path, merged=merged)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    printed = "" if merged else process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 128 + signal.SIGPIPE, printed
    assert "Traceback" not in printed


def test_variables_of_a_dotenv_file_are_set_and_named_without_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".env").write_text('# of this machine\nLATHE_TOKEN="hush hush"\nLATHE_SET=file\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATHE_SET", "before")
    monkeypatch.setenv("LATHE_TOKEN", "x")  # so that it is removed after the test
    monkeypatch.delenv("LATHE_TOKEN")
    found: dict[str, str] = {}
    report_errors(lambda: found.update(os.environ))()
    assert (found["LATHE_TOKEN"], found["LATHE_SET"]) == ("hush hush", "before")
    assert capsys.readouterr().out == ".env sets LATHE_TOKEN.\n"


DOTS = "\u2026 \u00b1 \udcff"  # in a table, in a report, in a file name that is not valid text


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("latin-1", "strict", "? \u00b1 ?"),
        ("ascii", "backslashreplace", r"\u2026 \xb1 \udcff"),  # by PYTHONIOENCODING
    ],
)
def test_characters_that_a_terminal_has_not_are_replaced(
    encoding: str, errors: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(taken, encoding, errors))
    report_errors(lambda: print(DOTS))()
    assert taken.getvalue().decode(encoding) == f"{written}\n"


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
