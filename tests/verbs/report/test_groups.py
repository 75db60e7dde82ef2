"""Groups of runs by the keys in which they differ: metrics, directions, pairs, caveats and searches."""

import io
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from scipy import stats
from support.report_data import report as report_data
from support.reports import REQUEST
from support.run_directories import write_run, write_sweep
from support.runs import SMALL, new_run

from lathe.training.train import train
from lathe.verbs.report.assemble import Report, assemble
from lathe.verbs.report.groups import Interval, corrected, summarise
from lathe.verbs.report.page import importance
from lathe.verbs.report.tables import headline, latex, markdown, show, table


def report(folder: Path, **asked: Any) -> Report:
    return assemble({"runs": str(folder), **REQUEST, **asked})


def labels(found: Report) -> list[str]:
    return [group.label for group in found.groups]


def test_five_seeds_of_two_widths(tmp_path: Path) -> None:
    """test_report.py has the numbers."""
    for at, value in enumerate((0.80, 0.81, 0.82, 0.83, 0.84, 0.91, 0.90, 0.93, 0.95, 0.96)):
        write_run(tmp_path, at, value, [f"model.net.width={4 + at // 5 * 4}"], at % 5)
    told = report(tmp_path)
    assert (told.metrics, told.directions, told.marks) == (["test/accuracy"], {"test/accuracy": "max"}, [])
    assert [group.best("test/accuracy", "max") for group in told.groups] == [0.84, 0.96]
    assert told.pairs["test/accuracy"][0].says == "p = 3.6e-05: better than the baseline"
    assert [report(tmp_path, baseline=name).baseline for name in ("model.net.width=8", "width=8", 8)] == [1, 1, 1]


def test_only_equal_seeds_and_folds_are_paired(tmp_path: Path) -> None:
    runs = [(4, 1, 0, 0.5), (4, 1, 1, 0.6), (4, 2, 0, 0.7), (8, 1, 0, 0.6), (8, 1, 1, 0.8), (8, 3, 0, 0.1)]
    for at, (width, seed, fold, value) in enumerate(runs):
        write_run(tmp_path, at, value, [f"model.net.width={width}", "data.folds=2", f"data.fold={fold}"], seed)
    told = report(tmp_path)
    assert told.factors == ["model.net.width"]
    (pair,) = told.pairs["test/accuracy"]
    assert (pair.test.n, pair.test.difference) == (2, pytest.approx(0.15))
    assert told.marks == ["Folds share most of their training data: intervals over them are too narrow."]


def test_what_follows_another_key_is_no_factor_of_its_own(tmp_path: Path) -> None:
    """optimizer.batch_size follows data.batch_size, and data.seed the seed; paths and names are not factors."""
    write_run(tmp_path, 0, 0.8, ["data.batch_size=32", "tags=[a]"], seed=1)
    write_run(tmp_path, 1, 0.8, ["data.batch_size=64", "name=train", "launch.timeout=5"], seed=2)
    assert report(tmp_path).factors == ["data.batch_size"]


def test_choices_of_groups_are_told_by_their_words(tmp_path: Path) -> None:
    for at, (model, width) in enumerate((("mlp", 4), ("mlp", 8), ("deep_mlp", 8))):
        write_run(tmp_path, at, 0.8, [f"model={model}", f"model.net.width={width}"])
    told = report(tmp_path)
    assert told.factors == ["model", "model.net.width"]
    assert labels(told) == [
        "model=deep_mlp, model.net.width=8",
        "model=mlp, model.net.width=4",
        "model=mlp, model.net.width=8",
    ]
    assert told.baseline == 2  # the most common values


def test_by_chooses_the_factors_and_says_what_is_mixed(tmp_path: Path) -> None:
    for at, (width, rate, seed) in enumerate(product((4, 8), (0.1, 0.2), (1, 2))):
        words = [f"model.net.width={width}", f"optimizer.lr={rate}"]
        write_run(tmp_path, at, width / 10 + rate + seed / 1000 * width, words, seed)
    told = report(tmp_path, by="model.net.width")
    assert labels(told) == ["model.net.width=4", "model.net.width=8"]
    assert told.groups[0].marks[0] == "mixes optimizer.lr (0.1, 0.2)"
    assert told.groups[0].marks[1].startswith("its 4 runs are of 2 configurations: ")
    assert told.groups[0].summary("test/accuracy", told.how).n == 4
    (pair,) = told.pairs["test/accuracy"]
    assert (pair.test.n, pair.test.difference) == (4, pytest.approx(0.406))  # each next to its own learning rate
    assert report(tmp_path, by=["optimizer.lr", "model.net.width"]).factors == ["optimizer.lr", "model.net.width"]


def test_a_run_that_was_repeated_counts_once(tmp_path: Path) -> None:
    for at, (value, seed) in enumerate(((0.5, 1), (0.6, 2), (0.9, 1))):
        write_run(tmp_path, at, value, seed=seed)
    told = report(tmp_path)
    (group,) = told.groups
    assert sorted(group.values("test/accuracy").values()) == [0.6, 0.9]
    assert group.label == "all runs"
    (mark,) = group.marks
    assert mark.endswith("is newer and of the same seed, and counts alone")


def test_runs_of_other_code_data_and_machines_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path, 0, 0.8, seed=1)
    write_run(tmp_path, 1, 0.8, seed=2, environment={"git_commit": "f" * 40, "cpu": "Another"})
    write_run(tmp_path, 2, 0.8, seed=3, environment={"git_diff": "- a\n+ b", "packages": {"lathe": "0.2.0"}})
    write_run(tmp_path, 3, 0.8, ["data.source.split_seed=3"], seed=3, devices=2)
    assert report(tmp_path).marks == [
        "The runs are of 3 states of the code (1234567: 2, fffffff: 1, 1234567 and changes: 1).",
        "The runs are of 2 versions of lathe (0.1.0: 3, 0.2.0: 1).",
        "The runs are of different data (data.source.split_seed): a difference may be theirs.",
        "The runs are of 2 kinds of machines and of 1 and 2 devices: their seconds can't be compared.",
    ]


def test_the_metric_is_the_monitors_on_the_test_split(tmp_path: Path) -> None:
    path = write_run(tmp_path, 0, 0.8, monitor="val/loss", **{"val/loss": 0.3})
    assert report(tmp_path).metrics == ["test/loss"]
    for results, metric in (
        ({"val/loss": 0.3, "val/accuracy": 0.5, "monitor": "val/loss"}, "val/loss"),
        ({"test_f1": 0.5, "val_f1": 0.6, "monitor": "val_f1"}, "test_f1"),
        ({"objective": 0.5, "monitor": "mine"}, "objective"),
    ):
        rewrite(path, results)
        assert report(tmp_path).metrics == [metric]


def test_losses_that_are_different_functions_are_marked(tmp_path: Path) -> None:
    for name, word in (("weights", "task.class_weights=[1,6]"), ("rates", "optimizer.lr=0.3")):
        write_run(tmp_path / name, 0, 0.8)
        write_run(tmp_path / name, 1, 0.7, [word])

    def marked(name: str, metric: str) -> bool:
        return any("different functions" in mark for mark in report(tmp_path / name, metric=metric).marks)

    assert marked("weights", "test/loss")
    assert not marked("weights", "test/accuracy")
    assert not marked("rates", "test/loss")


def test_what_differs_beside_the_key_is_told_with_the_difference(tmp_path: Path) -> None:
    """A has width 4 and rate 0.1, B width 8 and rate 0.2: width by itself does not explain the difference."""
    for at, ((width, rate), seed) in enumerate(product(((4, 0.1), (8, 0.2)), (1, 2, 3))):
        words = [f"model.net.width={width}", f"optimizer.lr={rate}"]
        write_run(tmp_path, at, width / 10 + seed / 1000 * width, words, seed)
    told = report(tmp_path, by="model.net.width")
    assert [group.marks for group in told.groups] == [[], []]
    assert told.pairs["test/accuracy"][0].says.endswith(
        ": better than the baseline; differs as well, and may be the reason: optimizer.lr (0.2 against 0.1)"
    )
    assert "differs as well" not in report(tmp_path).pairs["test/accuracy"][0].says


HINGE = "{_target_: torchmetrics.classification.MulticlassHingeLoss, num_classes: 10}"  # higher_is_better is False


def rewrite(path: Path, result: dict[str, Any]) -> None:
    (path / "result.json").write_text(json.dumps({"steps": 40, "parameters": 1000, "seconds": 2.0, **result}))


def test_a_run_writes_down_which_way_its_metrics_are_better_and_a_report_reads_it(tmp_path: Path) -> None:
    own = f"+task.metrics=[accuracy,{HINGE}]"
    cfg = new_run(tmp_path, *SMALL, own, "callbacks.checkpoint.monitor=val/hinge_loss")
    result = train(cfg)
    assert result["directions"] == {"loss": "min", "accuracy": "max", "hinge_loss": "min"}
    path = Path(cfg["paths"]["run_dir"])
    text = (path / "result.json").read_text().replace("hinge_loss", "bad_rate")
    (path / "result.json").write_text(text)  # the same under a name that reveals no direction
    told = report(tmp_path)
    assert (told.directions, told.marks) == ({"test/bad_rate": "min"}, [])
    assert told.groups[0].best("test/bad_rate", "min") == result["test/hinge_loss"]
    rewrite(path, {"test/bad_rate": 0.5, "monitor": "val/bad_rate"})
    told = report(tmp_path)
    assert told.directions == {"test/bad_rate": "max"}
    assert "was guessed from its name" in told.marks[0]
    assert report(tmp_path, direction="min").marks == []


def searched(folder: Path, jobs: list[dict[str, Any]], **options: Any) -> Path:
    sweep = write_sweep(folder, jobs)
    space = {"optimizer.lr": {"low": 0.1, "high": 0.5, "step": 0.1}}
    chosen = {"space": space, "objectives": None, "directions": "auto", **options}
    facts = {"format": 1, "words": [], "name": "train", "sweep": chosen}
    (sweep / "sweep.yaml").write_text(OmegaConf.to_yaml(facts))
    return sweep


def test_the_best_trial_is_the_first_row_and_is_named_with_its_objective(tmp_path: Path) -> None:
    """Four trials: the middle one is the best of val/accuracy, the last was pruned; the rate 0.3 with noise."""
    jobs = []
    for number, (rate, value) in enumerate([(0.1, 0.5), (0.1 + 0.2, 0.9), (0.5, 0.7), (0.2, None)]):
        run = write_run(tmp_path, number, value, [f"optimizer.lr={rate}"])
        state = {"state": "pruned"} if value is None else {"values": [value + 0.01]}
        jobs.append({"run_dir": str(run), "overrides": [f"optimizer.lr={rate}"], **state})
    told = report(searched(tmp_path, jobs))
    assert [group.label for group in told.listed] == ["optimizer.lr=0.3", "optimizer.lr=0.5", "optimizer.lr=0.1"]
    assert told.groups[-1].label == "optimizer.lr=0.2"  # which has no complete run
    assert told.baseline == 0
    assert "4 groups over seeds and folds, 1 of them without a complete run" in headline(told)
    assert "of 3 complete trials it chose 1, 0.91: optimizer.lr=0.3" in told.marks[0]
    assert told.marks[1].startswith("Each row is one run, so nothing here is evidence of a difference")
    columns = ["optimizer.lr", "n", "mean", "difference", "seconds", "parameters"]
    assert [cell.name for cell in table(told, "test/accuracy")[0]] == columns
    console = Console(file=io.StringIO(), width=200)
    show(told, console)
    for text in (markdown(told), latex(told), console.file.getvalue()):  # type: ignore[attr-defined]
        assert "n = 1" not in text
        assert text.index("0.9000") < text.index("0.7000") < text.index("0.5000")


def test_a_search_of_several_runs_each_goes_by_their_mean_and_by_its_own_direction(tmp_path: Path) -> None:
    jobs = []
    runs = [(0, 0.1, 1, 0.2), (0, 0.1, 2, 0.4), (1, 0.2, 1, 0.1), (1, 0.2, 2, 0.9), (2, 0.4, 1, 0.0)]
    for number, (trial, rate, seed, value) in enumerate(runs):
        words = [f"optimizer.lr={rate}", f"seed={seed}"]
        run = write_run(tmp_path, number, 0.5 + rate, words[:1], seed)
        jobs.append({"run_dir": str(run), "overrides": words, "trial": trial, "values": [value]})
    told = report(searched(tmp_path, jobs, objectives=["val/bad_rate"], directions="min"))
    assert "(lower is better): of 2 complete trials it chose 0, 0.3: optimizer.lr=0.1" in told.marks[0]
    assert told.groups[0].label == "optimizer.lr=0.4"


def test_a_search_for_several_objectives_names_what_no_trial_beats(tmp_path: Path) -> None:
    jobs = []
    for number, values in enumerate([[0.9, 8.0], [0.8, 4.0], [0.7, 6.0]]):
        rate = 0.1 * (number + 1)
        run = write_run(tmp_path, number, values[0], [f"optimizer.lr={rate}"])
        jobs.append({"run_dir": str(run), "overrides": [f"optimizer.lr={rate}"], "values": values})
    told = report(searched(tmp_path, jobs, objectives=["val/accuracy", "latency"]))
    assert "latency (lower is better): no trial beats 0, 1 in all of them" in told.marks[0]


HOW = Interval()


def test_a_bootstrap_is_of_percentiles_and_repeats() -> None:
    """Resampled means of two values are 0, 1/2 and 1 with 1/4, 1/2 and 1/4 of the draws. Those of eight zeros and eight
    ones are binomial with mean 1/2 and deviation 1/8: 95 % lie within about 1.96 / 8.
    """
    assert summarise((0.0, 1.0), Interval("bootstrap")).interval == (0.0, 1.0)
    told = summarise((0.0, 1.0) * 8, Interval("bootstrap"))
    assert told.interval == (0.25, 0.75)
    many = tuple(map(math.sin, range(30)))
    first, second, same = (summarise(many, Interval("bootstrap", seed=seed)) for seed in (1, 2, 1))
    assert first == same != second
    few = summarise((1.0, 2.0, 4.0), Interval("bootstrap"))
    assert few.why == "n = 3: the interval is narrower than it should be"


def test_the_interval_of_a_share_ends_at_one() -> None:
    low, high = summarise((0.9, 0.99, 1.0), HOW).interval or (0, 0)
    assert high > 1
    assert summarise((0.9, 0.99, 1.0), HOW, share=True).interval == (low, 1.0)
    assert summarise((90.0, 99.0, 100.0), HOW, share=True).interval == pytest.approx((100 * low, 100 * high))  # percent


def test_p_is_corrected_for_the_number_of_comparisons() -> None:
    """Holm: 4 x 0.01, 3 x 0.02 and 2 x 0.03, none below the one before. Benjamini and Hochberg: p x 4 / rank."""
    holm, fdr = zip(*corrected([0.03, 0.01, 0.5, 0.02]), strict=True)
    assert holm == pytest.approx((0.06, 0.04, 0.5, 0.06))
    assert fdr == pytest.approx((0.04, 0.04, 0.5, 0.04))
    assert corrected([0.04]) == [(0.04, 0.04)]
    assert corrected([]) == []


def test_the_share_is_epsilon_squared_of_kruskal_and_wallis() -> None:
    data = report_data(60)
    found = importance(data)
    runs = [run for run in data["runs"] if run["state"] == "complete"]
    depths, scores = zip(*((r["factors"]["model.net.depth"], r["metrics"]["test/accuracy"]) for r in runs), strict=True)
    levels = [[score for score, depth in zip(scores, depths, strict=True) if depth == level] for level in (20, 32, 56)]
    h = stats.kruskal(*levels).statistic  # (n - 1) times the explained share of the variance
    (row,) = [row for row in found["rows"] if row["factor"] == "model.net.depth"]
    assert (row["levels"], found["n"], len(runs)) == (3, 54, 54)
    assert row["share"] == pytest.approx(1 - (1 - h / 53) * 53 / 51)
    assert row["direction"] == pytest.approx(stats.spearmanr(depths, scores).statistic)
