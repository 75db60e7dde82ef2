"""Quantization-aware training."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.callbacks.methods.base import Compression
from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.compression.quantization import ranges
from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.compression.quantization.layer_plan import float_sentence
from lathe.compression.quantization.layers import QuantConv2d, QuantEmbedding, QuantLinear, weighted
from lathe.compression.quantization.net import LayerPlan, choose, quantize, quantized_layers, quantizers, reopen
from lathe.compression.trace import tensors_read
from lathe.config.types import Bits, Name, Share
from lathe.config.validation import validated
from lathe.data.transfer import val_batches
from lathe.errors import ArgumentError, UserError
from lathe.measure.shards import whole

EXAMPLES = 64  # samples of the trace of layers and a first range
RECOMPILATIONS = 64  # compiled graphs per function, which rounding, observing and frozen statistics change once each


class QAT(SkippableHooks, Compression):
    """Fake quantization of convolutions, linear layers, embeddings and residual sums.

    Jacob et al. 2018, arXiv:1712.05877. Layers change their class before the optimizer is built; parameters keep their
    names. Ranges of activations are observed from the run's first step on; rounding begins at `start`, in validation
    and checkpoints too, and an earlier epoch is never the best one. All state is in buffers of the net.

    Args:
        bits, activation_bits: of weights and activations, 2 to 8; None leaves activations in float.
        per_channel: a scale for each output channel of a weight, else one for the tensor.
        lsq: train scales from `start` on (learned step size, Esser et al. 2020, arXiv:1902.08153).
        layer_bits: {pattern of layer names: bits of the weights, or None for float}; the last match counts.
        exclude: patterns of layer names that stay in float.
        start, freeze_observers, freeze_batchnorm: shares of the window at which rounding begins, ranges of activations
            are fixed, and BatchNorm switches to its running statistics and freezes them; None (not `start`): never.
        observer: minmax (the widest so far), moving_average (of each step's extremes) or percentile (moving average of
            percentiles).
        percentile: share of values within the range, in percent, for observer=percentile.
    """

    @validated
    def __init__(
        self,
        bits: Bits = 8,
        activation_bits: Bits | None = 8,
        per_channel: bool = True,
        lsq: bool = False,
        layer_bits: Mapping[str, Bits | None] | None = None,
        exclude: Sequence[Name] | None = None,
        start: Share = 0.2,
        freeze_observers: Share | None = 0.8,
        freeze_batchnorm: Share | None = 0.8,
        observer: Literal["minmax", "moving_average", "percentile"] = "moving_average",
        percentile: Annotated[float, Field(gt=50, le=100)] = 99.99,
    ) -> None:
        if freeze_observers is not None and freeze_observers < start:
            raise ArgumentError(f"freeze_observers={freeze_observers} lies before start={start}: freeze later.")
        self.plan = LayerPlan(weight_bits=bits, activation_bits=activation_bits, per_channel=per_channel, lsq=lsq)
        self.overrides: dict[str, LayerPlan | None] = {}
        for pattern, width in (layer_bits or {}).items():
            self.overrides[str(pattern)] = (
                None if width is None else LayerPlan(width, activation_bits, per_channel, lsq)
            )
        self.overrides |= {str(pattern): None for pattern in exclude or []}
        self.start, self.freeze_observers, self.freeze_batchnorm = start, freeze_observers, freeze_batchnorm
        self.observer, self.percentile = observer, percentile
        self._quantizers: list[FakeQuantize] = []
        self._layers: dict[str, nn.Module] = {}
        self._weighted: dict[str, QuantConv2d | QuantLinear | QuantEmbedding] = {}
        self._norms: list[nn.Module] = []
        self._parameters = 0
        self._steps: dict[str, float] = {}
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        net = pl_module.get_submodule("net")
        key = "compression.qat.layer_bits"
        self._layers = quantized_layers(net)
        if not self._layers:
            quantize(net, _example(trainer, pl_module, net), self.plan, self.overrides, key=key)
            self._layers = quantized_layers(net)
            if trainer.world_size > 1:
                _share_ranges(trainer, quantizers(net))
            sentence = float_sentence(net, "compression.qat", self.overrides)
            if sentence is not None:
                rank_zero_warn(sentence)
        elif not self._agrees(trainer, pl_module, net, key):
            raise UserError(
                "compression.qat: the net's layers are quantized already, with other bits than these or other layers "
                "left in float: start from its float weights."
            )
        self._quantizers = quantizers(net)
        self._weighted = weighted(net)
        self._parameters = sum(parameter.numel() for parameter in net.parameters())
        for q in self._quantizers:
            q.observer, q.percentile = self.observer, self.percentile
        if any(module._compiled_call_impl is not None for module in net.modules()):
            import torch._dynamo.config as dynamo

            dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILATIONS)
            # torch 2.13's compiler instantiates each autograd function, and warns of that itself
            warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)

    def _agrees(self, trainer: Trainer, pl_module: LightningModule, net: nn.Module, key: str) -> bool:
        """Return whether a quantized net has the bits and float layers of these options."""
        plans = choose(net, self.plan, self.overrides, key)
        if any(layer.__dict__["plan"] != plans.get(name) for name, layer in self._layers.items()):
            return False
        left = {
            name: net.get_submodule(name) for name in plans if name not in self._layers
        }  # correct for layers that the net does not call
        traced = tensors_read(net, _example(trainer, pl_module, net), left) if left else None
        return traced is None or not any(traced.called(name) for name in left)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scales = {id(q.growth) for q in self._quantizers if q.lsq}
        decayed = [
            group for optimizer in trainer.optimizers for group in optimizer.param_groups if group.get("weight_decay")
        ]
        if any(id(parameter) in scales for group in decayed for parameter in group["params"]):
            rank_zero_warn(
                "compression.qat.lsq=true: the optimizer's weight decay also shrinks the learned step sizes; put "
                "parameters named *_quantizer.growth in a group without it."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # synchronized BatchNorm layers have replaced plain ones since setup
        self._norms = [module for module in pl_module.get_submodule("net").modules() if isinstance(module, _BatchNorm)]
        for q in self._quantizers:
            q.sync()  # a strategy may have written the buffers directly
        if trainer.global_step == 0:
            reopen(pl_module.get_submodule("net"))  # the run may start from a net with fixed ranges
        shares = {"start": self.start, "observers": self.freeze_observers, "batchnorm": self.freeze_batchnorm}
        self._steps = {
            name: math.inf if share is None else self.step_at(trainer, share) for name, share in shares.items()
        }
        self._step = trainer.global_step
        self._apply(self._step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._freeze_norms(trainer.global_step)  # train() has unfrozen them

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._step:  # not while gradients accumulate
            self._step = step
            ranges.update(self._quantizers, _over_ranks if trainer.world_size > 1 else None)
            self._apply(step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            self._check_ranks()
        if self._quantizers and not self.ready(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # a connector sets it
            rank_zero_warn(
                f"compression.qat: training ended at step {trainer.global_step}, before rounding began at step "
                f"{self._steps['start']} (compression.qat.start), so nothing was trained for integers: let it run on, "
                "or begin sooner."
            )

    def _apply(self, step: int) -> None:
        """Switch quantizers and BatchNorm to their state after optimizer step `step`."""
        if step >= self._steps["start"] and not all(q.is_enabled for q in self._quantizers):
            self._first_steps()
            for q in self._quantizers:
                q.switch(enabled=True, observing=False if q.lsq else None)
        if step >= self._steps["observers"]:
            for q in self._quantizers:
                if not q.follows and q.is_observing:
                    q.switch(observing=False)
        self._freeze_norms(step)

    def _freeze_norms(self, step: int) -> None:
        if step >= self._steps["batchnorm"]:
            for norm in self._norms:
                norm.eval()

    def _first_steps(self) -> None:
        """Initialize LSQ's scales from the observed ranges and the weights' mean."""
        done: set[int] = set()
        for layer in self._layers.values():
            for role in ("weight_quantizer", "input_quantizer", "other_quantizer"):
                q = getattr(layer, role, None)
                if q is None or not q.lsq or id(q) in done:
                    continue
                done.add(id(q))
                if q.follows:
                    weight = getattr(layer, "weight")  # noqa: B009  # mypy: an Add has none
                    q.set_first_step(whole(weight))
                else:
                    q.set_range(q.minimum, q.maximum)

    def _check_ranks(self) -> None:
        """Raise RuntimeError if ranges differ between ranks."""
        values = [t.float().flatten() for q in self._quantizers for t in (q.minimum, q.maximum, q.scale, q.zero_point)]
        mine = torch.cat(values)
        both = torch.stack([mine, -mine])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
        if not torch.equal(both[0], -both[1]):
            raise RuntimeError("The ranges of quantized activations differ between ranks.")

    def ready(self, trainer: Trainer) -> bool:
        return bool(self._quantizers) and all(q.is_enabled for q in self._quantizers)

    def report(self) -> dict[str, float]:
        """Return `qat/layers`, without sums, and `qat/bits`, the mean over all parameters with 32 for float."""
        weights = {id(layer.weight): layer for layer in self._weighted.values()}
        saved = sum(layer.weight.numel() * (32 - layer.__dict__["plan"].weight_bits) for layer in weights.values())
        return {"qat/layers": float(len(self._weighted)), "qat/bits": 32 - saved / max(self._parameters, 1)}


def _example(trainer: Trainer, pl_module: LightningModule, net: nn.Module) -> Any:
    """Return the inputs of up to 64 validation samples, on the net's device."""
    device = next(net.parameters()).device
    source: Any = getattr(trainer, "datamodule", None) or pl_module
    batch = next(iter(val_batches(source, device)))
    x: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
    return x[:EXAMPLES]


def _share_ranges(trainer: Trainer, every: list[FakeQuantize]) -> None:
    """Broadcast rank 0's ranges; each rank has read different samples."""
    observed = [q for q in every if not q.follows]
    ranges = trainer.strategy.broadcast([(q.minimum.tolist(), q.maximum.tolist()) for q in observed])
    for q, (low, high) in zip(observed, ranges, strict=True):
        q.set_range(torch.tensor(low), torch.tensor(high))


def _over_ranks(values: Tensor) -> None:
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
