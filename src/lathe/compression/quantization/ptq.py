"""Post-training quantization, static, dynamic, or of weights only, with equalization and bias correction.

The result is a net of `lathe.compression.quantization.net`, which computes as the integers will.

Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721.
Equalization (section 4.1): since relu(s x) = s relu(x), a channel between two layers can be divided by any s > 0 and
the next layer's weights multiplied by s. With s chosen so that the channel's weights have equal ranges on both sides,
one scale per tensor suits all channels. Bias correction (section 4.2 and appendix D, empirical): rounding a layer's
weights shifts the mean of its outputs, channel by channel. The shift, measured on calibration data, is subtracted from
the layer's bias, or added to the running mean of the BatchNorm that is its only reader.

Weight-only quantization has a scale per output channel or, for few bits, per group of weights along the input, as in
Frantar et al. 2023, "GPTQ", arXiv:2210.17323, section 4. Ranges include the largest weight: at 3 and 4 bits, ranges of
least squared error of the weights brought nets on digits no nearer to the float ones, while bias correction halves the
squared error of their outputs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lathe.compression.modes import evaluated
from lathe.compression.quantization.fake_quant import Observer, calibrate
from lathe.compression.quantization.net import (
    LayerPlan,
    Overrides,
    QuantLinear,
    freeze_observers,
    quantize,
    quantized_class,
    quantized_layers,
    set_enabled,
)
from lathe.errors import require
from lathe.measure.calls import Call, run

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (*CONVOLUTIONS, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Functions f with f(s x) = s f(x) for each channel and s > 0, by name: torch.relu, F.relu and Tensor.relu_ differ.
RECTIFIERS = frozenset({"relu", "relu_", "leaky_relu", "leaky_relu_", "dropout"})
POOLS = frozenset(
    {"max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"}
)
SAMPLES = 1024  # most inputs of bias correction at once: all of their activations are in memory
PIXELS, TOKENS = 2**23, 2**12  # most of all inputs together; a token takes the logits of a whole vocabulary


@dataclass(eq=False)
class Operation:
    """A function call of a forward pass: innermost module, tensors read and made, their dimensions."""

    name: str
    module: nn.Module | None
    reads: list[int]
    makes: list[int]
    dims: list[int]


@dataclass
class Flow:
    """The data flow of a forward pass; tensors are identified by `id` and kept alive in `alive`."""

    calls: list[Operation] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.readers: dict[int, list[Operation]] = defaultdict(list)
        self.results: Counter[int] = Counter()
        self.times: Counter[nn.Module] = Counter()

    def add(self, call: Operation) -> None:
        self.calls.append(call)
        for tensor in set(call.reads):
            self.readers[tensor].append(call)
        if call.module is not None:
            self.times[call.module] += 1

    def only_reader(self, call: Operation) -> Operation | None:
        """Return the only call that reads the result of `call`; None if several do, or the net returns it."""
        if len(call.makes) != 1 or self.results[call.makes[0]]:
            return None
        readers = self.readers[call.makes[0]]
        return readers[0] if len(readers) == 1 else None


class _Recorder(TorchFunctionMode):
    def __init__(self, flow: Flow, stack: list[nn.Module]) -> None:
        super().__init__()
        self.flow, self.stack = flow, stack

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [tensor for tensor in tensors((args, kwargs)) if not isinstance(tensor, nn.Parameter)]
        versions = [tensor._version for tensor in inputs]
        result = function(*args, **(kwargs or {}))
        outputs = tensors(result)
        self.flow.alive += [*inputs, *outputs]
        name = getattr(function, "__name__", "")
        reads, makes = [id(tensor) for tensor in inputs], [id(tensor) for tensor in outputs]
        if name == "flatten" and not (outputs[0].dim() == 2 and len(outputs[0]) == len(inputs[0])):
            name = "reshape"
        if makes and not set(makes) <= set(reads):  # not for a returned argument (dropout in eval)
            self.flow.add(
                Operation(
                    name, self.stack[-1] if self.stack else None, reads, makes, [tensor.dim() for tensor in outputs]
                )
            )
        changed = [key for key, tensor, was in zip(reads, inputs, versions, strict=True) if tensor._version != was]
        if changed and name not in RECTIFIERS:  # counts an in-place change as a reader
            self.flow.add(Operation("in_place", None, changed, [], []))
        return result


def tensors(item: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts, also of their subclasses, which pytree takes for leaves."""
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, (tuple, list)):
        return [tensor for part in item for tensor in tensors(part)]
    return []


@torch.no_grad()
def trace(net: nn.Module, example: Tensor | Call) -> Flow:
    """Return the calls of `net(example)` in eval mode, in order."""
    flow, stack = Flow(), []  # type: tuple[Flow, list[nn.Module]]

    def leave(*_: Any) -> None:
        stack.pop()  # a result would replace the output

    modules = [module for module in net.modules() if isinstance(module, LAYERS) or not list(module.children())]
    handles = [module.register_forward_pre_hook(lambda module, _: stack.append(module)) for module in modules]
    handles += [module.register_forward_hook(leave) for module in modules]
    with evaluated(net, handles), _Recorder(flow, stack):
        result = run(net, example)
    flow.alive.append(result)
    flow.results.update(id(tensor) for tensor in tensors(result))
    return flow


@dataclass(frozen=True)
class Pair:
    """Two layers with only homogeneous functions between the first one (or its BatchNorm) and the second."""

    first: str
    norm: str | None
    second: str


def find_pairs(net: nn.Module, example: Tensor | Call) -> list[Pair]:
    """Return the pairs of layers that can be equalized, in the order of the forward pass.

    Not in a pair: layers that run more than once, share a weight, or have an output with several readers, as before a
    residual sum.
    """
    flow = trace(net, example)
    names = {module: name for name, module in net.named_modules()}
    uses = Counter(id(parameter) for module in net.modules() for parameter in module.parameters(recurse=False))
    pairs = []
    for call in flow.calls:
        first = call.module
        if not _single(first, LAYERS, flow, uses):
            continue
        norm, reader, passes = None, flow.only_reader(call), []
        if reader is not None and _single(reader.module, NORMS, flow, uses):
            norm, reader = reader.module, flow.only_reader(reader)
            if norm.weight is None or (isinstance(first, nn.Linear) and call.dims != [2]):  # type: ignore[union-attr]
                continue
        # Pooling and flattening act on the pixels of a convolution, but on the channels of a linear layer.
        allowed = RECTIFIERS if isinstance(first, nn.Linear) else RECTIFIERS | POOLS | {"flatten"}
        while reader is not None and reader.name in allowed and not isinstance(reader.module, LAYERS):
            passes.append(reader.name)
            reader = flow.only_reader(reader)
        second = reader.module if reader is not None else None
        if _single(second, LAYERS, flow, uses) and fits(first, second, "flatten" in passes):
            pairs.append(Pair(names[first], names[norm] if norm is not None else None, names[second]))
    return pairs


def followers(net: nn.Module, example: Tensor | Call) -> dict[str, str]:
    """Return the BatchNorm after each layer whose output has no other reader, by name."""
    flow = trace(net, example)
    names = {module: name for name, module in net.named_modules()}
    norms = {}
    for call in flow.calls:
        reader = flow.only_reader(call)
        if not isinstance(call.module, LAYERS) or reader is None or not isinstance(reader.module, NORMS):
            continue
        if flow.times[call.module] == flow.times[reader.module] == 1:
            norms[names[call.module]] = names[reader.module]
    return norms


def _single(module: nn.Module | None, types: tuple[type[nn.Module], ...], flow: Flow, uses: Counter[int]) -> bool:
    return (
        isinstance(module, types)
        and flow.times[module] == 1
        and all(uses[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
    )


def fits(first: Any, second: Any, flattened: bool) -> bool:
    """Return whether an output channel of `first` is one input channel (or flattened block) of `second`."""
    outputs, inputs = first.weight.shape[0], second.weight.shape[1] * getattr(second, "groups", 1)
    if flattened:
        return bool(inputs % outputs == 0 and isinstance(second, nn.Linear))
    return bool(inputs == outputs and isinstance(first, nn.Linear) == isinstance(second, nn.Linear))


@torch.no_grad()
def equalize(net: nn.Module, example: Tensor | Call, iterations: int = 20, tolerance: float = 1e-3) -> list[Pair]:
    """Equalize weight ranges over every pair of layers, in place; the net's outputs do not change.

    The first layer is scaled by its BatchNorm's weight and bias, or by its own. Sweeps over all pairs until no
    channel's scale changes by more than `tolerance`, at most `iterations` times. Channels without weights on one side
    are skipped. Returns the pairs.
    """
    pairs = find_pairs(net, example)
    modules: dict[str, Any] = dict(net.named_modules())
    for _ in range(iterations):
        moved = 0.0  # the largest relative change of a channel's scale
        for pair in pairs:
            first, second = modules[pair.first], modules[pair.second]
            norm = modules[pair.norm] if pair.norm is not None else None
            written = first.weight.abs().flatten(1).amax(dim=1)
            if norm is not None:
                written = written * norm.weight.abs() / (norm.running_var + norm.eps).sqrt()
            # by input channel: [groups, channels / groups, outputs / groups, values]
            groups, channels, outputs = getattr(second, "groups", 1), len(first.weight), len(second.weight)
            weight = second.weight.detach().reshape(groups, outputs // groups, channels // groups, -1).transpose(1, 2)
            read = weight.abs().amax(dim=(2, 3)).flatten()
            # sqrt(made / read), the paper's equation 11; 1 if either is zero
            ratio = (written / read.clamp(min=1e-12)).sqrt()
            scale = torch.where(torch.minimum(written, read) < 1e-12, torch.ones_like(written), ratio)
            scaled = weight * scale.view(groups, -1, 1, 1)
            second.weight.copy_(scaled.transpose(1, 2).reshape(second.weight.shape))
            for parameter in (norm.weight, norm.bias) if norm is not None else (first.weight, first.bias):
                if parameter is not None:
                    parameter.div_(scale.view(-1, *[1] * (parameter.dim() - 1)))
            moved = max(moved, float((scale - 1).abs().max()))
        if moved <= tolerance:
            break
    return pairs


def channel_means(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Return the mean of each output channel: dimension 1 of a convolution, the last of a linear layer."""
    channel = outputs.dim() - 1 if isinstance(layer, nn.Linear) else 1
    return outputs.detach().float().mean([dim for dim in range(outputs.dim()) if dim != channel])


@torch.no_grad()
def expected_outputs(net: nn.Module, inputs: Tensor | Call) -> dict[str, Tensor]:
    """Return the mean of each output channel of every convolution and linear layer that runs once."""
    means: dict[str, list[Tensor]] = {}

    def note(name: str, layer: nn.Module, outputs: Tensor) -> None:
        means.setdefault(name, []).append(channel_means(layer, outputs))

    _run(net, inputs, note)
    return {name: values[0] for name, values in means.items() if len(values) == 1}


@torch.no_grad()
def correct_bias(
    net: nn.Module, inputs: Tensor | Call, expected: Mapping[str, Tensor], norms: Mapping[str, str]
) -> dict[str, list[str]]:
    """Restore the mean outputs `expected` of layers of the quantized `net`, in place.

    `expected` is what `expected_outputs` returned for the same `inputs` before rounding; `norms` are the layers'
    BatchNorms (`followers`). A layer is corrected as it runs, so that each correction includes the previous
    ones. Returns the layers by "bias", "batchnorm" and "uncorrected" (neither of the two).
    """
    modules: dict[str, Any] = dict(net.named_modules())
    done: dict[str, list[str]] = {"bias": [], "batchnorm": [], "uncorrected": []}

    def correct(name: str, layer: Any, outputs: Tensor) -> Tensor | None:
        if name not in expected:
            return None
        shift = channel_means(layer, outputs) - expected[name]
        if layer.bias is not None:
            layer.bias.sub_(shift)
            done["bias"].append(name)
        elif name in norms:
            modules[norms[name]].running_mean.add_(shift)
            done["batchnorm"].append(name)
            return None  # the BatchNorm runs next, and subtracts it
        else:
            done["uncorrected"].append(name)
            return None
        return outputs - shift.view(-1, *[1] * (0 if isinstance(layer, nn.Linear) else outputs.dim() - 2))

    _run(net, inputs, correct)
    return done


def bias_inputs(batches: Sequence[Tensor | Call]) -> Tensor | Call:
    """Return the first inputs as a batch, the first batch of Calls.

    At most 1024, or as many as have 8 million pixels or 4096 tokens in total.
    """
    first = batches[0]
    if isinstance(first, Call):
        return first
    tokens = not first.is_floating_point()
    size = first[0].numel() if tokens or first.dim() < 4 else first[0, 0].numel()
    rows = min(SAMPLES, max(1, (TOKENS if tokens else PIXELS) // max(size, 1)))
    # batches of documents differ in length
    alike = [batch for batch in batches if isinstance(batch, Tensor) and batch.shape[1:] == first.shape[1:]]
    return torch.cat(alike)[:rows]


def _run(net: nn.Module, inputs: Tensor | Call, act: Callable[[str, nn.Module, Tensor], Tensor | None]) -> None:
    """Run `net(inputs)` in eval mode; `act(name, layer, outputs)` may replace each layer's outputs."""

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        return lambda layer, _, outputs: act(name, layer, outputs)

    handles = [
        layer.register_forward_hook(hook(name)) for name, layer in net.named_modules() if isinstance(layer, LAYERS)
    ]
    with evaluated(net, handles):
        run(net, inputs)


@dataclass
class Quantized:
    """Layers that were quantized, pairs that were equalized, and layers whose means were corrected, by kind."""

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
        inputs, norms = bias_inputs(batches), followers(net, example)
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
