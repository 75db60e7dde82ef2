"""Quantization of a trained net, without training: to static integers, to integers whose scale each batch sets, or of
weights alone.

```python
quantize_static(net, batches)      # a few batches of training inputs
integers = integer_weight(net.head)
```

What comes out is the net in the representation of `lathe.compression.quantization.net`: it computes what the integers
will.
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
    """What was done: the quantized layers, the pairs that were equalised, and which layers' means were corrected by
    what.
    """

    layers: list[str]
    pairs: list[Pair] = field(default_factory=list)
    corrected: dict[str, list[str]] = field(default_factory=dict)


def overrides_of(
    plan: LayerPlan, layer_bits: Mapping[str, int | None] | None = None, exclude: Sequence[str] = ()
) -> dict[str, LayerPlan | None]:
    """`quantize`'s overrides for weights of `layer_bits` bits by pattern, and for layers that stay as they are (None,
    or `exclude`).
    """
    return {
        **{
            str(pattern): None if bits is None else replace(plan, weight_bits=bits)
            for pattern, bits in (layer_bits or {}).items()
        },
        **dict.fromkeys(map(str, exclude), None),
    }


def refuse_quantized(net: nn.Module) -> None:
    """Raises UserError for a net that is quantized: its weights are rounded already."""
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
    """Integer weights and activations, whose ranges come from the net's inputs `batches` `[batch, ...]`, in place.

    `observer` says how: the whole range that was seen, that of the `percentile` of the values, or the one whose
    histogram loses the least information (Migacz 2017, "8-bit Inference with TensorRT"). `equalization` comes first,
    while the net computes in float; `bias_correction` last, on the first 1024 inputs. `key` names `overrides` in
    messages.

    Raises:
        UserError: the net is quantized already, there are no batches, or a pattern of `overrides` or all of them match
            nothing.
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
    """Integer weights of linear layers, in place, whose inputs are rounded in the range of each batch as it comes: no
    calibration.

    Convolutions stay in float: no runtime computes them so. An embedding is quantized where it shares its weight with a
    linear layer. `example`, the net's input, only shows which layers run; `key` names `overrides` in messages.

    Raises:
        UserError: the net is quantized already, has no linear layer, or a pattern matches none.
    """
    refuse_quantized(net)
    net.eval()
    chosen = linear_alone(net, overrides or {}, key)
    return start(net, quantize(net, example, replace(plan or LayerPlan(), activation="dynamic"), chosen, key=key))


def linear_alone(net: nn.Module, overrides: Mapping[str, LayerPlan | None], key: str) -> dict[str, LayerPlan | None]:
    """The overrides, and one for each layer of another kind, which leaves it in float.

    Raises:
        UserError: the net has no linear layer, or a pattern matches none.
    """
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
    """Fixes the ranges of weights and turns rounding on, for nets whose activations need no calibration."""
    freeze_observers(net)
    set_enabled(net, True)
    return Quantized(layers)
