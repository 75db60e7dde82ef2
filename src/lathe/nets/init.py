"""Initialisations by name, for `model.init`: functions that change a net's weights in place.

A name is one of the table, a dotted path to a user's function (`my_project.init.fixup`), or a list of either, applied
in order: `model.init=[kaiming_normal,zero_gamma]`. Biases of initialised layers are set to zero.
"""

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import nn

from lathe.errors import ArgumentError, UserError, did_you_mean

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
Init = Callable[[nn.Module], None]


def _layers(net: nn.Module) -> Iterator[tuple[Layer, bool]]:
    """Yield each convolution and linear layer, and whether it is the classifier (the last linear one)."""
    layers = [module for module in net.modules() if isinstance(module, Layer)]
    if not layers:
        raise UserError("Initialisation found no convolution and no linear layer in this net: leave it out.")
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for layer in layers:
        yield layer, bool(linear) and layer is linear[-1]
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


@torch.no_grad()
def kaiming_normal(net: nn.Module) -> None:
    """Initialise by He et al. 2015, arXiv:1502.01852.

    Weights are normal with variance 2 / fan-out for convolutions, 2 / fan-in for hidden linear layers, and 1 / fan-in
    for the classifier, which has no ReLU after it.
    """
    for layer, is_classifier in _layers(net):
        mode: Literal["fan_in", "fan_out"] = "fan_in" if isinstance(layer, nn.Linear) else "fan_out"
        nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="linear" if is_classifier else "relu")


@torch.no_grad()
def xavier_uniform(net: nn.Module) -> None:
    """Initialise by Glorot and Bengio 2010: uniform, variance 2 / (fan-in + fan-out)."""
    for layer, _ in _layers(net):
        nn.init.xavier_uniform_(layer.weight)


@torch.no_grad()
def orthogonal(net: nn.Module) -> None:
    """Initialise by Saxe et al. 2014, arXiv:1312.6120: orthonormal rows or columns, x sqrt(2) before ReLU."""
    for layer, is_classifier in _layers(net):
        nn.init.orthogonal_(layer.weight, gain=1.0 if is_classifier else nn.init.calculate_gain("relu"))


@torch.no_grad()
def zero_gamma(net: nn.Module) -> None:
    """Zero the norms that end residual branches (Goyal et al. 2017, arXiv:1706.02677). Blocks start as shortcuts."""
    norms = [block.last_norm for block in getattr(net, "blocks", []) if hasattr(block, "last_norm")]
    if not norms:
        raise ArgumentError(f"init=zero_gamma found no block with a last_norm in {type(net).__name__}: choose another.")
    for norm in norms:
        nn.init.zeros_(norm.weight)


INITS: dict[str, Init] = {init.__name__: init for init in (kaiming_normal, xavier_uniform, orthogonal, zero_gamma)}


def _resolve(name: str) -> Init:
    if name in INITS:
        return INITS[name]
    if "." in name:
        try:
            function = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ArgumentError(
                f"init={name} cannot be imported ({error}): name a function that takes the net."
            ) from error
        if not callable(function):
            raise ArgumentError(f"init={name} is not a function: name one that takes the net.")
        return function  # a user's function
    hint = did_you_mean(name, INITS, f"choose from {', '.join(INITS)}, a dotted path to your own function, or null.")
    raise ArgumentError(f"init={name} is unknown: {hint}")


def apply_init(net: nn.Module, name: str | Iterable[str] | None) -> None:
    """Initialise `net` in place by one name or several in order; None keeps the constructor's weights.

    Random numbers come from torch's global generator.
    """
    names = [] if name is None else [name] if isinstance(name, str) else list(name)
    for init in [_resolve(each) for each in names]:  # resolve all first: a typo must leave the net untouched
        init(net)


def describe_loaded(summary: str, absent: list[str], shapes: list[str], extra: list[str]) -> list[str]:
    """Return the line `summary`, and one for each kind of weights in which a file and a net differ."""
    groups = {
        "Not in the file, so as they were made": absent,
        "Of another shape, so as they were made": shapes,
        "In the file alone": extra,
    }
    return [summary, *(f"{title}: {', '.join(names)}." for title, names in groups.items() if names)]
