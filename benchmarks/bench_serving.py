"""What the server costs and what its batches give: python benchmarks/bench_serving.py

    python benchmarks/bench_serving.py --rounds 5

Two figures, each of interleaved rounds. First, what the server adds to a bare call at batch 1: one client with one kept
connection sends the binary input and reads binary logits, one request after the other; before each block of requests
the call is timed in this process. Second, requests per second of 32 clients with batches of up to 32 over the same
server without batching, for an MLP whose weights don't fit into a cache, so that a batch of 32 costs much less than 32
calls; how much less is measured and printed beside it. The clients are one process of this script. Runs and exports are
made by the real commands in a temporary folder, or taken from `--folder` if they are there.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
# ms; times; the largest cost of a batch-32 call, in batch-1 calls, at which the gain is required
BARS = {
    "added": 3.0,
    "gain": 2.5,
    "ratio": 8.0,
}
COMMON = (
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=1",
)
NETS = {
    "small": ("model=resnet20", "model.net.width=8"),
    "wide": ("model=mlp", "model.net.width=3072", "model.net.depth=4"),
}


def command(script: str, *words: str) -> None:
    line = [sys.executable, str(ROOT / script), *words]
    done = subprocess.run(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(words)}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")


def make(folder: Path, name: str, target: str) -> Path:
    """Return the run of a net of NETS with its export, made if missing."""
    log_dir = folder / name
    if not (log_dir / "latest").exists():
        command("train.py", *NETS[name], *COMMON, f"paths.log_dir={log_dir}")
    run = (log_dir / "latest").resolve()
    if not (run / "exports" / target).is_dir():
        command("scripts/export.py", f"run={run}", f"target={target}")
    return run


class Served:
    """`scripts/serve.py` on a free port."""

    def __init__(self, run: Path, target: str, *words: str) -> None:
        line = [
            sys.executable,
            str(ROOT / "scripts/serve.py"),
            f"run={run}",
            f"target={target}",
            "port=0",
            "threads=1",
            *words,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: S603
        assert self.process.stdout is not None
        words_printed = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", words_printed)
        if match is None:
            raise SystemExit(f"the server did not start: {words_printed}")
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


def content_of(found: bytes) -> bytes | None:
    """Return the body of a complete answer, or None."""
    head, separator, body = found.partition(b"\r\n\r\n")
    if not separator:
        return None
    match = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert head.startswith(b"HTTP/1.1 200"), found
    assert match is not None
    return body if len(body) == int(match[1]) else None


def ask(connection: socket.socket, sent: bytes) -> bytes:
    connection.sendall(sent)
    found = b""
    while (content := content_of(found)) is None:
        found += connection.recv(65536)
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


async def _throughput(port: int, sent: bytes, clients: int, seconds: float) -> float:
    began = time.perf_counter()
    loop, protocols = asyncio.get_running_loop(), [Client(sent, began + seconds) for _ in range(clients)]
    for client in protocols:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(client.over for client in protocols))
    return sum(client.count for client in protocols) / (time.perf_counter() - began)


def throughput(port: int, sent: bytes, clients: int, seconds: float) -> float:
    """Return requests per second."""
    return asyncio.run(_throughput(port, sent, clients, seconds))


def added(run: Path, target: str, rounds: int, calls: int) -> dict[str, Any]:
    """Return the milliseconds of a bare call and of a request, medians of each round."""
    from lathe.export.bundle import open_bundle

    bundle = open_bundle(run / "exports" / target, 1)
    shape = [1, *bundle.manifest["input"]["shape"][1:]]
    inputs = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    bare, whole = [], []
    with Served(run, target) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = request(inputs.tobytes())
        answered = np.frombuffer(ask(connection, sent), "<f4")
        np.testing.assert_allclose(answered, bundle(inputs)[0], rtol=1e-4, atol=1e-4)
        for _ in range(rounds):
            bare.append(timed(lambda: bundle(inputs), calls))
            whole.append(timed(lambda: ask(connection, sent), calls))
    return {
        "bare_ms": bare,
        "request_ms": whole,
        "added_ms": [a - b for a, b in zip(whole, bare, strict=True)],
        "calls": calls,
    }


def timed(call: Any, calls: int) -> float:
    """Return the median milliseconds of `calls` calls, after a warm-up."""
    times = []
    for index in range(calls + 20):
        began = time.perf_counter()
        call()
        if index >= 20:
            times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def gain(run: Path, target: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Return requests per second with and without batches, and the cost of a batch of 32 in calls of one."""
    from lathe.export.bundle import open_bundle

    bundle = open_bundle(run / "exports" / target, 1)
    inputs = np.random.default_rng(0).integers(0, 256, [32, *bundle.manifest["input"]["shape"][1:]], dtype=np.uint8)
    sent = request(inputs[:1].tobytes())
    found: dict[str, Any] = {"ratio": [], "batched": [], "unbatched": [], "gain": [], "seconds": seconds}
    with Served(run, target, "max_batch_size=32") as batched, Served(run, target, "max_batch_size=1") as unbatched:
        for port in (batched.port, unbatched.port):
            throughput(port, sent, 32, 1)  # warms up
        for _ in range(rounds):
            found["ratio"].append(timed(lambda: bundle(inputs), 30) / timed(lambda: bundle(inputs[:1]), 30))
            found["batched"].append(throughput(batched.port, sent, 32, seconds))
            found["unbatched"].append(throughput(unbatched.port, sent, 32, seconds))
            found["gain"].append(found["batched"][-1] / found["unbatched"][-1])
    return found


def spread(values: list[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of each figure")
    parser.add_argument("--calls", type=int, default=500, help="calls and requests of a round at batch 1")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round with 32 clients")
    parser.add_argument("--target", default="onnx", help="the export that is served")
    parser.add_argument(
        "--folder", type=Path, help="where runs are made, or lie from an earlier time; none: a temporary one"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        small, wide = (make(folder, name, options.target) for name in NETS)
        one = added(small, options.target, options.rounds, options.calls)
        many = gain(wide, options.target, options.rounds, options.seconds)
    met = {
        "added": statistics.median(one["added_ms"]) <= BARS["added"],
        "gain": statistics.median(many["gain"]) >= BARS["gain"],
        "ratio": statistics.median(many["ratio"]) < BARS["ratio"],
    }
    word = {True: "met", False: "missed"}
    print("| figure | median of rounds (lowest to highest) | bar | |\n| --- | --- | --- | --- |")
    print(f"| bare call, batch 1, ms | {spread(one['bare_ms'], '.3f')} | | |")
    print(f"| request, batch 1, ms | {spread(one['request_ms'], '.3f')} | | |")
    print(
        f"| the server adds, ms | {spread(one['added_ms'], '.3f')} | at most {BARS['added']:g} | {word[met['added']]} |"
    )
    print(
        f"| a batch of 32, in calls of one | {spread(many['ratio'])} | below {BARS['ratio']:g} | {word[met['ratio']]} |"
    )
    print(f"| 32 clients, max_batch_size=32, requests/s | {spread(many['batched'], '.0f')} | | |")
    print(f"| 32 clients, max_batch_size=1, requests/s | {spread(many['unbatched'], '.0f')} | | |")
    print(f"| batches give | {spread(many['gain'])} | at least {BARS['gain']:g} | {word[met['gain']]} |")
    packages = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("starlette", "uvicorn", "onnxruntime", "torch")
    )
    print(
        f"\nn = {options.rounds} rounds of {options.calls} calls and of {options.seconds:g} s; "
        f"target={options.target}, 1 worker, 1 thread; {packages}; Python {platform.python_version()}; "
        f"{os.cpu_count()} cores, {time.monotonic() - began:.0f} s."
    )
    if options.json:
        figures = {"added": one, "gain": many, "met": met, "bars": BARS}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    raise SystemExit(0 if all(met.values()) else 1)


if __name__ == "__main__":
    main()
