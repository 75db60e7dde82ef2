"""Places a net's blocks on several devices of one process, which work one at a time."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from pydantic import Field
from torch import nn
from torch.utils._pytree import tree_map_only

from lathe.config.types import Count, SomeNames
from lathe.config.validation import validated
from lathe.errors import require
from lathe.nets import blocks_of


class ModelSplit(SingleDeviceStrategy):
    """Places a net's blocks on `devices` in order; activations move with them.

    Everything outside the blocks stays on the first device, with the input and the loss, so a tied embedding needs no
    copy. Parameters keep their names and there is one process, so checkpoints, callbacks and results equal those of
    strategy=auto. The devices' memory adds up, their speed does not: strategy=pipeline keeps all of them busy.

    Args:
        devices: such as ["cuda:0", "cuda:1"]; null takes every GPU of this machine. A device may be repeated.
        split: number of blocks per device; null minimizes the largest number of parameters on a device.
    """

    @validated
    def __init__(
        self,
        devices: SomeNames | None = None,
        split: Annotated[Sequence[Count], Field(min_length=1)] | None = None,
    ) -> None:
        names = devices or [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        setting = "null (every GPU)" if devices is None else list(devices)
        require(
            len(names) >= 2,
            f"strategy.devices={setting} is {len(names)} of two and more devices: name them, such as [cpu:0,cpu:0], or "
            "use strategy=auto.",
        )
        named = [torch.device(str(name)) for name in names]
        self.devices = [torch.device("cpu") if device.type == "cpu" else device for device in named]
        self.split = split
        super().__init__(device=self.devices[0])
        self._hooks: list[Any] = []

    def shard(self, task: Any) -> None:
        self._plan(task.net)  # raises; `model_to_device` moves the blocks

    def _plan(self, net: nn.Module) -> list[list[nn.Module]]:
        blocks, name = blocks_of(net), type(net).__name__
        require(
            len(blocks) >= len(self.devices),
            f"strategy=model_split places a net's repeated blocks, and {name} has {len(blocks)} `blocks` for "
            f"{len(self.devices)} devices. Use strategy=auto or a deeper net.",
        )
        if self.split is None:
            sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
            rest = sum(p.numel() for p in net.parameters()) - sum(sizes)
            edges = balance(sizes, len(self.devices), max(0, rest))
        else:
            edges = [0, *accumulate(self.split)]
            require(
                len(self.split) == len(self.devices) and edges[-1] == len(blocks),
                f"strategy.split={list(self.split)} does not place the {len(blocks)} blocks of {name} on "
                f"{len(self.devices)} devices.",
            )
        return [blocks[start:end] for start, end in pairwise(edges)]

    def model_to_device(self) -> None:
        assert self.model is not None
        task: Any = self.lightning_module
        self._release()
        parts = self._plan(task.net)
        # move block by block first: the whole net may not fit on the first device
        for part, device in zip(parts, self.devices, strict=True):
            for block in part:
                block.to(device)
        away = {id(t) for part in parts[1:] for block in part for t in [*block.parameters(), *block.buffers()]}
        self.model._apply(lambda tensor: tensor if id(tensor) in away else tensor.to(self.devices[0]))
        for part, device in zip(parts, self.devices, strict=True):
            for block in part:
                mover = partial(lambda device, _, args, kwargs: (_moved(args, device), _moved(kwargs, device)), device)
                self._hooks.append(block.register_forward_pre_hook(mover, with_kwargs=True))
        self._hooks.append(
            parts[-1][-1].register_forward_hook(lambda module, args, output: _moved(output, self.devices[0]))
        )

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # torch moves each state to its parameter's device; Lightning would then move all to the first device
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        self._release()
        super().teardown()


def balance(sizes: list[int], parts: int, extra: int = 0) -> list[int]:
    """Return edges that cut `sizes` into non-empty parts with the smallest largest sum. The first adds `extra`."""
    n = len(sizes)
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    # best[end]: the smallest largest sum of the first `end` sizes in this number of parts, and the edges
    best = {end: (extra + total[end], [0, end]) for end in range(1, n + 1)}
    for part in range(2, parts + 1):
        best = {
            end: min(
                (max(best[start][0], total[end] - total[start]), [*best[start][1], end])
                for start in range(part - 1, end)
            )
            for end in range(part, n + 1)
        }
    return best[n][1]


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), value)
