"""Prefetches one batch on a separate CUDA stream (`trainer.prefetch_to_device`).

Copies, picking and augmentation then overlap with the step before. Values do not change, and the position in the data
counts only batches that were taken.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lathe.data.transfer import HOOKS, is_own

KEY = "trainer.prefetch_to_device=true"


class SideStream:
    """Makes batches on another stream of the step's GPU; `moves` copies tensors to it."""

    def __init__(self, device: torch.device, moves: bool = True) -> None:
        self.device, self.moves = device, moves
        self._stream: Any = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Make later work wait for the current work of the step's stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def making(self) -> AbstractContextManager[Any]:
        """Return a context whose work runs on the side."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def moved(self, batch: Any) -> Any:
        """Move tensors in tuples, lists and dicts; other objects are not searched for tensors."""
        if not self.moves:
            return batch
        return tree_map_only(Tensor, lambda part: part.to(self.device, non_blocking=True), batch)

    def mark(self) -> Any:
        """Return an event after all current work of the side."""
        return self._stream.record_event()

    def take(self, batch: Any, mark: Any) -> None:
        """Make the step's stream wait for the event, and keep the batch's memory until it is done."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(mark)
        for part in tree_leaves(batch):
            if isinstance(part, Tensor) and part.device.type == "cuda":
                part.record_stream(stream)  # the side allocated it, and would reuse its memory


def one_ahead(batches: Iterator[Any], side: SideStream) -> Iterator[Any]:
    """Yield each batch after starting the next; exceptions are raised at their batch's place."""
    side.begin()
    ahead = _start(batches, side)
    while ahead is not None:
        if isinstance(ahead, Exception):
            raise ahead
        batch, mark = ahead
        ahead = _start(batches, side)
        side.take(batch, mark)
        yield batch


def _start(batches: Iterator[Any], side: SideStream) -> tuple[Any, Any] | Exception | None:
    """Start the next batch, and return it and its event, or what it raised; None after the last."""
    with side.making():
        try:
            return side.moved(next(batches)), side.mark()
        except StopIteration:
            return None
        except Exception as error:
            return error


def go_ahead(loader: Any, trainer: Any, device: torch.device | None = None) -> None:
    """Prefetch a loader's batches if `trainer.prefetch_to_device` is set and the loader allows it.

    Loaders without `goes_ahead` draw from the run's generators, or have a position that is more than a number. "auto"
    leaves out batches so small that several are made at once (`chunk`): the gain is small, and a change of streams
    takes some microseconds. `device` None is the trainer's.
    """
    wanted: bool | Literal["auto"] = getattr(trainer, "prefetch_to_device", False)
    if not wanted:
        return
    device = device or trainer.strategy.root_device
    if device.type != "cuda" or (wanted == "auto" and getattr(loader, "chunk", 1) > 1):
        return
    if getattr(loader, "goes_ahead", False):
        loader.side = SideStream(device, moves=not _transfers_itself(trainer))
    elif wanted is True:
        rank_zero_warn(
            f"{KEY} has no effect on batches of {type(loader).__name__}: how they are made is not known, or one that "
            "is made early would change what a continued run draws."
        )


def tell_no_effect(wanted: bool | Literal["auto"], device: torch.device) -> None:
    """Warn if prefetching is requested on a device without streams."""
    if wanted is True and device.type != "cuda":
        rank_zero_warn(f"{KEY} has no effect: it is for NVIDIA GPUs, and this run computes on {device.type}.")


def _transfers_itself(trainer: Any) -> bool:
    """Return whether user code overrides a transfer hook."""
    parts = [part for part in (trainer.lightning_module, trainer.datamodule) if part is not None]
    return any(is_overridden(name, part) and is_own(getattr(part, name)) for part in parts for name in HOOKS)
