"""Runs torch modules as functions of arrays, for the targets that torch runs."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lathe.export.gpu import full_float32

Array = np.ndarray[Any, Any]


def on_arrays(
    call: Callable[[Tensor], Tensor], threads: int | None = None, device: torch.device | None = None
) -> Callable[[Array], Array]:
    """Return `call` on arrays, without gradients.

    `threads` is torch's number of threads during each call; None leaves it unchanged. `call` computes on `device`; None
    is the CPU, without copies.
    """
    staged = None if device is None else Staged(call, device)

    def forward(x: Array) -> Array:
        was = torch.get_num_threads()
        if threads is not None and threads != was:
            torch.set_num_threads(threads)
        try:
            if staged is not None:
                return staged(x)
            with torch.no_grad():
                # a client's buffer may be read-only or have negative strides, which tensors can't have
                found: Array = call(torch.from_numpy(np.require(x, requirements=["C", "W"]))).numpy()
            return found
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
        self._going, self._coming = self._buffer(0), self._buffer(0)
        self._one = threading.Lock()

    def __call__(self, x: Array) -> Array:
        with self._one, torch.no_grad(), full_float32():
            self._going = self._room(self._going, x.nbytes)
            given = self._going[: x.nbytes].numpy().view(x.dtype).reshape(x.shape)
            np.copyto(given, x)
            out = self.call(torch.from_numpy(given).to(self.device, non_blocking=True))
            self._coming = self._room(self._coming, out.nbytes)
            back = self._coming[: out.nbytes].view(out.dtype).view(out.shape)
            back.copy_(out, non_blocking=True)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            return back.numpy().copy()

    def _room(self, buffer: Tensor, size: int) -> Tensor:
        """Return `buffer`, or one of `size` bytes and at least twice the old size: locking pages is slow."""
        return buffer if size <= len(buffer) else self._buffer(max(size, 2 * len(buffer)))

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
