"""Memory of a step: the peak, its contents, and a timeline."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lathe.files import whole
from lathe.measure import PeakMemory, SavedActivations, count_state

SNAPSHOT = "memory.pickle"
ENTRIES = 200_000  # allocations in a snapshot


class Timeline(PeakMemory):
    """Record, on a CPU, the bytes after each operation in `points`, and the operation of the peak in `at`."""

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        super().__init__(device, known)
        self.points: list[int] = []
        self.at = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        self.points.append(self.bytes)
        if self._peak > before:
            self.at = str(func)
        return result


class StepMemory(Callback):
    """Measure batch `batch` of the fit: bytes of the peak, of persistent tensors and of activations.

    On a GPU the allocator's snapshot is written to `folder`.
    """

    skippable_steps = None  # needs every step

    def __init__(self, batch: int, folder: Path) -> None:
        self.batch, self.folder, self.found = batch, folder, dict[str, Any]()
        self._seen = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._seen += 1
        if self._seen != self.batch:
            return
        device, state = trainer.strategy.root_device, [one.state for one in trainer.optimizers]
        given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        lasting = [
            *pl_module.parameters(),
            *pl_module.buffers(),
            *(p.grad for p in pl_module.parameters() if p.grad is not None),
        ]
        held = [leaf for leaf in tree_leaves([list(one.values()) for one in state]) if isinstance(leaf, Tensor)]
        self._saved = SavedActivations(pl_module, given)
        self._timeline = Timeline(device, [*lasting, *held, *given])
        self._timeline.reset()
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
        self._saved.__enter__()
        self._timeline.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._seen != self.batch or self.found:
            return
        self._timeline.__exit__(None, None, None)
        self._saved.__exit__(None, None, None)
        counted = count_state(pl_module, trainer.strategy.optimizers)
        self.found = {
            "peak": self._timeline.peak,
            "parameters": counted.parameters,
            "gradients": counted.gradients,
            "optimizer": counted.optimizer,
            "activations": self._saved.peak,
        }
        if self._timeline.points:
            self.found |= {"at": self._timeline.at, "timeline": thinned(self._timeline.points)}
        if trainer.strategy.root_device.type == "cuda":
            self.found["snapshot"] = write_snapshot(self.folder)


def write_snapshot(folder: Path) -> str:
    """Write the GPU allocator's snapshot for https://pytorch.org/memory_viz, and return its file name."""
    try:
        with whole(folder / SNAPSHOT) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return SNAPSHOT


def thinned(points: list[int], most: int = 400) -> list[tuple[int, int]]:
    """Return (operation, bytes) of at most `most` operations: the maximum of each interval."""
    size = -(-len(points) // most)
    stretches = [range(first, min(first + size, len(points))) for first in range(0, len(points), size)]
    return [(at := max(stretch, key=lambda index: points[index]), points[at]) for stretch in stretches]
