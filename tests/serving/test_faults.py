"""Hostile, slow and vanishing clients: the server answers them and keeps running."""

import io
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.server_process import BINARY, Served, ask, descriptors, message, receive

pytestmark = pytest.mark.slow
JSON, NPY, PNG = "application/json", "application/x-npy", "image/png"


@pytest.fixture(scope="module")
def server(served_run: Path) -> Iterator[Served]:
    """A server with short timeouts, so that slow clients don't make the tests slow."""
    with Served(
        served_run,
        "target=onnx",
        "threads=1",
        "header_timeout=1",
        "body_timeout=1.5",
        "max_body_bytes=2000000",
        "max_connections=40",
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def _still_well(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each fault that the shared server answers as before."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        assert server.ask("GET", "/health").status == 200
        assert server.ask("POST", "/predict", bytes(64), content_type=BINARY).status == 200


def png(width: int, height: int, rows: bytes) -> bytes:
    """A greyscale PNG of `rows`, the compressed bytes of its lines."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bomb() -> bytes:
    """A PNG whose header says 4,000 x 4,000 and which unpacks to 400 MB."""
    packer = zlib.compressobj(9)
    return png(4000, 4000, b"".join([*(packer.compress(bytes(1_000_000)) for _ in range(400)), packer.flush()]))


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def resident(pid: int) -> int:
    """Return the peak memory so far in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def test_a_bomb_is_not_unpacked(server: Served) -> None:
    server.ask(
        "POST", "/predict", png(4000, 4000, zlib.compress(bytes(4001 * 4000))), content_type=PNG
    )  # as much as a valid one
    before = resident(server.process.pid)
    found = server.ask("POST", "/predict", bomb(), content_type=PNG)
    assert found.status in (200, 400, 413)  # a decoder may stop where the announced pixels end
    assert resident(server.process.pid) - before < 100


def test_bodies_over_the_limit(server: Served) -> None:
    sent = message("POST", "/predict", bytes(3_000_000), content_type=BINARY)
    with server.connect() as connection:
        found = ask(connection, sent)
    assert found.status == 413
    assert "2000000" in found.sentence
    with server.connect() as connection:  # announced only, by a client that sends Expect
        found = ask(connection, message("POST", "/predict", b"", content_length=str(10**15), expect="100-continue"))
    assert found.status == 413
    with server.connect() as connection:  # chunked, without a length
        connection.sendall(message("POST", "/predict", transfer_encoding="chunked", content_type=BINARY))
        for _ in range(30):
            connection.sendall(b"186a0\r\n" + bytes(100_000) + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert receive(connection).status == 413


def test_a_body_in_chunks_and_a_client_that_asks_first(server: Served) -> None:
    with server.connect() as connection:
        connection.sendall(message("POST", "/predict", transfer_encoding="chunked", content_type=BINARY))
        connection.sendall(b"20\r\n" + bytes(32) + b"\r\n20\r\n" + bytes(32) + b"\r\n0\r\n\r\n")
        assert receive(connection).status == 200
        connection.sendall(message("POST", "/predict", content_length="64", content_type=BINARY, expect="100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        assert ask(connection, bytes(64)).status == 200


def test_lengths_that_lie_are_refused(server: Served) -> None:
    with server.connect() as connection:  # the rest would be the next request
        found = ask(connection, message("POST", "/predict", bytes(100), content_type=BINARY, content_length="63"))
        assert found.status in (400, 422)
    with server.connect() as connection:
        began = time.monotonic()
        found = ask(connection, message("POST", "/predict", bytes(64), content_type=BINARY, content_length="100"))
        assert found.status == 408
        assert time.monotonic() - began < 10


def test_slow_clients_hold_up_nobody(server: Served) -> None:
    with server.connect() as silent, server.connect() as headers, server.connect() as body:
        began = time.monotonic()
        headers.sendall(b"POST /predict HTTP/1.1\r\nhost: ")
        body.sendall(message("POST", "/predict", bytes(10), content_type=BINARY, content_length="64"))

        def drip(connection: socket.socket) -> None:
            try:
                for _ in range(100):
                    connection.sendall(b"a")
                    time.sleep(0.1)
            except OSError:
                pass

        threads = [threading.Thread(target=drip, args=(connection,)) for connection in (headers, body)]
        for thread in threads:
            thread.start()
        with server.connect() as other:  # they delay no other client
            assert ask(other, message("POST", "/predict", bytes(64), content_type=BINARY)).status == 200
        found = [receive(headers), receive(body)]
        assert [answer.status for answer in found] == [408, 408]
        assert all(answer.sentence for answer in found)
        assert silent.recv(10) == b""
        assert time.monotonic() - began < 9
        for thread in threads:
            thread.join()


def test_endless_headers_are_refused(server: Served) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000)
        found = receive(connection)
    assert found.status == 431
    assert found.sentence


def test_too_many_connections_are_refused(server: Served) -> None:
    held = [server.connect() for _ in range(60)]
    try:
        statuses = []
        for connection in held[45:]:
            try:
                statuses.append(receive(connection).status)
            except ConnectionError:
                statuses.append(0)
        assert 503 in statuses
    finally:
        for connection in held:
            connection.close()
    deadline = time.monotonic() + 10
    while server.ask("GET", "/health").status != 200 and time.monotonic() < deadline:
        time.sleep(0.1)


def test_hang_ups_leave_nothing_behind(server: Served) -> None:
    for _ in range(3):
        server.ask("GET", "/health")
    before = descriptors(server.process.pid)
    whole = message("POST", "/predict", bytes(64), content_type=BINARY)
    for number in range(100):
        connection = server.connect()
        connection.sendall(whole if number % 2 else whole[:-10])  # disconnects before its answer, or within its body
        if number % 3 == 0:  # with a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    deadline = time.monotonic() + 20
    while server.metric("lathe_queue") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.metric("lathe_queue") == 0
    # The server itself opens files for a moment, such as those that report free memory.
    while (open_now := descriptors(server.process.pid)) > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert open_now <= before


def test_requests_in_a_pipeline_are_answered_in_order(
    server: Served, bare: Callable[..., np.ndarray], digits: np.ndarray
) -> None:
    with server.connect() as connection:
        sent = [
            message("POST", "/predict", digits[i : i + 1].tobytes(), content_type=BINARY, accept=BINARY)
            for i in range(3)
        ]
        connection.sendall(b"".join(sent))
        file = connection.makefile("rb")
        for i in range(3):
            while (line := file.readline()) != b"\r\n":
                assert line
            np.testing.assert_allclose(
                np.frombuffer(file.read(40), "<f4"), bare(digits[i : i + 1])[0], rtol=1e-4, atol=1e-4
            )
