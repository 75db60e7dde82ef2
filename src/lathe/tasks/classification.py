"""Image classification: cross-entropy and accuracy."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.compression.modes import evaluated
from lathe.config.schema.held import held
from lathe.data.order import IGNORE
from lathe.errors import UserError
from lathe.nets.init import apply_init
from lathe.tasks.base import Task


@held("lathe.tasks.ClassificationTask")
class ClassificationTask(Task):
    """Cross-entropy with optional label smoothing (Szegedy et al. 2016).

    A batch is `(x, y)`: x [batch, channels, height, width], y either class numbers [batch], -100 in rows that do not
    count, or class probabilities [batch, classes] as mixup gives them. Accuracy against probabilities counts their
    largest class.

    Raises:
        ArgumentError: an unknown initialisation.
    """

    metrics = ("loss", "accuracy")
    monitor = "val/accuracy"

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        label_smoothing: float = 0.0,
        init: str | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        self.label_smoothing = label_smoothing
        self._sizes: dict[tuple[int, torch.device], Tensor] = {}
        apply_init(net, init)

    @torch.no_grad()
    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Asks the net for the logits of one empty image.

        Raises:
            UserError: there are more or fewer than `num_classes`.
        """
        sizes = [facts.get(name) for name in ("channels", "image_size", "image_size")]
        if not all(isinstance(size, int) for size in (*sizes, facts.get("num_classes"))):
            return
        try:
            with evaluated(self.net):
                logits = self.net(torch.zeros(1, *sizes))  # type: ignore[arg-type]  # ints, as asked above
        except Exception:
            return  # a net for other images, or another device: its own words come with its first batch
        found, wanted = (logits.shape[-1] if isinstance(logits, Tensor) else None), facts["num_classes"]
        if found is not None and found != wanted:
            raise UserError(
                f"data.num_classes={wanted}, but the net gives {found} logits: let model.net.num_classes follow the "
                "data."
            )

    def losses(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        smoothing = self.label_smoothing if self.training else 0.0
        target = batch[1]
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))  # a half-precision sum loses its digits
        if self.training or target.is_floating_point():
            return {"cross_entropy": F.cross_entropy(outputs, target, label_smoothing=smoothing)}
        # A batch of nothing but filling rows has no mean: it weighs nothing instead of being NaN.
        total = F.cross_entropy(outputs, target, ignore_index=IGNORE, reduction="sum")
        return {"cross_entropy": total / (target != IGNORE).sum().clamp(min=1)}

    def reduce(self, outputs: Tensor, batch: Any, loss: Tensor) -> Tensor:
        target = batch[1]
        if target.is_floating_point():
            target = target.argmax(dim=1)
        outputs = outputs.detach()
        correct = (outputs.argmax(dim=1) == target).sum()
        count = self._size(target) if self.training else (target != IGNORE).sum()
        return torch.stack((loss.float() * count, correct.float(), count.float()))

    def _size(self, target: Tensor) -> Tensor:
        """The number of rows as a tensor beside `target`; made once for each batch size."""
        key = (len(target), target.device)
        if key not in self._sizes:
            self._sizes[key] = torch.tensor(
                float(key[0]), dtype=torch.float32, device=key[1]
            )  # the default may be less
        return self._sizes[key]
