"""Post-training quantization of the best weights, by `lathe.compression.quantization.ptq`."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from pydantic import Field
from torch import Tensor, nn

from lathe.callbacks.methods.base import Compression
from lathe.compression.quantization.layer_plan import LayerPlan, choose, float_sentence
from lathe.compression.quantization.ptq import (
    Quantized,
    linear_alone,
    overrides_of,
    quantize_dynamic,
    quantize_static,
    refuse_quantized,
)
from lathe.compression.quantization.weight_only import quantize_weights
from lathe.config.types import Bits, Count, Name
from lathe.config.validation import validated
from lathe.data.transfer import train_batches
from lathe.errors import UserError
from lathe.measure.flops import net_input


class _AfterTraining(Compression):
    """Base class: layers, bits and report. `name` is the method's key in the configuration."""

    name = ""
    batches = 1
    plan: LayerPlan

    def __init__(
        self, weight_bits: int, layer_bits: Mapping[str, int | None] | None = None, exclude: Sequence[str] | None = None
    ) -> None:
        self.weight_bits = weight_bits
        self.layer_bits, self.exclude = dict(layer_bits or {}), list(exclude or [])
        self.key = f"compression.{self.name}"  # the prefix of messages
        self._layers: dict[str, int] = {}

    def check(self, net: nn.Module) -> None:
        refuse_quantized(net)
        self.check_layers(net)

    def overrides(self) -> dict[str, LayerPlan | None]:
        """Return the layers that differ from `plan`, by pattern."""
        return overrides_of(self.plan, self.layer_bits, self.exclude)

    def check_layers(self, net: nn.Module) -> None:
        """Raise UserError for options that don't fit the net."""
        choose(net, self.plan, self.overrides(), self.key)

    def finalise(self, net: nn.Module, datamodule: Any) -> bool:
        refuse_quantized(net)
        net.eval()
        done = self.act(net, inputs_of(datamodule, self.batches))
        self._layers = {"layers": len(done.layers)}
        if done.pairs:
            self._layers["pairs"] = len(done.pairs)
        corrected = sum(len(done.corrected.get(kind, ())) for kind in ("bias", "batchnorm"))
        if corrected:
            self._layers["corrected"] = corrected
        self.tell_what_is_left(net, done.layers)
        left = done.corrected.get("uncorrected", [])
        if left and len(left) >= corrected:  # no warning for a few layers, such as a head without a bias
            rank_zero_warn(
                f"compression.{self.name}.bias_correction=true: {len(left)} of {len(left) + corrected} layers, such as "
                f"{left[0]}, have neither a bias nor a BatchNorm that alone reads them, so their means stay shifted."
            )
        return True

    def tell_what_is_left(self, net: nn.Module, layers: Sequence[str]) -> None:
        """Warn of weights that are still float, unless they were excluded."""
        sentence = float_sentence(net, self.key, self.overrides())
        if sentence is not None:
            rank_zero_warn(sentence)

    def act(self, net: nn.Module, batches: list[Tensor]) -> Quantized:
        """Quantize `net` in place; `batches` are training inputs."""
        raise NotImplementedError

    def report(self) -> dict[str, float]:
        return {f"{self.name}/{what}": float(count) for what, count in self._layers.items()}


class PTQStatic(_AfterTraining):
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
        observer: Literal["minmax", "percentile", "entropy"] = "minmax",
        percentile: Annotated[float, Field(gt=50, le=100)] = 99.99,
        weight_bits: Bits = 8,
        activation_bits: Bits = 8,
        per_channel: bool = True,
        equalize: bool = False,
        bias_correction: bool = True,
        layer_bits: Mapping[str, Bits | None] | None = None,
        exclude: Sequence[Name] | None = None,
    ) -> None:
        super().__init__(weight_bits, layer_bits, exclude)
        self.batches = batches
        self.observer, self.percentile = observer, percentile
        self.equalize, self.bias_correction = equalize, bias_correction
        self.plan = LayerPlan(weight_bits=weight_bits, activation_bits=activation_bits, per_channel=per_channel)

    def act(self, net: nn.Module, batches: list[Tensor]) -> Quantized:
        done = quantize_static(
            net,
            batches,
            self.plan,
            self.overrides(),
            observer=self.observer,
            percentile=self.percentile,
            equalization=self.equalize,
            bias_correction=self.bias_correction,
            key=self.key,
        )
        if self.equalize and not done.pairs:
            rank_zero_warn(
                f"compression.{self.name}.equalize=true found no two layers with only BatchNorm, ReLU or pooling "
                "between them, so nothing was equalised: this net has another kind of activation; leave it false."
            )
        return done


class PTQDynamic(_AfterTraining):
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
        layer_bits: Mapping[str, Bits | None] | None = None,
        exclude: Sequence[Name] | None = None,
    ) -> None:
        super().__init__(weight_bits, layer_bits, exclude)
        self.plan = LayerPlan(
            weight_bits=weight_bits, activation_bits=activation_bits, per_channel=per_channel, activation="dynamic"
        )

    def check_layers(self, net: nn.Module) -> None:
        linear_alone(net, self.overrides(), self.key)

    def act(self, net: nn.Module, batches: list[Tensor]) -> Quantized:
        return quantize_dynamic(net, batches[0], self.plan, self.overrides(), key=self.key)

    def tell_what_is_left(self, net: nn.Module, layers: Sequence[str]) -> None:
        share = weights_in(net, layers)
        if share < 0.5:
            rank_zero_warn(
                f"compression.{self.name} quantizes linear layers alone, which hold {share:.1%} of this net's "
                "parameters: the rest stays in float; compression=ptq_static takes convolutions too."
            )


class WeightOnly(_AfterTraining):
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
        layer_bits: Mapping[str, Bits | None] | None = None,
        exclude: Sequence[Name] | None = None,
    ) -> None:
        super().__init__(weight_bits, layer_bits, exclude)
        self.batches = batches
        self.bias_correction = bias_correction
        self.plan = LayerPlan(weight_bits=weight_bits, activation_bits=None, activation="none", group_size=group_size)

    def check_layers(self, net: nn.Module) -> None:
        self.ungrouped(net, list(choose(net, self.plan, self.overrides(), self.key)))

    def ungrouped(self, net: nn.Module, layers: Sequence[str]) -> list[str]:
        """Return the layers whose weights per output do not divide into groups; raise UserError if all are."""
        size = self.plan.group_size
        if size is None:
            return []
        left = [name for name in layers if net.get_submodule(name).weight[0].numel() % size]  # type: ignore[index]
        if len(left) == len(layers):
            raise UserError(f"{self.key}.group_size={size}: it divides the inputs of no layer; give another, or null.")
        return left

    def act(self, net: nn.Module, batches: list[Tensor]) -> Quantized:
        correct = self.bias_correction
        done = quantize_weights(net, batches, self.plan, self.overrides(), bias_correction=correct, key=self.key)
        left = self.ungrouped(net, done.layers)
        if left:
            rank_zero_warn(
                f"compression.{self.name}.group_size={self.plan.group_size} does not divide the inputs of {len(left)} "
                f"layers, such as {left[0]}: these have one scale for each output channel."
            )
        return done


def inputs_of(datamodule: Any, batches: int) -> list[Tensor]:
    """Return the inputs of the first `batches` training batches."""
    return [net_input(batch) for batch in islice(train_batches(datamodule), batches)]


def weights_in(net: nn.Module, layers: Sequence[str]) -> float:
    """Return the share of the net's parameters in `layers`."""
    inside = {id(p): p.numel() for name in layers for p in net.get_submodule(name).parameters(recurse=False)}
    return sum(inside.values()) / max(sum(p.numel() for p in net.parameters()), 1)
