"""Which device each worker computes on. Imports torch only where a GPU is asked for."""

from lathe.errors import UserError

GPU = "gpu"


def gpus() -> list[str]:
    """Names of the GPUs that are visible here, such as `cuda:0`. Nothing is allocated on them: the process that listens
    has no use for one.
    """
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def places(accelerator: str, workers: int | str) -> tuple[int, tuple[str, ...]]:
    """How many workers there are, and the device of each; of the CPU, which they share, none is named. `auto` is one
    worker for each GPU, and one on the CPU; more workers than GPUs share them in turns.

    Raises:
        UserError: no GPU is visible.
    """
    if accelerator != GPU:
        return (1 if workers == "auto" else int(workers)), ()
    found = gpus()
    if not found:
        raise UserError(f"trainer.accelerator={accelerator}: no GPU of NVIDIA's is visible here: leave it cpu.")
    count = len(found) if workers == "auto" else int(workers)
    return count, tuple(found[index % len(found)] for index in range(count))
