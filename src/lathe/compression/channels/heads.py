"""Attention heads as removable units."""

import torch
from torch import Tensor, nn

from lathe.compression.channels.slices import Group, Slice

PROJECTIONS = ("q", "k", "v")


def attentions(net: nn.Module) -> dict[str, nn.Module]:
    """Return modules with Linears q, k, v, out and `head_dim`, as `lathe.nets.attention.Attention`."""
    return {
        name: module
        for name, module in net.named_modules()
        if isinstance(getattr(module, "head_dim", None), int)
        and all(isinstance(getattr(module, part, None), nn.Linear) for part in (*PROJECTIONS, "out"))
    }


def head_groups(net: nn.Module) -> list[Group]:
    """Return a group of heads for each attention (Michel et al. 2019, arXiv:1905.10650).

    The residual stream keeps its width: a norm averages over it, so that removing a part always has an effect.
    """
    return [_group(name, module) for name, module in attentions(net).items()]


def _group(name: str, attention: nn.Module) -> Group:
    head_dim = int(attention.head_dim)  # type: ignore[arg-type]
    width = attention.get_submodule("out").in_features
    index = torch.arange(int(width)).view(-1, head_dim)  # type: ignore[arg-type]
    prefix = f"{name}." if name else ""
    slices, sizes = [], []
    for part in PROJECTIONS:
        path, layer = prefix + part, attention.get_submodule(part)
        slices.append(Slice(path, "weight", 0, index, "out"))
        if isinstance(layer.bias, Tensor):
            slices.append(Slice(path, "bias", 0, index, "out"))
        sizes.append((path, "out_features", head_dim))
    slices.append(Slice(prefix + "out", "weight", 1, index, "in"))
    sizes.append((prefix + "out", "in_features", head_dim))
    return Group(name, "heads", len(index), tuple(slices), tuple(sizes))
