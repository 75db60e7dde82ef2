"""Groups by one key: what differs beside it, what keeps runs from being paired, how a whole group is made again."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.reports import REQUEST
from support.run_directories import write_run

from lathe.verbs.report.assemble import Report, assemble
from lathe.verbs.report.data import page_data
from lathe.verbs.report.latex import latex
from lathe.verbs.report.markdown import markdown
from lathe.verbs.report.screen import show
from lathe.verbs.report.tables import groups_csv


def report(folder: Path, **asked: Any) -> Report:
    return assemble({"runs": str(folder), **REQUEST, **asked})


def write(folder: Path, words: Sequence[str], values: Sequence[float], seeds: Sequence[int], at: int = 0) -> None:
    for number, (value, seed) in enumerate(zip(values, seeds, strict=True)):
        write_run(folder, at + number, value, words, seed)


def test_what_differs_beside_the_key_is_told_with_the_difference(tmp_path: Path) -> None:
    """A has width 4 and rate 0.1, B width 8 and rate 0.2: the width alone is no reason."""
    for at, (width, rate, seed) in enumerate((w, r, s) for w, r in ((4, 0.1), (8, 0.2)) for s in (1, 2, 3)):
        words = [f"model.net.width={width}", f"optimizer.lr={rate}"]
        write_run(tmp_path, at, width / 10 + seed / 1000 * width, words, seed)
    told = report(tmp_path, by="model.net.width")
    assert [group.marks for group in told.groups] == [[], []]
    assert told.pairs["test/accuracy"][0].says.endswith(
        ": better than the baseline; differs as well, and may be the reason: optimizer.lr (0.2 against 0.1)"
    )
    for path in (tmp_path / "train").iterdir():  # the same from configurations alone, as of a recipe of one's own
        (path / "overrides.yaml").write_text("[]\n")
    assert (
        report(tmp_path, by="model.net.width")
        .pairs["test/accuracy"][0]
        .says.endswith("may be the reason: optimizer.lr (0.2 against 0.1)")
    )
    assert "differs as well" not in report(tmp_path).pairs["test/accuracy"][0].says


def test_what_a_choice_brings_along_is_not_told_beside_it(tmp_path: Path) -> None:
    for at, name in enumerate(("mlp", "deep_mlp")):
        write(tmp_path, [f"model={name}", f"data.batch_size={32 * (at + 1)}"], [0.8, 0.81 + at / 100], [1, 2], at * 10)
    for by in ("model", "model.net._target_"):
        says = report(tmp_path, by=by).pairs["test/accuracy"][0].says
        assert says.partition("the reason: ")[2] in (
            "data.batch_size (64 against 32)",
            "data.batch_size (32 against 64)",
        )


def test_where_a_mixed_key_keeps_runs_apart_it_is_named_and_not_the_seeds(tmp_path: Path) -> None:
    at = 0
    for width, rates in ((4, (0.1, 0.2)), (8, (0.3, 0.4))):
        for rate, seed in [(rate, seed) for rate in rates for seed in (2, 1)]:
            write_run(
                tmp_path, at := at + 1, 0.5 + at / 100, [f"model.net.width={width}", f"optimizer.lr={rate}"], seed
            )
    told = report(tmp_path, by="model.net.width")
    assert told.pairs["test/accuracy"][0].says == (
        "the same seeds, but optimizer.lr mixed in the groups and never alike on both sides: nothing to pair; group by "
        "it as well, by=[model.net.width,optimizer.lr]"
    )
    # and every one of a group's runs is made again, by a command for each of its rates
    assert [[command.partition("model.net.width=")[2] for command in group.commands] for group in told.groups] == [
        ["4 optimizer.lr=0.1 seed=1,2", "4 optimizer.lr=0.2 seed=1,2"],
        ["8 optimizer.lr=0.3 seed=1,2", "8 optimizer.lr=0.4 seed=1,2"],
    ]
    assert told.groups[0].command.count(" && python train.py -m ") == 1
    by_both = report(tmp_path, by=["model.net.width", "optimizer.lr"])
    assert [pair.told.n for pair in by_both.pairs["test/accuracy"]] == [2, 2, 2]


def test_a_difference_that_is_not_of_the_two_means_says_of_which_runs_it_is(tmp_path: Path) -> None:
    """An ablation: each of two settings left out alone, so one configuration has a like without dropout."""
    configurations = [(0.1, 0.2, 0.8), (0.1, 0.1, 0.5), (0.0, 0.2, 0.7)]
    for at, (dropout, rate, value) in enumerate(configurations):
        words = ["model=mlp", f"model.net.dropout={dropout}", f"optimizer.lr={rate}"]
        write(tmp_path, words, [value, value + 0.01, value + 0.03], [1, 2, 3], at=3 * at)
    told = report(tmp_path, by="model.net.dropout", baseline="dropout=0.1")
    means = [group.summary("test/accuracy", told.how) for group in told.groups]
    assert [(one.n, one.mean) for one in means] == [
        (3, pytest.approx(0.71333, abs=1e-5)),
        (6, pytest.approx(0.66333, abs=1e-5)),
    ]
    (pair,) = told.pairs["test/accuracy"]
    assert (pair.told.n, pair.told.difference) == (3, pytest.approx(-0.1))
    note = (
        "pairs are alike in seed and fold, optimizer.lr: 3 of 3 runs here and 3 of 6 of the baseline are in the "
        "difference"
    )
    console = Console(file=io.StringIO(), width=200)
    show(told, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (printed, markdown(told), latex(told), groups_csv(told), str(page_data(told))):
        assert note in text
        assert "its 6 runs are of 2 configurations: intervals and p are not over seeds alone" in text


def test_seeds_without_a_pair_are_counted(tmp_path: Path) -> None:
    write(tmp_path, ["model.net.width=4"], [0.80, 0.84, 0.82], [1, 2, 3])
    write(tmp_path, ["model.net.width=8"], [0.81, 0.88], [1, 2], at=3)
    (pair,) = report(tmp_path).pairs["test/accuracy"]
    assert pair.says.endswith(
        "pairs are alike in seed and fold: 2 of 2 runs here and 2 of 3 of the baseline are in the difference"
    )
