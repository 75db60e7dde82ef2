"""The web page: what it may load, and its behaviour in a real browser, with scripts/serve.py too."""

import base64
import hashlib
import io
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.browser import THREE, draw, lines, recorded
from support.server_process import Served

from lathe.serving.app import page

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
    attributes = [item for _, values in elements.found for item in values.items()]
    assert [value for name, value in attributes if name in ("src", "href", "action")] == ["data:,"]
    assert not re.search(r"https?:|@import|url\(", text)
    assert [name for name, _ in attributes if name.startswith("on") or name == "style"] == []
    policy = next(values["content"] for _, values in elements.found if values.get("http-equiv"))
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
    def given(facts: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(Elements(page(facts)).texts["data"]))

    assert [given(DIGITS)[key] for key in ("kind", "draw", "size", "ink")] == ["image", True, [8, 8], "white"]
    assert (given(PHOTOS)["draw"], given(PHOTOS)["size"]) == (False, [32, 32])
    assert given({**DIGITS, "preprocess": {**DIGITS["preprocess"], "mean": [0.9]}})["ink"] == "black"
    assert (given(WORDS)["kind"], given(WORDS)["vocab_size"], given(WORDS)["longest"]) == ("tokens", 256, 64)


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


@pytest.mark.slow
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


KEY = "a key of the test"


@pytest.fixture(scope="module")
def server(exported: Callable[..., Path]) -> Iterator[str]:
    """The address of scripts/serve.py with an API key and a small trained net."""
    with Served(exported("trainer.max_epochs=20"), "target=onnx", LATHE_API_KEY=KEY) as process:
        yield f"http://127.0.0.1:{process.port}"


def asked(address: str, body: bytes, kind: str = "image/png") -> list[dict[str, Any]]:
    """Return the answer of /predict without a browser."""
    call = urllib.request.Request(f"{address}/predict?top_k=5", body, {"Content-Type": kind, "X-API-Key": KEY})
    with urllib.request.urlopen(call, timeout=60) as response:
        return list(json.load(response)["predictions"])


def expected(predictions: list[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(line["class"], round(100 * line["probability"], 1)) for line in predictions]


def numbers(shown: list[tuple[str, str]]) -> list[tuple[str, float]]:
    rounded = {"> 99.9 %": 100.0, "< 0.1 %": 0.0}
    return [(name, rounded[share] if share in rounded else float(share.removesuffix(" %"))) for name, share in shown]


@pytest.mark.slow
def test_a_person_draws_a_digit_and_sees_the_servers_answer(tab: Any, server: str) -> None:
    tab.goto(server)
    assert tab.title().endswith(": onnx")
    bodies = recorded(tab)
    draw(tab, THREE)
    tab.locator("#error").wait_for()
    assert tab.locator("#error").inner_text() == "The API key is missing: send it in the header X-API-Key."
    assert not tab.locator("#found").is_visible()
    with tab.expect_response("**/predict**"):
        tab.get_by_label("Sent as X-API-Key").fill(KEY)  # the field appeared by itself
        tab.keyboard.press("Enter")
    assert bodies[1] == bodies[0]
    found = asked(server, bodies[1])
    assert numbers(lines(tab)) == expected(found)
    assert tab.locator("#best").inner_text() == found[0]["class"] == "3"
    assert tab.get_by_role("status").inner_text().startswith("3, ")
    assert re.fullmatch(r"\d+\.\d ms round trip.*", tab.locator("#time").inner_text())
    picture = np.asarray(Image.open(io.BytesIO(bodies[1])).convert("L"))
    assert picture.shape == (8, 8)
    assert (picture.max() > 200, picture[:, 0].max() < 40, picture[:, -1].max() < 40) == (True, True, True)
    assert picture[0].max() > 60  # cut out and enlarged: ink reaches the upper and the lower edge, as in the data
    assert picture[-1].max() > 60
    tab.get_by_label("Fit to frame").uncheck()
    tab.wait_for_timeout(500)
    tab.get_by_role("button", name="Clear").click()
    assert not tab.locator("#found").is_visible()
    draw(tab, THREE)
    as_drawn = np.asarray(Image.open(io.BytesIO(bodies[-1])).convert("L"))
    assert max(as_drawn[0].max(), as_drawn[:, 0].max()) < 10  # as drawn on the pad, with its margin
    assert tab.evaluate("[localStorage.length, document.cookie, sessionStorage.getItem('lathe-key')]") == [0, "", KEY]
    tab.reload()
    draw(tab, THREE)
    assert lines(tab)[0][0] == "3"  # the key is kept


@pytest.mark.slow
def test_a_person_brings_files(tab: Any, server: str, tmp_path: Path) -> None:
    tab.goto(server)
    tab.evaluate(f"sessionStorage.setItem('lathe-key', {KEY!r})")
    tab.reload()
    pixels = np.kron(np.eye(8, dtype=np.uint8) * 250, np.ones((4, 4), np.uint8))
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels).save(tmp_path / "b.jpg")
    np.save(tmp_path / "c.npy", np.stack([pixels[::4, ::4]] * 2))
    (tmp_path / "d.png").write_bytes(b"no picture")
    Image.fromarray(pixels).save(tmp_path / "e.gif")
    for name, kind in (("a.png", "image/png"), ("b.jpg", "image/jpeg")):
        tab.get_by_label("Choose a file").set_input_files(tmp_path / name)
        tab.locator("#time:text('ms')").wait_for()
        assert numbers(lines(tab)) == expected(asked(server, (tmp_path / name).read_bytes(), kind))
        assert tab.get_by_alt_text("The image that was sent").is_visible()
    tab.get_by_label("Choose a file").set_input_files(tmp_path / "c.npy")
    tab.locator("#share:text('the first of 2')").wait_for()
    for name, sentence in (
        ("d.png", "The image can't be read as a PNG image: send a whole one, and declare its type."),
        ("e.gif", "Content-Type 'image/gif' is not taken: declare one of image/png, image/jpeg"),
    ):
        tab.get_by_label("Choose a file").set_input_files(tmp_path / name)
        tab.locator("#error").get_by_text(sentence).wait_for()
        assert not tab.locator("#found").is_visible()
    content = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    tab.evaluate(
        """async (content) => {
          const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0)), data = new DataTransfer();
          data.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
          const event = (name) => new DragEvent(name, { dataTransfer: data, bubbles: true, cancelable: true });
          for (const name of ["dragover", "drop"]) document.dispatchEvent(event(name));
        }""",
        content,
    )
    tab.locator("#found").wait_for()
    assert numbers(lines(tab)) == expected(asked(server, (tmp_path / "a.png").read_bytes()))
    tab.keyboard.press("Escape")
    assert not tab.get_by_alt_text("The image that was sent").is_visible()
