"""Post-training quantization: static, dynamic, or of weights only.

```python
quantize_static(net, batches)      # a few batches of training inputs
integers = integer_weight(net.head)
```

The result is a net of `lathe.compression.quantization.net`, which computes as the integers will.

Weight-only quantization has a scale per output channel or, for few bits, per group of weights along the input, as in
Frantar et al. 2023, "GPTQ", arXiv:2210.17323, section 4. Ranges include the largest weight: at 3 and 4 bits, ranges of
least squared error of the weights brought nets on digits no nearer to the float ones, while bias correction halves the
squared error of their outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lathe.compression.quantization.calibration import Observer, calibrate
from lathe.compression.quantization.equalize import (
    Pair,
    correct_bias,
    equalize,
    expected_outputs,
    first_inputs,
    followers,
)
from lathe.compression.quantization.layers import LayerPlan, Overrides, QuantLinear, quantized_class, quantized_layers
from lathe.compression.quantization.net import freeze_observers, quantize, set_enabled
from lathe.errors import require
from lathe.measure.calls import Call


@dataclass
class Quantized:
    """Quantized layers, equalized pairs, and layers whose means were corrected, by kind."""

    layers: list[str]
    pairs: list[Pair] = field(default_factory=list)
    corrected: dict[str, list[str]] = field(default_factory=dict)


def overrides_of(
    plan: LayerPlan, layer_bits: Mapping[str, int | None] | None, exclude: Sequence[str] | None = None
) -> dict[str, LayerPlan | None]:
    """Return the layers that differ from `plan`, by pattern: weight bits, and float layers (None, or `exclude`)."""
    differ: dict[str, LayerPlan | None] = {}
    for pattern, bits in (layer_bits or {}).items():
        differ[str(pattern)] = None if bits is None else replace(plan, weight_bits=bits)
    return differ | dict.fromkeys(map(str, exclude or ()))


def require_float(net: nn.Module) -> None:
    """Raise UserError for a quantized net, whose weights are rounded already."""
    require(not quantized_layers(net), "the net is quantized already: start from the run before it.")


def quantize_static(
    net: nn.Module,
    batches: Sequence[Tensor | Call],
    plan: LayerPlan | None = None,
    overrides: Overrides | None = None,
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
    plan = plan or LayerPlan()
    calibration = (observer, percentile)
    return _quantize(net, batches, plan, overrides, key, bias_correction, equalization, calibration)


def quantize_dynamic(
    net: nn.Module,
    example: Tensor | Call,
    plan: LayerPlan | None = None,
    overrides: Overrides | None = None,
    *,
    key: str = "overrides",
) -> Quantized:
    """Quantize weights of linear layers, in place; inputs are rounded in the range of each batch.

    Convolutions stay in float: no runtime computes them so. An embedding is quantized if it shares its weight with a
    linear layer. `example`, the net's input, shows which layers run; `key` names `overrides` in messages.

    Raises:
        UserError: the net is quantized already, has no linear layer, or a pattern matches none.
    """
    require_float(net)
    plan = replace(plan or LayerPlan(), activation="dynamic")
    return _quantize(net, [example], plan, linear_only(net, overrides or {}, key), key)


def linear_only(net: nn.Module, overrides: Overrides, key: str) -> dict[str, LayerPlan | None]:
    """Add overrides that leave other layers in float; raise UserError without a linear layer or match."""
    linear = {name: module for name, module in net.named_modules() if quantized_class(module) is QuantLinear}
    require(
        bool(linear),
        f"{type(net).__name__} has no linear layer, and dynamic quantization is for these alone: take ptq_static.",
    )
    for pattern in overrides:
        require(
            any(fnmatchcase(name, pattern) for name in linear),
            f"{key}: the pattern {pattern!r} matches no linear layer; they are {', '.join(list(linear)[:5])}, ...",
        )
    tied = {id(module.weight) for module in linear.values()}
    others = [
        name
        for name, module in net.named_modules()
        if quantized_class(module) is not None and id(getattr(module, "weight", None)) not in tied
    ]
    return {**overrides, **dict.fromkeys(others, None)}


def quantize_weights(
    net: nn.Module,
    batches: Sequence[Tensor | Call],
    plan: LayerPlan | None = None,
    overrides: Overrides | None = None,
    *,
    bias_correction: bool = False,
    key: str = "overrides",
) -> Quantized:
    """Quantize weights of convolutions, linear layers and embeddings, in place.

    The first of the inputs `batches` `[batch, ...]` shows which layers run; `bias_correction` measures means on the
    first 1024. A layer whose weights per output (of a convolution: channels x kernel) do not divide by the plan's
    `group_size` has one scale per output channel. `key` names `overrides` in messages.

    Raises:
        UserError: the net is quantized already, there are no batches or layers, or a pattern matches nothing.
    """
    plan = replace(plan or LayerPlan(), activation_bits=None, activation="none")
    return _quantize(net, batches, plan, overrides, key, bias_correction)


def _quantize(
    net: nn.Module,
    batches: Sequence[Tensor | Call],
    plan: LayerPlan,
    overrides: Overrides | None,
    key: str,
    bias_correction: bool = False,
    equalization: bool = False,
    calibration: tuple[Observer, float] | None = None,
) -> Quantized:
    require_float(net)
    require(bool(batches), "Quantization was given no batch: give at least one.")
    net.eval()
    example = batches[0][:2]
    pairs = equalize(net, example) if equalization else []
    if bias_correction:
        inputs, norms = first_inputs(batches), followers(net, example)
        expected = expected_outputs(net, inputs)
    done = Quantized(quantize(net, example, plan, overrides, key=key), pairs)
    if calibration is not None:
        calibrate(net, batches, *calibration)
    freeze_observers(net)
    set_enabled(net, True)
    if bias_correction:
        of_layers = {name: mean for name, mean in expected.items() if name in done.layers}
        done.corrected = correct_bias(net, inputs, of_layers, norms)
    return done
