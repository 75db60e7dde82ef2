"""An optimizer from a net and the keys of `configs/optimizer/`: parameter groups by rule, and a learning rate for the batch."""

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lathe.errors import UserError
from lathe.optim.rules import matching_names

SCALES = ("none", "linear", "sqrt")


def scaled_lr(lr: float, *, scale_lr: str, batch_size: int, reference_batch_size: int) -> float:
    """Return `lr`, which was tuned at `reference_batch_size`, as it should be at the global `batch_size`.

    `linear` multiplies by the ratio of the batches (Goyal et al. 2017, arXiv:1706.02677, for SGD), `sqrt` by its square root
    (Malladi et al. 2022, arXiv:2205.10287, for Adam), `none` leaves it.

    Raises UserError for another rule, and for a batch or learning rate that is not above zero.
    """
    if scale_lr not in SCALES:
        raise UserError(f"optimizer.scale_lr={scale_lr!r} is unknown: take none, linear or sqrt.")
    for key, value in (("lr", lr), ("batch_size", batch_size), ("reference_batch_size", reference_batch_size)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"optimizer.{key}={value!r} must be a number above 0: set optimizer.{key} to one.")
    ratio = batch_size / reference_batch_size
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scale_lr]


def parameter_groups(
    net: nn.Module, *, weight_decay: float, no_decay: Iterable[str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Split the trainable parameters of `net` by their role (empty for most optimizers) and by whether they decay.

    `no_decay` holds the words `norm` (parameters of normalisation layers) and `bias` (names that end in bias) and name
    patterns such as `head.*`; a module may name parameters of its own in `never_decayed`, such as learned step sizes. Each group
    has a `name` (`decay`, `no_decay`, `muon/decay`, ...) for the learning-rate monitor; empty groups are left out. Frozen parameters
    are in none.

    Raises UserError if a pattern matches no parameter, or nothing is left to train.
    """
    exempt = matching_names(net, no_decay, key="optimizer.no_decay")
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
            groups[name] = {"params": [], "name": name, "weight_decay": 0.0 if parameter_name in exempt else weight_decay}
            if role:
                groups[name]["role"] = role
        groups[name]["params"].append(parameter)
    if not groups:
        raise UserError(
            "optimizer found no parameter to train: every parameter of the net is frozen; leave at least one unfrozen."
        )
    return [groups[name] for name in sorted(groups)]  # a fixed order, whatever the net registers first


def _check_known(kind: type[Optimizer], keys: Iterable[str]) -> None:
    parameters = list(inspect.signature(kind).parameters.values())[1:]  # the first one is the groups
    known = [parameter.name for parameter in parameters]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    unknown = [key for key in keys if key not in known]
    if unknown and not takes_any:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its options are {', '.join(known)}."
        raise UserError(f"optimizer.{unknown[0]} is not an option of {kind.__name__}: {hint}")


def build_optimizer(
    net: nn.Module,
    *,
    kind: type[Optimizer],
    lr: float,
    weight_decay: float,
    no_decay: Sequence[str] | None,
    scale_lr: str = "none",
    reference_batch_size: int,
    batch_size: int,
    **options: Any,
) -> Optimizer:
    """Return `kind` over the parameter groups of `net`; `options` go to `kind`, except those at null.

    An optimizer class whose parameters play different roles (Muon's do) has a static method `roles(net)` that returns one
    word per parameter name; its groups then carry that word as `role`.

    Raises UserError for what `scaled_lr` and `parameter_groups` refuse, and for options that `kind` does not know or accept.
    """
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        name = getattr(kind, "__name__", kind)
        raise UserError(f"optimizer.kind={name} is not an optimizer: set optimizer.kind.path to a class such as torch.optim.SGD.")
    # Hydra hands lists over as OmegaConf nodes, which would end up in the checkpoint and keep it from opening with weights_only.
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in options.items()
        if value is not None
    }
    _check_known(kind, ("lr", "weight_decay", *plain))
    rate = scaled_lr(lr, scale_lr=scale_lr, batch_size=batch_size, reference_batch_size=reference_batch_size)
    roles: Mapping[str, str] = kind.roles(net) if hasattr(kind, "roles") else {}
    patterns = [no_decay] if isinstance(no_decay, str) else list(no_decay or [])
    groups = parameter_groups(net, weight_decay=weight_decay, no_decay=patterns, roles=roles)
    try:
        return kind(groups, lr=rate, weight_decay=weight_decay, **plain)  # type: ignore[call-arg]  # checked above
    except (TypeError, ValueError, RuntimeError) as error:
        typed = ", ".join(f"optimizer.{key}={value}" for key, value in {"weight_decay": weight_decay, **plain}.items())
        raise UserError(f"{kind.__name__} refused {typed} ({error}): correct that key.") from error
