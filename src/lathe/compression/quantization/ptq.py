"""Post-training quantization: static or dynamic.

```python
quantize_static(net, batches)      # a few batches of training inputs
integers = integer_weight(net.head)
```

The result is a net of `lathe.compression.quantization.net`, which computes as the integers will.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn

from lathe.compression.quantization.bias_correction import Means
from lathe.compression.quantization.equalize import Pair, equalize
from lathe.compression.quantization.layers import QuantLinear, quantized_class
from lathe.compression.quantization.net import LayerPlan, calibrate, describe, freeze_observers, quantize, set_enabled
from lathe.errors import UserError

Observer = Literal["minmax", "percentile", "entropy"]
OBSERVERS = ("minmax", "percentile", "entropy")


@dataclass
class Quantized:
    """Quantized layers, equalized pairs, and layers whose means were corrected, by kind."""

    layers: list[str]
    pairs: list[Pair] = field(default_factory=list)
    corrected: dict[str, list[str]] = field(default_factory=dict)


def overrides_of(
    plan: LayerPlan, layer_bits: Mapping[str, int | None] | None = None, exclude: Sequence[str] = ()
) -> dict[str, LayerPlan | None]:
    """Return overrides for `quantize`: weight bits by pattern, and float layers (None, or `exclude`)."""
    return {
        **{
            str(pattern): None if bits is None else replace(plan, weight_bits=bits)
            for pattern, bits in (layer_bits or {}).items()
        },
        **dict.fromkeys(map(str, exclude), None),
    }


def refuse_quantized(net: nn.Module) -> None:
    """Raise UserError for a quantized net, whose weights are rounded already."""
    if describe(net):
        raise UserError(
            "the net is quantized already, and rounding rounded weights only loses: start from the run before it."
        )


def quantize_static(
    net: nn.Module,
    batches: Sequence[Tensor],
    plan: LayerPlan | None = None,
    overrides: Mapping[str, LayerPlan | None] | None = None,
    *,
    observer: Observer = "minmax",
    percentile: float = 99.99,
    equalization: bool = False,
    bias_correction: bool = False,
    key: str = "overrides",
) -> Quantized:
    """Quantize weights and activations statically, in place, with ranges from inputs `[batch, ...]`.

    `observer` takes the whole range, the share `percentile` of the values, or the histogram of least information loss
    (Migacz 2017, "8-bit Inference with TensorRT"). `equalization` comes first, in float; `bias_correction` last, on the
    first 1024 inputs. `key` names `overrides` in messages.

    Raises:
        UserError: the net is quantized already, there are no batches, or overrides match nothing.
    """
    refuse_quantized(net)
    if not batches:
        raise UserError("Calibration was given no batch: give at least one.")
    plan = plan or LayerPlan()
    net.eval()
    example = batches[0][:2]
    done = Quantized([])
    if equalization:
        done.pairs = equalize(net, example)
    means = Means(net, batches) if bias_correction else None
    done.layers = quantize(net, example, plan, dict(overrides or {}), key=key)
    calibrate(net, batches, method=observer, percentile=percentile)
    freeze_observers(net)
    if means is not None:
        done.corrected = means.restore(net, done.layers)
    return done


def quantize_dynamic(
    net: nn.Module,
    example: Tensor,
    plan: LayerPlan | None = None,
    overrides: Mapping[str, LayerPlan | None] | None = None,
    *,
    key: str = "overrides",
) -> Quantized:
    """Quantize weights of linear layers, in place; inputs are rounded in the range of each batch.

    Convolutions stay in float: no runtime computes them so. An embedding is quantized if it shares its weight with a
    linear layer. `example`, the net's input, shows which layers run; `key` names `overrides` in messages.

    Raises:
        UserError: the net is quantized already, has no linear layer, or a pattern matches none.
    """
    refuse_quantized(net)
    net.eval()
    chosen = linear_alone(net, overrides or {}, key)
    return start(net, quantize(net, example, replace(plan or LayerPlan(), activation="dynamic"), chosen, key=key))


def linear_alone(net: nn.Module, overrides: Mapping[str, LayerPlan | None], key: str) -> dict[str, LayerPlan | None]:
    """Add overrides that leave other layers in float; raise UserError without a linear layer or match."""
    linear = {name: module for name, module in net.named_modules() if quantized_class(module) is QuantLinear}
    if not linear:
        raise UserError(
            f"{type(net).__name__} has no linear layer, and dynamic quantization is for these alone: take static "
            "quantization (ptq_static)."
        )
    for pattern in overrides:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise UserError(
                f"{key}: the pattern {pattern!r} matches no linear layer of {type(net).__name__}, which dynamic "
                f"quantization is for; they are {', '.join(list(linear)[:5])}{', ...' if len(linear) > 5 else ''}."
            )
    tied = {id(module.weight) for module in linear.values()}
    others = [
        name
        for name, module in net.named_modules()
        if quantized_class(module) is not None and id(getattr(module, "weight", None)) not in tied
    ]
    return {**overrides, **dict.fromkeys(others, None)}


def start(net: nn.Module, layers: list[str]) -> Quantized:
    """Fix the ranges of weights and turn rounding on, for nets without calibration."""
    freeze_observers(net)
    set_enabled(net, True)
    return Quantized(layers)
