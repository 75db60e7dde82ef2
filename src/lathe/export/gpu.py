"""GPUs of exports: lookup, description, and full float32 precision."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The values of `target.aot_inductor.device` and `trainer.accelerator`. A test maps a GPU to the CPU, which then runs
# all steps but the copies.
DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda")}


def missing(device: torch.device) -> bool:
    """Return whether torch does not find the device on this machine."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()


def described(device: torch.device) -> dict[str, str]:
    """Describe the device for a compiled file: kind and, of a GPU, name and compute capability (`9.0`)."""
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
    """Compute float32 without TF32, which cuDNN uses in convolutions and leaves three digits of a logit."""
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was[0])
        torch.backends.cudnn.allow_tf32 = was[1]
