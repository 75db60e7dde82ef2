"""Dynamic batching: one queue of requests, worker processes, and for each a task that feeds and restarts it.

A batch has the requests that arrived while a worker computed the last one. Only if that last batch had several requests
(several concurrent clients), the next waits for as many, at most `batch_timeout`: a single client never waits.

The requests of a worker that dies go back to the front of the queue. Each is then computed alone, so that an input that
kills its worker takes no other request with it; one that has killed two is refused.

A worker loads the net, and computes batches from its socket until the server closes it. Batches and answers are pickled
lists of arrays: both ends are processes of this user that run the same code.
"""

import asyncio
import logging
import os
import pickle
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from socket import socket, socketpair
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lathe.errors import UserError
from lathe.serving import model
from lathe.serving.decode import BadRequest
from lathe.serving.options import Options

Array = np.ndarray[Any, Any]
Net = Callable[[Array], Array]
LENGTH = struct.Struct("<Q")
log = logging.getLogger(__name__)
Launch = Callable[[int], tuple[BaseProcess, socket]]
BYTES = 2**30  # of waiting inputs
LEAVE = 5.0  # seconds that a worker has to exit by itself
DEATHS = 2  # workers that a request may kill
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The server's Prometheus metrics. `waiting` and `ready` return the queue's length and the workers that are up."""

    def __init__(self, waiting: Callable[[], float], ready: Callable[[], float]) -> None:
        self.registry = registry = CollectorRegistry()
        latency = "From a request's headers to its answer, of POST /predict answered with 200"
        self.latency = Histogram("lathe_request_seconds", latency, buckets=SECONDS, registry=registry)
        handed = "From handing a batch to a worker to its answers"
        self.compute = Histogram("lathe_batch_seconds", handed, buckets=SECONDS, registry=registry)
        rows = "Samples of a batch that a worker computed at once"
        self.batch = Histogram("lathe_batch_samples", rows, buckets=ROWS, registry=registry)
        self.responses = Counter("lathe_responses", "Answers by path and status", ["path", "status"], registry=registry)
        restarts = "Workers that died or hung and were started again"
        self.restarts = Counter("lathe_worker_restarts", restarts, registry=registry)
        Gauge("lathe_queue", "Requests that wait for a worker", registry=registry).set_function(waiting)
        Gauge("lathe_workers", "Workers that are up", registry=registry).set_function(ready)


@dataclass(eq=False)
class Request:
    """A request in the queue or in a worker's batch. `deaths` counts the workers that died with it."""

    inputs: Array
    answer: "asyncio.Future[Array]"
    since: float
    deaths: int = 0


class Batcher:
    """The queue and its workers. `launch(index)` starts a worker, and returns its process and the server's socket."""

    def __init__(self, launch: Launch, options: Options) -> None:
        self.launch, self.options = launch, options
        self.metrics = Metrics(lambda: len(self.waiting), lambda: self.ready)
        self.waiting: deque[Request] = deque()
        self.ready = 0
        self._arrived, self._taking = asyncio.Event(), asyncio.Lock()
        self._last = 1  # requests of the last batch
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: dict[int, BaseProcess] = {}
        self._stopping = False

    @property
    def full(self) -> bool:
        """Return whether `max_queue` requests wait, or inputs of `BYTES`: small files may decode to large pictures."""
        waiting = sum(request.inputs.nbytes for request in self.waiting)
        return len(self.waiting) >= self.options.max_queue or waiting >= BYTES

    async def start(self) -> None:
        """Start the workers, and return when all have loaded the net."""
        loop = asyncio.get_running_loop()
        loaded: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self.options.workers)]
        self._keepers = [asyncio.create_task(self._keep(index, first)) for index, first in enumerate(loaded)]
        await asyncio.gather(*loaded)

    async def stop(self) -> None:
        """Stop all workers, and answer waiting requests with 503."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for request in self.waiting:
            _refuse(request, 503, "The server is stopping: send it again later.")
        deadline = time.monotonic() + LEAVE
        for process in self._processes.values():
            await asyncio.to_thread(process.join, max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()

    async def predict(self, inputs: Array, timeout: float, urgent: bool = False) -> Array:
        """Return the logits `[rows, ..., classes]` of `inputs`, `[rows, ...]`.

        An urgent request is put first, also into a full queue.

        Raises:
            BadRequest: 503 the queue is full, 504 it took longer than `timeout` seconds, 500 the net raised an error,
                or two workers died with it.
        """
        if self.full and not urgent:
            raise BadRequest(503, f"{len(self.waiting)} requests wait already: send it again later.")
        request = Request(inputs, asyncio.get_running_loop().create_future(), time.monotonic())
        self.waiting.insert(0 if urgent else len(self.waiting), request)
        self._arrived.set()
        try:
            return await asyncio.wait_for(request.answer, timeout)
        except TimeoutError:
            raise BadRequest(504, f"There was no answer within {timeout:.3g} seconds: send it again later.") from None
        finally:
            if request in self.waiting:
                self.waiting.remove(request)

    async def _keep(self, index: int, loaded: "asyncio.Future[None]") -> None:
        """Start worker `index`, feed it until it dies or hangs, and restart it."""
        failures = 0
        while True:
            process, writer, why, up = None, None, "died", False
            try:
                process, end = self.launch(index)
                self._processes[index] = process
                reader, writer = await asyncio.open_connection(sock=end)
                async with asyncio.timeout(self.options.load_timeout):
                    (refused,) = await _receive(reader)
                if refused is not None:
                    raise UserError(refused)
                if not loaded.done():
                    loaded.set_result(None)
                failures, up = 0, True
                await self._attend(process, reader, writer)
            except EOFError:
                pass
            except TimeoutError:
                late = f"had not loaded the net after load_timeout={self.options.load_timeout:g} seconds"
                why = "hung and was killed" if up else late
            except OSError as error:  # too many files, no memory
                why = f"could not be started ({error.strerror})"
            except UserError as error:
                why = f"could not load the net ({error})"
                if not loaded.done():
                    loaded.set_exception(error)
            finally:
                if writer is not None:
                    writer.close()  # which makes a ready worker exit
                if process is not None and not (self._stopping and up):
                    process.kill()
            if process is not None:
                await asyncio.to_thread(process.join)
                why += f", exit code {process.exitcode}" if why == "died" else ""
            if not loaded.done():
                loaded.set_exception(UserError(f"A worker {why}: its output says more."))
            if loaded.exception():
                return
            print(f"Worker {index} {why}: starting another.", file=sys.stderr, flush=True)
            self.metrics.restarts.inc()
            await asyncio.sleep(min(0.1 * (2 ** min(failures, 10) - 1), 10))  # at once after a worker that was ready
            failures += 1

    async def _attend(self, process: BaseProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Feed a ready worker while it lives. Requests that it held return to the queue.

        Raises:
            EOFError: it died. It may also return then.
            TimeoutError: it had a batch for longer than any request may take.
        """
        batch: list[Request] = []
        loop = asyncio.get_running_loop()
        dead: asyncio.Future[None] = loop.create_future()
        loop.add_reader(process.sentinel, dead.cancel)
        feeding = asyncio.create_task(self._feed(reader, writer, batch))
        self.ready += 1
        try:
            await asyncio.wait({feeding, dead}, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                await feeding
        finally:
            self.ready -= 1
            loop.remove_reader(process.sentinel)
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            for request in batch:
                request.deaths += 1
                if request.deaths >= DEATHS:
                    _refuse(request, 500, f"{DEATHS} workers died with this input: the server's log says more.")
            self.waiting.extendleft(request for request in reversed(batch) if not request.answer.done())
            self._arrived.set()

    async def _feed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, batch: list[Request]) -> None:
        """Send batches to a worker; `held` always has the requests that it computes."""
        while True:
            batch[:] = await self._take()
            began = time.perf_counter()
            async with asyncio.timeout(self.options.request_timeout):
                writer.write(pickle.dumps([request.inputs for request in batch], protocol=5))
                answers = await _receive(reader)
            self.metrics.compute.observe(time.perf_counter() - began)
            self.metrics.batch.observe(sum(len(request.inputs) for request in batch))
            for request, logits in zip(batch, answers, strict=True):
                if logits is None:
                    _refuse(request, 500, "The net failed on this input: the server's log says why.")
                elif not request.answer.done():
                    request.answer.set_result(logits)
            batch.clear()

    async def _take(self) -> list[Request]:
        """Return the next requests in order: `max_batch_size` samples at most, or a single request with more."""
        async with self._taking:
            while True:
                while not self.waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                # wait for as many requests as the last batch had
                left = self.waiting[0].since + self.options.batch_timeout - time.monotonic()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        while len(self.waiting) < min(self._last, self.options.max_batch_size):
                            self._arrived.clear()
                            await self._arrived.wait()
                batch: list[Request] = []
                rows = 0
                while self.waiting and (not batch or rows + len(self.waiting[0].inputs) <= self.options.max_batch_size):
                    if batch and (batch[-1].deaths or self.waiting[0].deaths):  # computed alone
                        break
                    request = self.waiting.popleft()
                    if not request.answer.done():  # else it has timed out
                        batch.append(request)
                        rows += len(request.inputs)
                if batch:
                    self._last = len(batch)
                    return batch


async def _receive(reader: asyncio.StreamReader) -> list[Any]:
    """Return a worker's next answer; raise EOFError if it died."""
    try:
        head = await reader.readexactly(LENGTH.size)
        answers: list[Any] = pickle.loads(await reader.readexactly(*LENGTH.unpack(head)))  # noqa: S301 (of our process)
        return answers
    except ConnectionError as error:  # IncompleteReadError is an EOFError
        raise EOFError from error


def _refuse(request: Request, status: int, sentence: str) -> None:
    if not request.answer.done():
        request.answer.set_exception(BadRequest(status, sentence))


def launch(index: int, options: Options, facts: dict[str, Any]) -> tuple[BaseProcess, socket]:
    """Start worker `index`; return its process and the server's socket. `facts` are the target's manifest."""
    ours, theirs = socketpair()
    device = options.devices[index] if options.devices else None
    process = get_context("spawn").Process(target=work, args=(theirs, options, facts, device), name=f"worker {index}")
    with theirs:
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
    return process, ours


def work(end: socket, options: Options, facts: dict[str, Any], device: str | None = None) -> None:
    """Run the worker on the GPU `device`, or the CPU: send null or an error message, then answer each batch."""
    # Ctrl-C and a service manager's SIGTERM reach the whole process group, but the server still has requests to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s worker %(process)d: %(message)s")
    net = load(options, facts, device)
    try:
        with end.makefile("rb") as batches:
            send(end, [net if isinstance(net, str) else None])
            while not isinstance(net, str):
                send(end, compute(net, pickle.load(batches)))  # noqa: S301 (of the server)
    except (EOFError, ConnectionError, pickle.UnpicklingError):  # the server is gone, or wants the worker to stop
        logging.shutdown()
        os._exit(0)  # it holds nothing, and torch's teardown takes a second


def send(end: socket, items: Sequence[Any]) -> None:
    """Send a pickled list after its length, which lets the server read it in its event loop."""
    content = pickle.dumps(items)
    end.sendall(LENGTH.pack(len(content)) + content)


def load(options: Options, facts: dict[str, Any], device: str | None = None) -> Net | str:
    """Return the net after a first computation, or an error message."""
    try:
        net = model.load(options.run, options.target, options.checkpoint, options.threads, device)
        first = model.example(facts, options.run)
        for rows in sorted({1, options.max_batch_size}):  # the first call of a size allocates
            net(np.repeat(first, rows, axis=0))
    except UserError as error:
        return str(error)
    except Exception as error:
        log.exception("target=%s can't be loaded.", options.target)
        kind = type(error).__name__
        return f"target={options.target} can't be loaded ({kind}): export the run again with scripts/export.py."
    return net


def compute(net: Net, inputs: list[Array]) -> list[Array | None]:
    """Return the logits `[rows, ..., classes]` of each request `[rows, ...]`; None if the net failed on it.

    Requests of the same sample shape and dtype are computed together. If that fails, each is computed on its own, so
    that only the faulty one fails.
    """
    answers: list[Array | None] = [None] * len(inputs)
    alike: dict[Any, list[int]] = {}
    for index, array in enumerate(inputs):
        alike.setdefault((array.shape[1:], array.dtype), []).append(index)
    for indices in alike.values():
        for index, logits in zip(indices, _together(net, [inputs[index] for index in indices]), strict=True):
            answers[index] = logits
    return answers


def _together(net: Net, inputs: list[Array]) -> list[Array | None]:
    rows = [len(array) for array in inputs]
    try:
        logits = net(inputs[0] if len(inputs) == 1 else np.concatenate(inputs))
        if logits.dtype.names is None:
            logits = np.asarray(logits, dtype=np.float32)
        if len(logits) != sum(rows):
            raise ValueError(f"{sum(rows)} rows gave {len(logits)} answers")
        return list(np.split(logits, np.cumsum(rows)[:-1]))
    except Exception:
        if len(inputs) > 1:
            return [_together(net, [array])[0] for array in inputs]
        log.exception("The net failed on an input of shape %s.", inputs[0].shape)
        return [None]
