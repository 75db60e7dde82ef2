"""Initialize a whitening layer from training images."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.callbacks.module_access import net_of
from lathe.compression.modes import is_compiled
from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.errors import require


class Whitening(Callback):
    """Call `whiten(images)` of a net such as `lathe.nets.Airbench` before its first step.

    Images are normalized and not augmented, the same on each rank. Weights from a checkpoint stay as they are: the
    net's buffer `whitened` is set.

    Args:
        samples: images, the first of the training split in stored order.
        settle_epoch: epoch from which the layer's bias is frozen too, by the net's method `settle()`, as Jordan's is
            after three of eight epochs (arXiv:2404.00498): steps skip the gradient of the layer's outputs. None never.
            Not with compiled code or several ranks, where the set of trained weights is fixed.
    """

    @validated
    def __init__(self, samples: Count = 5000, settle_epoch: NonNegativeInt | None = None) -> None:
        self.samples, self.settle_epoch = samples, settle_epoch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        net: Any = net_of(pl_module)
        data: Any = getattr(trainer, "datamodule", None)
        settles = [(net, "settle")] if self.settle_epoch is not None else []
        for owner, method in ((net, "whiten"), (data, "first_images"), *settles):
            message = f"callbacks.whitening: {type(owner).__name__} has no method {method}: leave it out."
            require(hasattr(owner, method), message)
        if self.settle_epoch is not None:
            compiled = is_compiled(net) or "whole_step" in vars(pl_module)
            message = (
                f"callbacks.whitening.settle_epoch={self.settle_epoch} works in one process, not compiled: set null."
            )
            require(not compiled and trainer.world_size == 1, message)
        if not net.whitened:
            images = data.first_images(self.samples)
            net.whiten(images)
            if trainer.is_global_zero:
                print(f"Whitening: the first layer of {type(net).__name__} is made from {len(images)} images.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epochs, settles = trainer.max_epochs or -1, self.settle_epoch
        if settles is not None and 0 <= epochs <= settles:
            rank_zero_warn(
                f"callbacks.whitening.settle_epoch={settles} is not below trainer.max_epochs={epochs}: no effect."
            )
        self.on_train_epoch_start(trainer, pl_module)  # which a run that resumes inside an epoch does not call

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.settle_epoch is not None and trainer.current_epoch >= self.settle_epoch:
            net: Any = net_of(pl_module)
            net.settle()
