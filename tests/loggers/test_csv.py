"""metrics.csv: one line per step, and the same file with and without an interruption."""

import csv as csv_module
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lathe.loggers import CSVLogger
from lathe.loggers.csv_logger import read_lines

WRITER = CSVLogger.save.__wrapped__.__code__.co_filename  # type: ignore[attr-defined]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def lines(path: Path) -> list[str]:
    return path.read_bytes().decode().splitlines()


def begun(path: Path, start_step: int = 0) -> CSVLogger:
    logger = CSVLogger(path, start_step)
    logger.begin()
    return logger


def test_a_new_figure_adds_a_column_and_leaves_older_lines_blank_there(path: Path) -> None:
    logger = begun(path)
    logger.log_metrics({"a": 1}, step=1)
    logger.log_metrics({"b": 2}, step=2)
    logger.log_metrics({"a": 3, "c": 4}, step=3)
    logger.log_metrics({"c": 5}, step=4)
    logger.finalize("success")
    assert lines(path) == ["step,a,b,c", "1,1,,", "2,,2,", "3,3,,4", "4,,,5"]


def test_figures_of_an_earlier_step_go_into_its_line(path: Path) -> None:
    logger = begun(path)
    for step in (2, 4, 6):
        logger.log_metrics({"a": step}, step=step)
    logger.log_metrics({"b": 1}, step=4)
    logger.log_metrics({"a": 3}, step=3)
    logger.log_metrics({"a": 0}, step=0)
    logger.log_metrics({"b": 6}, step=6)  # the newest line is still buffered
    logger.log_metrics({"a": 8}, step=8)
    logger.finalize("success")
    assert lines(path) == ["step,a,b", "0,0,", "2,2,", "3,3,", "4,4,1", "6,6,6", "8,8,"]


def test_numbers_come_back_exactly(path: Path) -> None:
    logger = begun(path)
    values = {
        "float": 0.1 + 0.2,
        "tiny": 5e-324,
        "tensor": torch.tensor(1 / 3),
        "whole": 7,
        "nan": float("nan"),
        "inf": float("inf"),
    }
    logger.log_metrics(values, step=1)
    logger.save()
    with open(path, newline="") as file:
        row = next(csv_module.DictReader(file))
    assert float(row["float"]) == 0.1 + 0.2
    assert float(row["tiny"]) == 5e-324
    assert torch.tensor(float(row["tensor"])) == torch.tensor(1 / 3)
    assert (row["whole"], row["nan"], row["inf"]) == ("7", "nan", "inf")


def test_save_brings_the_open_line_to_disk_and_it_stays_open(path: Path) -> None:
    logger = begun(path)
    logger.log_metrics({"a": 1.0, "b": 2.0}, step=1)
    logger.log_metrics({"a": 3.0}, step=2)
    logger.save()
    assert lines(path) == ["step,a,b", "1,1.0,2.0", "2,3.0,"]
    logger.log_metrics({"b": 4.0}, step=2)
    logger.log_metrics({"a": 0.0}, step=2)  # the line shrinks
    logger.save()
    logger.save()
    assert lines(path) == ["step,a,b", "1,1.0,2.0", "2,0.0,4.0"]
    logger.log_metrics({"a": 5.0}, step=3)
    logger.finalize("success")
    assert lines(path) == ["step,a,b", "1,1.0,2.0", "2,0.0,4.0", "3,5.0,"]


def test_a_saved_line_is_in_the_file_whenever_the_run_is_killed(path: Path) -> None:
    """Checked between any two lines of the writer's code."""
    logger, kept, looks = begun(path), dict[str, str](), 0

    def look(frame: Any, event: str, arg: object) -> Any:
        nonlocal looks
        if frame.f_code.co_filename != WRITER:
            return None
        looks += 1
        found = {row["step"]: row.get("a") for row in read_lines(path).rows}
        assert all(found.get(step) == value for step, value in kept.items()), (frame.f_lineno, found, kept)
        return look

    before = sys.gettrace()
    for step in range(1, 40):
        sys.settrace(look)
        try:
            logger.log_metrics({"a": step / 8}, step)
            if step % 3 == 0:
                logger.save()  # as a checkpoint does
                kept[str(step)] = str(step / 8)
            if step % 6 == 0:
                logger.log_metrics({"late": 1.0, f"of {step}": 0.5} if step % 12 else {"late": 1.0}, step)
            if step % 9 == 0:
                logger.log_metrics({"a": step / 8}, step - 1)
        finally:
            sys.settrace(before)
    assert looks > 300
    assert len(kept) == 13


def test_a_file_that_may_not_grow_keeps_its_lines(path: Path) -> None:
    resource = pytest.importorskip("resource")  # not on Windows
    logger = begun(path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.save()
    before = path.read_bytes()
    logger.log_metrics({"a": 2.0}, step=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 3, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as found:
            logger.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.value.filename == str(path)
    assert path.read_bytes() == before
    logger.save()
    assert lines(path)[1:] == ["1,1.0", "2,2.0"]


def write(logger: CSVLogger, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step, "epoch": step // 4}, step=step)
        if step % 4 == 0:
            logger.log_metrics({"val/accuracy": step / 100}, step=step)
        if step == 6:
            logger.log_metrics({"late": 1.5}, step=step)


@pytest.mark.parametrize("checkpoint", [1, 4, 6])
@pytest.mark.parametrize("torn", [b"", b"9,0.11", b"9,0.1111,2,\n10,"])
def test_a_continued_file_is_the_uninterrupted_one(tmp_path: Path, checkpoint: int, torn: bytes) -> None:
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    logger = begun(whole)
    write(logger, range(1, 13))
    logger.finalize("success")

    first = begun(broken)
    write(first, range(1, 9))
    first.save()
    with open(broken, "ab") as file:
        file.write(torn)  # and killed
    second = begun(broken, start_step=checkpoint)
    assert max((int(line.split(",")[0]) for line in lines(broken)[1:]), default=0) == checkpoint
    write(second, range(checkpoint + 1, 13))
    second.finalize("success")

    assert broken.read_bytes() == whole.read_bytes()


def test_nothing_half_written_stays_when_the_disk_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = begun(path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.save()
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        logger.log_metrics({"b": 1.0}, step=1)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["metrics.csv"]


def test_pictures_of_a_module_are_dropped_with_one_note(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = begun(path)
    for step in (1, 2):
        logger.experiment.add_image("samples", torch.zeros(3, 4, 4), step)
    assert capsys.readouterr().out.count("logger.experiment") == 1
    logger.log_metrics({"train/loss": 0.5}, step=1)
    logger.save()
    assert lines(path) == ["step,train/loss", "1,0.5"]
