"""A command ends as it would elsewhere where its terminal has few characters, and where it has no output at all."""

import io
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.commands import command, environment, start
from support.runs import ROOT

import lathe.data
from lathe.launch.agent import worker
from lathe.launch.streams import _nowhere
from lathe.launch.sweep.child import fork
from lathe.launch.telling import FULL_ERROR, one_sentence

DOTS = "\u2026 \u00b1 \udcff"  # of a table, of a report, of the name of a file that is no text


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
        ("ascii", "backslashreplace", r"\u2026 \xb1 \udcff"),  # as somebody has chosen
    ],
)
def test_characters_that_a_terminal_has_not_are_replaced(
    encoding: str, errors: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(taken, encoding, errors))
    one_sentence(lambda: print(DOTS))()
    assert taken.getvalue().decode(encoding) == f"{written}\n"


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_the_null_device_stands_in_for_a_stream_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, None)
    seen: list[bool] = []

    def main() -> None:
        print(DOTS, flush=True)
        seen.append(getattr(sys, name).isatty())

    one_sentence(main)()
    assert seen == [False]
    os.close(getattr(sys, name).fileno())


@pytest.mark.parametrize("number", [None, 200], ids=["the next that is free", "another"])
def test_it_stands_at_the_streams_own_number_for_children_too(number: int | None) -> None:
    if number is None:
        number = os.dup(1)
        os.close(number)
    stream = _nowhere(number, "w")
    try:
        assert stream.fileno() == number
        assert os.get_inheritable(number)
        assert os.path.samestat(os.fstat(number), os.stat(os.devnull))
    finally:
        os.close(number)


def test_a_rank_has_them_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lathe.launch.agent._die_with_parent", lambda: None)
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

    one_sentence(main)()
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "Warning: ours is odd"
    assert others[0] == f"{__file__}:3: UserWarning: another's"


STOPPED = """
import runpy
import sys

class Stopping:
    def find_spec(self, name, path=None, target=None):
        half = sys.modules.get("torch._subclasses.fake_tensor")
        if hasattr(half, "dump_cache_stats"):
            raise KeyboardInterrupt

sys.meta_path.insert(0, Stopping())
sys.argv = ["train.py", "paths.log_dir=" + sys.argv[1]]
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_stop_amid_torchs_import_is_one_line(tmp_path: Path) -> None:
    """Hydra logs from its first line on, and torch's own levels are set at the end of its import."""
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.stderr == "Error: stopped by Ctrl-C.\n"
    assert done.returncode == 130


def shown(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """As Python's own does, which pytest takes the place of."""
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_output_that_finds_no_place_is_told_as_such(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(command("--help"), cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 1
    assert found.stderr == "Error: this command's output can't be written, the disk is full: free some space.\n"


@pytest.mark.parametrize("words", [("--cfg", "job"), ("model=mlp", "trainer.max_epochs=1")], ids=["text", "table"])
def test_both_streams_that_nobody_reads_end_a_command_as_one_does(words: tuple[str, ...], tmp_path: Path) -> None:
    """As behind `2>&1 | head`: there is nobody to tell."""
    process = start(command(*words), tmp_path, merged=True)
    for stream in filter(None, (process.stdout, process.stderr)):
        stream.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
