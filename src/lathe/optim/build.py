"""Builds an optimizer from a net and the keys of `configs/optimizer/`."""

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lathe.config.types import Count, Name, NonNegative, Positive, PositiveShare
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, did_you_mean
from lathe.optim.foreign import refused, try_out
from lathe.optim.rules import layer_numbers, matching_names, scale_of_each


@validated
def scaled_lr(
    lr: Positive,
    *,
    scale_lr: Literal["none", "linear", "sqrt"],
    batch_size: Count | None,
    reference_batch_size: Count | None,
) -> float:
    """Return `lr`, tuned at `reference_batch_size`, scaled to the global `batch_size`.

    `linear` multiplies by the ratio of the batches (Goyal et al. 2017, arXiv:1706.02677, for SGD), `sqrt` by its square
    root (Malladi et al. 2022, arXiv:2205.10287, for Adam), `none` by 1. `batch_size` is None for data that declare no
    batch size. Raises ArgumentError if the rule needs a batch size that is None.
    """
    if scale_lr == "none":
        return lr
    if batch_size is None:
        raise ArgumentError(f"scale_lr={scale_lr} needs batch_size, the global batch of this run: set it, or use none.")
    if reference_batch_size is None:
        raise ArgumentError(
            f"scale_lr={scale_lr} needs reference_batch_size, the global batch that lr is meant for: set it, or use "
            "none."
        )
    ratio = batch_size / reference_batch_size
    return lr * (ratio if scale_lr == "linear" else math.sqrt(ratio))


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

    Raises UserError if a pattern matches no parameter, or none is trainable.
    """
    exempt = matching_names(net, no_decay, key="no_decay") if decays else set()
    for prefix, module in net.named_modules():
        exempt |= {f"{prefix}.{name}" if prefix else name for name in getattr(module, "never_decayed", ())}
    groups: dict[str, dict[str, Any]] = {}
    for parameter_name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        kept = parameter_name in exempt
        decay = ("no_decay" if kept else "decay") if decays else "all"
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
            if decays and (kept or weight_decay is not None):
                groups[name]["weight_decay"] = 0.0 if kept else weight_decay
            if role:
                groups[name]["role"] = role
        groups[name]["params"].append(parameter)
    if not groups:
        raise UserError(
            "The optimizer found no parameter to train: every one of the net is frozen; leave at least one unfrozen."
        )
    return [groups[name] for name in sorted(groups)]  # a fixed order, independent of the order of registration


def _takes(kind: type[Optimizer]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the options of a class, and whether it accepts others."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]  # the first one is the groups
    named = {one.name: one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return named, any(one.kind is one.VAR_KEYWORD for one in parameters)


def _check_known(kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    known, takes_any = _takes(kind)
    unknown = [key for key in options if key not in known]
    if unknown and not takes_any:
        key = unknown[0]
        if key in ("lr", "weight_decay"):
            raise ArgumentError(f"{key} is not an option of {kind.__name__}: set {key} to null, or choose another.")
        hint = did_you_mean(key, known, f"its options are {', '.join(known)}.")
        raise ArgumentError(f"{key}: {kind.__name__} takes no such option; leave it out, or set it to null; {hint}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in options:
            raise ArgumentError(f"{key}: {kind.__name__} needs a value for it; add one.")


@validated
def check_options(
    *,
    kind: type[Optimizer],
    lr: Positive | None = None,
    weight_decay: NonNegative | None = None,
    scale_lr: Literal["none", "linear", "sqrt"] = "none",
    reference_batch_size: Count | None = None,
    batch_size: Count | None = None,
    no_decay: Sequence[Name] | Name | None = None,
    layer_decay: PositiveShare | None = None,
    lr_scale: Mapping[str, Positive] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the options for `kind` without nulls, after a trial step on a single weight.

    These are all checks that need no net. Raises ArgumentError if `kind` is not an optimizer's class or its step needs
    a closure, if `scaled_lr` does, or for options that `kind` lacks; UserError for values that it does not accept.
    """
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        name = getattr(kind, "__name__", kind)
        raise ArgumentError(f"kind={name}: expected the class of an optimizer such as torch.optim.SGD.")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ArgumentError(
            f"kind={kind.__name__} computes the loss several times in a step, and a batch is counted once: choose "
            "another."
        )
    if scale_lr != "none" and lr is None:
        raise ArgumentError(f"scale_lr={scale_lr} needs lr, the rate at reference_batch_size: set it, or use none.")
    if lr is not None:
        lr = scaled_lr(lr, scale_lr=scale_lr, batch_size=batch_size, reference_batch_size=reference_batch_size)
    # Hydra passes lists as OmegaConf nodes, which would get into the checkpoint and prevent opening it with
    # weights_only.
    given = {"lr": lr, "weight_decay": weight_decay, **options}
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in given.items()
        if value is not None
    }
    _check_known(kind, plain)
    if not hasattr(kind, "roles"):
        try_out(kind, plain)
    return plain


def factory_of(made: Any) -> Any:
    """Return `made`, or `of_class` with options if `made` is an optimizer's class, as in Lightning."""
    function, given = getattr(made, "func", made), getattr(made, "keywords", {})
    if not (inspect.isclass(function) and issubclass(function, Optimizer)):
        return made
    return partial(of_class, **{"no_decay": ["norm", "bias"], "lr": None, "weight_decay": None, **given}, kind=function)


def of_class(net: nn.Module, **keys: Any) -> Optimizer:
    """Call `build_optimizer` with the class in `_target_`."""
    with _named_by_target():
        return build_optimizer(net, **keys)


@contextmanager
def _named_by_target() -> Iterator[None]:
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(*(re.sub("^kind=", "_target_=", sentence) for sentence in error.args)) from error


def check_optimizer(factory: Any) -> None:
    """Check that a task can call the factory, and that its keys suit the class (else ArgumentError)."""
    function = getattr(factory, "func", factory)
    if function is of_class:
        with _named_by_target():
            check_options(**factory.keywords)
    elif function is build_optimizer:
        missing = [key for key in ("kind", "lr", "weight_decay") if key not in factory.keywords]
        if missing:
            raise ArgumentError(
                f"{missing[0]} is missing: lathe.optim.build_optimizer needs kind, lr and weight_decay."
            )
        check_options(**factory.keywords)
    elif inspect.isclass(function):
        path = f"{function.__module__}.{function.__qualname__}"
        raise ArgumentError(
            f"_target_={path}: expected the class of an optimizer such as torch.optim.SGD, or a function that makes "
            "one from a net."
        )


def try_on(factory: Any, net: nn.Module) -> None:
    """Check an optimizer with the net, before data are loaded.

    Builds an optimizer of a user's class once (`check_options` tries only torch's and Lathe's), and looks up the layers
    of `layer_decay` and `lr_scale`. Raises UserError as `build_optimizer`.
    """
    keys = getattr(factory, "keywords", {})
    own = inspect.isclass(keys.get("kind")) and keys["kind"].__module__.split(".")[0] not in ("torch", "lathe")
    if own:
        factory(net)
        return
    if keys.get("layer_decay") is not None:
        layer_numbers(net)
    scale_of_each(net, keys.get("lr_scale") or {})


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

    Raises UserError as `check_options`, `parameter_groups` and `layer_numbers`.
    """
    plain = check_options(
        kind=kind,
        lr=lr,
        weight_decay=weight_decay,
        scale_lr=scale_lr,
        reference_batch_size=reference_batch_size,
        batch_size=batch_size,
        **options,
    )
    roles: Mapping[str, str] = kind.roles(net) if hasattr(kind, "roles") else {}
    patterns = [no_decay] if isinstance(no_decay, str) else list(no_decay or [])
    known, takes_any = _takes(kind)
    layers = None if layer_decay is None else layer_numbers(net)
    groups = parameter_groups(
        net,
        weight_decay=weight_decay,
        no_decay=patterns,
        roles=roles,
        decays=takes_any or "weight_decay" in known,
        layers=layers,
        scales=scale_of_each(net, lr_scale or {}),
    )
    try:
        optimizer: Optimizer = kind(groups, **plain)
    except Exception as error:  # a user's class can raise anything
        raise refused(kind, plain, error) from error
    if any("lr" not in group for group in optimizer.param_groups):
        raise ArgumentError(
            f"kind={kind.__name__} keeps no lr in its groups, which schedulers and monitors read: choose another."
        )
    if layers is not None and layer_decay is not None:
        top = max(layers.values())
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * layer_decay ** (top - group["layer"])
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * group.get("lr_scale", 1.0)
    return optimizer
