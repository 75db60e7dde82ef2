"""Base class of methods that mask weights."""

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
from lathe.callbacks.methods.base import Compression, compressions
from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.compression.channels.slices import staying
from lathe.compression.masks.masks import Masks, make_masks
from lathe.compression.masks.parameters import HEAD_RULE, maskable, weights_of
from lathe.config.types import LayerTypes
from lathe.errors import UserError
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
        self.masks: Masks = {}
        self.parameters: dict[str, Tensor] = {}
        self.updates = 0
        self._step = -1  # the last optimizer step that was processed; -1 before training
        self._owners: list[Tensor] = []  # masked parameters, this rank's local tensors, and masks as numbers
        self._live: list[Tensor] = []
        self._factors: list[Tensor] = []
        self._optimizers: list[Optimizer] = []
        self._averages: list[EMA] = []
        self._handles: list[Any] = []
        self._others: list[Compression] = []  # methods that remove parts of parameters after training
        self._shapes: dict[str, tuple[int, ...]] = {}  # of all parameters, before sharding
        self._chosen: list[str] = []  # maskable parameters

    def choose(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """Return the maskable parameters, by name."""
        return maskable(net, self.layers, self.exclude, self.types, self.head, prefix=f"compression.{self.name}")

    def check(self, net: nn.Module) -> None:
        self.choose(net)

    def warn_if_few(self, net: nn.Module, chosen: dict[str, nn.Parameter]) -> None:
        """Warn if less than half of the requested weights are masked."""
        weights = {name: p.numel() for name, p in weights_of(net, self.layers, self.exclude).items()}
        left = sorted(weights.keys() - chosen.keys(), key=lambda name: (-weights[name], name))
        share = 1 - sum(weights[name] for name in left) / max(sum(weights.values()), 1)
        if share < 0.5 and {"linear", "conv"} & set(self.types):
            rank_zero_warn(
                f"compression.{self.name} masks only {share:.1%} of the weights: {left[0]} stays dense. List in layers "
                "what to mask."
            )

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Act before the first optimizer step (0) and after each (from 1), once masks are applied."""

    def make(self, scores: dict[str, Tensor], sparsity: float, **options: Any) -> Masks:
        """Return `make_masks` of the weights that remain after training; the others keep their masks."""
        leaving = self._leaving()
        if not leaving:
            return make_masks(scores, sparsity, previous=self.masks, **options)
        left = {name: staying(score.shape, leaving.get(name, {})) for name, score in scores.items()}
        previous = {name: mask[left[name]] for name, mask in self.masks.items()}
        made = make_masks(
            {name: score[left[name]] for name, score in scores.items()}, sparsity, previous=previous, **options
        )
        masks = {}
        for name, mask in made.items():
            masks[name] = (
                self.masks[name].clone() if name in self.masks else torch.ones_like(scores[name], dtype=torch.bool)
            )
            masks[name][left[name]] = mask
        return masks

    def follow_removal(self, trainer: Trainer, last: int) -> None:
        """Raise UserError if channels are chosen after the last update, which then could not exclude them."""
        for other in self._others:
            choice = other.step_at(trainer, other.start)  # type: ignore[attr-defined]
            if choice > last:
                raise UserError(
                    f"compression.{self.name} ends at step {last} and channels that go are chosen at step {choice}: "
                    f"raise compression.{self.name}.end, or lower compression.prune_channels.start."
                )

    def set_masks(self, masks: Masks, momentum: bool = False) -> None:
        """Set masks (full shape, True: kept) and apply them; a collective that broadcasts rank 0's masks.

        `momentum` also zeroes the optimizer's state of weights that were or become masked.
        """
        before = self.masks
        self.masks = _from_process_0(
            {name: mask.bool().to(self.parameters[name].device) for name, mask in masks.items()}
        )
        self.updates += 1
        self._bind_masks()
        if momentum:
            self._clear_momentum(before)
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
        chosen = self.choose(net)
        if not chosen:
            raise UserError(f"compression.{self.name} finds nothing to mask: {HEAD_RULE}")
        self.warn_if_few(net, chosen)
        self._chosen = list(chosen)
        # without LSQ's scales, which only a resumed run's net has already
        self._shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if "_quantizer." not in name}
        self._others = [method for method in compressions(trainer) if method.removes_late]
        if self._others and not self.beside_removal:
            raise UserError(
                f"compression.{self.name} lays its masks on channels that go after training, and would ship others "
                "than it was asked for: use compression.prune_channels.mode=one_shot, or two runs."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = pl_module.get_submodule("net")
        spread = parameters_of(net)
        self.parameters = {name: spread[name] for name in self.choose(net)}
        self._averages = [callback for callback in trainer.callbacks if isinstance(callback, EMA)]  # type: ignore[attr-defined]
        self._optimizers = list(trainer.optimizers)
        self._handles = [optimizer.register_step_post_hook(lambda *_: self.apply()) for optimizer in self._optimizers]
        if self.masks:
            self._install()
        if self._step < 0:
            self._step = trainer.global_step
            self.on_step(trainer, pl_module, self._step)
        elif trainer.global_step > self._step:
            # the checkpoint was written between an optimizer step and its update
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
                f"compression.{self.name}: training ended at step {trainer.global_step}, before "
                f"compression.{self.name}.end, at sparsity "
                f"{self.report()[f'{self.name}/sparsity']:.3f}: let it run to its end."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers, self._averages = [], [], []
        self.parameters, self._owners, self._live, self._factors = {}, [], [], []

    def report(self) -> dict[str, float]:
        leaving = self._leaving()
        counts = {
            name: math.prod(size - len(leaving.get(name, {}).get(dim, ())) for dim, size in enumerate(shape))
            for name, shape in self._shapes.items()
        }
        masks = {
            name: mask[staying(mask.shape, leaving[name])] if name in leaving else mask
            for name, mask in self.masks.items()
        }
        zeros = sum(int((~mask).sum()) for mask in masks.values())
        return {
            f"{self.name}/sparsity": zeros / max(sum(counts[name] for name in self._chosen), 1),
            f"{self.name}/sparsity_net": zeros / max(sum(counts.values()), 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state; a collective, which asserts that all ranks have the same masks."""
        self._assert_same()
        return {
            "masks": {name: mask.cpu() for name, mask in self.masks.items()},
            "updates": self.updates,
            "step": self._step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.masks = {name: mask.bool() for name, mask in state_dict["masks"].items()}
        self.updates, self._step = state_dict["updates"], state_dict["step"]

    def _leaving(self) -> dict[str, dict[int, set[int]]]:
        found: dict[str, dict[int, set[int]]] = {}
        for other in self._others:
            found |= other.leaving()
        return found

    def _install(self) -> None:
        """Install restored masks, once the net is sharded and on its device."""
        strange = [
            name
            for name, mask in self.masks.items()
            if name not in self.parameters or mask.shape != self.parameters[name].shape
        ]
        if strange:
            raise UserError(
                f"compression.{self.name}: the checkpoint masks {strange[0]}, which this run does not mask in that "
                "shape: keep the layers of the run that wrote it."
            )
        self.masks = {name: mask.to(self.parameters[name].device) for name, mask in self.masks.items()}
        self._bind_masks()

    def _bind_masks(self) -> None:
        self._owners = [self.parameters[name] for name in self.masks]
        self._live = [local(owner) for owner in self._owners]
        self._factors = [
            part_of(mask.to(owner.dtype), owner) for mask, owner in zip(self.masks.values(), self._owners, strict=True)
        ]
        self.apply()

    def _clear_momentum(self, before: Masks) -> None:
        for name, owner in zip(self.masks, self._owners, strict=True):
            kept = self.masks[name] & before[name] if name in before else self.masks[name]
            for optimizer in self._optimizers:
                for value in optimizer.state.get(owner, {}).values():
                    if isinstance(value, Tensor) and value.shape == owner.shape:
                        with torch.no_grad():
                            local(value).mul_(part_of(kept.to(value.dtype), value if is_sharded(value) else owner))

    def _assert_same(self) -> None:
        if processes() < 2 or not self.masks:
            return
        everyone = everyones(checksum(self.masks))
        if any(other != everyone[0] for other in everyone):
            raise UserError(
                f"compression.{self.name}: the processes hold different masks ({everyone}): report this with your "
                "configuration."
            )


def checksum(masks: Masks) -> int:
    """Return the CRC-32 of names and bits of masks."""
    total = 0
    for name, mask in masks.items():
        total = zlib.crc32(
            mask.cpu().contiguous().view(torch.uint8).numpy().tobytes(), zlib.crc32(name.encode(), total)
        )
    return total


def _from_process_0(masks: Masks) -> Masks:
    """Broadcast rank 0's masks; names and shapes are the same on all ranks."""
    if processes() < 2:
        return masks
    for mask in masks.values():
        torch.distributed.broadcast(mask.view(torch.uint8), src=0)
    return masks
