"""10,000 mixed requests of many clients at once: nothing is lost, and every answer is that of its own input."""

import asyncio
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.server_process import BINARY, Served, message

REQUESTS, CLIENTS = 10_000, 32


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


class Mix:
    """Requests whose right answers are known; each kind has its share."""

    def __init__(self, digits: np.ndarray, logits: np.ndarray) -> None:
        self.digits, self.logits, self.counts, self.random = digits, logits, Counter(), random.Random(0)  # type: ignore[var-annotated]

    async def one(self, number: int, port: int, pair: list[asyncio.StreamReader | asyncio.StreamWriter]) -> None:
        first, rows = number % 480, self.random.choice((1, 1, 1, 2, 5))
        pixels = self.digits[first : first + rows]
        kinds = (
            "binary",
            "binary",
            "binary",
            "json",
            "npy",
            "png",
            "nan",
            "shape",
            "dtype",
            "broken",
            "empty",
            "health",
            "hang-up",
        )
        kind = self.random.choice(kinds)
        reader, writer = pair
        if kind == "binary":
            await self.send(writer, pixels.tobytes(), content_type=BINARY, accept=BINARY)
            status, body = await answer(reader)
            assert status == 200, body
            np.testing.assert_allclose(
                np.frombuffer(body, "<f4").reshape(rows, 10), self.logits[first : first + rows], rtol=1e-4, atol=1e-4
            )
        elif kind in ("json", "npy", "png"):
            file = io.BytesIO()
            if kind == "json":
                await self.send(
                    writer, json.dumps({"images": pixels.tolist()}).encode(), content_type="application/json"
                )
            elif kind == "npy":
                np.save(file, pixels)
                await self.send(writer, file.getvalue(), content_type="application/x-npy")
            else:
                rows = 1
                Image.fromarray(pixels[0, 0]).save(file, "PNG")
                await self.send(writer, file.getvalue(), content_type="image/png")
            status, body = await answer(reader)
            assert status == 200, body
            predictions = json.loads(body)["predictions"]
            for row, line in enumerate([predictions] if kind == "png" else predictions):
                logits = self.logits[first + row].astype(np.float64)
                shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
                best = np.argsort(-logits)[:5]
                assert [entry["index"] for entry in line] == best.tolist()
                np.testing.assert_allclose([entry["probability"] for entry in line], shares[best], atol=1e-4)
        elif kind == "hang-up":  # a client that leaves without its answer, or in the middle of its body
            _, short = await asyncio.open_connection("127.0.0.1", port)
            sent = message("POST", "/predict", pixels.tobytes(), content_type=BINARY)
            short.write(sent if number % 2 else sent[:-20])
            await short.drain()
            short.close()
        elif kind == "health":
            writer.write(message("GET", "/health"))
            status, body = await answer(reader)
            assert status == 200, body
        else:
            await self.bad(kind, pixels, writer)
            status, body = await answer(reader)
            assert 400 <= status < 500, (kind, status, body)
            assert list(json.loads(body)) == ["error"]
        self.counts[kind] += 1

    async def bad(self, kind: str, pixels: np.ndarray, writer: asyncio.StreamWriter) -> None:
        file = io.BytesIO()
        if kind == "nan":
            await self.send(writer, b'{"image": [[NaN]]}', content_type="application/json")
        elif kind == "broken":
            await self.send(writer, b'{"image": [[1, 2', content_type="application/json")
        elif kind == "empty":
            await self.send(writer, b"", content_type=BINARY)
        else:
            np.save(file, pixels.astype(np.float64) if kind == "dtype" else pixels[..., :5])
            await self.send(writer, file.getvalue(), content_type="application/x-npy")

    @staticmethod
    async def send(writer: asyncio.StreamWriter, body: bytes, **headers: str) -> None:
        writer.write(message("POST", "/predict", body, **headers))
        await writer.drain()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ten_thousand_mixed_requests(
    served_run: Path, bare: Callable[..., np.ndarray], digits: np.ndarray, workers: int
) -> None:
    mix = Mix(digits, bare(digits))
    requests = REQUESTS if workers == 1 else REQUESTS // 5

    async def client(numbers: list[int], port: int) -> None:
        pair = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            await mix.one(number, port, list(pair))
        pair[1].close()

    async def all_clients(port: int) -> None:
        await asyncio.gather(*(client(list(range(start, requests, CLIENTS)), port) for start in range(CLIENTS)))

    with Served(served_run, "target=onnx", "threads=1", f"workers={workers}", "max_queue=1000") as server:
        asyncio.run(asyncio.wait_for(all_clients(server.port), 500))
        assert sum(mix.counts.values()) == requests
        good = sum(mix.counts[kind] for kind in ("binary", "json", "npy", "png"))
        answered = server.metric('lathe_responses_total{path="/predict",status="200"}')
        assert (
            good <= answered <= good + mix.counts["hang-up"]
        )  # of a hang-up with a whole body, some were computed for nobody
        assert server.metric("lathe_queue") == 0
        assert server.metric("lathe_worker_restarts_total") == 0
        assert server.metric("lathe_batch_samples_count") < server.metric(
            "lathe_request_seconds_count"
        )  # there were batches
        assert server.stop() == (0, "")
