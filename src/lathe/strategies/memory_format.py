"""Memory format of images and convolutions, `trainer.channels_last`."""

import warnings
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from lathe.errors import ArgumentError


def channels_last(net: nn.Module, strategy: Strategy, wanted: bool | Literal["auto"]) -> None:
    """Put weights of 2-d convolutions, and input images, in channels_last format, in place.

    Low-precision convolutions are computed in this order. Shapes, names and values do not change; sums are added in
    another order. `auto` skips nets without 2-d convolutions (`true` warns), nets that a strategy shards, and on a CPU
    those with `unsafe_convolutions`.

    Raises:
        ArgumentError: `true` for a sharded net, or for unsafe convolutions on a CPU.
    """
    whole = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    if wanted is True and not whole:
        raise ArgumentError(
            f"channels_last=true is for nets that are whole on each device, and {type(strategy).__name__} spreads "
            "them: use auto, or strategy=ddp."
        )
    unsafe = unsafe_convolutions(net) if whole and strategy.root_device.type == "cpu" else []
    if wanted is True and unsafe:
        raise ArgumentError(
            f"channels_last=true is not safe for {unsafe[0]} on a CPU: oneDNN's gradient of a strided 1x1 "
            "convolution of fewer than 16 channels writes beyond its memory. Use auto or false."
        )
    convolves = any(isinstance(module, nn.Conv2d) for module in net.modules())
    if wanted is True and not convolves:
        warnings.warn(
            f"trainer.channels_last=true has no effect: {type(net).__name__} has no 2-d convolution.", stacklevel=2
        )
    if wanted and whole and convolves and not unsafe:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in the stub
        net.register_forward_pre_hook(_lay)


def unsafe_convolutions(net: nn.Module) -> list[str]:
    """Return the names of convolutions whose gradient must not be computed in channels_last format on a CPU.

    For strided 1x1 convolutions of fewer channels than a vector has numbers, oneDNN writes out of bounds
    (github.com/uxlfoundation/oneDNN/issues/6035).
    """
    return [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.stride != (1, 1)
        and module.in_channels // module.groups < 16
    ]


def _lay(net: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.ndim == 4 else value
        for value in args
    )
