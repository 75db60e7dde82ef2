"""The server's other answers: compressed responses, other methods, unwanted bodies, internal errors."""

import contextlib
import gzip
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.server_in_process import Here
from support.server_process import BINARY, message, receive

from lathe.serving.model import describe


@pytest.fixture(scope="module")
def facts(served_run: Path) -> dict[str, Any]:
    return describe(str(served_run), "onnx", "best")


@pytest.fixture(scope="module")
def server(options: Callable[..., Any], facts: dict[str, Any], bare: Callable[..., Any]) -> Iterator[Here]:
    with Here(options(), facts, bare) as here:
        yield here


def test_long_answers_are_compressed_for_who_takes_that(server: Here, digits: np.ndarray) -> None:
    for path, body, headers in (
        ("/", b"", {}),
        ("/info", b"", {}),
        ("/predict", digits[:9].tobytes(), {"content_type": BINARY}),
    ):
        method = "POST" if body else "GET"
        plain = server.ask(method, path, body, **headers)
        packed = server.ask(method, path, body, accept_encoding="gzip", **headers)
        assert "content-encoding" not in plain.headers
        assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "Accept-Encoding")
        assert gzip.decompress(packed.body) == plain.body
        assert packed.headers["x-frame-options"] == "DENY"
    assert "content-encoding" not in server.ask("GET", "/health", accept_encoding="gzip").headers


def test_other_methods(server: Here) -> None:
    for path in ("/", "/health", "/metrics", "/info"):
        with server.connect() as connection:
            connection.sendall(message("HEAD", path) + message("DELETE", path))
            while b"\r\n\r\n" not in (found := connection.recv(1 << 16, socket.MSG_PEEK)) or b"405" not in found:
                time.sleep(0.01)
            assert found.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\n\r\nHTTP/1.1 405 " in found  # without a body
        refused = server.ask("DELETE", path)
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
    assert [server.ask("GET", path).status for path in ("/health/", "/health%0A", "//health")] == [404] * 3


UNWANTED = [
    ("GET", "/health", 200),
    ("GET", "/", 200),
    ("POST", "/nothing", 404),
    ("PUT", "/predict", 405),
    ("POST", "/info", 405),
]


def test_an_unwanted_body_does_not_hold_the_connection(server: Here) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in UNWANTED]
        for _ in range(2):  # a complete body is read, and the connection stays open
            for connection, (method, path, status) in zip(connections, UNWANTED, strict=True):
                connection.sendall(message(method, path, bytes(300_000), content_length="300000"))
                assert receive(connection).status == status
        for connection, (method, path, _) in zip(connections, UNWANTED, strict=True):
            connection.sendall(message(method, path, b"4\r\nsome\r\n", transfer_encoding="chunked"))
        for connection, (_, _, status) in zip(connections, UNWANTED, strict=True):
            found = receive(connection)
            assert (found.status, found.headers["connection"]) == (status, "close")
            assert connection.recv(1) == b""


def test_an_error_of_the_servers_own_is_one_sentence(
    options: Callable[..., Any],
    facts: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(inputs: np.ndarray) -> np.ndarray:
        raise RuntimeError("a secret")

    with Here(options(), facts, broken) as server:
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
        for _ in range(2):
            found = server.ask("POST", "/predict", bytes(64), content_type=BINARY)
            assert found.status == 500
            assert b"a secret" not in found.body
        assert 'lathe_responses_total{path="/predict",status="500"} 2.0' in server.ask("GET", "/metrics").body.decode()
    assert "a secret" in caplog.text
