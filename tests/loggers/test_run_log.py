"""run.log: messages during a run."""

import logging
import sys
import warnings
from pathlib import Path

import pytest
from support.interruptions import Interrupted, Interruption, interruption
from support.runs import SMALL, new_run

from lathe.errors import UserError
from lathe.loggers import run_log
from lathe.tasks import ClassificationTask
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture


def said(run_dir: Path) -> list[str]:
    """Return the lines without times and tracebacks."""
    lines = (run_dir / "run.log").read_text().splitlines()
    return [line.split(" ", 2)[2] for line in lines if line.startswith("20")]


def test_logging_and_warnings_are_kept_and_shown_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    before = (list(root.handlers), root.level)
    leaves = {"logger.hub.api_key": "abcdefgh", "seed": 1}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with run_log(tmp_path, leaves, {"HF_TOKEN": "s3cr3t-value"}):
            logging.getLogger("mine").info("width %d of %s", 16, "s3cr3t-value")
            logging.getLogger("mine").warning("key abcdefgh at https://me:pw@host/x")
            logging.getLogger("lightning.pytorch.deep").warning("deep")
            warnings.warn("odd", UserWarning, stacklevel=1)
    assert (list(root.handlers), root.level) == before
    logging.getLogger("mine").warning("later")
    lines = said(tmp_path)
    assert lines[1:4] == [
        "INFO mine: width 16 of hidden",
        "WARNING mine: key hidden at https://hidden@host/x",
        "WARNING lightning.pytorch.deep: deep",
    ]
    assert lines[4].startswith(f"WARNING warnings: UserWarning: odd ({__file__}:")
    assert len(lines) == 6
    shown = capsys.readouterr().err
    assert "key abcdefgh" in shown  # the terminal's output is unchanged
    assert "width" not in shown


def test_the_error_is_the_end_a_bug_with_its_traceback(tmp_path: Path) -> None:
    for error in (UserError("seed=x: a mistake."), RuntimeError("a bug")):
        with pytest.raises(type(error)), run_log(tmp_path, {}):
            raise error
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines[1:2]] == ["ERROR lathe: seed=x: a mistake."]
    assert lines[3].endswith("ERROR lathe: a bug")
    assert lines[-1] == "RuntimeError: a bug"


def test_a_continued_run_goes_on_in_it(
    tmp_path: Path, interruption: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: ClassificationTask) -> None:
        logging.getLogger("mine").warning("epoch %d", self.current_epoch)

    monkeypatch.setattr(ClassificationTask, "on_validation_epoch_start", end)
    cfg = new_run(tmp_path, *SMALL)
    interruption.hook, interruption.step = "on_train_epoch_end", 1
    with pytest.raises(Interrupted):
        train(cfg)
    interruption.step = sys.maxsize
    train(cfg)
    lines = said(Path(cfg["paths"]["run_dir"]))
    mine = [line for line in lines if "mine" in line]
    assert mine[0] == "WARNING mine: epoch 0"
    assert mine[-1] == "WARNING mine: epoch 1"
    assert sum("begins" in line for line in lines) == 2
    assert lines[-1].endswith("has ended")


def test_a_full_disk_below_run_log_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Path("/dev/full").open("a")  # noqa: SIM115 - the log closes it
    monkeypatch.setattr(sys.modules["lathe.loggers.run_log"], "open_plain", lambda *_, **__: full)
    with run_log(tmp_path, {}):
        logging.getLogger("mine").info("and on")
    told = capsys.readouterr().err
    assert told == f"Note: {tmp_path}/run.log can't be written ([Errno 28] No space left on device): it ends here.\n"
