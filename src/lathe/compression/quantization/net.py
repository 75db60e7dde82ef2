"""Fake quantization of a net.

```python
names = quantize(net, example)             # 8 bits for weights and activations
for x, y in batches:                       # train, with fake quantization on
    set_enabled(net, True)
    ...; optimizer.step(); update_ranges(net)
integers, scale = integer_weight(net.get_submodule(names[0]))
```
"""

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from lathe.compression.quantization import observers, ranges
from lathe.compression.quantization.calibration import calibrate
from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.compression.quantization.layer_plan import LayerPlan, choose
from lathe.compression.quantization.layers import (
    QuantAdd,
    quantized_class,
    quantized_layers,
    quantizers,
    roles_of,
    some_quantizers,
    to_plain,
    to_quantized,
    weighted,
)
from lathe.compression.trace import Slot, tensors_read
from lathe.errors import UserError

__all__ = [
    "LayerPlan",
    "calibrate",
    "choose",
    "describe",
    "freeze_observers",
    "integer_weight",
    "quantize",
    "quantized_layers",
    "quantizers",
    "rebuild",
    "reopen",
    "set_enabled",
    "strip",
    "update_ranges",
]

INT8 = LayerPlan()


def quantize(
    net: nn.Module,
    example: Any,
    default: LayerPlan | None = INT8,
    overrides: dict[str, LayerPlan | None] | None = None,
    *,
    observer: str = "moving_average",
    percentile: float = 99.99,
    key: str = "overrides",
) -> list[str]:
    """Quantize convolutions, linear layers, embeddings and residual sums (`Add`) of a float net, in place.

    One forward pass `net(example)` in eval mode shows which layers read the same tensor, which then share a quantizer,
    and sets a first range of activations. The last pattern of `overrides` that matches a layer's name sets its plan,
    else `default`; None leaves it in float. `key` names `overrides` in messages. Rounding is off until `set_enabled`.
    Returns the layers' names.

    Raises:
        UserError: the net is quantized already, a pattern matches no layer that can be quantized, or no layer is left.
    """
    if quantized_layers(net):
        raise UserError(f"{type(net).__name__} is quantized already: start from its float weights.")
    if observer not in observers.OBSERVERS:
        raise UserError(f"observer={observer!r} is unknown: take {', '.join(observers.OBSERVERS)}.")
    plans = choose(net, default, overrides or {}, key)
    traced = tensors_read(net, example, {name: net.get_submodule(name) for name in plans})
    plans = {name: plan for name, plan in plans.items() if traced.called(name)}
    if not any(quantized_class(net.get_submodule(name)) is not QuantAdd for name in plans):
        raise UserError(
            f"No layer of {type(net).__name__} would be quantized: it has no convolution, linear layer or embedding "
            f"that is called and not excluded; check {key} and exclude."
        )
    _swap(net, plans, _sharing(net, plans, traced.group))
    for q in quantizers(net):
        q.observer, q.percentile = observer, percentile
    for slot, (low, high) in traced.ranges.items():
        found = getattr(net.get_submodule(slot[0]), slot[1], None) if slot[0] in plans else None
        if isinstance(found, FakeQuantize) and not found.follows:
            found.set_range(torch.minimum(found.minimum, low), torch.maximum(found.maximum, high))
    for layer in weighted(net).values():
        if layer.weight_quantizer is not None and layer.weight_quantizer.lsq:
            layer.weight_quantizer.set_first_step(layer.weight)
    return list(plans)


def _sharing(net: nn.Module, plans: dict[str, LayerPlan], group: Callable[[Slot], Any]) -> dict[Slot, Slot]:
    """Return the first quantizer that each one equals, by layer and role."""
    firsts: dict[Any, Slot] = {}
    owners: dict[Slot, Slot] = {}
    for name, plan in plans.items():
        module = net.get_submodule(name)
        for role in roles_of(module):
            slot = (name, role)
            if role == "weight_quantizer":
                marks: Any = ("weight", id(module.weight))
                settings: Any = (plan.weight_bits, plan.per_channel, plan.lsq, plan.group_size)
                if marks in firsts and _weight_settings(plans[firsts[marks][0]]) != settings:
                    raise UserError(
                        f"{name} and {firsts[marks][0]} share one weight and are to be quantized differently: give "
                        "both the same bits."
                    )
            elif plan.reads == "none":
                continue
            else:
                marks = (group(slot), plan.activation_bits, plan.reads, plan.lsq)
            owners[slot] = firsts.setdefault(marks, slot)
    return owners


def _weight_settings(plan: LayerPlan) -> tuple[Any, ...]:
    return plan.weight_bits, plan.per_channel, plan.lsq, plan.group_size


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
        return FakeQuantize(
            plan.activation_bits, symmetric=False, follows=dynamic, lsq=plan.lsq and not dynamic, device=device
        )
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
    found: dict[str, Any] = {}
    for name, layer in quantized_layers(net).items():
        entry: dict[str, Any] = {"plan": asdict(layer.__dict__["plan"])}
        for role in roles_of(layer):
            quantizer = getattr(layer, role)
            if quantizer is not None:
                entry[role] = list(firsts.setdefault(id(quantizer), [name, role]))
        found[name] = entry
    return found


def rebuild(net: nn.Module, description: dict[str, Any]) -> None:
    """Quantize a float `net` as `describe` returned, in place; ranges and flags come with the weights.

    Raises:
        UserError: the net has no such layers, or is quantized differently.
    """
    if quantized_layers(net):
        raise UserError(
            f"{type(net).__name__} is quantized already, and otherwise than the checkpoint: start from its float "
            "weights."
        )
    modules = dict(net.named_modules())
    plans = {name: LayerPlan(**entry["plan"]) for name, entry in description.items()}
    for name in plans:
        if name not in modules or quantized_class(modules[name]) is None:
            raise UserError(
                f"The checkpoint's net has a quantized layer {name}, which {type(net).__name__} lacks: choose the "
                "model that it was trained with."
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
    ranges.update(some_quantizers(net))


def freeze_observers(net: nn.Module, weights: bool = True) -> None:
    """Fix the ranges of activations, and with `weights` those of weights; dynamic ones stay dynamic."""
    layers = quantized_layers(net)
    some_quantizers(net)
    for layer in layers.values():
        for role in roles_of(layer):
            q = getattr(layer, role)
            if q is None or (role != "weight_quantizer" and q.follows) or (role == "weight_quantizer" and not weights):
                continue
            if role == "weight_quantizer" and q.is_observing and not q.lsq:
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
    q = getattr(layer, "weight_quantizer", None)
    weight = getattr(layer, "weight", None)
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
    for module in list(quantized_layers(plain).values()):
        to_plain(module)
    return plain
