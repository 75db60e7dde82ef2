"""Importance of factors against known answers, and its refusals."""

from typing import Any

import pytest
from scipy import stats
from support.report_data import report

from lathe.verbs.report.importance import importance


def sweep(metric: list[float], **factors: list[Any]) -> dict[str, Any]:
    """Complete runs with these values of the metric and these columns of factors."""
    columns = [dict(zip(factors, values, strict=True)) for values in zip(*factors.values(), strict=True)]
    runs = [
        {"state": "complete", "metrics": {"m": value}, "factors": own}
        for value, own in zip(metric, columns, strict=True)
    ]
    return {"metric": "m", "factors": list(factors), "runs": runs}


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


def test_a_factor_that_decides_has_all_and_one_that_does_nothing_none() -> None:
    data = sweep(
        [float(i // 12) for i in range(24)],
        decides=["a"] * 12 + ["b"] * 12,
        nothing=[True, False] * 12,
        one=[3] * 24,
        alone=[f"name {i}" for i in range(24)],
    )
    rows = {row["factor"]: (row["share"], row["direction"]) for row in importance(data)["rows"]}
    assert rows == {"decides": (1.0, None), "nothing": (0.0, None)}  # one level or one run each: no information


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (sweep([1.0] * 24, lr=[1, 2] * 12), "Every complete run has the same m: there is nothing to explain."),
        (sweep([1.0], lr=[1]), "1 complete run has m, and importance needs 20"),
        (sweep([1.0, 2.0] * 12, lr=[1] * 24), "No factor has levels with two runs each"),
    ],
)
def test_it_is_refused_with_a_reason(data: dict[str, Any], why: str) -> None:
    found = importance(data)
    assert found["rows"] == []
    assert found["why"].startswith(why)
