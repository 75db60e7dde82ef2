"""Training inside a process that continues afterwards, such as a notebook's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.data import get_all_subclasses
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch.utils.data import BatchSampler, DataLoader

from lathe.training.train import train


def train_inside(cfg: dict[str, Any]) -> dict[str, Any]:
    """Run `train`, then restore torch's settings and random states, and end its process group."""
    strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tuned, exact = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    kind, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        with same_numbers():
            return train(cfg)
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = tuned, exact
        torch.set_default_dtype(kind)
        torch.set_float32_matmul_precision(precision)
        if not several and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        # Lightning 2.6 leaves its patches of torch's loaders after an error; with them, later loaders that pass
        # `batch_size` by position fail.
        for base in (DataLoader, BatchSampler):
            for loader in get_all_subclasses(base) | {base}:
                for method in ("__init__", "__setattr__", "__delattr__"):
                    if f"__old{method}" in vars(loader):
                        setattr(loader, method, vars(loader)[f"__old{method}"])
                        delattr(loader, f"__old{method}")


@contextmanager
def same_numbers() -> Iterator[None]:
    """Restore random states on exit, also after an error, which Lightning's isolate_rng does not."""
    states = _collect_rng_states()
    try:
        yield
    finally:
        _set_rng_states(states)
