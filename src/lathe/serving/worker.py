"""A worker process: loads the net, and computes batches from its socket until the server closes it."""

import logging
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from socket import socket, socketpair
from typing import Any

import numpy as np

from lathe.errors import UserError
from lathe.serving import model
from lathe.serving.channel import WorkerEnd
from lathe.serving.options import Options

Array = np.ndarray[Any, Any]
Net = Callable[[Array], Array]
log = logging.getLogger(__name__)


def launch(index: int, options: Options, facts: dict[str, Any]) -> tuple[BaseProcess, socket]:
    """Start worker `index`; return its process and the server's socket. `facts` are the target's manifest."""
    ours, theirs = socketpair()
    with theirs:
        device = options.devices[index] if options.devices else None
        given = (theirs, options, facts, device)
        process = get_context("spawn").Process(target=work, args=given, name=f"worker {index}")
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
    return process, ours


def work(end: socket, options: Options, facts: dict[str, Any], device: str | None = None) -> None:
    """Run the worker on the GPU `device`, or the CPU.

    Its first message is null once the net is loaded, or an error; then it answers each batch.
    """
    # Ctrl-C and a service manager's SIGTERM reach the whole process group, but the server still has requests to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s worker %(process)d: %(message)s")
    channel = WorkerEnd(end)
    try:
        net = load(options, facts, device)
        channel.send([net if isinstance(net, str) else None])
        while not isinstance(net, str):
            channel.send(compute(net, channel.receive()))
    except EOFError:
        logging.shutdown()
        os._exit(0)  # it holds nothing, and torch's teardown takes a second


def load(options: Options, facts: dict[str, Any], device: str | None = None) -> Net | str:
    """Return the net after a first computation, or an error message."""
    try:
        net = model.load(options.run, options.target, options.checkpoint, options.threads, device)
        first = model.example(facts)
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
    found: list[Array | None] = [None] * len(inputs)
    alike: dict[Any, list[int]] = {}
    for index, array in enumerate(inputs):
        alike.setdefault((array.shape[1:], array.dtype.str), []).append(index)
    for indices in alike.values():
        try:
            _compute(net, inputs, indices, found)
        except Exception:
            for index in indices:
                try:
                    _compute(net, inputs, [index], found)
                except Exception:
                    log.exception("The net failed on an input of shape %s.", inputs[index].shape)
    return found


def _compute(net: Net, inputs: list[Array], indices: list[int], found: list[Array | None]) -> None:
    together = [inputs[index] for index in indices]
    rows = [len(array) for array in together]
    logits = np.asarray(net(together[0] if len(together) == 1 else np.concatenate(together)), dtype=np.float32)
    if len(logits) != sum(rows):
        raise ValueError(f"{sum(rows)} rows gave {len(logits)} answers")
    for index, part in zip(indices, np.split(logits, np.cumsum(rows)[:-1]), strict=True):
        found[index] = part
