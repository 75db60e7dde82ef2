"""The report of a search: its best trial first, its objective, and no claim of significance."""

import io
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from support.reports import REQUEST
from support.run_directories import write_run, write_sweep

from lathe.verbs.report.assemble import Report, assemble
from lathe.verbs.report.latex import latex
from lathe.verbs.report.markdown import found, markdown
from lathe.verbs.report.screen import show
from lathe.verbs.report.tables import columns


def report(folder: Path, **asked: Any) -> Report:
    return assemble({"runs": str(folder), **REQUEST, **asked})


def searched(folder: Path, jobs: list[dict[str, Any]], **options: Any) -> Path:
    sweep = write_sweep(folder, jobs)
    space = {"optimizer.lr": {"low": 0.1, "high": 0.5, "step": 0.1}}
    chosen = {"space": space, "objectives": None, "directions": "auto", **options}
    facts = {"format": 1, "words": [], "name": "train", "sweep": chosen}
    (sweep / "sweep.yaml").write_text(OmegaConf.to_yaml(facts))
    return sweep


@pytest.fixture
def search(tmp_path: Path) -> Path:
    """Four trials: the middle one is the best of val/accuracy, the last was pruned; the rate 0.3 with noise."""
    jobs = []
    for number, (rate, value) in enumerate([(0.1, 0.5), (0.1 + 0.2, 0.9), (0.5, 0.7), (0.2, None)]):
        run = write_run(tmp_path, number, value, [f"optimizer.lr={rate}"])
        state = {"state": "pruned"} if value is None else {"values": [value + 0.01]}
        jobs.append({"run_dir": str(run), "overrides": [f"optimizer.lr={rate}"], **state})
    return searched(tmp_path, jobs)


def test_the_best_trial_is_the_first_row_and_is_named_with_its_objective(search: Path) -> None:
    told = report(search)
    assert [group.label for group in told.listed] == ["optimizer.lr=0.3", "optimizer.lr=0.5", "optimizer.lr=0.1"]
    assert told.groups[-1].label == "optimizer.lr=0.2"  # which has no complete run
    assert told.baseline == 0
    assert " in 4 groups over seeds and folds, 1 of them without a complete run and so without a row; " in found(told)
    assert told.marks[:2] == [
        "A search by val/accuracy (higher is better): of 3 complete trials it chose 1, 0.91: "
        "optimizer.lr=0.3; rows are ordered by test/accuracy.",
        "Each row is one run, so nothing here is evidence of a difference: add -m and seed=1,2,3 to a row's command.",
    ]
    assert [column.name for column in columns(told, "test/accuracy")] == [
        *("optimizer.lr", "n", "mean", "difference", "seconds", "parameters")
    ]
    console = Console(file=io.StringIO(), width=200)
    show(told, console)
    for text in (markdown(told), latex(told), console.file.getvalue()):  # type: ignore[attr-defined]
        assert "no evidence" not in text
        assert "n = 1" not in text
        assert [text.index(value) for value in ("0.9000", "0.7000", "0.5000")] == sorted(
            text.index(value) for value in ("0.9000", "0.7000", "0.5000")
        )


def test_a_search_of_several_runs_each_goes_by_their_mean_and_by_its_own_direction(tmp_path: Path) -> None:
    jobs = []
    for number, (trial, rate, seed, value) in enumerate(
        [(0, 0.1, 1, 0.2), (0, 0.1, 2, 0.4), (1, 0.2, 1, 0.1), (1, 0.2, 2, 0.9), (2, 0.4, 1, 0.0)]
    ):
        words = [f"optimizer.lr={rate}", f"seed={seed}"]
        run = write_run(tmp_path, number, 0.5 + rate, words[:1], seed)
        jobs.append({"run_dir": str(run), "overrides": words, "trial": trial, "values": [value]})
    sweep = searched(tmp_path, jobs, objectives=["val/bad_rate"], directions="min")
    told = report(sweep)
    assert told.marks[0] == (
        "A search by val/bad_rate (lower is better): of 2 complete trials it chose 0, 0.3: optimizer.lr=0.1; rows are "
        "ordered by test/accuracy."
    )
    assert told.groups[0].label == "optimizer.lr=0.4"


def test_a_search_for_several_objectives_names_what_no_trial_beats(tmp_path: Path) -> None:
    jobs = []
    for number, values in enumerate([[0.9, 8.0], [0.8, 4.0], [0.7, 6.0]]):
        rate = 0.1 * (number + 1)
        run = write_run(tmp_path, number, values[0], [f"optimizer.lr={rate}"])
        jobs.append({"run_dir": str(run), "overrides": [f"optimizer.lr={rate}"], "values": values})
    told = report(searched(tmp_path, jobs, objectives=["val/accuracy", "latency"]))
    assert told.marks[0] == (
        "A search by val/accuracy (higher is better) and latency (lower is better): no trial beats 0, 1 in all of "
        "them; rows are ordered by test/accuracy."
    )
