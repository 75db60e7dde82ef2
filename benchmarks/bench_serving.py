"""Time that the server adds to a call, and requests per second that its batches give.

    python benchmarks/bench_serving.py --rounds 5

Two figures, each of interleaved rounds. First, the time that the server adds to a bare call at batch 1: one client with
one open connection sends binary input and reads binary logits, one request after the other; before each block of
requests the call is timed in this process. Second, requests per second of 32 clients with batches of up to 32 over the
same server without batching, for an MLP whose weights don't fit into a cache, so that a batch of 32 costs much less
than 32 calls; that cost is measured and printed too. The clients are in one process, this one. Runs and exports are
made by the real commands in a temporary folder, or taken from `--folder` if they are there.
"""

import asyncio
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import QUIET, ROOT, describe_machine, parser, run, write_json
from suites.results import Results, Threshold, rows

# ms; times; the largest cost of a batch-32 call, in batch-1 calls, at which the gain is required
BARS = {"added": 3.0, "gain": 2.5, "ratio": 8.0}
NETS = {
    "small": ("model=resnet20", "model.net.width=8"),
    "wide": ("model=mlp", "model.net.width=3072", "model.net.depth=4"),
}


def make(folder: Path, name: str, target: str) -> Path:
    """Return the run of a net of NETS with its export, made if missing."""
    log_dir = folder / name
    if not (log_dir / "latest").exists():
        run("train.py", *NETS[name], *QUIET, "trainer.max_epochs=1", f"paths.log_dir={log_dir}")
    path = (log_dir / "latest").resolve()
    if not (path / "exports" / target).is_dir():
        run("scripts/export.py", f"run={path}", f"target={target}")
    return path


class Served:
    """`scripts/serve.py` on a free port."""

    def __init__(self, run: Path, target: str, *words: str) -> None:
        script = str(ROOT / "scripts/serve.py")
        line = [sys.executable, script, f"run={run}", f"target={target}", "port=0", "threads=1", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: S603
        assert self.process.stdout is not None
        line_printed = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line_printed)
        if match is None:
            raise SystemExit(f"the server did not start: {line_printed}")
        self.port = int(match[1])

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def request(body: bytes) -> bytes:
    """Return a POST request with binary input and binary logits."""
    head = (
        "POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\naccept: "
        "application/octet-stream\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def content_of(received: bytes) -> bytes | None:
    """Return the body of a complete answer, or None."""
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    match = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert head.startswith(b"HTTP/1.1 200"), received
    assert match is not None
    return body if len(body) == int(match[1]) else None


def ask(connection: socket.socket, sent: bytes) -> bytes:
    connection.sendall(sent)
    received = b""
    while (content := content_of(received)) is None:
        received += connection.recv(65536)
    return content


class Client(asyncio.Protocol):
    """A client that sends the next request after each answer, until `until`."""

    def __init__(self, sent: bytes, until: float) -> None:
        self.sent, self.until, self.count, self.found = sent, until, 0, b""
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.sent)

    def data_received(self, data: bytes) -> None:
        self.found += data
        if content_of(self.found) is None:
            return
        self.count, self.found = self.count + 1, b""
        if time.perf_counter() < self.until:
            self.transport.write(self.sent)
        else:
            self.transport.close()
            self.over.set_result(None)


async def throughput(port: int, sent: bytes, seconds: float, clients: int = 32) -> float:
    """Return requests per second."""
    began = time.perf_counter()
    loop, protocols = asyncio.get_running_loop(), [Client(sent, began + seconds) for _ in range(clients)]
    for client in protocols:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(client.over for client in protocols))
    return sum(client.count for client in protocols) / (time.perf_counter() - began)


def added(run: Path, target: str, rounds: int, calls: int) -> list[dict[str, float]]:
    """Return the median milliseconds of a bare call and of a request of each round."""
    from lathe.export.bundle import open_bundle

    bundle = open_bundle(run / "exports" / target, 1)
    shape = [1, *bundle.manifest["input"]["shape"][1:]]
    inputs = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    rounds_ms = []
    with Served(run, target) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = request(inputs.tobytes())
        answered = np.frombuffer(ask(connection, sent), "<f4")
        np.testing.assert_allclose(answered, bundle(inputs)[0], rtol=1e-4, atol=1e-4)
        for _ in range(rounds):
            bare, whole = timed(lambda: bundle(inputs), calls), timed(lambda: ask(connection, sent), calls)
            rounds_ms.append({"bare_ms": bare, "request_ms": whole, "added_ms": whole - bare})
    return rounds_ms


def timed(call: Any, calls: int) -> float:
    """Return the median milliseconds of `calls` calls, after a warm-up."""
    times = []
    for index in range(calls + 20):
        began = time.perf_counter()
        call()
        if index >= 20:
            times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def gain(run: Path, target: str, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Return requests per second with and without batches, and the cost of a batch of 32 in calls of one."""
    from lathe.export.bundle import open_bundle

    bundle = open_bundle(run / "exports" / target, 1)
    inputs = np.random.default_rng(0).integers(0, 256, [32, *bundle.manifest["input"]["shape"][1:]], dtype=np.uint8)
    sent = request(inputs[:1].tobytes())
    figures = []
    with Served(run, target, "max_batch_size=32") as batched, Served(run, target, "max_batch_size=1") as unbatched:
        for port in (batched.port, unbatched.port):
            asyncio.run(throughput(port, sent, seconds=1))  # warms up
        for _ in range(rounds):
            ratio = timed(lambda: bundle(inputs), 30) / timed(lambda: bundle(inputs[:1]), 30)
            rates = [asyncio.run(throughput(server.port, sent, seconds)) for server in (batched, unbatched)]
            figures.append({"ratio": ratio, "batched": rates[0], "unbatched": rates[1], "gain": rates[0] / rates[1]})
    return figures


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--calls", type=int, default=500, help="calls and requests of a round at batch 1")
    arguments.add_argument("--seconds", type=float, default=5.0, help="of a round with 32 clients")
    arguments.add_argument("--target", default="onnx", help="the export that is served")
    arguments.add_argument("--folder", type=Path, help="where runs are kept; by default a temporary folder")
    arguments.add_argument("--json", type=Path, help="a file for all figures")
    options = arguments.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        small, wide = (make(folder, name, options.target) for name in NETS)
        results = Results(
            one=added(small, options.target, options.rounds, options.calls),
            many=gain(wide, options.target, options.rounds, options.seconds),
        )
    judged = [
        Threshold("bare call, batch 1, ms", results.spread("one", "bare_ms")),
        Threshold("request, batch 1, ms", results.spread("one", "request_ms")),
        Threshold("the server adds, ms,", results.spread("one", "added_ms"), at_most=BARS["added"]),
        Threshold("a batch of 32, in calls of one,", results.spread("many", "ratio"), at_most=BARS["ratio"]),
        Threshold("32 clients, max_batch_size=32, requests/s", results.spread("many", "batched")),
        Threshold("32 clients, max_batch_size=1, requests/s", results.spread("many", "unbatched")),
        Threshold("batches give", results.spread("many", "gain"), at_least=BARS["gain"]),
    ]
    print(rows(judged, "figure"))
    machine = describe_machine("starlette", "uvicorn", "onnxruntime", "torch")
    print(
        f"n = {options.rounds} rounds of {options.calls} calls and of {options.seconds:g} s; target={options.target}, "
        f"1 worker, 1 thread; {machine}; {time.monotonic() - began:.0f} s."
    )
    write_json(options.json, {"results": results, "bars": BARS})
    raise SystemExit(0 if all(threshold.met for threshold in judged) else 1)


if __name__ == "__main__":
    main()
