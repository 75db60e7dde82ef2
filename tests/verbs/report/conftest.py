"""A browser in which pages of reports are opened as files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import open_browser, open_tab

from lathe.verbs.report.page import write_page

Show = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as chromium:
        yield chromium


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Show]:
    """Opens the page of some data from a file and waits until it is ready; what the console says and what is asked of
    a network fails the test. Without `plots` none comes near the window, and Plotly's second is saved."""
    said: list[str] = []

    def opened(data: dict[str, Any], plots: bool = True, **media: str) -> Any:
        if not plots:
            tab.add_init_script("window.IntersectionObserver = class { observe() {} }")
        write_page(data, tmp_path / "report.html")
        tab.emulate_media(**media)
        tab.goto((tmp_path / "report.html").as_uri())
        tab.locator("html[data-ready]").wait_for(state="attached")
        return tab

    with open_tab(browser) as tab:
        tab.on("console", lambda message: said.append(message.text))
        tab.on("request", lambda asked: said.append(asked.url) if not asked.url.startswith("file:") else None)
        yield opened
    assert said == []
