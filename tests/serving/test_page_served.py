"""The web page in a real browser with scripts/serve.py: it shows the answers of /predict."""

import base64
import io
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.browser import THREE, draw, lines, recorded
from support.runs import SMALL, new_run
from support.server_process import Served

from lathe import export
from lathe.export import manifest as manifests
from lathe.runs.export_model import open_export_model
from lathe.training.train import train

KEY = "a key of the test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of scripts/serve.py with an API key and a small trained net."""
    pytest.importorskip("uvicorn")
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL, "trainer.max_epochs=20")
    train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    ready, folder = open_export_model(run), run / "exports" / "onnx"
    folder.mkdir(parents=True)
    export.get("onnx").export(ready.net, ready.example, folder / "model.onnx")
    manifests.write(folder, {"target": "onnx", "file": "model.onnx", **ready.facts}, ["model.onnx"])
    with Served(run, "target=onnx", LATHE_API_KEY=KEY) as process:
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
