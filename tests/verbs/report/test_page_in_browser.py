"""The report's page in a real browser: tables, filter, drawer, plots and themes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.report_data import HOSTILE, report, run
from support.report_page import column, drawn, redrawn, traces

Show = Callable[..., Any]


def test_heads_sort_with_mouse_and_keyboard_and_what_is_missing_comes_last(show: Show) -> None:
    data = report(30)
    tab = show(data, plots=False)
    told = column(tab, "test/accuracy")
    assert [len(text) for text in told[:27]] == [6] * 27  # decimals are aligned
    known = sorted((one["metrics"]["test/accuracy"] for one in data["runs"] if one["metrics"]), reverse=True)
    assert told == [f"{value:.4f}" for value in known] + ["–"] * 3
    tab.locator("#runs-table th button", has_text="lr").click()
    rates = [float(text) for text in column(tab, "lr")]
    assert rates == sorted(rates)
    tab.keyboard.press("Enter")
    assert [float(text) for text in column(tab, "lr")] == rates[::-1]
    assert tab.locator("#runs-table th[aria-sort=descending]").inner_text().startswith("lr")
    tab.locator("#runs-table tbody button").first.focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    second = column(tab, "Run")[1].split()[-1]
    assert tab.locator("#drawer .path").inner_text().endswith(second)
    tab.keyboard.press("Escape")
    assert not tab.locator("#drawer").is_visible()
    assert second in tab.evaluate("document.activeElement.innerText")


def test_the_filter_leaves_the_right_runs_in_tables_and_plots(show: Show) -> None:
    data = report(30)
    tab = show(data)

    def left(text: str) -> set[str]:
        tab.locator("#filter").fill(text)
        return {cell.split()[-1] for cell in column(tab, "Run")}

    def expected(keeps: Callable[[dict[str, Any]], bool]) -> set[str]:
        return {one["path"].rpartition("/")[2] for one in data["runs"] if keeps(one)}

    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "filter"
    assert left("depth=20 lr<0.1") == expected(
        lambda one: one["factors"]["model.net.depth"] == 20 and one["factors"]["optimizer.lr"] < 0.1
    )
    assert left("accuracy>0.93 flip=TRUE") == expected(
        lambda one: one["factors"]["data.augment.flip"] and one["metrics"].get("val/accuracy", 0) > 0.93
    )
    assert left("00001D") == expected(lambda one: one["path"].endswith("00001d"))
    assert left("group!=x state=complete depth>=56") == expected(
        lambda one: one["state"] == "complete" and one["factors"]["model.net.depth"] == 56
    )
    assert tab.locator("#filter-says").inner_text() == "9 of 30 runs"
    assert sorted(column(tab, "n", "#groups-table")) == ["4", "5"]
    assert left("depht=20") == expected(lambda one: True)
    assert tab.locator("#filter-says").inner_text() == "Nothing is called depht. 30 runs"
    assert left("nowhere") == set()
    assert tab.locator("#runs-table .empty").inner_text().startswith("The filter leaves no run")
    left("")
    points = {name for trace in traces(tab, "cost-plot") for name in trace["text"] or []}
    assert len(points) == 27
    redrawn(tab, "cost-plot", lambda: left("depth=32"))
    points = {name for trace in traces(tab, "cost-plot") for name in trace["text"] or []}
    assert len(points) == 10 - sum(one["state"] != "complete" for one in data["runs"][1::3])


def test_the_drawer_has_the_run_that_was_opened(show: Show) -> None:
    data = report(30)
    receipt = {"verdict": "faster", "latency": {"onnx": {"ratio": 0.4321}}}
    diff = {"optimizer.lr": 0.125, "ema": None}
    data["runs"][7] |= {"receipt": receipt, "samples": "../a b/samples:1/", "diff": diff}
    tab = show(data, plots=False)
    tab.locator("#runs-table button.open", has_text="000007").click()
    drawer = tab.locator("#drawer")
    text = drawer.inner_text()
    assert drawer.locator(".path").inner_text() == data["runs"][7]["path"]
    assert drawer.locator("pre").inner_text() == data["runs"][7]["command"]
    for line in ("optimizer.lr\n0.125", "ema\nnull", "latency.onnx.ratio\n0.4321", "commit\n87ce878 with changes"):
        assert line in text.replace("\n\n", "\n")
    assert drawer.get_by_role("link").get_attribute("href") == "./../a%20b/samples%3A1/"
    assert tab.locator("tr.chosen").count() == 1
    following = column(tab, "Run")[[cell.split()[-1][-6:] for cell in column(tab, "Run")].index("000007") + 1]
    drawer.get_by_role("button", name="The run after").click()
    assert drawer.locator(".path").inner_text().endswith(following.split()[-1])
    drawer.get_by_role("button", name="Copy").click()
    drawer.get_by_text(re.compile("^(Copied|Selected)")).wait_for()


def test_hostile_names_stay_text_everywhere(show: Show) -> None:
    key = f"x.{HOSTILE}"
    texts = dict.fromkeys(("name", "sentence", "command"), HOSTILE) | {"samples": "javascript:alert(1)//"}
    texts |= {"diff": {HOSTILE: [HOSTILE]}, "environment": {HOSTILE: HOSTILE}, "receipt": {HOSTILE: {"a": HOSTILE}}}
    texts |= {"curves": {HOSTILE: [[1, 2], [0.1, 0.2]]}}
    runs = [run(i, **texts, path=f"logs/{HOSTILE}{i}") for i in range(2)]
    for i, one in enumerate(runs):
        one |= {"metrics": {"test/accuracy": 0.5 + i / 10, HOSTILE: "no number"}, "factors": {key: f"{HOSTILE}{i}"}}
    group = {
        **report(1)["groups"][0],
        "factors": {HOSTILE: HOSTILE},
        "label": HOSTILE,
        "marks": [HOSTILE],
        "why": HOSTILE,
    }
    about = {"title": HOSTILE, "marks": [HOSTILE], "factors": [key], "metrics": [HOSTILE]}
    tab = show(report(2, runs=runs, groups=[group], **about))
    for name in ("curves-plot", "cost-plot", "sweep-plot"):
        drawn(tab, name)
    tab.locator("#runs-table button.open").first.click()
    assert tab.locator("#drawer").inner_text().count(HOSTILE) > 8
    assert tab.locator("#drawer a").get_attribute("href") == "./javascript%3Aalert(1)//"
    assert "</script><img src…" in tab.locator("#sweep-plot").text_content()
    assert HOSTILE in tab.locator("#curves-plot").text_content()
    tab.locator("#groups-table button.open").first.click()
    assert tab.locator("#drawer-title").inner_text() == HOSTILE
    assert tab.title() == HOSTILE
    assert tab.evaluate("document.querySelectorAll('img, b, iframe, svg a').length") == 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_best_groups_are_drawn_until_others_are_chosen(show: Show) -> None:
    data = report(1)
    data["groups"] = [{**data["groups"][0], "factors": {"model.net.width": i}, "mean": i / 1000} for i in range(20)]
    data["runs"] = [run(i, group=i, curves={"val/accuracy": [[1, 2], [0.0, i / 1000]]}) for i in range(20)]
    tab = show(data)

    def names() -> list[str]:
        return list(tab.locator("#legend li").all_inner_texts())

    traces(tab, "curves-plot")
    assert names() == [f"width={i}" for i in range(19, 11, -1)]
    assert tab.locator("#curves-says").inner_text().startswith("8 groups of 20, the best; ")
    assert tab.locator("#groups-table input:checked").count() == 8
    redrawn(tab, "curves-plot", lambda: tab.get_by_label("Draw width=3", exact=True).check())
    redrawn(tab, "curves-plot", lambda: tab.get_by_label("Draw width=19", exact=True).uncheck())
    assert sorted(names()) == sorted(["width=3", *(f"width={i}" for i in range(18, 11, -1))])
    assert tab.locator("#curves-says").inner_text().startswith("8 groups of 20, as chosen in their table; ")
    redrawn(tab, "curves-plot", lambda: tab.get_by_role("button", name="Best groups again").click())
    assert sorted(names()) == [f"width={i}" for i in range(12, 20)]


@pytest.mark.slow
def test_a_thousand_runs_of_four_curves_stay_below_two_and_a_half_megabytes(show: Show, tmp_path: Path) -> None:
    tab = show(report(1000))
    size = (tmp_path / "report.html").stat().st_size
    assert size < 2_500_000
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
