"""The report's page in a real browser: tables, filter and drawer."""

import re
from collections.abc import Callable
from typing import Any

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
        lambda one: (
            one["factors"]["data.augment.flip"]
            and any(value > 0.93 for name, value in one["metrics"].items() if name.endswith("accuracy"))
        )
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
    data["runs"][7] |= {
        "receipt": receipt,
        "samples": "../a b/samples:1/",
        "diff": {"optimizer.lr": 0.125, "ema": None},
    }
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
    runs = [
        run(
            i,
            name=HOSTILE,
            path=f"logs/{HOSTILE}{i}",
            factors={f"x.{HOSTILE}": f"{HOSTILE}{i}"},
            metrics={"test/accuracy": 0.5 + i / 10, HOSTILE: "not a number"},
            curves={HOSTILE: [[1, 2], [0.1, 0.2]]},
            diff={HOSTILE: [HOSTILE]},
            environment={HOSTILE: HOSTILE},
            receipt={HOSTILE: {"a": HOSTILE}},
            samples="javascript:alert(1)//",
            sentence=HOSTILE,
            command=HOSTILE,
        )
        for i in range(2)
    ]
    group = {
        **report(1)["groups"][0],
        "label": HOSTILE,
        "marks": [HOSTILE],
        "why": HOSTILE,
        "factors": {HOSTILE: HOSTILE},
    }
    tab = show(
        report(
            2, runs=runs, groups=[group], marks=[HOSTILE], title=HOSTILE, factors=[f"x.{HOSTILE}"], metrics=[HOSTILE]
        )
    )
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
