"""Milliseconds that a report's page takes in a browser: until its tables work, until its first plot, and until a sorted
or filtered table is drawn.

    python benchmarks/bench_report_page.py logs/train/report/report.html

Opens the file five times in headless Chromium, and prints median and range.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from common import parser
from playwright.sync_api import sync_playwright
from suites.results import Spread

REPEATS = 5
# Each action, and the time until the browser has drawn its result.
ACTS = """async () => {
  const seen = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const heads = [...document.querySelectorAll("#runs-table th button")], filter = document.getElementById("filter");
  const typed = (text) => { filter.value = text; view.text = text; applyFilter(); };
  const acts = { sort: () => heads[0].click(), filter: () => typed("state=complete 1"), clear: () => typed("") };
  const found = {};
  for (const [name, act] of Object.entries(acts)) {
    const began = performance.now();
    act();
    await seen();
    found[name] = performance.now() - began;
    await new Promise((done) => setTimeout(done, 1500)); // what is drawn later must not count for the next
  }
  return found;
}"""


def once(browser: Any, path: Path) -> dict[str, float]:
    """Return the milliseconds of one visit."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    tab = context.new_page()
    tab.goto(path.resolve().as_uri())
    tab.locator("html[data-ready]").wait_for(state="attached")
    found = {"tables": float(tab.evaluate("document.documentElement.dataset.ready"))}
    if tab.locator("#curves-plot").is_visible():
        tab.locator("#curves-plot[data-drawn]").wait_for(state="attached")
        found["first plot"] = float(tab.evaluate("performance.now()"))
    found |= tab.evaluate(ACTS)
    context.close()
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("page", type=Path)
    path = made.parse_args().page
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = f"{path.stat().st_size:,} bytes"
        print(f"{size}, Chromium {browser.version}, {os.cpu_count()} cores, load {os.getloadavg()}")
        visits = [once(browser, path) for _ in range(REPEATS)]
        browser.close()
    for name in visits[0]:
        print(f"{name:10} {Spread([visit[name] for visit in visits]):.0f} ms")


if __name__ == "__main__":
    main()
