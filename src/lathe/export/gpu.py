"""GPUs that files compute on: which there are, what is known of them, and their float32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What the words of `target.aot_inductor.device` and `trainer.accelerator` stand for. A test puts the CPU in a GPU's
# place, which then takes every step but the copies.
DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda")}


def missing(device: torch.device) -> bool:
    """Whether torch finds no such device on this machine."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()


def described(device: torch.device) -> dict[str, str]:
    """What a file that was compiled for it holds for: its kind, of a GPU its name and compute capability (`9.0`)."""
    if device.type != "cuda":
        return {"device": device.type}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device),
        "compute_capability": f"{major}.{minor}",
    }


@contextmanager
def full_float32() -> Iterator[None]:
    """Products and convolutions of float32 in float32. Left to itself, cuDNN computes convolutions in TF32, of which a
    logit has three digits.
    """
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was[0])
        torch.backends.cudnn.allow_tf32 = was[1]
