"""A real server of scripts/serve.py: its answers, many clients, killed and hung workers, slow clients, its end."""

import gzip
import http.client
import io
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.server_process import BINARY, Answer, Served, alive, ask, descriptors, message, receive

from lathe.errors import UserError
from lathe.serving.server import listen

JSON, NPY, PNG = "application/json", "application/x-npy", "image/png"
Net = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def server(served_run: Path) -> Iterator[Served]:
    """A server with short timeouts, so that slow clients don't make the tests slow."""
    short = ("header_timeout=1", "body_timeout=1.5", "max_body_bytes=2000000", "max_connections=40")
    with Served(served_run, "target=onnx", "top_k=3", "threads=1", *short) as found:
        yield found


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_binary_input_and_binary_logits(server: Served, bare: Net, digits: np.ndarray) -> None:
    with server.connect() as connection:  # one connection for all
        for rows in (1, 3, 40):
            sent = message("POST", "/predict", digits[:rows].tobytes(), content_type=BINARY, accept=BINARY)
            found = ask(connection, sent)
            assert (found.status, found.headers["x-shape"]) == (200, f"{rows},10")
            assert float(found.headers["server-timing"].removeprefix("predict;dur=")) > 0
            logits = np.frombuffer(found.body, "<f4").reshape(rows, 10)
            np.testing.assert_allclose(logits, bare(digits[:rows]), rtol=1e-5, atol=1e-5)


def test_each_path_answers(server: Served, served_run: Path, bare: Net, digits: np.ndarray) -> None:
    best = np.argsort(-bare(digits[:2]))
    one = json.dumps({"image": digits[0].tolist()}).encode()
    found = server.ask("POST", "/predict", one, content_type=JSON)
    assert [line["index"] for line in found.json["predictions"]] == best[0, :3].tolist()
    found = server.ask("POST", "/predict?top_k=1", npy(digits[:2]), content_type=NPY)
    assert [[line["index"] for line in row] for row in found.json["predictions"]] == best[:, :1].tolist()
    assert server.ask("GET", "/health").json == {"status": "ok", "workers": 1}
    info = server.ask("GET", "/info").json
    assert info["manifest"] == json.loads((served_run / "exports/onnx/manifest.json").read_text())
    assert (info["receipt"], info["limits"]["body_bytes"]) == (None, 2_000_000)
    text = server.ask("GET", "/metrics").body.decode()
    for name in ('{path="/health",status="200"}', "lathe_queue 0.0", "lathe_workers 1.0", "lathe_batch_samples_bucket"):
        assert name in text
    assert "content-encoding" not in server.ask("GET", "/").headers
    packed = server.ask("GET", "/", accept_encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == server.ask("GET", "/").body


def test_chunks_a_client_that_asks_first_and_a_pipeline(server: Served, bare: Net, digits: np.ndarray) -> None:
    with server.connect() as connection:
        connection.sendall(message("POST", "/predict", transfer_encoding="chunked", content_type=BINARY))
        connection.sendall(b"20\r\n" + bytes(32) + b"\r\n20\r\n" + bytes(32) + b"\r\n0\r\n\r\n")
        assert receive(connection).status == 200
        connection.sendall(message("POST", "/predict", content_length="64", content_type=BINARY, expect="100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        assert ask(connection, bytes(64)).status == 200
        sent = [message("POST", "/predict", one.tobytes(), content_type=BINARY, accept=BINARY) for one in digits[:3]]
        connection.sendall(b"".join(sent))
        file = connection.makefile("rb")
        for i in range(3):
            while (line := file.readline()) != b"\r\n":
                assert line
            logits = np.frombuffer(file.read(40), "<f4")
            np.testing.assert_allclose(logits, bare(digits[i : i + 1])[0], rtol=1e-4, atol=1e-4)


def test_a_port_in_use_and_an_address_of_another_machine(server: Served) -> None:
    with pytest.raises(UserError, match=f"^port={server.port} .* in use"):
        listen("127.0.0.1", server.port)
    with pytest.raises(UserError, match=r"host=192\.0\.2\.1"):
        listen("192.0.2.1", 0)


@pytest.mark.slow
def test_many_connections_and_hang_ups_leave_nothing_behind(server: Served) -> None:
    held = [server.connect() for _ in range(60)]
    assert server.ask("GET", "/health").status == 503
    for connection in held:
        connection.close()
    wait_for(lambda: server.ask("GET", "/health").status == 200, 10)
    before = descriptors(server.process.pid)
    whole = message("POST", "/predict", bytes(64), content_type=BINARY)
    for number in range(100):
        connection = server.connect()
        connection.sendall(whole if number % 2 else whole[:-10])  # disconnects before its answer, or within its body
        if number % 3 == 0:  # with a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    # the server itself opens files for a moment, such as those that report free memory
    wait_for(lambda: not server.metric("lathe_queue") and descriptors(server.process.pid) <= before, 20)
    assert server.ask("POST", "/predict", bytes(64), content_type=BINARY).status == 200


class Stranger:
    """A client of Python's standard library that draws valid and invalid requests, and checks each answer."""

    def __init__(self, seed: int, port: int, net: Net) -> None:
        self.random, self.net = random.Random(seed), net
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, body: bytes, kind: str, path: str = "/predict?top_k=10") -> Any:
        self.connection.request("POST", path, body, {"Content-Type": kind})
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def once(self) -> int:
        """Send one request; return its status."""
        pixels = np.array([[self.random.randrange(256) for _ in range(8)] for _ in range(8)], np.uint8)
        if self.random.random() < 0.3:
            return self.send_wrong(pixels)
        image = json.dumps({"image": pixels.tolist()}).encode()
        forms = [(pixels.tobytes(), BINARY), (npy(pixels), NPY), (image, JSON), (png(pixels), PNG)]
        status, found = self.ask(*self.random.choice(forms))
        assert status == 200, found
        expected = self.net(pixels[None, None])[0].astype(np.float64)
        shares = np.exp(expected - expected.max()) / np.exp(expected - expected.max()).sum()
        rows = json.loads(found)["predictions"]
        assert sorted(row["index"] for row in rows) == list(range(10))
        wanted = [shares[row["index"]] for row in rows]
        assert wanted == pytest.approx(sorted(wanted, reverse=True), abs=1e-4)
        np.testing.assert_allclose([row["probability"] for row in rows], wanted, atol=1e-4)
        return int(status)

    def send_wrong(self, pixels: np.ndarray) -> int:
        body, kind, path, expected = self.random.choice(
            [
                (b"{", JSON, "/predict", 400),
                (npy(pixels)[:-1], NPY, "/predict", 400),
                (png(pixels)[:40], PNG, "/predict", 400),
                (pixels.tobytes(), BINARY, "/predict?top_k=0", 400),
                (pixels.tobytes(), BINARY, "/elsewhere", 404),
                (pixels.tobytes(), "text/plain", "/predict", 415),
                (pixels.tobytes()[:-1], BINARY, "/predict", 422),
                (json.dumps({"image": (pixels / 255).tolist()}).encode(), JSON, "/predict", 422),
            ]
        )
        status, answer = self.ask(body, kind, path)
        assert (status, list(json.loads(answer))) == (expected, ["error"])
        return int(status)


@pytest.mark.slow
def test_no_request_is_lost_when_workers_are_killed_and_they_leave_with_the_server(served_run: Path, bare: Net) -> None:
    pair, over = Served(served_run, "target=onnx", "threads=1", "workers=2", "max_queue=1000"), threading.Event()

    def client(seed: int) -> list[int]:
        stranger, found = Stranger(seed, pair.port, bare), []
        with closing(stranger.connection):
            while not over.is_set() or len(found) < 100:
                found.append(stranger.once())
        return found

    with ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(client, seed) for seed in range(16)]
        try:
            for kill in range(2):
                time.sleep(1)
                os.kill(pair.workers()[kill], signal.SIGKILL)
                restarted = ("lathe_worker_restarts_total", kill + 1), ("lathe_workers", 2)
                wait_for(lambda expected=restarted: all(pair.metric(name) == value for name, value in expected), 180)
        finally:
            over.set()
        statuses = [status for future in clients for status in future.result(timeout=60)]
    assert len(statuses) > 1000
    assert set(statuses) == {200, 400, 404, 415, 422}
    assert pair.metric("lathe_queue") == 0
    assert pair.metric("lathe_batch_samples_count") < pair.metric("lathe_request_seconds_count")
    workers = pair.workers()
    pair.process.kill()
    _, error = pair.process.communicate()
    wait_for(lambda: not any(alive(worker) for worker in workers))
    assert len(workers) == 2
    assert error.count("died, exit code -9: starting another.") == 2
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_hung_worker_a_full_queue_and_a_stop_that_answers_what_was_accepted(
    served_run: Path, digits: np.ndarray, bare: Net
) -> None:
    """The signal to stop may reach the workers too, as from a terminal."""
    words = ("request_timeout=6", "health_timeout=2", "max_queue=11", "max_batch_size=1")
    with Served(served_run, "target=onnx", "threads=1", *words) as server, ThreadPoolExecutor(16) as pool:

        def one(number: int) -> "Future[Answer]":
            sent = digits[number].tobytes()
            return pool.submit(server.ask, "POST", "/predict", sent, content_type=BINARY, accept=BINARY)

        def hang() -> tuple[int, list["Future[Answer]"]]:
            """Let the worker hang with one request, and fill the queue with eleven."""
            (worker,) = server.workers()
            os.kill(worker, signal.SIGSTOP)
            calls = list(map(one, range(12)))
            wait_for(lambda: server.metric("lathe_queue") == 11)
            return worker, calls

        hung, calls = hang()
        refused = [one(number).result() for number in range(3)]
        assert [(answer.status, answer.headers.get("retry-after")) for answer in refused] == [(503, "1")] * 3
        assert {call.result().status for call in calls} == {504}
        wait_for(lambda: server.ask("GET", "/health").status == 200)
        assert not alive(hung)
        assert server.metric("lathe_queue") == 0

        worker, calls = hang()
        os.kill(worker, signal.SIGINT)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        with pytest.raises(OSError, match="refused"):
            server.connect()
        os.kill(worker, signal.SIGCONT)
        for number, call in enumerate(calls):
            found = call.result(timeout=60)
            assert found.status == 200
            logits = np.frombuffer(found.body, "<f4")
            np.testing.assert_allclose(logits, bare(digits[number : number + 1])[0], rtol=1e-4, atol=1e-4)
        _, error = server.process.communicate(timeout=60)
        assert server.process.returncode == 0
        assert not alive(worker)
        assert "hung and was killed" in error


def test_sigterm_ends_it_and_its_workers(server: Served) -> None:
    assert len(server.workers()) == 1
    assert server.stop(signal.SIGTERM) == (0, "")
