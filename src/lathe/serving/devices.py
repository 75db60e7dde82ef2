"""The device of each worker. Imports torch only for GPUs."""

from lathe.errors import UserError

GPU = "gpu"


def gpus() -> list[str]:
    """Return the names of the visible GPUs, such as `cuda:0`. Allocates nothing, as the server process uses none."""
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def places(accelerator: str, workers: int | str) -> tuple[int, tuple[str, ...]]:
    """Return the number of workers, and the device of each (empty on the CPU).

    `auto` is one worker for each GPU, or one on the CPU; more workers than GPUs share them in turn.
    """
    if accelerator != GPU:
        return (1 if workers == "auto" else int(workers)), ()
    found = gpus()
    if not found:
        raise UserError(f"trainer.accelerator={accelerator}: no GPU of NVIDIA's is visible here: leave it cpu.")
    count = len(found) if workers == "auto" else int(workers)
    return count, tuple(found[index % len(found)] for index in range(count))
