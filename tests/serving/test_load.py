"""Many clients at once: every request gets the answer to its own input, and requests share batches."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.server_process import BINARY, Served, message

REQUESTS, CLIENTS = 4000, 32


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_four_thousand_requests_of_many_clients(
    served_run: Path, bare: Callable[..., np.ndarray], digits: np.ndarray, workers: int
) -> None:
    logits = bare(digits)

    async def client(start: int, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(start, REQUESTS, CLIENTS):
            first, rows = number % 480, 1 + number % 5
            sent = digits[first : first + rows].tobytes()
            writer.write(message("POST", "/predict", sent, content_type=BINARY, accept=BINARY))
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            found = np.frombuffer(body, "<f4").reshape(rows, 10)
            np.testing.assert_allclose(found, logits[first : first + rows], rtol=1e-4, atol=1e-4)
        writer.close()

    async def all_clients(port: int) -> None:
        await asyncio.gather(*(client(start, port) for start in range(CLIENTS)))

    with Served(served_run, "target=onnx", "threads=1", f"workers={workers}", "max_queue=1000") as server:
        asyncio.run(asyncio.wait_for(all_clients(server.port), 500))
        assert server.metric('lathe_responses_total{path="/predict",status="200"}') == REQUESTS
        assert server.metric("lathe_queue") == server.metric("lathe_worker_restarts_total") == 0
        assert server.metric("lathe_batch_samples_count") < server.metric("lathe_request_seconds_count")
        assert server.stop() == (0, "")
