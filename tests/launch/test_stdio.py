"""A command works on a terminal with a small character set, and without any output."""

import io
import sys

import pytest

from lathe.launch.error_reporting import FULL_ERROR, report_errors

DOTS = "\u2026 \u00b1 \udcff"  # in a table, in a report, in a file name that is not valid text


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    for key in (FULL_ERROR, "HYDRA_FULL_ERROR"):
        monkeypatch.setenv(key, "0")  # so that variables set by a command are restored after the test


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("latin-1", "strict", "? \u00b1 ?"),
        ("ascii", "surrogateescape", "? ? ?"),  # of LC_ALL=C
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
