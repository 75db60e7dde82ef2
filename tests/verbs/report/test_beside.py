"""Groups by one key: what differs beside it, what keeps runs from being paired, how a whole group is made again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.reports import REQUEST
from support.run_directories import write_run

from lathe.verbs.report.assemble import Report, assemble


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
