"""Means, intervals and paired tests against results by hand and textbook tables."""

import math

import pytest

from lathe.verbs.report.statistics import Interval, compare, summarise

T_975 = {1: 12.706205, 2: 4.302653, 4: 2.776445, 9: 2.262157}  # Student's t, two-sided 5 %, as tables print it
HOW = Interval()


def test_the_interval_is_students() -> None:
    # 1, 2, 3, 4, 5: mean 3, squares 4 + 1 + 0 + 1 + 4 = 10, variance 10 / 4, standard error sqrt(2.5 / 5)
    told = summarise([1, 2, 3, 4, 5], HOW)
    assert (told.n, told.mean, told.why) == (5, 3, None)
    assert told.std == pytest.approx(1.5811388)
    half = T_975[4] * math.sqrt(0.5)
    assert told.interval == pytest.approx((3 - half, 3 + half), abs=1e-6)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_quantile_is_that_of_n_less_one(n: int) -> None:
    values = [0.0] * (n - 1) + [float(n)]  # mean 1, squares (n - 1) + (n - 1)^2 = n (n - 1), variance n, error 1
    told = summarise(values, HOW)
    assert told.interval == pytest.approx((1 - T_975[n - 1], 1 + T_975[n - 1]), abs=1e-5)
    assert told.why == (f"n = {n}: the interval is wide" if n < 5 else None)


def test_what_has_no_interval_says_why() -> None:
    assert (summarise([], HOW).mean, summarise([], HOW).why) == (None, "no complete run")
    one = summarise([0.9], HOW)
    assert (one.mean, one.std, one.interval, one.why) == (0.9, None, None, "n = 1: no interval")
    same = summarise([0.1 + 0.2, 0.3, 0.3], HOW)
    assert (same.std, same.interval, same.why) == (0.0, None, "all 3 values are equal: no interval")


def test_a_bootstrap_is_of_percentiles_and_repeats() -> None:
    """Resampled means of two values are 0, 1/2 and 1 with 1/4, 1/2 and 1/4 of the draws. Those of eight zeros and eight
    ones are binomial with mean 1/2 and deviation 1/8: 95 % lie within about 1.96 / 8.
    """
    assert summarise([0.0, 1.0], Interval("bootstrap")).interval == (0.0, 1.0)
    told = summarise([0.0, 1.0] * 8, Interval("bootstrap"))
    assert told.interval == (0.25, 0.75)
    many = [math.sin(number) for number in range(30)]
    assert summarise(many, Interval("bootstrap", seed=1)) == summarise(many, Interval("bootstrap", seed=1))
    assert summarise(many, Interval("bootstrap", seed=1)) != summarise(many, Interval("bootstrap", seed=2))
    few = summarise([1.0, 2.0, 4.0], Interval("bootstrap"))
    assert few.why == "n = 3: the interval is narrower than it should be"


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
