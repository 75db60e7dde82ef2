"""The base class of callbacks that mask weights."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lathe.callbacks.ema import EMA
from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.compression.callback import Compression, compressions
from lathe.compression.channels.slices import staying
from lathe.compression.pruning.masks import HEAD_RULE, Masks, make_masks, maskable, weights_of
from lathe.config.types import LayerTypes
from lathe.errors import UserError, require
from lathe.measure.processes import everyones, processes
from lathe.measure.shards import is_sharded, local, parameters_of, part_of


class Masking(SkippableHooks, Compression):
    """Keep masked weights exactly zero: in the net, in checkpoints and in EMA's average.

    A subclass overrides `on_step`, reads `parameters` (of the net, by name; they may be DTensors) and calls
    `set_masks`. Masks are not part of the modules: parameters keep their names, and an optimizer step changes masked
    weights before they are zeroed again, so that their gradients and momentum exist for regrowth. If channels are
    removed after training (`prune_channels` with mode=gradual), sparsity is that of the remaining weights; a method
    supports that if `beside_removal` is True.

    Args:
        layers, exclude: shell patterns of module names, such as `blocks.*.conv1`; None takes every layer of `types`.
        types: linear, conv, embedding, norm, bias.
        head: mask the layer that makes the logits too.
    """

    name = "masking"
    beside_removal = False

    def __init__(
        self,
        layers: Sequence[str] | None = None,
        exclude: list[str] | None = None,
        types: LayerTypes | None = None,
        head: bool = False,
    ) -> None:
        self.layers, self.exclude, self.head = layers, exclude or [], head
        self.types: LayerTypes = types or ("linear", "conv")
        self.key = f"compression.{self.name}"  # in messages
        self.masks: Masks = {}
        self.parameters: dict[str, Tensor] = {}
        self.updates = 0
        self._step = -1  # the last optimizer step that was processed; -1 before training
        self._live: list[Tensor] = []  # this rank's part of the masked parameters, and of their masks as numbers
        self._factors: list[Tensor] = []
        self._optimizers: list[Optimizer] = []
        self._averages: list[EMA] = []
        self._handles: list[Any] = []
        self._removing: list[Any] = []  # methods that remove parts of parameters after training
        self._shapes: dict[str, tuple[int, ...]] = {}  # of all parameters, before sharding
        self._chosen: list[str] = []  # maskable parameters

    def choose(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """Return the maskable parameters, by name."""
        return maskable(net, self.layers, self.exclude, self.types, self.head, prefix=self.key)

    def check(self, net: nn.Module) -> None:
        self.choose(net)

    def chosen_or_raise(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """Return `choose(net)`; raise UserError if it is empty, warn if it is less than half of the weights."""
        chosen = self.choose(net)
        require(bool(chosen), f"{self.key} finds nothing to mask: {HEAD_RULE}")
        weights = {name: p.numel() for name, p in weights_of(net, self.layers, self.exclude).items()}
        left = sorted(weights.keys() - chosen.keys(), key=lambda name: (-weights[name], name))
        share = 1 - sum(weights[name] for name in left) / max(sum(weights.values()), 1)
        if share < 0.5 and {"linear", "conv"} & set(self.types):
            rank_zero_warn(
                f"{self.key} masks only {share:.1%} of the weights: {left[0]} stays dense. See {self.key}.layers."
            )
        return chosen

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Act before the first optimizer step (0) and after each (from 1), once masks are applied."""

    def make(self, scores: dict[str, Tensor], sparsity: float, **pattern: Any) -> Masks:
        """Return `make_masks` of the weights that remain after training; the others keep their masks."""
        leaving = self._leaving()
        if not leaving:
            return make_masks(scores, sparsity, previous=self.masks, **pattern)
        left = {name: staying(score.shape, leaving.get(name, {})) for name, score in scores.items()}
        previous = {name: mask[left[name]] for name, mask in self.masks.items()}
        remaining = {name: score[left[name]] for name, score in scores.items()}
        masks = {name: torch.ones_like(score, dtype=torch.bool) for name, score in scores.items()}
        masks |= {name: mask.clone() for name, mask in self.masks.items()}
        for name, mask in make_masks(remaining, sparsity, previous=previous, **pattern).items():
            masks[name][left[name]] = mask
        return masks

    def set_masks(self, masks: Masks, momentum: bool = False) -> None:
        """Set masks (full shape, True: kept) and apply them; a collective that broadcasts rank 0's masks.

        `momentum` also zeroes the optimizer's state of weights that were or become masked.
        """
        before = self.masks
        self.masks = {name: mask.bool().to(self.parameters[name].device) for name, mask in masks.items()}
        if processes() > 1:
            for mask in self.masks.values():
                torch.distributed.broadcast(mask.view(torch.uint8), src=0)
        self.updates += 1
        self._bind_masks()
        for name, mask in self.masks.items() if momentum else ():
            owner, kept = self.parameters[name], mask & before[name] if name in before else mask
            for optimizer in self._optimizers:
                for value in optimizer.state.get(owner, {}).values():
                    if isinstance(value, Tensor) and value.shape == owner.shape:
                        with torch.no_grad():
                            local(value).mul_(part_of(kept.to(value.dtype), value if is_sharded(value) else owner))
        for average in self._averages:
            average.mask(self.masks)

    def apply(self) -> None:
        """Zero the masked weights in place."""
        if self._live:
            with torch.no_grad():
                torch._foreach_mul_(self._live, self._factors)
                # -0.0 becomes 0.0: random signs of zeros do not compress
                torch._foreach_add_(self._live, 0.0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        net = pl_module.get_submodule("net")
        self._chosen = list(self.chosen_or_raise(net))
        # without LSQ's scales, which only a resumed run's net has already
        self._shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if "_quantizer." not in name}
        self._removing = [method for method in compressions(trainer) if method.removes_late]
        require(
            self.beside_removal or not self._removing,
            f"{self.key} would mask channels that are removed after training. Use "
            "compression.prune_channels.mode=one_shot, or two runs.",
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = pl_module.get_submodule("net")
        spread = parameters_of(net)
        self.parameters = {name: spread[name] for name in self.choose(net)}
        self._averages = [callback for callback in trainer.callbacks if isinstance(callback, EMA)]  # type: ignore[attr-defined]
        self._optimizers = list(trainer.optimizers)
        self._handles = [optimizer.register_step_post_hook(lambda *_: self.apply()) for optimizer in self._optimizers]
        if self.masks:  # restored, and the net is sharded and on its device by now
            for name, mask in self.masks.items():
                if name not in self.parameters or mask.shape != self.parameters[name].shape:
                    raise UserError(
                        f"{self.key}: the checkpoint masks {name} in another shape or not at all. Keep the layers of "
                        "its run."
                    )
            self.masks = {name: mask.to(self.parameters[name].device) for name, mask in self.masks.items()}
            self._bind_masks()
        # the checkpoint may have been written between an optimizer step and its update
        if self._step < 0 or trainer.global_step > self._step:
            self._step = trainer.global_step
            self.on_step(trainer, pl_module, self._step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._step:  # not while gradients accumulate
            self._step = step
            self.on_step(trainer, pl_module, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.ready(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # a connector sets it
            rank_zero_warn(
                f"{self.key}: training ended at step {trainer.global_step}, before {self.key}.end, at sparsity "
                f"{self.report()[f'{self.name}/sparsity']:.3f}: let it run to its end."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers, self._averages = [], [], []
        self.parameters, self._live, self._factors = {}, [], []

    def report(self) -> dict[str, float]:
        leaving = self._leaving()
        counts = {
            name: math.prod(size - len(leaving.get(name, {}).get(dim, ())) for dim, size in enumerate(shape))
            for name, shape in self._shapes.items()
        }
        zeros = 0
        for name, mask in self.masks.items():
            zeros += int((~(mask[staying(mask.shape, leaving[name])] if name in leaving else mask)).sum())
        return {
            f"{self.name}/sparsity": zeros / max(sum(counts[name] for name in self._chosen), 1),
            f"{self.name}/sparsity_net": zeros / max(sum(counts.values()), 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state; a collective, which verifies that all ranks have the same masks."""
        if processes() > 1 and len(set(everyones(checksum(self.masks)))) > 1:
            raise RuntimeError(f"{self.key}: ranks have different masks.")
        masks = {name: mask.cpu() for name, mask in self.masks.items()}
        return {"masks": masks, "updates": self.updates, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.masks = {name: mask.bool() for name, mask in state_dict["masks"].items()}
        self.updates, self._step = state_dict["updates"], state_dict["step"]

    def _leaving(self) -> dict[str, dict[int, set[int]]]:
        return {name: places for method in self._removing for name, places in method.leaving().items()}

    def _bind_masks(self) -> None:
        owners = [self.parameters[name] for name in self.masks]
        self._live = [local(owner) for owner in owners]
        self._factors = [
            part_of(mask.to(owner.dtype), owner) for mask, owner in zip(self.masks.values(), owners, strict=True)
        ]
        self.apply()


def checksum(masks: Masks) -> int:
    """Return the CRC-32 of names and bits of masks."""
    total = 0
    for name, mask in masks.items():
        bits = mask.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        total = zlib.crc32(bits, zlib.crc32(name.encode(), total))
    return total
