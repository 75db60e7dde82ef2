"""Fake quantization of a net: layers that round their input and weights, made by a change of class.

```python
names = quantize(net, example)             # 8 bits for weights and activations
for x, y in batches:                       # train, with fake quantization on
    set_enabled(net, True)
    ...; optimizer.step(); update_ranges(net)
integers, scale = integer_weight(net.get_submodule(names[0]))
```
"""

import copy
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.compression.modes import evaluated, uncompiled
from lathe.compression.pruning.masks import weights_of
from lathe.compression.quantization.fake_quant import (
    FakeQuantize,
    TrainingObserver,
    quantizers,
    some_quantizers,
    update_quantizers,
)
from lathe.config.types import Bits, Count
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, did_you_mean, require
from lathe.measure.calls import run


class QuantConv2d(nn.Conv2d):
    """`nn.Conv2d` with a `weight_quantizer` and an `input_quantizer`; None is float."""

    weight_quantizer: FakeQuantize | None
    input_quantizer: FakeQuantize | None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_quantizer is None else self.input_quantizer(x)
        weight = self.weight if self.weight_quantizer is None else self.weight_quantizer(self.weight)
        return self._conv_forward(x, weight, self.bias)


class QuantLinear(nn.Linear):
    """`nn.Linear` with a `weight_quantizer` and an `input_quantizer`; None is float."""

    weight_quantizer: FakeQuantize | None
    input_quantizer: FakeQuantize | None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_quantizer is None else self.input_quantizer(x)
        weight = self.weight if self.weight_quantizer is None else self.weight_quantizer(self.weight)
        return F.linear(x, weight, self.bias)


class QuantEmbedding(nn.Embedding):
    """`nn.Embedding` with a `weight_quantizer`, whose channels are rows."""

    weight_quantizer: FakeQuantize | None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight_quantizer is None else self.weight_quantizer(self.weight)
        return F.embedding(
            x, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class QuantAdd(nn.Module):
    """Sum of two tensors rounded by `input_quantizer` and `other_quantizer`; made of a class named `Add`."""

    input_quantizer: FakeQuantize
    other_quantizer: FakeQuantize

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cast(Tensor, self.input_quantizer(x) + self.other_quantizer(y))


Weighted = QuantConv2d | QuantLinear | QuantEmbedding
QuantLayer = Weighted | QuantAdd
WEIGHTED = {nn.Conv2d: QuantConv2d, nn.Linear: QuantLinear, nn.Embedding: QuantEmbedding}


def quantized_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that quantizes `module`; None for others and for subclasses, which may differ."""
    kind = type(module)
    if kind in WEIGHTED:
        return WEIGHTED[kind]
    is_add = kind.__name__ == "Add" and not list(module.children()) and not list(module.parameters())
    return QuantAdd if is_add else None


def roles_of(module: nn.Module) -> tuple[str, ...]:
    """Return the quantizers that a layer has, or will have once quantized."""
    kind = quantized_class(module) or type(module)
    if issubclass(kind, QuantAdd):
        return ("input_quantizer", "other_quantizer")
    return ("weight_quantizer",) if issubclass(kind, QuantEmbedding) else ("weight_quantizer", "input_quantizer")


def to_quantized(module: nn.Module) -> None:
    """Change the class of a plain layer; quantizers are None until set."""
    kind = quantized_class(module)
    assert kind is not None
    module.__dict__["_plain_class"] = type(module)
    module.__class__ = kind  # parameters, hooks and names stay; a wrapper would rename them
    for role in roles_of(module):
        module.register_module(role, None)


def quantized_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Return the quantized layers and residual sums of `net`, by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, QuantLayer)}


def weighted(net: nn.Module) -> dict[str, Weighted]:
    """Return the quantized layers that have a weight, by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, Weighted)}


@validated
@dataclass(frozen=True)
class LayerPlan:
    """Quantization settings of one layer.

    Attributes:
        weight_bits: 2 to 8.
        activation_bits: 2 to 8; None leaves the layer's input in float.
        per_channel: a scale for each output channel (row of an embedding), else one for the whole weight.
        lsq: scales are trained (learned step size).
        activation: static ranges; dynamic, per tensor; or none.
        group_size: that many weights of an output channel share a scale, if it divides their number; None: all of them.
    """

    weight_bits: Bits = 8
    activation_bits: Bits | None = 8
    per_channel: bool = True
    lsq: bool = False
    activation: Literal["static", "dynamic", "none"] = "static"
    group_size: Count | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None and self.lsq:
            raise ArgumentError(f"group_size={self.group_size} does not work with lsq=true.")

    @property
    def reads(self) -> str:
        """Return `activation`, or none without `activation_bits`."""
        return "none" if self.activation_bits is None else self.activation

    @property
    def of_weight(self) -> tuple[Any, ...]:
        """Return what layers that share a weight must have in common."""
        return self.weight_bits, self.per_channel, self.lsq, self.group_size


Overrides = Mapping[str, LayerPlan | None]  # by pattern of layer names; None leaves a layer in float


def choose(
    net: nn.Module, default: LayerPlan | None, overrides: Overrides, key: str = "overrides"
) -> dict[str, LayerPlan]:
    """Return the plan of each layer to quantize, by name, in the net's order.

    Raises:
        UserError: a pattern matches no layer that can be quantized.
    """
    kinds = {
        name: quantized_class(module) or type(module)
        for name, module in net.named_modules()
        if isinstance(module, QuantLayer) or quantized_class(module) is not None
    }
    for pattern in overrides:
        if not any(fnmatchcase(name, pattern) for name in kinds):
            hint = did_you_mean(pattern, kinds, f"layers are {', '.join(list(kinds)[:5]) or 'none'}, ...")
            raise UserError(f"{key}: the pattern {pattern!r} matches no layer to quantize; {hint}")
    chosen: dict[str, LayerPlan] = {}
    for name, kind in kinds.items():
        plan = default
        for pattern, other in overrides.items():
            if fnmatchcase(name, pattern):
                plan = other
        if plan is not None and not (kind is QuantAdd and plan.reads != "static"):
            chosen[name] = plan
    return chosen


def float_sentence(net: nn.Module, key: str, overrides: Overrides) -> str | None:
    """Return a warning if more than a twentieth of the weights stays in float unasked, else None."""
    rounded = {id(layer.weight) for layer in weighted(net).values() if layer.weight_quantizer is not None}
    requested = weights_of(net, exclude=[pattern for pattern, plan in overrides.items() if plan is None])
    left = {name: p.numel() for name, p in requested.items() if id(p) not in rounded}
    share = sum(left.values()) / max(sum(p.numel() for p in weights_of(net).values()), 1)
    if share <= 0.05:
        return None
    return (
        f"{key} leaves {share:.1%} of the weights in float, such as {max(left, key=lambda name: left[name])}: it "
        "quantizes plain Conv2d, Linear and Embedding layers that the net calls. Name others in exclude."
    )


INT8 = LayerPlan()
Slot = tuple[str, str]  # a layer's name and its quantizer


class Trace:
    """Layers of a net that read the same tensor, and the extremes of their inputs, found in one forward pass.

    `ranges` are extremes of each layer input, of shape [1], with zero.
    """

    def __init__(self, net: nn.Module, example: Any, names: Iterable[str]) -> None:
        self.called: set[str] = set()
        self.ranges: dict[Slot, tuple[Tensor, Tensor]] = {}
        self._parents: dict[Hashable, Hashable] = {}
        self._alive: list[Tensor] = []  # a freed tensor's id could be used again
        handles = [net.get_submodule(name).register_forward_pre_hook(partial(self._see, name)) for name in names]
        with evaluated(net, handles), torch.no_grad(), uncompiled(net):
            run(net, example)

    def group(self, item: Hashable) -> Hashable:
        """Return a key that is equal for the slots of the same tensor, and for all calls of a layer."""
        while item in self._parents and self._parents[item] != item:
            item = self._parents[item]
        return item

    def _see(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.called.add(name)
        for role, x in zip(("input_quantizer", "other_quantizer"), inputs, strict=False):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            slot = (name, role)
            self._alive.append(x)
            self._parents[self.group(slot)] = self.group((id(x), x._version))  # an in-place ReLU changes the version
            low, high = torch.aminmax(x.detach().float())
            old = self.ranges.get(slot, (torch.zeros(1), torch.zeros(1)))
            self.ranges[slot] = torch.minimum(old[0], low.cpu().view(1)), torch.maximum(old[1], high.cpu().view(1))


def quantize(
    net: nn.Module,
    example: Any,
    default: LayerPlan | None = INT8,
    overrides: Overrides | None = None,
    *,
    observer: TrainingObserver = "moving_average",
    percentile: float = 99.99,
    key: str = "overrides",
) -> list[str]:
    """Quantize convolutions, linear layers, embeddings and residual sums (`Add`) of a float net, in place.

    One forward pass on `example`, a tensor or a Call, in eval mode shows which layers read the same tensor, which then
    share a quantizer, and sets a first range of activations. The last pattern of `overrides` that matches a layer's
    name sets its plan, else `default`; None leaves it in float. `key` names `overrides` in messages. Rounding is off
    until `set_enabled`. Returns the layers' names.

    Raises:
        UserError: the net is quantized already, a pattern matches no layer that can be quantized, or no layer is left.
    """
    require(not quantized_layers(net), f"{type(net).__name__} is quantized already: start from its float weights.")
    require(
        observer in get_args(TrainingObserver), f"observer={observer}: choose {', '.join(get_args(TrainingObserver))}."
    )
    plans = choose(net, default, overrides or {}, key)
    traced = Trace(net, example, plans)
    plans = {name: plan for name, plan in plans.items() if name in traced.called}
    require(
        any(quantized_class(net.get_submodule(name)) is not QuantAdd for name in plans),
        f"No layer of {type(net).__name__} would be quantized: it calls no convolution, linear layer or embedding that "
        f"is not excluded; check {key} and exclude.",
    )
    _swap(net, plans, _sharing(net, plans, traced))
    for q in quantizers(net):
        q.observer, q.percentile = observer, percentile
    for (name, role), (low, high) in traced.ranges.items():
        quantizer = getattr(net.get_submodule(name), role, None) if name in plans else None
        if isinstance(quantizer, FakeQuantize) and not quantizer.follows:
            quantizer.set_range(torch.minimum(quantizer.minimum, low), torch.maximum(quantizer.maximum, high))
    for layer in weighted(net).values():
        if layer.weight_quantizer is not None and layer.weight_quantizer.lsq:
            layer.weight_quantizer.set_first_step(layer.weight)
    return list(plans)


def _sharing(net: nn.Module, plans: dict[str, LayerPlan], traced: Trace) -> dict[Slot, Slot]:
    """Return the first quantizer that each one equals, by layer and role."""
    firsts: dict[Any, Slot] = {}
    owners: dict[Slot, Slot] = {}
    for name, plan in plans.items():
        module = net.get_submodule(name)
        for role in roles_of(module):
            slot = (name, role)
            if role == "weight_quantizer":
                marks: Any = ("weight", id(module.weight))
                first = firsts.get(marks, slot)[0]
                require(
                    plans[first].of_weight == plan.of_weight,
                    f"{name} and {first} share one weight: give both the same bits.",
                )
            elif plan.reads == "none":
                continue
            else:
                marks = (traced.group(slot), plan.activation_bits, plan.reads, plan.lsq)
            owners[slot] = firsts.setdefault(marks, slot)
    return owners


def _swap(net: nn.Module, plans: dict[str, LayerPlan], owners: dict[Slot, Slot]) -> None:
    for name, plan in plans.items():
        module = net.get_submodule(name)
        to_quantized(module)
        module.__dict__["plan"] = plan
        for role in roles_of(module):
            owner = owners.get((name, role))
            if owner is None:
                continue
            if owner == (name, role):
                setattr(module, role, _make(module, role, plan))
            else:
                same = getattr(net.get_submodule(owner[0]), owner[1])
                same.shared = role != "weight_quantizer"
                setattr(module, role, same)
        module.train(module.training)


def _make(module: nn.Module, role: str, plan: LayerPlan) -> FakeQuantize:
    weight = getattr(module, "weight", None)
    device = weight.device if weight is not None else None
    if role != "weight_quantizer":
        assert plan.activation_bits is not None
        dynamic = plan.reads == "dynamic"
        lsq = plan.lsq and not dynamic
        return FakeQuantize(plan.activation_bits, symmetric=False, follows=dynamic, lsq=lsq, device=device)
    assert isinstance(weight, Tensor)
    inner = weight[0].numel()
    groups = inner // plan.group_size if plan.group_size is not None and inner % plan.group_size == 0 else None
    return FakeQuantize(
        plan.weight_bits,
        symmetric=True,
        axis=0 if plan.per_channel or groups else None,
        channels=weight.shape[0],
        group_size=plan.group_size if groups else None,
        groups=groups or 1,
        follows=True,
        lsq=plan.lsq,
        device=device,
    )


def describe(net: nn.Module) -> dict[str, Any]:
    """Return the quantization of `net` as plain data; empty if none.

    `{layer: {"plan": fields of LayerPlan, role: [layer, role] of the quantizer's first owner}}`.
    """
    firsts: dict[int, list[str]] = {}
    description: dict[str, Any] = {}
    for name, layer in quantized_layers(net).items():
        entry: dict[str, Any] = {"plan": asdict(layer.__dict__["plan"])}
        for role in roles_of(layer):
            quantizer = getattr(layer, role)
            if quantizer is not None:
                entry[role] = list(firsts.setdefault(id(quantizer), [name, role]))
        description[name] = entry
    return description


def rebuild(net: nn.Module, description: Mapping[str, Any]) -> None:
    """Quantize a float `net` as `describe` returned, in place; ranges and flags come with the weights.

    Raises:
        UserError: the net has no such layers, or is quantized differently.
    """
    require(
        not quantized_layers(net),
        f"{type(net).__name__} is quantized, and not as the checkpoint is: start from its float weights.",
    )
    modules = dict(net.named_modules())
    plans = {name: LayerPlan(**entry["plan"]) for name, entry in description.items()}
    for name in plans:
        if name not in modules or quantized_class(modules[name]) is None:
            raise UserError(
                f"The checkpoint has a quantized layer {name}, which {type(net).__name__} lacks: choose the model of "
                "its run."
            )
    owners: dict[Slot, Slot] = {}
    for name, entry in description.items():
        owners |= {(name, role): (owner[0], owner[1]) for role, owner in entry.items() if role != "plan"}
    _swap(net, plans, owners)


def set_enabled(net: nn.Module, enabled: bool) -> None:
    """Turn rounding on or off in all layers; raise UserError if there are none."""
    for q in some_quantizers(net):
        q.switch(enabled=enabled)


def update_ranges(net: nn.Module) -> None:
    """Update the ranges from forward passes in training mode; call after each optimizer step."""
    update_quantizers(some_quantizers(net))


def freeze_observers(net: nn.Module) -> None:
    """Fix the ranges of weights and activations; dynamic ones stay dynamic."""
    some_quantizers(net)
    for layer in quantized_layers(net).values():
        for role in roles_of(layer):
            q = getattr(layer, role)
            is_weight = role == "weight_quantizer"
            if q is None or (q.follows and not is_weight):
                continue
            if is_weight and q.is_observing and not q.lsq:
                q.set_range(*q.extremes(layer.weight))
            q.switch(observing=False)


def reopen(net: nn.Module) -> None:
    """Prepare a net with fixed ranges for training: rounding off, ranges observed; learned scales stay."""
    for q in quantizers(net):
        if not q.lsq:
            q.switch(enabled=False, observing=True)
        elif q.is_enabled:
            q.restart()


def integer_weight(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return a layer's integer weight, int8, and its scale: [channels], [1], or [channels, groups].

    A weight of exactly zero has the integer zero.
    """
    q, weight = getattr(layer, "weight_quantizer", None), getattr(layer, "weight", None)
    assert isinstance(q, FakeQuantize)
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        scale, _ = q.qparams(weight)
        return q.integers(weight).to(torch.int8), scale.detach().clone()


def strip(net: nn.Module) -> nn.Module:
    """Return a copy of `net` in plain float layers with rounded weights; activations are not rounded."""
    plain = copy.deepcopy(net)
    done: set[int] = set()
    for layer in weighted(plain).values():
        if layer.weight_quantizer is not None and id(layer.weight) not in done:
            done.add(id(layer.weight))
            with torch.no_grad():
                layer.weight.copy_(layer.weight_quantizer.quantize(layer.weight))
    for module in quantized_layers(plain).values():  # as before `to_quantized`
        for role in roles_of(module):
            del module._modules[role]
        module.__dict__.pop("plan", None)
        module.__class__ = module.__dict__.pop("_plain_class")  # undoes the swap above
    return plain
