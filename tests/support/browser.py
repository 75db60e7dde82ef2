"""A real browser for the server's web page, and a user's actions there."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
# a pen's path through a 3, in a unit square
X, Y = (0.35, 0.5, 0.63, 0.6, 0.48, 0.62, 0.66, 0.52, 0.34), (0.22, 0.17, 0.27, 0.42, 0.48, 0.55, 0.7, 0.82, 0.76)
THREE = list(zip(X, Y, strict=True))


@contextmanager
def open_browser() -> Iterator[Any]:
    """Headless Chromium; skips the test without one."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Tabs:
    """Tabs shared by the tests of a file, since a new tab and its first page take a second."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._kept: dict[str, tuple[Any, list[Any]]] = {}

    @contextmanager
    def tab(self, script: str = "", strict: bool = False) -> Iterator[Any]:
        """A clean tab whose pages begin with `script`. Their errors, if `strict` any output and request, fail tests."""
        if script not in self._kept:
            self._kept[script] = self._made(script, strict)
        tab, said = self._kept[script]
        said.clear()
        yield tab
        tab.evaluate("try { localStorage.clear(); sessionStorage.clear(); } catch {}")
        tab.unroute_all(behavior="ignoreErrors")
        tab.goto("about:blank")
        tab.set_viewport_size({"width": 1280, "height": 720})
        tab.emulate_media(color_scheme="light")
        assert said == []

    def _made(self, script: str, strict: bool) -> tuple[Any, list[Any]]:
        said: list[Any] = []
        context = self._browser.new_context()
        context.set_default_timeout(60_000)
        tab = context.new_page()
        if script:
            tab.add_init_script(script)
        tab.on("pageerror", lambda error: said.append(error))  # playwright marks the given function
        if strict:
            tab.on("console", lambda message: said.append(message.text))
            local = ("file:", "about:")
            tab.on("request", lambda asked: None if asked.url.startswith(local) else said.append(asked.url))
        return tab, said


def recorded(tab: Any) -> list[bytes]:
    """Collect the body of each request that the page sends; the browser only has it while the request is held."""
    bodies: list[bytes] = []

    def keep(route: Any) -> None:
        bodies.append(route.request.post_data_buffer)
        route.continue_()

    tab.route("**/predict**", keep)
    return bodies


def draw(tab: Any, points: list[tuple[float, float]]) -> None:
    """Draw a line through points of a unit square, and wait for the answer."""
    box = tab.locator("#drawing").bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    tab.mouse.move(*places[0])
    tab.mouse.down()
    for place in places[1:]:
        tab.mouse.move(*place, steps=4)
    with tab.expect_response("**/predict**"):
        tab.mouse.up()


def lines(tab: Any) -> list[tuple[str, str]]:
    """Return the names and percentages on the page."""
    tab.locator("#found").wait_for()
    return [tuple(item.inner_text().split("\n")) for item in tab.locator("#rows li").all()]
