"""The server's answers over HTTP, with the net in this process: paths, hosts, key, limits, compression, errors."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from support.server_in_process import Here
from support.server_process import BINARY, message, receive

from lathe.serving.app import host_of, is_allowed
from lathe.serving.model import describe

KEY = "s3cret"


@pytest.fixture(scope="module")
def facts(served_run: Path) -> dict[str, Any]:
    return describe(str(served_run), "onnx", "best")


LOOPS = [asyncio.new_event_loop, pytest.param(uvloop.new_event_loop, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=LOOPS, ids=["asyncio", "uvloop"])
def server(request: Any, options: Callable[..., Any], facts: Any, bare: Callable[..., Any]) -> Iterator[Here]:
    short = options(header_timeout=1, body_timeout=1.5, max_body_bytes=2_000_000)
    with Here(short, facts, bare, request.param) as here:
        yield here


def test_other_paths_and_methods(server: Here) -> None:
    for path in ("/", "/health", "/metrics", "/info"):
        refused = server.ask("DELETE", path)
        assert (refused.status, set(refused.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    assert server.ask("GET", "/predict").headers["allow"] == "POST"
    for path in ("/nothing", "/docs", "/openapi.json", "/health/", "/predict/"):
        assert (found := server.ask("GET", path)).status == 404
        assert "/predict" in found.sentence
    with server.connect() as connection:
        connection.sendall(message("HEAD", "/"))
        while b"\r\n\r\n" not in (head := connection.recv(1 << 16, socket.MSG_PEEK)):
            time.sleep(0.01)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.endswith(b"\r\n\r\n")  # without a body


def test_wrong_options_of_a_request(server: Here) -> None:
    for path in ("/predict?top_k=0", "/predict?top_k=x", "/predict?topk=3"):
        assert server.ask("POST", path, bytes(64), content_type=BINARY).status == 400
    assert server.ask("POST", "/predict", bytes(64), content_type=BINARY, content_encoding="gzip").status == 415


def test_bodies_over_the_limit(server: Here) -> None:
    with server.connect() as connection:
        for _ in range(2):  # the rest is read, so the client gets its answer and may go on
            connection.sendall(message("POST", "/predict", bytes(3_000_000), content_type=BINARY))
            found = receive(connection)
            assert (found.status, "2000000" in found.sentence) == (413, True)
        connection.sendall(message("POST", "/predict", transfer_encoding="chunked", content_type=BINARY))
        for _ in range(30):
            connection.sendall(b"186a0\r\n" + bytes(100_000) + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert receive(connection).status == 413
    with server.connect() as connection:  # announced only, by a client that sends Expect
        connection.sendall(message("POST", "/predict", b"", content_length=str(10**15), expect="100-continue"))
        assert receive(connection).status == 413


def test_slow_headers_and_bodies_are_ended(server: Here) -> None:
    began = time.monotonic()
    with server.connect() as silent, server.connect() as headers, server.connect() as body:
        headers.sendall(b"POST /predict HTTP/1.1\r\nhost: ")
        body.sendall(message("POST", "/predict", bytes(10), content_type=BINARY, content_length="64"))
        assert server.ask("POST", "/predict", bytes(64), content_type=BINARY).status == 200  # no other client waits
        found = receive(body)
        assert (found.status, found.headers["connection"], bool(found.sentence)) == (408, "close", True)
        assert [connection.recv(10) for connection in (silent, headers)] == [b"", b""]
    assert 1 <= time.monotonic() - began < 6


def test_endless_headers_are_refused(server: Here) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        time.sleep(0.1)
        connection.sendall(b"x: " + b"a" * 70_000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


NAMES = {"localhost", "net.example.org"}


def test_a_request_is_for_an_address_or_a_name_of_the_server() -> None:
    """Other names may be rebound to this machine."""
    own = "localhost LOCALHOST:8000 a.localhost:1 127.0.0.1 10.0.0.7:80 [::1]:8000 net.example.org.:443"
    others = "evil.example:8000 localhost.evil.example 127.0.0.1.evil.example evillocalhost a.net.example.org :8000"
    others += " 2130706433 127.1 0x7f.0.0.1 user@localhost localhost,evil é"
    assert [host for host in own.split() if not is_allowed(host_of(host), NAMES)] == []
    assert [host for host in others.split() if is_allowed(host_of(host), NAMES)] == []


def test_every_path_checks_its_host(
    server: Here, options: Callable[..., Any], facts: dict[str, Any], bare: Callable[..., Any]
) -> None:
    for path in ("/", "/health", "/info", "/metrics", "/predict", "/nothing"):
        refused = server.ask("GET", path, host="evil.example")
        assert (refused.status, refused.sentence.startswith("'evil.example' is not this server")) == (421, True)
    with Here(options(hosts=["*"]), facts, bare) as everywhere:
        assert everywhere.ask("GET", "/health", host="any.example").status == 200


def test_a_page_of_another_site_cannot_ask(server: Here) -> None:
    """Its browser sends such types without asking the server first; all others need CORS headers, which it lacks."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
        assert server.ask("POST", "/predict", bytes(64), content_type=kind).status == 415
    asked = server.ask("OPTIONS", "/predict", origin="http://evil.example", access_control_request_method="POST")
    assert asked.status == 405
    answers = [asked, server.ask("GET", "/", origin="http://evil.example")]
    assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)
    assert answers[1].headers["x-frame-options"] == "DENY"


def test_the_api_key_guards_all_but_health_and_page(
    options: Callable[..., Any], facts: dict[str, Any], bare: Callable[..., Any]
) -> None:
    wrong = ({}, {"x_api_key": "wrong"}, {"x_api_key": ""}, {"authorization": f"Basic {KEY}"}, {"x_api_key": KEY + "é"})
    with Here(options(api_key=KEY), facts, bare) as server:
        for method, path in (("POST", "/predict"), ("GET", "/info"), ("GET", "/metrics")):
            for headers in wrong:
                found = server.ask(method, path, **headers)
                assert (found.status, found.headers["www-authenticate"]) == (401, "Bearer")
                assert KEY not in found.sentence
            for headers in ({"x_api_key": KEY}, {"authorization": f"Bearer {KEY}"}):
                assert server.ask(method, path, **headers).status != 401
        assert [server.ask("GET", free).status for free in ("/", "/health")] == [200, 200]


def test_an_error_of_the_servers_own_is_one_sentence(
    options: Callable[..., Any], facts: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(inputs: np.ndarray) -> np.ndarray:
        raise RuntimeError("a secret")

    with Here(options(), facts, broken) as server:
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
        for _ in range(2):
            found = server.ask("POST", "/predict", bytes(64), content_type=BINARY)
            assert (found.status, bool(found.sentence), b"a secret" in found.body) == (500, True, False)
        assert 'lathe_responses_total{path="/predict",status="500"} 2.0' in server.ask("GET", "/metrics").body.decode()
    assert "a secret" in caplog.text
