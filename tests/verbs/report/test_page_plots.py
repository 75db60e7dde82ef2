"""The report's page in a real browser: plots, themes, and reports of one run and of a thousand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.report_data import report, run
from support.report_page import column, drawn, redrawn, traces

Show = Callable[..., Any]


def test_bands_are_mean_and_ends_over_the_seeds_of_a_group(show: Show) -> None:
    flat = [
        run(i, group=0, curves={"val/accuracy": [[1, 2, 3], [level, level, level]]})
        for i, level in enumerate((0.2, 0.4, 0.9))
    ]
    flat[2]["curves"] = {"val/accuracy": [[1, 2], [0.9, float("nan")]]}
    tab = show(report(1, runs=flat))
    tab.locator("#band").select_option("range")
    band, line = traces(tab, "curves-plot")
    assert line["x"] == [1, 2, 3]
    assert line["y"] == pytest.approx([0.5, 0.3, 0.3])
    assert band["y"] == pytest.approx([0.9, 0.4, 0.4, 0.2, 0.2, 0.2])
    redrawn(tab, "curves-plot", lambda: tab.locator("#band").select_option("interval"))
    half = 4.303 * (0.13 / 3) ** 0.5  # Student's t with 2 degrees of freedom, of three values with variance 0.13
    assert traces(tab, "curves-plot")[0]["y"][0] == pytest.approx(0.5 + half, abs=1e-3)
    redrawn(tab, "curves-plot", lambda: tab.locator("#band").select_option("runs"))
    assert sorted(trace["y"][0] for trace in traces(tab, "curves-plot")) == pytest.approx([0.2, 0.4, 0.9])


def test_the_best_groups_are_drawn_until_others_are_chosen(show: Show) -> None:
    data = report(1)
    data["groups"] = [{**data["groups"][0], "factors": {"model.net.width": i}, "mean": i / 1000} for i in range(200)]
    data["runs"] = [run(i, group=i, curves={"val/accuracy": [[1, 2], [0.0, i / 1000]]}) for i in range(200)]
    tab = show(data)

    def names() -> list[str]:
        return list(tab.locator("#legend li").all_inner_texts())

    traces(tab, "curves-plot")
    assert names() == [f"width={i}" for i in range(199, 191, -1)]
    assert tab.locator("#curves-says").inner_text().startswith("8 groups of 200, the best; ")
    tab.locator("#groups-table .more").press("Enter")  # a mouse would scroll there, which also loads rows
    assert tab.locator("#groups-table input:checked").count() == 8
    redrawn(tab, "curves-plot", lambda: tab.get_by_label("Draw width=3", exact=True).check())
    redrawn(tab, "curves-plot", lambda: tab.get_by_label("Draw width=199", exact=True).uncheck())
    assert sorted(names()) == sorted(["width=3", *(f"width={i}" for i in range(198, 191, -1))])
    assert tab.locator("#curves-says").inner_text().startswith("8 groups of 200, as chosen in their table; ")
    redrawn(tab, "curves-plot", lambda: tab.get_by_role("button", name="Best groups again").click())
    assert sorted(names()) == [f"width={i}" for i in range(192, 200)]


def test_the_baseline_is_named_and_every_difference_has_a_row(show: Show) -> None:
    data = report(30, confidence=0.9)
    tab = show(data, plots=False)
    label = data["groups"][0]["label"]
    assert f"minus that of {label}, over the seeds" in tab.locator("#pairs-says").inner_text()
    differences = sorted((pair["difference"] for pair in data["pairs"]), reverse=True)
    told = [float(text) for text in column(tab, "difference", "#pairs-table")]
    assert told == pytest.approx(differences, abs=1e-3)
    assert len(column(tab, "90 % interval", "#pairs-table")) == 5
    assert set(column(tab, "What it says", "#pairs-table")) == {data["pairs"][0]["says"]}


@pytest.mark.slow
def test_a_thousand_runs_of_four_curves_stay_below_three_megabytes(show: Show, tmp_path: Path) -> None:
    tab = show(report(1000))
    size = (tmp_path / "report.html").stat().st_size
    assert size < 3_000_000
    assert tab.locator("#footer").inner_text().endswith("loads nothing.")  # no data were thinned out
    assert "1,000 runs" in tab.locator("#facts").inner_text()
    assert len(column(tab, "Run")) == 150
    tab.get_by_role("button", name="150 of 1,000 rows are here").press("Enter")
    assert len(column(tab, "Run")) == 1000
    tab.locator("#filter").fill("depth=20 state=complete")
    tab.locator("#filter-says", has_text="300 of 1,000 runs").wait_for()
    tab.locator("#filter").fill("")
    for name in ("curves-plot", "cost-plot", "sweep-plot"):
        drawn(tab, name)
