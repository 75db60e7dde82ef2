"""Dynamic sparse training."""

import math
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lathe.callbacks.methods.masking import Masking
from lathe.compression.masks.masks import Masks
from lathe.compression.masks.rigl import (
    cosine_fraction,
    erdos_renyi_kernel,
    exchange,
    magnitude_masks,
    random_masks,
    random_scores,
    uniform,
)
from lathe.config.types import Count, LayerTypes, Name, OpenShare, PositiveShare, Seed, SomeNames
from lathe.config.validation import validated
from lathe.errors import UserError
from lathe.measure.shards import local, part_of, whole

SECOND_MOMENTS = (
    "exp_avg_sq",
    "max_exp_avg_sq",
)  # follow the dense gradient while a weight is masked, and stay valid


class RigL(Masking):
    """RigL (Evci et al. 2020, arXiv:1911.11134), or SET with growth="random" (Mocanu et al. 2018).

    From the window's first step a share `sparsity` of the maskable weights is masked, spread over layers by
    `densities`. Every `every_n_steps` optimizer steps until `end`, a share of each layer's weights is dropped by
    magnitude and as many grow where the last step's dense gradient is largest. The share falls from `fraction` to 0
    along half a cosine. Grown weights start at zero, without momentum. A step whose gradient is not finite changes
    nothing.

    Args:
        densities: "erk" keeps small layers denser (Erdos-Renyi-Kernel), "uniform" gives each layer the same sparsity.
        growth: "gradient" (RigL) or "random" (SET), by (seed, step).
        end: share of the window after which the masks are fixed.
        initial: "random" masks, or by "magnitude" of trained weights (`ckpt_path`, a later stage).
        layers, exclude, types, head: which weights, as in `Masking`.
    """

    name = "rigl"

    @validated
    def __init__(
        self,
        sparsity: OpenShare = 0.8,
        densities: Literal["erk", "uniform"] = "erk",
        growth: Literal["gradient", "random"] = "gradient",
        fraction: OpenShare = 0.3,
        every_n_steps: Count = 100,
        end: PositiveShare = 0.75,
        initial: Literal["random", "magnitude"] = "random",
        seed: Seed = 0,
        layers: SomeNames | None = None,
        exclude: list[Name] | None = None,
        types: LayerTypes | None = None,
        head: bool = False,
    ) -> None:
        super().__init__(layers, exclude, types, head)
        self.sparsity, self.densities, self.growth, self.initial = sparsity, densities, growth, initial
        self.fraction, self.every_n_steps, self.end, self.seed = fraction, every_n_steps, end, seed

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        start, end = self.step_at(trainer, 0.0), self.step_at(trainer, self.end)
        if not self.masks:
            if step >= start:
                self.set_masks(self._first_masks(), momentum=True)
        elif start < step < end and (step - start) % self.every_n_steps == 0:
            self._exchange(step, cosine_fraction(step - start, end - start, self.fraction))

    def ready(self, trainer: Trainer) -> bool:
        return bool(self.masks)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.updates < 2:
            rank_zero_warn(
                f"compression.rigl.every_n_steps={self.every_n_steps}: no weight was exchanged in "
                f"{trainer.global_step} optimizer steps, so the first masks stayed; lower it."
            )

    def _first_masks(self) -> Masks:
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        densities = (erdos_renyi_kernel if self.densities == "erk" else uniform)(shapes, self.sparsity)
        if self.initial == "random":
            return random_masks(shapes, densities, self.seed)
        return magnitude_masks({name: whole(parameter) for name, parameter in self.parameters.items()}, densities)

    def _exchange(self, step: int, fraction: float) -> None:
        growths = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            growth = (
                random_scores(parameter.shape, self.seed, step, index)
                if self.growth == "random"
                else _gradient(parameter, name)
            )
            if not math.isfinite(growth.sum().item()):
                return
            growths[name] = growth.to(parameter.device)
        before = self.masks
        self.set_masks(
            {
                name: exchange(whole(self.parameters[name]), before[name], growth, fraction)
                for name, growth in growths.items()
            }
        )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self._forget(parameter, self.masks[name] & ~before[name])

    def _forget(self, parameter: Tensor, grown: Tensor) -> None:
        """Zero the momentum of weights that were masked."""
        for optimizer in self._optimizers:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and key not in SECOND_MOMENTS:
                    local(value).masked_fill_(part_of(grown, parameter), 0.0)


def _gradient(parameter: Tensor, name: str) -> Tensor:
    """Return magnitudes of the last step's gradient, which Lightning zeroes before the next backward."""
    if parameter.grad is None:
        raise UserError(
            f"compression.rigl.growth=gradient: {name} has no gradient after an optimizer step, because it is frozen "
            "or the strategy keeps none: exclude it, or use growth=random."
        )
    return whole(parameter.grad).abs().float()
