"""Means, intervals, paired tests and importance against results by hand, textbook tables and closed forms."""

import math

import pytest
from scipy import stats
from support.report_data import report

from lathe.verbs.report.groups import Interval, compare, corrected, summarise
from lathe.verbs.report.page import importance

T_975 = {1: 12.706205, 2: 4.302653, 4: 2.776445, 9: 2.262157}  # Student's t, two-sided 5 %, as tables print it
HOW = Interval()


def test_the_interval_is_students() -> None:
    # 1, 2, 3, 4, 5: mean 3, squares 4 + 1 + 0 + 1 + 4 = 10, variance 10 / 4, standard error sqrt(2.5 / 5)
    told = summarise((1, 2, 3, 4, 5), HOW)
    assert (told.n, told.mean, told.why) == (5, 3, None)
    assert told.std == pytest.approx(1.5811388)
    half = T_975[4] * math.sqrt(0.5)
    assert told.interval == pytest.approx((3 - half, 3 + half), abs=1e-6)


def test_a_bootstrap_is_of_percentiles_and_repeats() -> None:
    """Resampled means of two values are 0, 1/2 and 1 with 1/4, 1/2 and 1/4 of the draws. Those of eight zeros and eight
    ones are binomial with mean 1/2 and deviation 1/8: 95 % lie within about 1.96 / 8.
    """
    assert summarise((0.0, 1.0), Interval("bootstrap")).interval == (0.0, 1.0)
    told = summarise((0.0, 1.0) * 8, Interval("bootstrap"))
    assert told.interval == (0.25, 0.75)
    many = tuple(math.sin(number) for number in range(30))
    assert summarise(many, Interval("bootstrap", seed=1)) == summarise(many, Interval("bootstrap", seed=1))
    assert summarise(many, Interval("bootstrap", seed=1)) != summarise(many, Interval("bootstrap", seed=2))
    few = summarise((1.0, 2.0, 4.0), Interval("bootstrap"))
    assert few.why == "n = 3: the interval is narrower than it should be"


def test_the_interval_of_a_share_ends_at_one() -> None:
    low, high = summarise((0.9, 0.99, 1.0), HOW).interval or (0, 0)
    assert high > 1
    assert summarise((0.9, 0.99, 1.0), HOW, share=True).interval == (low, 1.0)
    assert summarise((90.0, 99.0, 100.0), HOW, share=True).interval == pytest.approx((100 * low, 100 * high))


def test_p_is_corrected_for_the_number_of_comparisons() -> None:
    """Holm: 4 x 0.01, 3 x 0.02 and 2 x 0.03, none below the one before. Benjamini and Hochberg: p x 4 / rank."""
    holm, fdr = zip(*corrected([0.03, 0.01, 0.5, 0.02]), strict=True)
    assert holm == pytest.approx((0.06, 0.04, 0.5, 0.06))
    assert fdr == pytest.approx((0.04, 0.04, 0.5, 0.04))
    assert corrected([0.04]) == [(0.04, 0.04)]
    assert corrected([]) == []


def test_pairs_are_compared_by_their_differences() -> None:
    # Differences 1, 2, 3: mean 2, variance 1, error 1 / sqrt(3), t = 3.4641. With 2 degrees of freedom the distribution
    # has a closed form: p = 1 - t / sqrt(2 + t^2).
    told = compare([11, 22, 33], [10, 20, 30], HOW)
    t = 2 * math.sqrt(3)
    assert told.p == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)
    assert told.p == pytest.approx(0.0741799, abs=1e-6)
    half = T_975[2] / math.sqrt(3)
    assert told.interval == pytest.approx((2 - half, 2 + half), abs=1e-6)
    assert compare([10, 20, 30], [11, 22, 33], HOW).difference == -2


def test_the_share_is_epsilon_squared_of_kruskal_and_wallis() -> None:
    data = report(60)
    found = importance(data)
    runs = [run for run in data["runs"] if run["state"] == "complete"]
    assert found["n"] == len(runs) == 54
    by = {depth: [] for depth in (20, 32, 56)}
    for run in runs:
        by[run["factors"]["model.net.depth"]].append(run["metrics"]["test/accuracy"])
    h = stats.kruskal(*by.values()).statistic  # (n - 1) times the explained share of the variance
    (row,) = [row for row in found["rows"] if row["factor"] == "model.net.depth"]
    assert row["share"] == pytest.approx(1 - (1 - h / 53) * 53 / 51)
    everything = [(run["factors"]["model.net.depth"], run["metrics"]["test/accuracy"]) for run in runs]
    assert row["direction"] == pytest.approx(stats.spearmanr(*zip(*everything, strict=True)).statistic)
    assert row["levels"] == 3
