"""Parameter rules such as `no_decay: [norm, bias, head.*]`, and the layer of each parameter."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from lathe.errors import ArgumentError, UserError, did_you_mean

# By name, because torch's norms have no common base class, and a user's `ScaleNorm` or `RMSNorm` should match too.
_NORM = re.compile(r"Norm(\dd)?$")


def norm_names(net: nn.Module) -> set[str]:
    """Return the names of the parameters of normalisation layers (classes `...Norm`, `...Norm1d` to `3d`)."""
    return {
        f"{path}.{name}" if path else name
        for path, module in net.named_modules()
        if _NORM.search(type(module).__name__)
        for name, _ in module.named_parameters(recurse=False)
    }


def bias_names(net: nn.Module) -> set[str]:
    """Return the names of the parameters that end in `bias` (an attention's `in_proj_bias` too)."""
    return {name for name, _ in net.named_parameters() if name.endswith("bias")}


def matching_names(net: nn.Module, rules: Iterable[str], *, key: str) -> set[str]:
    """Return names of parameters that any rule matches: `norm`, `bias`, or a pattern (`*`, `?`, `[...]`)."""
    names = [name for name, _ in net.named_parameters()]
    found: set[str] = set()
    for rule in rules:
        if rule in ("norm", "bias"):
            found |= norm_names(net) if rule == "norm" else bias_names(net)
            continue
        matched = {name for name in names if fnmatchcase(name, str(rule))}
        if not matched:
            like = f"parameters are named like {names[0]}." if names else "it has none."
            hint = did_you_mean(rule, ["norm", "bias", *names], like)
            raise ArgumentError(f"{key}: the pattern {rule!r} matches no parameter of {type(net).__name__}; {hint}")
        found |= matched
    return found


def scale_of_each(net: nn.Module, scales: Mapping[str, float]) -> dict[str, float]:
    """Return the learning-rate factor of each parameter that matches a rule; the last match counts."""
    found: dict[str, float] = {}
    for rule, scale in scales.items():
        matched = matching_names(net, [rule], key="lr_scale")
        if not matched:
            raise ArgumentError(f"lr_scale: {type(net).__name__} has no {rule} to give a learning rate: leave it out.")
        found |= dict.fromkeys(matched, float(scale))
    return found


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
    as after (heads). Raises UserError if the net names no `blocks` with parameters.
    """
    blocks = list(getattr(net, "blocks", None) or ())
    inside = {id(parameter): number for number, block in enumerate(blocks, 1) for parameter in block.parameters()}
    if not inside:
        raise UserError(
            f"layer_decay numbers the layers by the `blocks` of the net, and {type(net).__name__} has none: leave it "
            "out."
        )
    found: dict[str, int] = {}
    begun = False
    for name, parameter in net.named_parameters():
        begun = begun or id(parameter) in inside
        found[name] = inside.get(id(parameter), len(blocks) + 1 if begun else 0)
    return found
