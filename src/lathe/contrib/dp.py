"""The old DataParallel, as a baseline for DDP."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from pydantic import Field
from torch import nn

from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.errors import require


class DP(SingleDeviceStrategy):
    """torch.nn.DataParallel: one process copies the net to every GPU at each step and splits the batch.

    The wrapper replaces the net only during a step, so parameter names stay plain.

    Args:
        devices: as trainer.devices: a number of GPUs, their indices, or "auto", -1 or None for all visible ones.

    Raises:
        UserError: no GPU is visible.
    """

    @validated
    def __init__(
        self,
        devices: Count
        | Literal[-1]
        | Literal["auto"]
        | Annotated[list[NonNegativeInt], Field(min_length=1)]
        | None = None,
    ) -> None:
        message = "strategy=dp drives several GPUs from one process and none is visible here: use strategy=ddp or auto."
        require(torch.cuda.is_available(), message)
        all_visible = devices in (None, "auto", -1)
        count = torch.cuda.device_count() if all_visible or not isinstance(devices, int) else devices
        self.devices = list(devices) if isinstance(devices, list) else list(range(count))
        super().__init__(device=torch.device("cuda", self.devices[0]))
        self._parallel: nn.DataParallel[nn.Module] | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        self._parallel = nn.DataParallel(module.net, device_ids=self.devices)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._replicated():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._replicated():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._replicated():
            return super().test_step(*args, **kwargs)

    @contextmanager
    def _replicated(self) -> Iterator[None]:
        module: Any = self.lightning_module
        net, module.net = module.net, self._parallel
        try:
            yield
        finally:
            module.net = net
