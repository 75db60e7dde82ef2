"""A real server on the loopback interface: the answer of each path, the API key, and its shutdown."""

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.server_process import BINARY, Served, ask, message

from lathe.errors import UserError
from lathe.serving.model import describe
from lathe.serving.server import listen

KEY = "s3cret"


@pytest.fixture(scope="module")
def server(served_run: Path) -> Iterator[Served]:
    with Served(served_run, "target=onnx", "top_k=3", "threads=1", LATHE_API_KEY=KEY) as found:
        yield found


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_binary_input_and_binary_logits(server: Served, bare: Callable[..., np.ndarray], digits: np.ndarray) -> None:
    with server.connect() as connection:  # one connection for all
        for rows in (1, 3, 40):
            sent = message(
                "POST", "/predict", digits[:rows].tobytes(), content_type=BINARY, accept=BINARY, x_api_key=KEY
            )
            found = ask(connection, sent)
            assert found.status == 200
            assert found.headers["x-shape"] == f"{rows},10"
            assert float(found.headers["server-timing"].removeprefix("predict;dur=")) > 0
            logits = np.frombuffer(found.body, "<f4").reshape(rows, 10)
            np.testing.assert_allclose(logits, bare(digits[:rows]), rtol=1e-5, atol=1e-5)


def test_json_and_npy_get_the_likeliest_classes(
    server: Served, bare: Callable[..., np.ndarray], digits: np.ndarray
) -> None:
    best = np.argsort(-bare(digits[:2]))
    one = json.dumps({"image": digits[0].tolist()}).encode()
    found = server.ask("POST", "/predict", one, content_type="application/json", authorization=f"Bearer {KEY}")
    assert [line["index"] for line in found.json["predictions"]] == best[0, :3].tolist()
    found = server.ask("POST", "/predict?top_k=1", npy(digits[:2]), content_type="application/x-npy", x_api_key=KEY)
    assert [[line["index"] for line in row] for row in found.json["predictions"]] == best[:, :1].tolist()


def test_health_metrics_info_and_page(server: Served, served_run: Path) -> None:
    healthy = server.ask("GET", "/health")
    assert (healthy.status, healthy.json) == (200, {"status": "ok", "workers": 1})
    info = server.ask("GET", "/info", x_api_key=KEY).json
    assert info["manifest"] == json.loads((served_run / "exports/onnx/manifest.json").read_text())
    assert info["receipt"] is None
    assert info["limits"]["body_bytes"] == 16777216
    text = server.ask("GET", "/metrics", x_api_key=KEY).body.decode()
    assert 'lathe_responses_total{path="/health",status="200"}' in text
    assert "lathe_queue 0.0" in text
    assert "lathe_workers 1.0" in text
    for name in ("lathe_request_seconds_bucket", "lathe_batch_samples_bucket"):
        assert name in text
    page = server.ask("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.status == 200


def test_other_paths_are_not_found(server: Served) -> None:
    for path in ("/nothing", "/docs", "/openapi.json", "/redoc", "/shutdown", "/predict/"):
        found = server.ask("GET", path)
        assert found.status == 404
        assert path in found.sentence
    wrong = server.ask("GET", "/predict")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert "POST goes to /predict" in wrong.sentence


@pytest.mark.parametrize("path", ["/predict", "/info", "/metrics"])
def test_the_api_key_guards_all_but_health_and_page(server: Served, path: str) -> None:
    method = "POST" if path == "/predict" else "GET"
    for headers in (
        {},
        {"x_api_key": "wrong"},
        {"x_api_key": ""},
        {"authorization": f"Basic {KEY}"},
        {"x_api_key": KEY + "é"},
    ):
        found = server.ask(method, path, **headers)
        assert found.status == 401
        assert found.headers["www-authenticate"] == "Bearer"
        assert KEY not in found.sentence
    assert server.ask(method, path, x_api_key=KEY).status != 401


def test_a_port_in_use_and_an_export_that_is_not_there(server: Served, served_run: Path) -> None:
    with pytest.raises(UserError, match=f"^port={server.port} is in use"):
        listen("127.0.0.1", server.port)
    with pytest.raises(UserError, match=r"make it with python scripts/export\.py"):
        describe(str(served_run), "onnx_int8", "best")
    for outside in ("../checkpoints", "..", "."):
        with pytest.raises(UserError, match="has no such export"):
            describe(str(served_run), outside, "best")


def test_sigterm_ends_it_and_its_workers(server: Served) -> None:
    assert len(server.workers()) == 1
    assert server.stop(signal.SIGTERM) == (0, "")
