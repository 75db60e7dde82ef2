"""The web page: what it may load, and its behaviour in a real browser. test_page_served.py uses a real server."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from support.browser import THREE, draw, lines

from lathe.serving.page import page

DIGITS = {
    "run": "a_run",
    "target": "onnx",
    "checkpoint": "best",
    "integers": False,
    "classes": [str(i) for i in range(10)],
    "preprocess": {"in_graph": True, "mean": [0.3], "std": [0.4], "size": [8, 8]},
    "input": {"dtype": "uint8", "shape": ["batch", 1, 8, 8], "layout": "NCHW"},
}
PHOTOS = {
    **DIGITS,
    "classes": ["cat", "dog"],
    "preprocess": {**DIGITS["preprocess"], "mean": [0.5] * 3, "size": [32, 32]},
    "input": {"dtype": "uint8", "shape": ["batch", 3, "height", "width"], "layout": "NCHW"},
}
WORDS = {
    **DIGITS,
    "classes": None,
    "preprocess": None,
    "input": {"dtype": "int64", "shape": ["batch", "time"], "layout": "NT", "longest": 64, "vocab_size": 256},
}


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.found[-1] if self.found else ("", {})
        self.texts.setdefault(str(attributes.get("id") or tag), data)


@pytest.mark.parametrize("facts", [DIGITS, PHOTOS, WORDS])
def test_the_page_loads_nothing_and_runs_nothing_but_its_own(facts: dict[str, Any]) -> None:
    text = page(facts)
    elements = Elements(text)
    outside = [
        value
        for _, attributes in elements.found
        for name, value in attributes.items()
        if name in ("src", "href", "action")
    ]
    assert outside == ["data:,"]
    assert not re.search(r"https?:|@import|url\(", text)
    assert [
        name for _, attributes in elements.found for name in attributes if name.startswith("on") or name == "style"
    ] == []
    policy = next(attributes["content"] for tag, attributes in elements.found if attributes.get("http-equiv"))
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.texts[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in str(policy)
    assert str(policy).startswith("default-src 'none';")
    assert "__" not in text.replace("__proto__", "")


def test_names_cant_end_the_element_that_they_stand_in() -> None:
    text = page({**DIGITS, "run": "</title></script><script>alert(1)</script>"})
    assert text.count("<script") == page(DIGITS).count("<script")
    data = json.loads(Elements(text).texts["data"])
    assert data["about"][0] == "run </title></script><script>alert(1)</script>"


def test_the_script_gets_what_the_net_takes() -> None:
    def told(facts: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(Elements(page(facts)).texts["data"]))

    assert [told(DIGITS)[key] for key in ("kind", "draw", "size", "ink")] == ["image", True, [8, 8], "white"]
    assert (told(PHOTOS)["draw"], told(PHOTOS)["size"]) == (False, [32, 32])
    assert told({**DIGITS, "preprocess": {**DIGITS["preprocess"], "mean": [0.9]}})["ink"] == "black"
    assert (told(WORDS)["kind"], told(WORDS)["vocab_size"], told(WORDS)["longest"]) == ("tokens", 256, 64)


def show(tab: Any, facts: dict[str, Any], answer: Any, status: int = 200) -> list[Any]:
    """Open the page of `facts` with a server of one fixed answer, and return the list of its requests."""
    seen: list[Any] = []

    def respond(route: Any) -> None:
        seen.append(route.request)
        route.fulfill(status=status, json=answer, headers={"Server-Timing": "total;dur=1.25"})

    tab.route("http://page.test/**", lambda route: route.fulfill(body=page(facts), content_type="text/html"))
    tab.route("http://page.test/predict**", respond)
    tab.goto("http://page.test/")
    return seen


def test_a_net_of_tokens_has_a_field_for_them(tab: Any) -> None:
    rows = [{"class": "31", "index": 31, "probability": 0.75}, {"class": "7", "index": 7, "probability": 0.0001}]
    seen = show(tab, WORDS, {"predictions": rows})
    field = tab.get_by_label("Token ids")
    field.fill("3, 1 [49]")
    tab.get_by_role("button", name="Predict").click()
    assert lines(tab) == [("31", "75.0 %"), ("7", "< 0.1 %")]
    assert (seen[0].post_data_json, seen[0].headers["content-type"]) == ({"tokens": [3, 1, 49]}, "application/json")
    assert tab.locator("#time").inner_text().endswith("1.3 ms of it in the server")
    field.fill("3 cats")
    field.press("Enter")
    assert tab.get_by_role("alert").inner_text().startswith("cats is no token id")
    assert len(seen) == 1


def test_an_error_of_the_server_is_shown(tab: Any) -> None:
    show(tab, DIGITS, {"error": "Too many requests wait: try again."}, status=503)
    draw(tab, THREE)
    tab.locator("#error").wait_for()
    assert tab.get_by_role("alert").inner_text() == "Too many requests wait: try again."
