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

    `auto` leaves as they are: nets without 2-d convolutions (`true` warns of them), those that a strategy spreads, and
    on a CPU those with strided 1x1 convolutions of fewer than 16 channels, of which oneDNN's gradient then writes
    beyond its memory (github.com/uxlfoundation/oneDNN/issues/6035).

    Raises:
        ArgumentError: `true` for one of the latter two.
    """
    whole = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    if wanted is True and not whole:
        raise ArgumentError(
            f"channels_last=true is for nets that are whole on each device, and {type(strategy).__name__} spreads "
            "them: use auto, or strategy=ddp."
        )
    convolutions = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    overflowing = [name for name, module in convolutions if _overflows(module)] if whole and _on_cpu(strategy) else []
    if wanted is True and overflowing:
        raise ArgumentError(
            f"channels_last=true is not safe for {overflowing[0]} on a CPU: oneDNN's gradient of a strided 1x1 "
            "convolution of fewer than 16 channels writes beyond its memory. Use auto or false."
        )
    if wanted is True and not convolutions:
        warnings.warn(
            f"trainer.channels_last=true has no effect: {type(net).__name__} has no 2-d convolution.", stacklevel=2
        )
    if wanted and whole and convolutions and not overflowing:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which torch's stub lacks
        net.register_forward_pre_hook(_lay)


def _overflows(convolution: nn.Conv2d) -> bool:
    strided = convolution.kernel_size == (1, 1) and convolution.stride != (1, 1)
    return strided and convolution.in_channels // convolution.groups < 16


def _on_cpu(strategy: Strategy) -> bool:
    return strategy.root_device.type == "cpu"


def _lay(net: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.ndim == 4 else value
        for value in args
    )
