"""A worker process: loads the net, and computes batches from its socket until the server closes it.

Batches and answers are pickled lists of arrays: both ends are processes of this user that run the same code.
"""

import logging
import os
import pickle
import signal
import struct
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from socket import socket, socketpair
from typing import Any

import numpy as np

from lathe.errors import UserError
from lathe.serving import model
from lathe.serving.options import Options

Array = np.ndarray[Any, Any]
Net = Callable[[Array], Array]
LENGTH = struct.Struct("<Q")
log = logging.getLogger(__name__)


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
    """Run the worker on the GPU `device`, or the CPU.

    It first sends null once the net is loaded, or an error message; then it answers each batch.
    """
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
    found: list[Array | None] = [None] * len(inputs)
    alike: dict[Any, list[int]] = {}
    for index, array in enumerate(inputs):
        alike.setdefault((array.shape[1:], array.dtype), []).append(index)
    for indices in alike.values():
        for index, logits in zip(indices, _together(net, [inputs[index] for index in indices]), strict=True):
            found[index] = logits
    return found


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
