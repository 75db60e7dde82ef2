"""Run torch modules as functions of arrays, on the CPU or a GPU. Archives of target=torchserve hold this file."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
# The values of `target.aot_inductor.device`. A test maps a GPU to the CPU, which then runs all steps but the copies.
DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda")}


def is_missing(device: torch.device) -> bool:
    """Return whether torch does not find the device on this machine."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()


def describe_device(device: torch.device) -> dict[str, str]:
    """Describe the device for a compiled file: kind and, of a GPU, name and compute capability (`9.0`)."""
    if device.type != "cuda":
        return {"device": device.type}
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return {"device": device.type, "name": name, "compute_capability": f"{major}.{minor}"}


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 without TF32, which cuDNN uses in convolutions and leaves three digits of a logit."""
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was[0])
        torch.backends.cudnn.allow_tf32 = was[1]


def prepared(manifest: Mapping[str, Any], inputs: Array) -> Array:
    """Return the input that an export's file takes: pixels, normalized unless the graph does it."""
    preprocess = manifest["preprocess"]
    if preprocess is None or preprocess["in_graph"]:
        return inputs
    mean, std = (np.asarray(preprocess[name], dtype=np.float64)[:, None, None] for name in ("mean", "std"))
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    return inputs.astype(np.float32) * scale + shift


def on_arrays(
    call: Callable[..., Any], threads: int | None = None, device: torch.device | None = None
) -> Callable[..., Any]:
    """Return `call`, of one tensor or several, on arrays, without gradients; several outputs are a list.

    `threads` is torch's number of threads during each call; None leaves it unchanged. `call` computes on `device` with
    one input and one output; None is the CPU, without copies.
    """
    staged = None if device is None else Staged(call, device)

    def forward(*arrays: Array) -> Any:
        was = torch.get_num_threads()
        if threads is not None and threads != was:
            torch.set_num_threads(threads)
        try:
            if staged is not None:
                return staged(*arrays)
            with torch.no_grad():
                # a client's buffer may be read-only or have negative strides, which tensors can't have
                found = call(*(torch.from_numpy(np.require(x, requirements=["C", "W"])) for x in arrays))
            return found.numpy() if isinstance(found, Tensor) else [out.numpy() for out in found]
        finally:
            if threads is not None and threads != was:
                torch.set_num_threads(was)

    return forward


class Staged:
    """Runs `call`, which computes on `device`, on host arrays.

    Inputs and outputs go through two page-locked buffers, which grow with the largest batch: a GPU copies from them
    asynchronously (`non_blocking`), but from a NumPy array page by page. Float32 is computed without TF32
    (`full_float32`). Thread-safe; calls run one at a time.
    """

    def __init__(self, call: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.call, self.device = call, device
        self._input, self._output = self._buffer(0), self._buffer(0)
        self._lock = threading.Lock()

    def __call__(self, x: Array) -> Array:
        with self._lock, torch.no_grad(), full_float32():
            self._input = self._grown(self._input, x.nbytes)
            given = self._input[: x.nbytes].numpy().view(x.dtype).reshape(x.shape)
            np.copyto(given, x)
            out = self.call(torch.from_numpy(given).to(self.device, non_blocking=True))
            self._output = self._grown(self._output, out.nbytes)
            back = self._output[: out.nbytes].view(out.dtype).view(out.shape)
            back.copy_(out, non_blocking=True)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            return back.numpy().copy()

    def _grown(self, buffer: Tensor, size: int) -> Tensor:
        """Return `buffer`, or one of `size` bytes and at least twice the old size: locking pages is slow."""
        return buffer if size <= len(buffer) else self._buffer(max(size, 2 * len(buffer)))

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
