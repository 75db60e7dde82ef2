"""An optimizer from a net and the keys of `configs/optimizer/`: parameter groups by rule, and a learning rate for the
batch.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lathe.config.schema.held import held
from lathe.errors import ArgumentError, UserError, did_you_mean
from lathe.optim.foreign import refused, try_out
from lathe.optim.rules import matching_names


@held("lathe.optim.build_optimizer")
def scaled_lr(lr: float, *, scale_lr: str, batch_size: int | None, reference_batch_size: int | None) -> float:
    """Return `lr`, which was tuned at `reference_batch_size`, as it should be at the global `batch_size`.

    `linear` multiplies by the ratio of the batches (Goyal et al. 2017, arXiv:1706.02677, for SGD), `sqrt` by its square
    root (Malladi et al. 2022, arXiv:2205.10287, for Adam), `none` leaves it.

    Data that declare no batch size leave `batch_size` None; a file of the user's own need not have either.

    Raises ArgumentError for a rule without one of the batches.
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
    net: nn.Module, *, weight_decay: float, no_decay: Iterable[str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Split the trainable parameters of `net` by their role (empty for most optimizers) and by whether they decay.

    `no_decay` holds the words `norm` (parameters of normalisation layers) and `bias` (names that end in bias) and name
    patterns such as `head.*`; a module may name parameters of its own in `never_decayed`, such as learned step sizes.
    Each group has a `name` (`decay`, `no_decay`, `muon/decay`, ...) for the learning-rate monitor; empty groups are
    left out. Frozen parameters are in none.

    Raises UserError if a pattern matches no parameter, or nothing is left to train.
    """
    exempt = matching_names(net, no_decay, key="no_decay")
    for prefix, module in net.named_modules():
        exempt |= {f"{prefix}.{name}" if prefix else name for name in getattr(module, "never_decayed", ())}
    groups: dict[str, dict[str, Any]] = {}
    for parameter_name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = "no_decay" if parameter_name in exempt else "decay"
        role = roles.get(parameter_name)
        name = f"{role}/{decay}" if role else decay
        if name not in groups:
            groups[name] = {
                "params": [],
                "name": name,
                "weight_decay": 0.0 if parameter_name in exempt else weight_decay,
            }
            if role:
                groups[name]["role"] = role
        groups[name]["params"].append(parameter)
    if not groups:
        raise UserError(
            "The optimizer found no parameter to train: every one of the net is frozen; leave at least one unfrozen."
        )
    return [groups[name] for name in sorted(groups)]  # a fixed order, whatever the net registers first


def _check_known(kind: type[Optimizer], keys: Iterable[str]) -> None:
    parameters = list(inspect.signature(kind).parameters.values())[1:]  # the first one is the groups
    known = [parameter.name for parameter in parameters]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    unknown = [key for key in keys if key not in known]
    if unknown and not takes_any:
        key = unknown[0]
        if unknown[0] in ("lr", "weight_decay"):
            raise ArgumentError(
                f"{key} is not an option of {kind.__name__}, and every group of parameters is given it: choose "
                "another class."
            )
        hint = did_you_mean(unknown[0], known, f"its options are {', '.join(known)}.")
        raise ArgumentError(f"{key}: {kind.__name__} takes no such option; leave it out, or set it to null; {hint}")


@held("lathe.optim.build_optimizer")
def check_options(
    *,
    kind: type[Optimizer],
    lr: float,
    weight_decay: float,
    scale_lr: str = "none",
    reference_batch_size: int | None = None,
    batch_size: int | None = None,
    no_decay: Sequence[str] | None = None,
    **options: Any,
) -> tuple[float, dict[str, Any]]:
    """Return the learning rate and the options that `kind` gets, after trying them out on a weight of nothing: all that
    can be known without a net.

    Raises ArgumentError for a `kind` that is no optimizer, for what `scaled_lr` refuses, and for options that `kind`
    does not know, and UserError for those that it does not accept.
    """
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        name = getattr(kind, "__name__", kind)
        raise ArgumentError(f"kind={name}: expected the class of an optimizer such as torch.optim.SGD.")
    # Hydra hands lists over as OmegaConf nodes, which would end up in the checkpoint and keep it from opening with
    # weights_only.
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in options.items()
        if value is not None
    }
    _check_known(kind, ("lr", "weight_decay", *plain))
    rate = scaled_lr(lr, scale_lr=scale_lr, batch_size=batch_size, reference_batch_size=reference_batch_size)
    if not hasattr(kind, "roles"):
        try_out(kind, rate, weight_decay, plain)
    return rate, plain


def check_optimizer(factory: Any) -> None:
    """Holds what `optimizer` names against what a task can call, and `build_optimizer`'s keys against the optimizer's
    class.

    Raises ArgumentError for a class of torch's in its place, for a key that is missing, and for what `check_options`
    refuses.
    """
    function = getattr(factory, "func", factory)
    if function is build_optimizer:
        missing = [key for key in ("kind", "lr", "weight_decay") if key not in factory.keywords]
        if missing:
            raise ArgumentError(
                f"{missing[0]} is missing: lathe.optim.build_optimizer needs kind, lr and weight_decay."
            )
        check_options(**factory.keywords)
    elif inspect.isclass(function):
        path = f"{function.__module__}.{function.__qualname__}"
        raise ArgumentError(
            f"_target_={path}: expected a function that makes an optimizer from a net, got a class; an optimizer's "
            "class stands in "
            "kind.path, beside _target_=lathe.optim.build_optimizer."
        )


@held("lathe.optim.build_optimizer")
def build_optimizer(
    net: nn.Module,
    *,
    kind: type[Optimizer],
    lr: float,
    weight_decay: float,
    no_decay: Sequence[str] | None = None,
    scale_lr: str = "none",
    reference_batch_size: int | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> Optimizer:
    """Return `kind` over the parameter groups of `net`; `options` go to `kind`, except those at null.

    An optimizer class whose parameters play different roles (Muon's do) has a static method `roles(net)` that returns
    one word per parameter name; its groups then carry that word as `role`.

    Raises UserError for what `check_options` and `parameter_groups` refuse.
    """
    rate, plain = check_options(
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
    groups = parameter_groups(net, weight_decay=weight_decay, no_decay=patterns, roles=roles)
    try:
        return kind(groups, lr=rate, weight_decay=weight_decay, **plain)  # type: ignore[call-arg]  # checked above
    except (TypeError, ValueError, RuntimeError) as error:
        raise refused(kind, weight_decay, plain, error) from error
