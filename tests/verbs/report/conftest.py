"""A browser that opens report pages as files."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.browser import Tabs, open_browser

from lathe.verbs.report.page import page

Show = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def tabs(browser: Any) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def show(tabs: Tabs, tmp_path: Path) -> Iterator[Show]:
    """Open a page of these data from a file and wait until it is ready. Console output and network requests fail the
    test. Without `plots`, plots stay outside the window, which saves Plotly's second.
    """
    with ExitStack() as held:

        def opened(data: dict[str, Any], plots: bool = True, **media: str) -> Any:
            script = "" if plots else "window.IntersectionObserver = class { observe() {} }"
            tab = held.enter_context(tabs.tab(script, strict=True))
            (tmp_path / "report.html").write_text(page(data), encoding="utf-8")
            tab.emulate_media(**media)
            tab.goto((tmp_path / "report.html").as_uri())
            tab.locator("html[data-ready]").wait_for(state="attached")
            return tab

        yield opened
