"""Runs whose losses are different functions are not ranked by them without a word."""

from pathlib import Path

import pytest
from support.reports import REQUEST
from support.run_directories import write_run

from lathe.verbs.report.assemble import Report, assemble


def report(folder: Path, metric: str) -> Report:
    return assemble({"runs": str(folder), **REQUEST, "metric": metric})


@pytest.mark.parametrize(
    ("key", "marked"),
    [
        ("task.class_weights=[1,6]", True),
        ("task.loss={_target_: torch.nn.MultiMarginLoss}", True),
        ("task.label_smoothing=0.1", False),
        ("task.metrics=[accuracy]", False),
        ("optimizer.lr=0.3", False),
    ],
)
def test_losses_that_are_different_functions_are_marked(tmp_path: Path, key: str, marked: bool) -> None:
    for number in range(4):
        write_run(tmp_path, number, 0.8, [key] if number % 2 else [], seed=number, **{"test/loss": 0.5 + number / 9})
    found = [line for line in report(tmp_path, "test/loss").marks if line.startswith("The runs' losses")]
    assert len(found) == marked
    assert not marked or found[0].endswith("): test/loss of one is no measure of another's.")
    assert not any("losses" in line for line in report(tmp_path, "test/accuracy").marks)
