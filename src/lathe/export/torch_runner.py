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

_ALONE = threading.Lock()  # `full_float32` sets options of the process


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

    `threads` is torch's number of threads during each call; None leaves it unchanged. `call` computes on `device`, with
    copies to it and back, in float32 without TF32, one call at a time; None is the CPU.
    """

    def run(*arrays: Array) -> Any:
        # a client's buffer may be read-only or have negative strides, which tensors can't have
        tensors = (torch.from_numpy(np.require(x, requirements=["C", "W"])).to(device) for x in arrays)
        with torch.no_grad():
            found = call(*tensors)
        return found.cpu().numpy() if isinstance(found, Tensor) else [out.cpu().numpy() for out in found]

    def forward(*arrays: Array) -> Any:
        was = torch.get_num_threads()
        if threads is not None and threads != was:
            torch.set_num_threads(threads)
        try:
            if device is None:
                return run(*arrays)
            with _ALONE, full_float32():
                return run(*arrays)
        finally:
            if threads is not None and threads != was:
                torch.set_num_threads(was)

    return forward
