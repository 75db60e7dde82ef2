"""A first layer that is made from the training images."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lathe.callbacks.driven import net_of
from lathe.config.schema.held import held
from lathe.errors import UserError


@held("lathe.callbacks.Whitening")
class Whitening(Callback):
    """Has a net that has a method `whiten(images)`, such as `lathe.nets.Airbench`, look at training images before its
    first step.

    They are normalised and not augmented, the same on each process. Weights that come from a checkpoint, of the run
    itself or of another, stay as they are: the net says so by its buffer `whitened`.

    Args:
        samples: images, the first of the training split in stored order.

    Raises:
        UserError: when a fit begins, for a net that has no such method, or a data module that has no `first_images`.
    """

    def __init__(self, samples: int = 5000) -> None:
        self.samples = samples

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        net: Any = net_of(pl_module)
        data: Any = getattr(trainer, "datamodule", None)
        if not hasattr(net, "whiten"):
            raise UserError(f"callbacks.whitening: {type(net).__name__} has no layer to whiten: leave it out.")
        if not hasattr(data, "first_images"):
            raise UserError(
                f"callbacks.whitening: {type(data).__name__} has no first_images(n), which gives normalised images: "
                "leave it out."
            )
        if not net.whitened:
            images = data.first_images(self.samples)
            net.whiten(images)
            rank_zero_info(f"Whitening: the first layer of {type(net).__name__} is made from {len(images)} images.")
