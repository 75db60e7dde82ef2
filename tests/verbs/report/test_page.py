"""The report's page: what it may load, how large it is, and what a person sees in a real browser."""

import base64
import gzip
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.report_data import HOSTILE, ended, report, run

from lathe.errors import UserError
from lathe.verbs.report.page import page, write_page

Show = Callable[..., Any]


def column(tab: Any, title: str, table: str = "#runs-table") -> list[str]:
    """The cells below the head of that title, from the top."""
    return list(
        tab.evaluate(
            """([table, title]) => {
              const at = [...document.querySelectorAll(`${table} th`)].findIndex((head) => head.textContent === title);
              return [...document.querySelectorAll(`${table} tbody tr`)].map((row) => row.cells[at].innerText);
            }""",
            [table, title],
        )
    )


def drawn(tab: Any, name: str) -> Any:
    """A plot, once it is there."""
    tab.locator(f"#{name}").scroll_into_view_if_needed()
    tab.locator(f"#{name}[data-drawn]").wait_for(state="attached")
    return tab.locator(f"#{name}")


def traces(tab: Any, name: str) -> list[dict[str, Any]]:
    drawn(tab, name)
    return list(tab.evaluate(f"at('{name}').data.map(({{x, y, text, line}}) => ({{x, y, text, line}}))"))


def redrawn(tab: Any, name: str, act: Callable[[], Any]) -> None:
    """Does something and waits until the plot was drawn anew."""
    before = int(drawn(tab, name).get_attribute("data-drawn"))
    act()
    tab.wait_for_function(f"Number(at('{name}').dataset.drawn) > {before}")


def test_the_policy_runs_two_scripts_by_their_hash_and_loads_nothing() -> None:
    text = page(report(1))
    policy = re.findall(r'Content-Security-Policy" content="(.*?)"', text)[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy
    assert "unsafe" not in policy.partition("style-src")[0]
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    (plotly,) = re.findall(r'id="plotly">(.*?)</script>', text)
    for content in (script.encode(), gzip.decompress(base64.b64decode(plotly))):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'" in policy
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)
    assert set(re.findall(r"https?://[^\"']*", text)) == {"http://www.w3.org/2000/svg"}  # a name, which nothing loads


def test_names_of_strangers_are_no_html_and_no_marks_of_the_template() -> None:
    text = page(report(1, title=f"{HOSTILE} __PLOTLY__", runs=[run(0, name=HOSTILE)]))
    assert text.count("<script") == page(report(1)).count("<script")
    assert "<img" not in text
    assert "&lt;/script&gt;" in text
    assert "&amp;amp; __PLOTLY__" in text


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_page(report(2), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(report(2))
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UserError, match=r"^the report's page: plotly can't be imported: pip install -e '.\[report\]'"):
        write_page(report(1), tmp_path / "other.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_one_run_is_shown_and_what_is_missing_is_said(show: Show) -> None:
    tab = show(report(1))
    assert tab.title() == "Depth of a ResNet on CIFAR-10"
    assert tab.locator("#facts").inner_text().startswith("1 run")
    assert tab.locator("#groups-says").inner_text().startswith("One run: there is nothing to compare yet.")
    assert column(tab, "95 % interval", "#groups-table") == ["one run has no interval"]
    assert column(tab, "test/accuracy") == ["0.9105"]
    assert tab.locator("#cost-says").inner_text() == "One run: what it costs stands in the table of runs."
    assert tab.locator("#sweep-says").inner_text() == "One run: no factor differs."
    (_, line) = traces(tab, "curves-plot")
    steps, values = run(0)["curves"]["val/accuracy"]
    assert line["x"] == steps
    assert max(abs(a - b) for a, b in zip(line["y"], values, strict=True)) < 0.001


def test_runs_without_curves_and_costs_say_so(show: Show) -> None:
    bare = {"curves": {}, "cost": {}, "seconds": None, "parameters": None}
    tab = show(report(3, runs=[run(i, **bare) for i in range(3)]))
    assert tab.locator("#curves-says").inner_text().startswith("No run has a curve")
    assert tab.locator("#cost-says").inner_text().startswith("No complete run says what it costs")
    assert not tab.locator("#curves-plot").is_visible()
    assert (
        tab.locator("#importance")
        .inner_text()
        .endswith(
            "3 complete runs have test/accuracy, and importance needs 20: of fewer, a factor that does nothing looks "
            "important by chance."
        )
    )


def test_a_report_of_failures_has_no_group_and_shows_every_run(show: Show) -> None:
    runs = [ended(run(i), "failed") for i in range(2)]
    counts = {"complete": 0, "pruned": 0, "running": 0, "unfinished": 0, "failed": 2}
    tab = show(report(2, runs=runs, groups=[], counts=counts))
    assert tab.locator("#groups-says").inner_text() == "No group: no run is complete."
    assert column(tab, "State") == ["✕failed", "✕failed"]
    tab.locator("#runs-table button.open").first.click()
    assert "made the loss nan at step 310" in tab.locator("#drawer").inner_text()


def test_heads_sort_with_mouse_and_keyboard_and_what_is_missing_comes_last(show: Show) -> None:
    data = report(30)
    tab = show(data)
    told = column(tab, "test/accuracy")
    known = sorted((one["metrics"]["test/accuracy"] for one in data["runs"] if one["metrics"]), reverse=True)
    assert told == [str(float(f"{value:.4g}")) for value in known] + ["–"] * 3
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


def test_states_are_counted_and_hidden_only_when_asked(show: Show) -> None:
    tab = show(report(30))
    assert "27 complete" in tab.locator("#facts").inner_text()
    assert sorted(text[1:] for text in column(tab, "State"))[-3:] == ["pruned", "running", "unfinished"]
    chip = tab.get_by_role("button", name="complete 27")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert sorted(text[1:] for text in column(tab, "State")) == ["pruned", "running", "unfinished"]
    assert tab.locator("#runs-says").inner_text().startswith("3 runs; the filter hides 27.")


def test_the_drawer_has_the_run_that_was_opened(show: Show) -> None:
    data = report(30)
    receipt = {"verdict": "faster", "latency": {"onnx": {"ratio": 0.4321}}}
    data["runs"][7] |= {
        "receipt": receipt,
        "samples": "../a b/samples:1/",
        "diff": {"optimizer.lr": 0.125, "ema": None},
    }
    tab = show(data)
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
    half = 4.303 * (0.13 / 3) ** 0.5  # Student's t at 2 degrees of freedom, of three values with variance 0.13
    assert traces(tab, "curves-plot")[0]["y"][0] == pytest.approx(0.5 + half, abs=1e-3)
    redrawn(tab, "curves-plot", lambda: tab.locator("#band").select_option("runs"))
    assert sorted(trace["y"][0] for trace in traces(tab, "curves-plot")) == pytest.approx([0.2, 0.4, 0.9])


def test_the_front_holds_what_nothing_beats(show: Show) -> None:
    costs = {0: (1.0, 0.5), 1: (2.0, 0.7), 2: (3.0, 0.6), 3: (4.0, 0.9), 4: (None, 0.95)}
    runs = [
        run(i, cost={"latency_ms": latency, "bytes": None, "macs": None}, metrics={"test/accuracy": accuracy}, group=0)
        for i, (latency, accuracy) in costs.items()
    ]
    tab = show(report(5, runs=runs))
    front = traces(tab, "cost-plot")[0]
    assert (front["x"], front["y"]) == ([1.0, 2.0, 4.0], [0.5, 0.7, 0.9])
    assert tab.locator("#cost-says").inner_text() == "4 runs drawn; 1 run has no latency (ms)."
    assert "size of the file (bytes), MACs" in tab.locator("#cost-tools").inner_text()
    assert [text.split()[-1] for text in tab.locator("#front tr").all_inner_texts()] == ["0.5", "0.7", "0.9"]


def test_parallel_lines_and_importance_tell_the_factors_that_matter(show: Show) -> None:
    tab = show(report(60))
    lines = traces(tab, "sweep-plot")
    assert sum(x is None for trace in lines for x in trace["x"]) == 54  # a gap after each scored run
    names = tab.locator("#importance li span:first-child").all_inner_texts()
    assert (names[0], names[2]) == ("lr", "flip")
    assert "of 54 complete runs" in tab.locator("#importance").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_one_is_chosen(show: Show, scheme: str) -> None:
    tab = show(report(2), color_scheme=scheme)
    ground = {"light": "rgb(245, 244, 241)", "dark": "rgb(20, 22, 23)"}
    first = {"light": "#0072b2", "dark": "#5aa9e6"}
    other = "dark" if scheme == "light" else "light"

    def seen() -> str:
        return str(tab.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert seen() == ground[scheme]
    assert traces(tab, "curves-plot")[1]["line"]["color"] == first[scheme]
    redrawn(tab, "curves-plot", lambda: tab.locator("#theme").click())
    assert seen() == ground[other]
    assert traces(tab, "curves-plot")[1]["line"]["color"] == first[other]
    tab.locator("#theme").click()
    assert seen() == ground[scheme]


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


@pytest.mark.slow
def test_a_thousand_runs_of_four_curves_stay_below_three_megabytes(show: Show, tmp_path: Path) -> None:
    tab = show(report(1000))
    size = (tmp_path / "report.html").stat().st_size
    assert size < 3_000_000
    assert tab.locator("#footer").inner_text().endswith("loads nothing.")  # nothing was made coarser for it
    assert "1,000 runs" in tab.locator("#facts").inner_text()
    assert len(column(tab, "Run")) == 150
    tab.get_by_role("button", name="150 of 1,000 rows are here").click()
    assert len(column(tab, "Run")) == 1000
    tab.locator("#filter").fill("depth=20 state=complete")
    tab.wait_for_function("view.shown.length === 300")
    tab.locator("#filter").fill("")
    for name in ("curves-plot", "cost-plot", "sweep-plot"):
        drawn(tab, name)


def test_more_curves_than_fit_are_thinned_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = report(40)
    whole = page(data)
    monkeypatch.setattr("lathe.verbs.report.page.LIMIT", len(whole) - 1000)
    small = page(data)
    assert len(small) <= len(whole) - 1000
    (packed,) = re.findall(r'id="data">(.*?)</script>', small)
    told = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert told["thinned"] == "So that it stays small, curves have at most 100 points and 200 levels."
