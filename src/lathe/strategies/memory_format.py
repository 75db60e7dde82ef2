"""The order of an image's numbers in memory, `trainer.channels_last`."""

import warnings
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from lathe.errors import ArgumentError


def channels_last(net: nn.Module, strategy: Strategy, wanted: bool | Literal["auto"]) -> None:
    """Lays weights of 2-d convolutions, and images that come in, with their channels last, in place: the order in which
    convolutions of low precision are computed. Shapes, names and values stay; sums are added up in another order.

    `auto` leaves nets without 2-d convolutions as they are, and those that a strategy spreads; `true` warns of the
    former.

    Raises:
        ArgumentError: `true` under a strategy that spreads the net.
    """
    whole = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    if wanted is True and not whole:
        raise ArgumentError(
            f"channels_last=true is for nets that are whole on each device, and {type(strategy).__name__} spreads "
            "them: use auto, or strategy=ddp."
        )
    convolves = any(isinstance(module, nn.Conv2d) for module in net.modules())
    if wanted is True and not convolves:
        warnings.warn(
            f"trainer.channels_last=true has no effect: {type(net).__name__} has no 2-d convolution.", stacklevel=2
        )
    if wanted and whole and convolves:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which torch's stub lacks
        net.register_forward_pre_hook(_lay)


def _lay(net: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.ndim == 4 else value
        for value in args
    )
