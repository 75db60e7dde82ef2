"""Cross-layer equalization.

Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section
4.1. Since relu(s x) = s relu(x), a channel between two layers can be divided by any s > 0 and the next layer's weights
multiplied by s. With s chosen so that the channel's weights have equal ranges on both sides, one scale per tensor suits
all channels.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lathe.compression.modes import evaluated

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (*CONVOLUTIONS, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Functions f with f(s x) = s f(x) for each channel and s > 0, by name: torch.relu, F.relu and Tensor.relu_ differ.
RECTIFIERS = frozenset({"relu", "relu_", "leaky_relu", "leaky_relu_", "dropout"})
POOLS = frozenset(
    {"max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"}
)


@dataclass(eq=False)
class Call:
    """A function call of a forward pass: innermost module, tensors read and made, their dimensions."""

    name: str
    module: nn.Module | None
    reads: list[int]
    makes: list[int]
    dims: list[int]


@dataclass
class Flow:
    """The data flow of a forward pass; tensors are identified by `id` and kept alive in `kept`."""

    calls: list[Call] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.readers: dict[int, list[Call]] = defaultdict(list)
        self.results: Counter[int] = Counter()
        self.times: Counter[nn.Module] = Counter()

    def add(self, call: Call) -> None:
        self.calls.append(call)
        for tensor in set(call.reads):
            self.readers[tensor].append(call)
        if call.module is not None:
            self.times[call.module] += 1

    def only_reader(self, call: Call) -> Call | None:
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
        self.flow.kept += [*inputs, *outputs]
        name, reads, makes = (
            getattr(function, "__name__", ""),
            [id(tensor) for tensor in inputs],
            [id(tensor) for tensor in outputs],
        )
        if name == "flatten" and not (outputs[0].dim() == 2 and len(outputs[0]) == len(inputs[0])):
            name = "reshape"
        if makes and not set(makes) <= set(reads):  # not for a returned argument (dropout in eval)
            self.flow.add(
                Call(name, self.stack[-1] if self.stack else None, reads, makes, [tensor.dim() for tensor in outputs])
            )
        changed = [key for key, tensor, was in zip(reads, inputs, versions, strict=True) if tensor._version != was]
        if changed and name not in RECTIFIERS:  # counts an in-place change as a reader
            self.flow.add(Call("in_place", None, changed, [], []))
        return result


def tensors(item: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts."""
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, (tuple, list)):
        return [tensor for part in item for tensor in tensors(part)]
    return []


def _pop(stack: list[nn.Module]) -> None:
    stack.pop()  # returns None: a hook's result would replace the output


@torch.no_grad()
def trace(net: nn.Module, example: Tensor) -> Flow:
    """Return the calls of `net(example)` in eval mode, in order."""
    flow, stack = Flow(), []  # type: tuple[Flow, list[nn.Module]]
    modules = [
        module for module in net.modules() if not any(True for _ in module.children()) or isinstance(module, LAYERS)
    ]
    handles = [module.register_forward_pre_hook(lambda module, _: stack.append(module)) for module in modules]
    handles += [module.register_forward_hook(lambda *_: _pop(stack)) for module in modules]
    with evaluated(net, handles), _Recorder(flow, stack):
        result = net(example)
    flow.kept.append(result)
    flow.results.update(id(tensor) for tensor in tensors(result))
    return flow


@dataclass(frozen=True)
class Pair:
    """Two layers with only homogeneous functions between the first one (or its BatchNorm) and the second."""

    first: str
    norm: str | None
    second: str


def find_pairs(net: nn.Module, example: Tensor) -> list[Pair]:
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


def followers(net: nn.Module, example: Tensor) -> dict[str, str]:
    """Return the BatchNorm after each layer whose output has no other reader, by name."""
    flow = trace(net, example)
    names = {module: name for name, module in net.named_modules()}
    found = {}
    for call in flow.calls:
        reader = flow.only_reader(call)
        if not isinstance(call.module, LAYERS) or reader is None or not isinstance(reader.module, NORMS):
            continue
        if flow.times[call.module] == flow.times[reader.module] == 1:
            found[names[call.module]] = names[reader.module]
    return found


def _single(module: nn.Module | None, types: tuple[type[nn.Module], ...], flow: Flow, uses: Counter[int]) -> bool:
    return (
        isinstance(module, types)
        and flow.times[module] == 1
        and all(uses[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
    )


def fits(first: Any, second: Any, flattened: bool) -> bool:
    """Return whether an output channel of `first` is one input channel (or flattened block) of `second`."""
    made, read = first.weight.shape[0], second.weight.shape[1] * getattr(second, "groups", 1)
    if flattened:
        return bool(read % made == 0 and isinstance(second, nn.Linear))
    return bool(read == made and isinstance(first, nn.Linear) == isinstance(second, nn.Linear))


def by_input(layer: Any, channels: int) -> Tensor:
    """Return a weight by input channel: [groups, channels / groups, outputs / groups, values]."""
    groups = getattr(layer, "groups", 1)
    weight: Tensor = layer.weight.detach()
    return weight.reshape(groups, len(weight) // groups, channels // groups, -1).transpose(1, 2)


@torch.no_grad()
def equalize(net: nn.Module, example: Tensor, iterations: int = 20, tolerance: float = 1e-3) -> list[Pair]:
    """Equalize weight ranges over every pair of layers, in place; the net's outputs do not change.

    The first layer is scaled by its BatchNorm's weight and bias, or by its own. Sweeps over all pairs until no
    channel's scale changes by more than `tolerance`, at most `iterations` times. Channels without weights on one side
    are skipped. Returns the pairs.
    """
    pairs = find_pairs(net, example)
    modules: dict[str, Any] = dict(net.named_modules())
    for _ in range(iterations):
        moved = max((_equalize(pair, modules) for pair in pairs), default=0.0)
        if moved <= tolerance:
            break
    return pairs


def _equalize(pair: Pair, modules: dict[str, Any]) -> float:
    """Equalize one pair; return the largest relative change of a channel's scale."""
    first, second = modules[pair.first], modules[pair.second]
    norm = modules[pair.norm] if pair.norm is not None else None
    channels = len(first.weight)
    made = first.weight.abs().flatten(1).amax(dim=1)
    if norm is not None:
        made = made * norm.weight.abs() / (norm.running_var + norm.eps).sqrt()
    read = by_input(second, channels)
    scale = channel_scale(made, read.abs().amax(dim=(2, 3)).flatten())
    scaled = read * scale.view(len(read), -1, 1, 1)
    second.weight.copy_(scaled.transpose(1, 2).reshape(second.weight.shape))
    for parameter in (norm.weight, norm.bias) if norm is not None else (first.weight, first.bias):
        if parameter is not None:
            parameter.div_(scale.view(-1, *[1] * (parameter.dim() - 1)))
    return float((scale - 1).abs().max())


def channel_scale(made: Tensor, read: Tensor) -> Tensor:
    """Return sqrt(made / read) of each channel (the paper's equation 11), or 1 if either is zero."""
    nothing = torch.minimum(made, read) < 1e-12
    return torch.where(nothing, torch.ones_like(made), (made / read.clamp(min=1e-12)).sqrt())
