"""Builds an optimizer from a net and the keys of `configs/optimizer/`: parameter rules, groups, rates, kernels."""

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices, _get_fused_kernels_supported_devices

from lathe.config.types import Count, Name, NonNegative, Positive, PositiveShare
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, did_you_mean

# By name, because torch's norms have no common base class, and a user's `ScaleNorm` or `RMSNorm` should match too.
_NORM = re.compile(r"Norm(\dd)?$")


def matching_names(net: nn.Module, rules: Iterable[str], *, key: str) -> set[str]:
    """Return names of parameters that any rule matches: `norm`, `bias`, or a pattern (`*`, `?`, `[...]`)."""
    names = [name for name, _ in net.named_parameters()]
    matches: set[str] = set()
    for rule in rules:
        if rule == "norm":  # layers of classes `...Norm`, `...Norm1d` to `3d`
            norms = {path for path, module in net.named_modules() if _NORM.search(type(module).__name__)}
            matched = {name for name in names if name.rpartition(".")[0] in norms}
        elif rule == "bias":  # an attention's `in_proj_bias` too
            matched = {name for name in names if name.endswith("bias")}
        else:
            matched = {name for name in names if fnmatchcase(name, str(rule))}
        if not matched and rule not in ("norm", "bias"):
            like = f"parameters are named like {names[0]}." if names else "it has none."
            hint = did_you_mean(rule, ["norm", "bias", *names], like)
            raise ArgumentError(f"{key}: the pattern {rule!r} matches no parameter of {type(net).__name__}; {hint}")
        matches |= matched
    return matches


def scale_of_each(net: nn.Module, scales: Mapping[str, float]) -> dict[str, float]:
    """Return the learning-rate factor of each parameter that matches a rule; the last match counts."""
    factors: dict[str, float] = {}
    for rule, scale in scales.items():
        matched = matching_names(net, [rule], key="lr_scale")
        if not matched:
            raise ArgumentError(f"lr_scale: {type(net).__name__} has no {rule} to give a learning rate: leave it out.")
        factors |= dict.fromkeys(matched, float(scale))
    return factors


def freeze(net: nn.Module, rules: Iterable[str]) -> tuple[int, int]:
    """Freeze the parameters that `rules` match; return the number of frozen and of all scalars."""
    frozen = matching_names(net, rules, key="freeze")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    sizes = {name: parameter.numel() for name, parameter in net.named_parameters()}
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise UserError(f"freeze={list(rules)} leaves no parameter of {type(net).__name__} to train: free some.")
    return sum(sizes[name] for name in frozen), sum(sizes.values())


def layer_numbers(net: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter: 0 before the `blocks` of `net`, 1 to n in them, n + 1 after.

    Parameters outside blocks count as before if they are registered before the first block's (stems, embeddings), else
    as after (heads).
    """
    blocks = list(getattr(net, "blocks", None) or ())
    inside = {id(parameter): number for number, block in enumerate(blocks, 1) for parameter in block.parameters()}
    if not inside:
        raise UserError(
            f"layer_decay numbers the layers by the `blocks` of the net, and {type(net).__name__} has none: leave it "
            "out."
        )
    numbers: dict[str, int] = {}
    begun = False
    for name, parameter in net.named_parameters():
        begun = begun or id(parameter) in inside
        numbers[name] = inside.get(id(parameter), len(blocks) + 1 if begun else 0)
    return numbers


def parameter_groups(
    net: nn.Module,
    *,
    weight_decay: float | None,
    no_decay: Iterable[str],
    roles: Mapping[str, str],
    decays: bool = True,
    layers: Mapping[str, int] | None = None,
    scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters of `net` by role (empty for most optimizers) and by weight decay.

    `no_decay` holds the words `norm` (parameters of normalisation layers) and `bias` (names that end in bias) and name
    patterns such as `head.*`; a module may list more of its parameters in `never_decayed`, such as learned step sizes.
    Each group has a `name` (`decay`, `no_decay`, `muon/decay`, ...) for the learning-rate monitor; empty groups are
    left out. With `layers`, the layer number of each parameter, there is a group per layer (`layer_03/decay`) with its
    `layer`. A `weight_decay` of None is the optimizer's default; an optimizer without weight decay (not `decays`) has
    the one group `all`.
    """
    exempt = matching_names(net, no_decay, key="no_decay") if decays else set()
    for prefix, module in net.named_modules():
        exempt |= {f"{prefix}.{name}" if prefix else name for name in getattr(module, "never_decayed", ())}
    groups: dict[str, dict[str, Any]] = {}
    for parameter_name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        is_exempt = parameter_name in exempt
        decay = ("no_decay" if is_exempt else "decay") if decays else "all"
        role = roles.get(parameter_name)
        name = f"{role}/{decay}" if role else decay
        if layers is not None:
            name = f"layer_{layers[parameter_name]:02}/{name}"
        scale = (scales or {}).get(parameter_name, 1.0)
        if scale != 1:
            name = f"x{scale:g}/{name}"
        if name not in groups:
            groups[name] = {"params": [], "name": name}
            if layers is not None:
                groups[name]["layer"] = layers[parameter_name]
            if scale != 1:
                groups[name]["lr_scale"] = scale
            if decays and (is_exempt or weight_decay is not None):
                groups[name]["weight_decay"] = 0.0 if is_exempt else weight_decay
            if role:
                groups[name]["role"] = role
        groups[name]["params"].append(parameter)
    return [groups[name] for name in sorted(groups)]  # a fixed order, independent of the order of registration


@validated
def build_optimizer(
    net: nn.Module,
    *,
    kind: type[Optimizer],
    lr: Positive | None,
    weight_decay: NonNegative | None,
    no_decay: Sequence[Name] | Name | None = None,
    scale_lr: Literal["none", "linear", "sqrt"] = "none",
    reference_batch_size: Count | None = None,
    batch_size: Count | None = None,
    layer_decay: PositiveShare | None = None,
    lr_scale: Mapping[str, Positive] | None = None,
    **options: Any,
) -> Optimizer:
    """Return `kind` over the parameter groups of `net`; options at null take its defaults.

    An optimizer class whose parameters have different roles (such as Muon) has a static method `roles(net)` that
    returns one word per parameter name, which is the `role` of the groups. A class without weight decay gets one group.

    `layer_decay` multiplies the learning rate of each layer by itself once for each layer above it (Bao et al. 2022,
    arXiv:2106.08254): the head has the full rate, the stem the lowest. `lr_scale` multiplies the rate of the parameters
    that a rule such as `norm`, `bias` or `head.*` matches; the last matching rule counts.

    `scale_lr` scales `lr`, tuned at `reference_batch_size`, to the global `batch_size`: `linear` by the ratio of the
    batches (Goyal et al. 2017, arXiv:1706.02677, for SGD), `sqrt` by its square root (Malladi et al. 2022,
    arXiv:2205.10287, for Adam).

    Raises ArgumentError if `kind` is not an optimizer's class, its step needs a closure, it refuses its options, or
    `scale_lr` lacks a number; UserError as `parameter_groups` and `layer_numbers`.
    """
    name = getattr(kind, "__name__", kind)
    if not _is_optimizer(kind):
        raise ArgumentError(f"kind={name}: expected the class of an optimizer such as torch.optim.SGD.")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ArgumentError(f"kind={name} computes the loss several times in a step. Choose another.")
    if scale_lr != "none":
        needs = {"lr": lr, "batch_size": batch_size, "reference_batch_size": reference_batch_size}
        missing = next((key for key, value in needs.items() if value is None), None)
        if lr is None or batch_size is None or reference_batch_size is None:
            raise ArgumentError(f"scale_lr={scale_lr} needs {missing}: set it, or use none.")
        ratio = batch_size / reference_batch_size
        lr *= ratio if scale_lr == "linear" else math.sqrt(ratio)
    # Hydra passes lists as OmegaConf nodes, with which a checkpoint would not open with weights_only
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in {"lr": lr, "weight_decay": weight_decay, **options}.items()
        if value is not None
    }
    takes = inspect.signature(kind).parameters
    layers = None if layer_decay is None else layer_numbers(net)
    groups = parameter_groups(
        net,
        weight_decay=weight_decay,
        no_decay=[no_decay] if isinstance(no_decay, str) else list(no_decay or []),
        roles=kind.roles(net) if hasattr(kind, "roles") else {},
        decays="weight_decay" in takes or any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()),
        layers=layers,
        scales=scale_of_each(net, lr_scale or {}),
    )
    try:
        optimizer: Optimizer = kind(groups, **plain)
    except Exception as error:  # a user's class can raise anything
        settings = ", ".join(f"{key}={value}" for key, value in plain.items()) or "its defaults"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ArgumentError(f"kind={name} refused {settings} ({reason}).") from error
    for group in optimizer.param_groups:
        if layers is not None and layer_decay is not None:
            group["lr"] = group["lr"] * layer_decay ** (max(layers.values()) - group["layer"])
        group["lr"] = group["lr"] * group.get("lr_scale", 1.0)
    return optimizer


def _is_optimizer(kind: Any) -> TypeGuard[type[Optimizer]]:
    return inspect.isclass(kind) and issubclass(kind, Optimizer)


def factory_of(factory: Any) -> Any:
    """Return `factory`, or `of_class` with its options if it is an optimizer's class, as in Lightning."""
    function, keys = getattr(factory, "func", factory), getattr(factory, "keywords", {})
    if not _is_optimizer(function):
        return factory
    return partial(of_class, **{"no_decay": ["norm", "bias"], "lr": None, "weight_decay": None, **keys}, kind=function)


def of_class(net: nn.Module, **keys: Any) -> Optimizer:
    """Call `build_optimizer` with the class in `_target_`."""
    try:
        return build_optimizer(net, **keys)
    except ArgumentError as error:
        raise ArgumentError(*(re.sub("^kind=", "_target_=", message) for message in error.args)) from error


def try_on(factory: Any, net: nn.Module) -> None:
    """Build an optimizer once before data are loaded; a user's own function is not called."""
    function = getattr(factory, "func", factory)
    if inspect.isclass(function):
        path = f"{function.__module__}.{function.__qualname__}"
        raise ArgumentError(f"_target_={path}: expected the class of an optimizer such as torch.optim.SGD.")
    if function in (of_class, build_optimizer):
        factory(net)


def with_kernels(factory: Any, parameters: Iterable[nn.Parameter], unscales_late: bool) -> tuple[Any, str]:
    """Return `factory` with `fused=True`, else `foreach=True`, if its class and the devices support it.

    The second value is the end of a message that says which one was chosen, or why none. Values in the configuration
    are kept. The weights after a step differ in their last digits from those of torch's default on CPUs, which updates
    one tensor after the other.

    Args:
        parameters: of the net, on the devices where they are trained.
        unscales_late: gradients are clipped and scaled, and a fused step would unscale them too late.
    """
    keywords = getattr(factory, "keywords", {})
    kind = keywords.get("kind")
    if not _is_optimizer(kind):
        return factory, ": the optimizer of a function stays as it is."
    fixed = [name for name in ("fused", "foreach", "differentiable", "capturable") if keywords.get(name) is not None]
    if fixed:
        return factory, f": {fixed[0]}={str(keywords[fixed[0]]).lower()} of the optimizer is kept."
    takes, plain = inspect.signature(kind).parameters, list(parameters)
    devices = {parameter.device.type for parameter in plain}
    fits = all(type(p.data) is Tensor and torch.is_floating_point(p) for p in plain)
    fused = [] if unscales_late else _get_fused_kernels_supported_devices()
    for name, supported in {"fused": fused, "foreach": [*_get_foreach_kernels_supported_devices(), "cpu"]}.items():
        if name in takes and fits and devices <= set(supported):
            return partial(factory, **{name: True}), f" took {name}: {kind.__name__} updates all weights together."
    why = "the net is spread over processes" if not fits else f"{kind.__name__} has no such kernels"
    return factory, f": the optimizer's step stays as it is, since {why}."
