"""The old DataParallel, as a baseline for DDP."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from pydantic import Field
from torch import nn

from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.errors import UserError


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
        if not torch.cuda.is_available():
            raise UserError(
                "strategy=dp drives several GPUs from one process and none is visible here: use strategy=ddp or auto."
            )
        every = devices in (None, "auto", -1)
        count = torch.cuda.device_count() if every or not isinstance(devices, int) else devices
        self.devices = list(devices) if isinstance(devices, list) else list(range(count))
        super().__init__(device=torch.device("cuda", self.devices[0]))
        self._parallel: nn.DataParallel[nn.Module] | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert self.lightning_module is not None
        net = self.lightning_module.net
        assert isinstance(net, nn.Module)
        self._parallel = nn.DataParallel(net, device_ids=self.devices)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(super().test_step, *args, **kwargs)

    def _through(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        net = module.net
        assert self._parallel is not None
        module.net = self._parallel
        try:
            return step(*args, **kwargs)
        finally:
            module.net = net
