"""Dynamic batching: one queue of requests, and for each worker a task that feeds and restarts it.

A batch has the requests that arrived while a worker computed the last one. Only if that last batch had several requests
(several concurrent clients), the next waits for as many, at most `batch_timeout`: a single client never waits. A
request is in one batch of one worker at a time, and its answer returns over that worker's socket in the request's
place, so it can't reach another client.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from socket import socket
from typing import Any

import numpy as np

from lathe.errors import UserError
from lathe.serving.channel import ServerEnd
from lathe.serving.limits import BadRequest
from lathe.serving.metrics import Metrics
from lathe.serving.options import Options

Array = np.ndarray[Any, Any]
Launch = Callable[[int], tuple[BaseProcess, socket]]
BYTES = 2**30  # of waiting inputs
LEAVE = 5.0  # seconds that a worker has to exit by itself


@dataclass(eq=False)
class Request:
    inputs: Array
    answer: "asyncio.Future[Array]"
    since: float


class Engine:
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
        return (
            len(self.waiting) >= self.options.max_queue
            or sum(request.inputs.nbytes for request in self.waiting) >= BYTES
        )

    async def start(self) -> None:
        """Start the workers, and return when all have loaded the net."""
        loaded: list[asyncio.Future[None]] = [
            asyncio.get_running_loop().create_future() for _ in range(self.options.workers)
        ]
        self._keepers = [asyncio.create_task(self._keep(index, first)) for index, first in enumerate(loaded)]
        await asyncio.gather(*loaded)

    async def stop(self) -> None:
        """Stop all workers, and answer waiting requests with 503."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._fail(list(self.waiting), 503, "The server is stopping: send the request again later.")
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
            BadRequest: 503 the queue is full or the worker died, 504 it took longer than `timeout` seconds, 500 the net
                raised an error.
        """
        if self.full and not urgent:
            raise BadRequest(503, f"{len(self.waiting)} requests wait already: send it again later.")
        request = Request(inputs, asyncio.get_running_loop().create_future(), time.monotonic())
        if urgent:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
        self._arrived.set()
        try:
            return await asyncio.wait_for(request.answer, timeout)
        except TimeoutError:
            self._forget(request)
            raise BadRequest(504, f"There was no answer within {timeout:.3g} seconds: send it again later.") from None
        except asyncio.CancelledError:
            self._forget(request)
            raise

    async def _keep(self, index: int, loaded: "asyncio.Future[None]") -> None:
        """Start worker `index`, feed it until it dies or hangs, and restart it."""
        failures = 0
        slow = f"had not loaded the net after load_timeout={self.options.load_timeout:g} seconds"
        while True:
            process, channel, why, up = None, None, "died", False
            try:
                process, end = self.launch(index)
                self._processes[index] = process
                channel = await ServerEnd.open(end)
                (refused,) = await asyncio.wait_for(channel.receive(1), self.options.load_timeout)
                if refused is not None:
                    raise UserError(refused)
                if not loaded.done():
                    loaded.set_result(None)
                self.ready, up = self.ready + 1, True
                try:
                    why = await self._attend(process, channel)
                finally:
                    self.ready -= 1
                failures = 0
            except EOFError:
                pass
            except TimeoutError:
                why = slow
            except OSError as error:  # too many files, no memory
                why = f"could not be started ({error.strerror})"
            except UserError as error:
                why = f"could not load the net ({error})"
                if not loaded.done():
                    loaded.set_exception(error)
            finally:
                if channel is not None:
                    channel.close()  # which makes the worker exit
                if process is not None and not (self._stopping and up):  # a loading worker would notice too late
                    process.kill()
            if process is not None:
                await asyncio.to_thread(process.join)
                why += f", exit code {process.exitcode}" * (why != slow)
            if not loaded.done():
                way = "raise it" if why == slow else "what it printed says why"
                loaded.set_exception(UserError(f"A worker {why}: {way}."))
            if loaded.exception():
                return
            print(f"Worker {index} {why}: starting another.", file=sys.stderr, flush=True)
            self.metrics.restarts.inc()
            await asyncio.sleep(min(0.1 * (2 ** min(failures, 10) - 1), 10))  # at once after a worker that was ready
            failures += 1

    async def _attend(self, process: BaseProcess, channel: ServerEnd) -> str:
        """Feed a worker while it lives; return how it ended. Requests that it held are answered with an error."""
        held: list[Request] = []
        loop = asyncio.get_running_loop()
        dead: asyncio.Future[None] = loop.create_future()
        loop.add_reader(process.sentinel, dead.cancel)
        feeding = asyncio.create_task(self._feed(channel, held))
        status, sentence = 503, "The worker that computed this died: send it again."
        try:
            await asyncio.wait({feeding, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not feeding.done() or isinstance(feeding.exception(), EOFError):
                return "died"
            if not isinstance(feeding.exception(), asyncio.TimeoutError):
                feeding.result()
            status, sentence = (
                504,
                f"There was no answer within {self.options.request_timeout:g} seconds: send it again later.",
            )
            return "hung and was killed"
        except asyncio.CancelledError:
            sentence = "The server is stopping: send it again later."
            raise
        finally:
            loop.remove_reader(process.sentinel)
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            self._fail(held, status, sentence)

    async def _feed(self, channel: ServerEnd, held: list[Request]) -> None:
        """Send batches to a worker; `held` always has the requests that it computes.

        Raises:
            EOFError: it died.
            TimeoutError: it had a batch for longer than any request may take.
        """
        while True:
            held[:] = await self._take()
            began = time.perf_counter()
            inputs = [request.inputs for request in held]
            answers = await asyncio.wait_for(channel.exchange(inputs), self.options.request_timeout)
            self.metrics.compute.observe(time.perf_counter() - began)
            self.metrics.batch.observe(sum(len(request.inputs) for request in held))
            self._settle(held, answers)
            held.clear()

    async def _take(self) -> list[Request]:
        """Return the next requests in order: `max_batch_size` samples at most, or a single request with more."""
        async with self._taking:
            while True:
                while not self.waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                await self._gather()
                batch: list[Request] = []
                rows = 0
                while self.waiting and (not batch or rows + len(self.waiting[0].inputs) <= self.options.max_batch_size):
                    request = self.waiting.popleft()
                    if not request.answer.done():  # else it has timed out
                        batch.append(request)
                        rows += len(request.inputs)
                if batch:
                    self._last = len(batch)
                    return batch

    async def _gather(self) -> None:
        """Wait for as many requests as the last batch had, at most `batch_timeout` after the first arrived."""
        expected = min(self._last, self.options.max_batch_size)
        left = self.waiting[0].since + self.options.batch_timeout - time.monotonic()
        if left <= 0 or len(self.waiting) >= expected:
            return
        over = False

        def end() -> None:
            nonlocal over
            over = True
            self._arrived.set()

        timer = asyncio.get_running_loop().call_later(left, end)
        try:
            while not over and len(self.waiting) < expected:
                self._arrived.clear()
                await self._arrived.wait()
        finally:
            timer.cancel()

    def _settle(self, batch: list[Request], answers: list[Any]) -> None:
        """Give each request its logits, or an error."""
        for request, logits in zip(batch, answers, strict=True):
            if request.answer.done():
                continue
            if isinstance(logits, np.ndarray):
                request.answer.set_result(logits)
            else:
                request.answer.set_exception(
                    BadRequest(500, "The net failed on this input: the server's log says why.")
                )

    def _fail(self, requests: list[Request], status: int, sentence: str) -> None:
        for request in requests:
            if not request.answer.done():
                request.answer.set_exception(BadRequest(status, sentence))

    def _forget(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
