"""Progressive resizing."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lathe.callbacks.module_access import net_of, planned_batches, task_of
from lathe.compression.modes import evaluated, is_compiled
from lathe.config.types import PositiveShare
from lathe.config.validate import SPLIT_NETS
from lathe.config.validation import validated
from lathe.errors import UserError, require

OUT = "leave image_sizes out of callbacks"


class ImageSizes(Callback):
    """Train on smaller images in the first epochs, at a cost in proportion to their pixels.

    Howard et al. in DAWNBench 2018; Tan and Le 2021, arXiv:2104.00298. Images are augmented at full size and shrunk by
    `torch.nn.functional.interpolate(mode="area")`. Evaluation and exports use full-size images.

    Args:
        scales: factor of the side in each epoch from the first on; later epochs use full-size images.
    """

    @validated
    def __init__(self, scales: Annotated[Sequence[PositiveShare], Field(min_length=1)]) -> None:
        self.scales = list(scales)
        self._whole = 0  # pixels of a side at full size
        self._size = 0  # pixels of a side in the current epoch
        self._hook: Any = None

    @torch.no_grad()
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        data: Any = getattr(trainer, "datamodule", None)
        channels, whole = getattr(data, "channels", None), getattr(data, "image_size", None)
        if not (isinstance(channels, int) and isinstance(whole, int)):
            raise UserError(f"callbacks.image_sizes: {type(data).__name__} has no square images: {OUT}.")
        own = task_of(pl_module) is pl_module
        require(own, f"callbacks.image_sizes needs the net of a task, not {type(pl_module).__name__}: {OUT}.")
        strategy = type(trainer.strategy).__name__
        require(strategy not in SPLIT_NETS, f"callbacks.image_sizes needs a whole net, and {strategy} cuts it: {OUT}.")
        self._whole = whole
        net: Any = net_of(pl_module)
        compiled = is_compiled(net) or "whole_step" in vars(pl_module)
        message = f"callbacks.image_sizes: compiled code takes one size of images: use compile=none, or {OUT}."
        require(not compiled, message)
        like = next(net.parameters(), torch.empty(0))
        for size in dict.fromkeys(self._side(epoch) for epoch in range(len(self.scales))):
            try:
                with evaluated(net):
                    net(torch.zeros(1, channels, size, size, dtype=like.dtype, device=like.device))
            except Exception as error:
                message = f"{type(net).__name__} takes no images of {size} x {size} pixels ({type(error).__name__})"
                key = f"callbacks.image_sizes.scales={self.scales}"
                raise UserError(f"{key}: {message}: choose another net.") from error

    def _side(self, epoch: int) -> int:
        """Return the pixels of a side in an epoch."""
        return max(1, round(self.scales[epoch] * self._whole)) if epoch < len(self.scales) else self._whole

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sizes = [self._side(epoch) for epoch in range(len(self.scales))]
        if trainer.is_global_zero:
            sides = ", ".join(map(str, sizes))
            print(f"image_sizes: sides of {sides} pixels by epoch, then of {self._whole}.", flush=True)
        each = int(trainer.num_training_batches)
        batches, small = planned_batches(trainer, each), [size < self._whole for size in sizes]
        if batches is not None and all(small[: -(-batches // max(1, each))]) and batches <= len(small) * each:
            rank_zero_warn(
                f"callbacks.image_sizes.scales={self.scales}: this run of {batches} batches ends before an epoch of "
                "whole images: the net never trains on what it is evaluated on. Make it longer, or shorten scales."
            )
        self._size = self._side(trainer.current_epoch)  # a run that resumes inside an epoch has no on_train_epoch_start
        self._hook = net_of(pl_module).register_forward_pre_hook(self._shrink)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._size = self._side(trainer.current_epoch)

    def _shrink(self, net: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        images = inputs[0]
        if not net.training or images.shape[-1] <= self._size:
            return None
        small: Tensor = F.interpolate(images, size=(self._size, self._size), mode="area")
        return (small, *inputs[1:])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
