"""A command works on a terminal of few characters, and without any output."""

import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import lathe.data
from lathe.launch.elastic import worker
from lathe.launch.error_reporting import FULL_ERROR, report_errors
from lathe.launch.sweep.child import fork

DOTS = "\u2026 \u00b1 \udcff"  # in a table, in a report, in a file name that is not valid text


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    for key in (FULL_ERROR, "HYDRA_FULL_ERROR"):
        monkeypatch.setenv(key, "0")  # so that what a command sets is taken back after the test


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("latin-1", "strict", "? \u00b1 ?"),
        ("ascii", "strict", "? ? ?"),
        ("ascii", "surrogateescape", "? ? ?"),  # of LC_ALL=C
        ("utf-8", "strict", "\u2026 \u00b1 ?"),
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


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_the_null_device_stands_in_for_a_stream_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, None)
    seen: list[bool] = []

    def main() -> None:
        print(DOTS, flush=True)
        seen.append(getattr(sys, name).isatty())

    report_errors(main)()
    assert seen == [False]
    getattr(sys, name).close()


def test_a_rank_has_them_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lathe.launch.elastic.die_with_parent", lambda: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    (tmp_path / "mistake.json").touch()
    with pytest.raises(SystemExit):
        worker("x:y", {}, str(tmp_path), 1.0)
    print(DOTS)
    assert sys.stdout.errors == "replace"


def test_a_job_of_a_sweep_has_them_in_its_log(tmp_path: Path) -> None:
    pid = fork(lambda: print(DOTS), tmp_path / "log.txt", tmp_path / "outcome.json", {}, None)
    assert os.waitpid(pid, 0)[1] == 0, (tmp_path / "log.txt").read_text()
    assert "\ufffd" not in (tmp_path / "log.txt").read_text(errors="replace")


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' stay as Python shows them."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    monkeypatch.setattr(warnings, "showwarning", shown)

    def main() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn_explicit("ours\n is odd", UserWarning, lathe.data.__file__, 3)
            warnings.warn_explicit("another's", UserWarning, __file__, 3)

    report_errors(main)()
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "Warning: ours is odd"
    assert others[0] == f"{__file__}:3: UserWarning: another's"


def shown(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """As Python's own does, which pytest takes the place of."""
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))
