"""Callbacks of quantization: during training (QAT), and after it, of the best weights (PTQ)."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.compression.callback import Compression, an_input, inputs_of, steps_of
from lathe.compression.modes import is_compiled
from lathe.compression.quantization import ptq
from lathe.compression.quantization.fake_quant import FakeQuantize, Observer, TrainingObserver, update_quantizers
from lathe.compression.quantization.net import (
    LayerPlan,
    Trace,
    Weighted,
    choose,
    float_sentence,
    quantize,
    quantized_layers,
    quantizers,
    reopen,
    weighted,
)
from lathe.config.types import Bits, Count, Name, Share
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require
from lathe.measure.shards import whole
from lathe.tasks.core import core_of

EXAMPLES = 64  # samples of the trace of layers and a first range
RECOMPILATIONS = 64  # compiled graphs per function, which rounding, observing and frozen statistics change once each
LayerBits = Mapping[str, Bits | None]  # bits of weights by pattern of layer names; None: float
Percentile = Annotated[float, Field(gt=50, le=100)]


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
        layer_bits: LayerBits | None = None,
        exclude: Sequence[Name] | None = None,
        start: Share = 0.2,
        freeze_observers: Share | None = 0.8,
        freeze_batchnorm: Share | None = 0.8,
        observer: TrainingObserver = "moving_average",
        percentile: Percentile = 99.99,
    ) -> None:
        if freeze_observers is not None and freeze_observers < start:
            raise ArgumentError(f"freeze_observers={freeze_observers} lies before start={start}: freeze later.")
        self.plan = LayerPlan(bits, activation_bits, per_channel, lsq)
        self.overrides = ptq.overrides_of(self.plan, layer_bits, exclude)
        self.start, self.freeze_observers, self.freeze_batchnorm = start, freeze_observers, freeze_batchnorm
        self.observer, self.percentile = observer, percentile
        self._quantizers: list[FakeQuantize] = []
        self._layers: dict[str, nn.Module] = {}
        self._weighted: dict[str, Weighted] = {}
        self._norms: list[nn.Module] = []
        self._parameters = 0
        self._steps: dict[str, float] = {}
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        net = core_of(pl_module)
        key = "compression.qat.layer_bits"
        self._layers = quantized_layers(net)
        if not self._layers:
            quantize(net, _example(trainer, pl_module, net), self.plan, self.overrides, key=key)
            self._layers = quantized_layers(net)
            if trainer.world_size > 1:  # each rank has read different samples
                observed = [q for q in quantizers(net) if not q.follows]
                ranges = trainer.strategy.broadcast([(q.minimum.tolist(), q.maximum.tolist()) for q in observed])
                for q, (low, high) in zip(observed, ranges, strict=True):
                    q.set_range(torch.tensor(low), torch.tensor(high))
            sentence = float_sentence(net, "compression.qat", self.overrides)
            if sentence is not None:
                rank_zero_warn(sentence)
        else:
            plans = choose(net, self.plan, self.overrides, key)
            same = all(layer.__dict__["plan"] == plans.get(name) for name, layer in self._layers.items())
            # float layers are right if the net does not call them
            left = [name for name in plans if name not in self._layers] if same else []
            require(
                same and not (left and Trace(net, _example(trainer, pl_module, net), left).called),
                "compression.qat: the net is quantized already, in another way: start from its float weights.",
            )
        self._quantizers = quantizers(net)
        self._weighted = weighted(net)
        self._parameters = sum(parameter.numel() for parameter in net.parameters())
        for q in self._quantizers:
            q.observer, q.percentile = self.observer, self.percentile
        if is_compiled(net):
            import torch._dynamo.config as dynamo

            dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILATIONS)
            # torch 2.13's compiler instantiates each autograd function, and warns of that itself
            warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # synchronized BatchNorm layers have replaced plain ones since setup
        self._norms = [module for module in core_of(pl_module).modules() if isinstance(module, _BatchNorm)]
        for q in self._quantizers:
            q.sync()  # a strategy may have written the buffers directly
        if steps_of(trainer) == 0:
            reopen(core_of(pl_module))  # the run may start from a net with fixed ranges
        shares = {"start": self.start, "observers": self.freeze_observers, "batchnorm": self.freeze_batchnorm}
        self._steps = {
            name: math.inf if share is None else self.step_at(trainer, share) for name, share in shares.items()
        }
        self._step = steps_of(trainer)
        self._apply(self._step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._freeze_norms(steps_of(trainer))  # train() has unfrozen them

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = steps_of(trainer)
        if step > self._step:  # not while gradients accumulate
            self._step = step
            maximum = None
            if trainer.world_size > 1:
                maximum = partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX)
            update_quantizers(self._quantizers, maximum)
            self._apply(step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._quantizers and not self.ready(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # a connector sets it
            rank_zero_warn(
                f"compression.qat: training ended at step {steps_of(trainer)}, before rounding began at step "
                f"{self._steps['start']}. Lower compression.qat.start, or train longer."
            )

    def _apply(self, step: int) -> None:
        """Switch quantizers and BatchNorm to their state after optimizer step `step`."""
        if step >= self._steps["start"] and not all(q.is_enabled for q in self._quantizers):
            # LSQ's scales start from the observed ranges and the weights' mean
            weights = {id(layer.weight_quantizer): layer.weight for layer in self._weighted.values()}
            for q in self._quantizers:
                if q.lsq and q.follows:
                    q.set_first_step(whole(weights[id(q)]))
                elif q.lsq:
                    q.set_range(q.minimum, q.maximum)
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

    def ready(self, trainer: Trainer) -> bool:
        return bool(self._quantizers) and all(q.is_enabled for q in self._quantizers)

    def report(self) -> dict[str, float]:
        """Return `qat/layers`, without sums, and `qat/bits`, the mean over all parameters with 32 for float."""
        weights = {id(layer.weight): layer for layer in self._weighted.values()}
        saved = sum(layer.weight.numel() * (32 - layer.__dict__["plan"].weight_bits) for layer in weights.values())
        return {"qat/layers": float(len(self._weighted)), "qat/bits": 32 - saved / max(self._parameters, 1)}


def _example(trainer: Trainer, pl_module: LightningModule, net: nn.Module) -> Any:
    """Return the inputs of up to 64 validation samples, on the net's device."""
    return an_input(trainer, pl_module, EXAMPLES, next(net.parameters()).device)


class AfterTraining(Compression):
    """Base class; `name` is the method's key in the configuration.

    A subclass sets `quantize`, a function of a net, training inputs (tensors or Calls), `plan` and `overrides`.
    """

    name = ""

    def __init__(
        self,
        plan: LayerPlan,
        layer_bits: LayerBits | None,
        exclude: Sequence[str] | None,
        quantize: Callable[..., ptq.Quantized],
        batches: int = 1,
    ) -> None:
        self.plan, self.overrides = plan, ptq.overrides_of(plan, layer_bits, exclude)
        self.quantize, self.batches = quantize, batches
        self.key = f"compression.{self.name}"  # in messages
        self._counts: dict[str, int] = {}

    def check(self, net: nn.Module) -> None:
        ptq.require_float(net)
        choose(net, self.plan, self.overrides, self.key)

    def finalise(self, net: nn.Module, datamodule: Any) -> bool:
        done = self.quantize(net, inputs_of(datamodule, self.batches), self.plan, self.overrides, key=self.key)
        corrected = sum(len(done.corrected.get(kind, ())) for kind in ("bias", "batchnorm"))
        self._counts = {"layers": len(done.layers), "pairs": len(done.pairs), "corrected": corrected}
        left = done.corrected.get("uncorrected", [])
        if left and len(left) >= corrected:  # no warning for a few layers, such as a head without a bias
            rank_zero_warn(
                f"{self.key}.bias_correction=true: {len(left)} of {len(left) + corrected} layers, such as {left[0]}, "
                "have neither a bias nor a BatchNorm of their own, so their means stay shifted."
            )
        self.warn(net, done)
        return True

    def warn(self, net: nn.Module, done: ptq.Quantized) -> None:
        """Warn of weights that are still float, unless they were excluded."""
        sentence = float_sentence(net, self.key, self.overrides)
        if sentence is not None:
            rank_zero_warn(sentence)

    def report(self) -> dict[str, float]:
        return {f"{self.name}/{what}": float(count) for what, count in self._counts.items() if count}


class PTQStatic(AfterTraining):
    """Static integers for weights and activations, calibrated on the first `batches` training batches.

    `equalize` balances channels across layers first, `bias_correction` restores each layer's mean outputs at the end
    (both Nagel et al. 2019); `observer` and `percentile` choose the activations' ranges. By pattern of layer names,
    `layer_bits` sets the bits of weights (None: float); layers in `exclude` stay in float.
    """

    name = "ptq_static"

    @validated
    def __init__(
        self,
        batches: Count = 16,
        observer: Observer = "minmax",
        percentile: Percentile = 99.99,
        weight_bits: Bits = 8,
        activation_bits: Bits = 8,
        per_channel: bool = True,
        equalize: bool = False,
        bias_correction: bool = True,
        layer_bits: LayerBits | None = None,
        exclude: Sequence[Name] | None = None,
    ) -> None:
        quantize = partial(
            ptq.quantize_static,
            observer=observer,
            percentile=percentile,
            equalization=equalize,
            bias_correction=bias_correction,
        )
        plan = LayerPlan(weight_bits, activation_bits, per_channel)
        super().__init__(plan, layer_bits, exclude, quantize, batches)
        self.equalize = equalize

    def warn(self, net: nn.Module, done: ptq.Quantized) -> None:
        super().warn(net, done)
        if self.equalize and not done.pairs:
            rank_zero_warn(
                f"{self.key}.equalize=true found no two layers with only BatchNorm, ReLU or pooling between them: "
                "leave it false."
            )


class PTQDynamic(AfterTraining):
    """Integer weights of linear layers, whose inputs are rounded in each batch's range; no calibration.

    Convolutions stay in float, as no runtime is faster with them; a warning reports a small quantized share. The
    options are those of `PTQStatic`.
    """

    name = "ptq_dynamic"

    @validated
    def __init__(
        self,
        weight_bits: Bits = 8,
        activation_bits: Bits = 8,
        per_channel: bool = True,
        layer_bits: LayerBits | None = None,
        exclude: Sequence[Name] | None = None,
    ) -> None:
        plan = LayerPlan(weight_bits, activation_bits, per_channel, activation="dynamic")

        def quantize(net: nn.Module, batches: list[Any], *args: Any, **options: Any) -> ptq.Quantized:
            return ptq.quantize_dynamic(net, batches[0], *args, **options)

        super().__init__(plan, layer_bits, exclude, quantize)

    def check(self, net: nn.Module) -> None:
        ptq.require_float(net)
        ptq.linear_only(net, self.overrides, self.key)

    def warn(self, net: nn.Module, done: ptq.Quantized) -> None:
        inside = {id(p): p.numel() for name in done.layers for p in net.get_submodule(name).parameters(recurse=False)}
        share = sum(inside.values()) / max(sum(p.numel() for p in net.parameters()), 1)
        if share < 0.5:
            rank_zero_warn(
                f"{self.key} quantizes linear layers alone, which hold {share:.1%} of this net's parameters. Use "
                "compression=ptq_static for convolutions too."
            )


class WeightOnly(AfterTraining):
    """Integer weights of linear layers, convolutions and embeddings; the net computes in float.

    `group_size` consecutive weights along the input dimension share a scale; None is one scale per output channel.
    `bias_correction` restores each layer's mean outputs on `batches` training batches. The other options are those of
    `PTQStatic`.
    """

    name = "weight_only"

    @validated
    def __init__(
        self,
        weight_bits: Bits = 8,
        group_size: Annotated[int, Field(ge=2)] | None = None,
        bias_correction: bool = True,
        batches: Count = 16,
        layer_bits: LayerBits | None = None,
        exclude: Sequence[Name] | None = None,
    ) -> None:
        plan = LayerPlan(weight_bits, activation_bits=None, activation="none", group_size=group_size)
        quantize = partial(ptq.quantize_weights, bias_correction=bias_correction)
        super().__init__(plan, layer_bits, exclude, quantize, batches)

    def check(self, net: nn.Module) -> None:
        super().check(net)
        self.ungrouped(net, list(choose(net, self.plan, self.overrides, self.key)))

    def ungrouped(self, net: nn.Module, layers: Sequence[str]) -> list[str]:
        """Return the layers whose weights per output do not divide into groups; raise UserError if all are."""
        size = self.plan.group_size
        if size is None:
            return []
        left = [name for name in layers if net.get_submodule(name).weight[0].numel() % size]  # type: ignore[index]
        if len(left) == len(layers):
            raise UserError(f"{self.key}.group_size={size}: it divides the inputs of no layer; give another, or null.")
        return left

    def warn(self, net: nn.Module, done: ptq.Quantized) -> None:
        super().warn(net, done)
        left = self.ungrouped(net, done.layers)
        if left:
            rank_zero_warn(
                f"{self.key}.group_size={self.plan.group_size} does not divide the inputs of {len(left)} layers, such "
                f"as {left[0]}: these have one scale for each output channel."
            )
