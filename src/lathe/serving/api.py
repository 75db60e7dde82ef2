"""The net in LitServe's terms: the hooks that a worker calls on each batch, and the loop that calls them."""

import logging
import os
import signal
from typing import Any

import numpy as np
from litserve import LitAPI
from litserve.loops import BatchedLoop

from lathe.errors import UserError
from lathe.serving import model
from lathe.serving.channel import WorkerEnd
from lathe.serving.options import Options

FAILED = "failed"  # in an answer's place: the net raised an error on this request
Array = np.ndarray[Any, Any]


class Loop(BatchedLoop):
    """LitServe's batched loop with the server's batches for LitServe's own collecting of them."""

    def __call__(self, lit_api: "Api", device: str, worker_id: int, request_queue: WorkerEnd, transport: WorkerEnd,
                 workers_setup_status: Any, callback_runner: Any, **_: Any) -> None:  # fmt: skip
        try:
            transport.put(lit_api.failure)  # None: ready
            if lit_api.failure is None:
                self.run_batched_loop(lit_api, request_queue, transport, callback_runner)
        except EOFError:  # the server closed the socket: that is how a worker is told to stop
            logging.shutdown()
            os._exit(0)  # it holds nothing, and torch takes a second to be taken down module by module

    def get_batch_requests(self, lit_api: LitAPI, request_queue: WorkerEnd, transport: WorkerEnd) -> tuple[list[Any], list[Any]]:
        """LitServe's hook: `(consumer, id, request)` of each request of the next batch, and those that waited too long: none, as the server
        keeps the time."""
        return [(0, uid, inputs) for uid, inputs in request_queue.exchange()], []


class Api(LitAPI):
    """Runs in each worker. A request is an array `[rows, ...]`, its answer logits `[rows, ..., classes]`."""

    failure: str | None = None

    def __init__(self, options: Options, facts: dict[str, Any]) -> None:
        super().__init__(max_batch_size=options.max_batch_size, batch_timeout=options.batch_timeout, loop=Loop())
        self.options, self.facts = options, facts

    def setup(self, device: Any) -> None:
        # A terminal's Ctrl-C and a service manager's SIGTERM reach every process of the group; the server still owes answers then.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self.call = model.load(self.options.run, self.options.target, self.options.checkpoint, self.options.threads)
            first = model.example(self.facts)
            for rows in sorted({1, self.max_batch_size}):  # the first call of a size allocates
                self.call(np.repeat(first, rows, axis=0))
        except UserError as error:
            self.failure = str(error)
        except Exception as error:
            logging.getLogger("litserve").exception("The worker can't load target=%s.", self.options.target)
            kind = type(error).__name__
            self.failure = f"target={self.options.target} can't be loaded ({kind}): export the run again with scripts/export.py."

    def batch(self, inputs: list[Array]) -> list[Array]:
        """Requests may differ in rows, picture size and length: `predict` puts together those that fit."""
        return inputs

    def predict(self, inputs: list[Array]) -> list[Any]:
        """The logits of each request, or FAILED. An input that the net can't take fails alone, not with its batch."""
        found: list[Any] = [FAILED] * len(inputs)
        alike: dict[Any, list[int]] = {}
        for index, array in enumerate(inputs):
            alike.setdefault((array.shape[1:], array.dtype.str), []).append(index)
        for indices in alike.values():
            try:
                self._predict(inputs, indices, found)
            except Exception:
                for index in indices:
                    try:
                        self._predict(inputs, [index], found)
                    except Exception:
                        logging.getLogger("litserve").exception("The net failed on an input of shape %s.", inputs[index].shape)
        return found

    def _predict(self, inputs: list[Array], indices: list[int], found: list[Any]) -> None:
        together = [inputs[index] for index in indices]
        rows = [len(array) for array in together]
        logits = np.asarray(self.call(together[0] if len(together) == 1 else np.concatenate(together)), dtype=np.float32)
        if len(logits) != sum(rows):
            raise ValueError(f"{sum(rows)} rows gave {len(logits)} answers")
        for index, part in zip(indices, np.split(logits, np.cumsum(rows)[:-1]), strict=True):
            found[index] = part
