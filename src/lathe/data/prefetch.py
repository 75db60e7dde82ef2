"""Batches that are made one ahead of the step, on a CUDA stream of their own, `trainer.prefetch_to_device`.

What is copied, picked and augmented on the stream that computes waits there for the step before. On another one it is
done meanwhile. The values are the same, and so is the position in the data: it counts the batches that were taken.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lathe.data.transfer import HOOKS, is_own

KEY = "trainer.prefetch_to_device=true"


class Side(Protocol):
    """Where batches are made beside the step."""

    def begin(self) -> None:
        """Has what is made from here on wait for what the step's stream has done so far."""

    def making(self) -> AbstractContextManager[Any]:
        """Within it, work goes to the side."""

    def moved(self, batch: Any) -> Any:
        """The batch on the device; called within `making`."""

    def mark(self) -> Any:
        """A mark behind all work that the side has been given."""

    def take(self, batch: Any, mark: Any) -> None:
        """Has the step's stream wait for that mark, and the batch's memory stay until that stream is done with it."""


class SideStream:
    """`Side` on a GPU.

    Args:
        device: that computes.
        moves: whether tensors that are elsewhere are copied to it; False leaves them to whoever takes the batch.
    """

    def __init__(self, device: torch.device, moves: bool = True) -> None:
        self.device, self.moves = device, moves
        self._stream: Any = torch.cuda.Stream(device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def making(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def moved(self, batch: Any) -> Any:
        """Tensors in tuples, lists and dicts; other objects stay, whose tensors nobody here could find again."""
        if not self.moves:
            return batch
        return tree_map_only(Tensor, lambda part: part.to(self.device, non_blocking=True), batch)

    def mark(self) -> Any:
        return self._stream.record_event()

    def take(self, batch: Any, mark: Any) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(mark)
        for part in tree_leaves(batch):
            if isinstance(part, Tensor) and part.device.type == "cuda":
                part.record_stream(stream)  # it was allocated for the side, which would use it again


class _Made(NamedTuple):
    """A batch that is under way, or what was raised in its place."""

    batch: Any
    mark: Any
    error: Exception | None


def one_ahead(batches: Iterator[Any], side: Side) -> Iterator[Any]:
    """The same batches, each of which is given away when the next one is under way already. What is raised while one is
    made comes in its place, behind those before it.
    """
    side.begin()
    ahead = _make(batches, side)
    while ahead is not None:
        current, ahead = ahead, None
        if current.error is not None:
            raise current.error
        ahead = _make(batches, side)
        side.take(current.batch, current.mark)
        yield current.batch


def _make(batches: Iterator[Any], side: Side) -> _Made | None:
    """The next batch; None behind the last."""
    with side.making():
        try:
            batch = side.moved(next(batches))
        except StopIteration:
            return None
        except Exception as error:
            return _Made(None, None, error)
        return _Made(batch, side.mark(), None)


def go_ahead(loader: Any, trainer: Any, device: torch.device | None = None) -> None:
    """Has a loader's batches made ahead, where the trainer's `prefetch_to_device` asks for it and the loader can
    (`goes_ahead`): none can whose batches draw from the generators that the run draws from, or whose position is more
    than a number. "auto" leaves batches so small that several are made at once (`chunk`) as they are: there is little
    to gain, and a change of streams costs some microseconds. None for the device takes the trainer's.
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
    """Warns where batches are asked to be ahead on a device that has no streams."""
    if wanted is True and device.type != "cuda":
        rank_zero_warn(f"{KEY} has no effect: it is for NVIDIA GPUs, and this run computes on {device.type}.")


def _transfers_itself(trainer: Any) -> bool:
    """Whether a part of the user's own has a say in how batches come to the device."""
    parts = [part for part in (trainer.lightning_module, trainer.datamodule) if part is not None]
    return any(is_overridden(name, part) and is_own(getattr(part, name)) for part in parts for name in HOOKS)
