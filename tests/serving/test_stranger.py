"""A shortened soak test: thousands of valid and hostile requests, each with its expected answer."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fuzz_draws import seed
from support.server_in_process import Here
from support.server_process import BINARY, Served, message
from support.stranger import Stranger

from lathe.serving.model import describe

SEED = seed()  # LATHE_FUZZ_SEED, as for the fuzz of law 7
COMMON = (200, 400, 415, 422, 431)


def test_a_strangers_minute(served_run: Path, bare: Callable[..., Any], options: Callable[..., Any]) -> None:
    print(f"LATHE_FUZZ_SEED={SEED}")
    with Here(options(header_timeout=2, body_timeout=2), describe(str(served_run), "onnx", "best"), bare) as server:
        stranger = Stranger(SEED, server.connect, bare)
        stranger.visit(100)
        assert server.ask("GET", "/health").status == 200
    assert stranger.answered[200] > 20
    assert sum(stranger.answered.values()) - stranger.answered[200] > 20


@pytest.mark.slow
def test_a_strangers_half_hour(served_run: Path, bare: Callable[..., Any]) -> None:
    """With slow clients that must not delay others, at a real server whose memory must not grow."""
    print(f"LATHE_FUZZ_SEED={SEED}")
    with Served(
        served_run, "target=onnx", "threads=1", "workers=2", "header_timeout=2", "body_timeout=2", "max_connections=60"
    ) as server:
        guests = [Stranger(SEED + number, server.connect, bare, patience=0.001) for number in range(3)]

        def visits(guest: Stranger) -> None:
            while time.monotonic() < until:
                guest.visit(20)

        Stranger(SEED + 9, server.connect, bare).visit(60)
        before, until = resident(server.process.pid), time.monotonic() + 25
        slow = [threading.Thread(target=drip, args=(server, number, until)) for number in range(12)]
        for thread in slow:
            thread.start()
        with ThreadPoolExecutor(len(guests)) as pool:
            list(pool.map(visits, guests))
        for thread in slow:
            thread.join()
        assert resident(server.process.pid) - before < 150
        seen = {status for guest in guests for status in guest.answered}
        assert seen >= set(COMMON)
        sent = np.zeros((1, 1, 8, 8), np.uint8)
        found = server.ask("POST", "/predict", sent.tobytes(), content_type=BINARY, accept=BINARY)
        np.testing.assert_allclose(np.frombuffer(found.body, "<f4"), bare(sent)[0], rtol=1e-4, atol=1e-4)
        assert server.metric("lathe_worker_restarts_total") == 0
        assert server.metric("lathe_queue") == 0
        assert server.stop() == (0, "")


def drip(server: Served, number: int, until: float) -> None:
    """Connections that send a byte of headers, body or chunks now and then, or read nothing."""
    begin = [
        message("POST", "/predict", b"", content_length="64", content_type=BINARY),
        b"GET / HTTP/1.1\r\nx: ",
        message("POST", "/predict", transfer_encoding="chunked") + b"ff;",
        message("GET", "/") * 500,
    ][number % 4]
    while time.monotonic() < until:
        with suppress(OSError), server.connect() as connection:
            connection.sendall(begin)
            for _ in range(40):
                time.sleep(0.1)
                connection.sendall(b"a")


def resident(pid: int) -> int:
    """Return the current memory in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))
