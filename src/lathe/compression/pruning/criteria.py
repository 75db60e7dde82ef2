"""Pruning criteria: scores of the shape of each parameter, by name; the lowest are removed."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.compression.pruning.masks import CONV
from lathe.compression.pruning.rewiring import random_scores
from lathe.errors import UserError, require
from lathe.measure.shards import whole

Scores = dict[str, Tensor]


def magnitude(parameters: Mapping[str, Tensor]) -> Scores:
    """Return |w| (Han et al. 2015, arXiv:1506.02626); `make_masks(norm=p)` makes Lp norms of it."""
    return {name: parameter.detach().abs() for name, parameter in parameters.items()}


def random(parameters: Mapping[str, Tensor], seed: int, step: int = 0) -> Scores:
    """Return uniform numbers in [0, 1) that depend only on (seed, step, name), as a baseline."""
    return {
        name: random_scores(parameter.shape, seed, step, zlib.crc32(name.encode())).to(parameter.device)
        for name, parameter in parameters.items()
    }


def batchnorm_scale(net: nn.Module, parameters: Mapping[str, Tensor]) -> Scores:
    """Return |gamma| of the BatchNorm after each layer, per output channel; a collective for sharded ones.

    Liu et al. 2017, "Network Slimming", arXiv:1708.06519. The next layer with weights in `net.modules()` must be a
    BatchNorm of as many channels, else UserError.
    """
    followers = batchnorms(net, parameters)
    scores = {}
    for name, parameter in parameters.items():
        gamma = whole(net.get_parameter(followers[name])).abs()
        scores[name] = gamma.reshape(-1, *[1] * (parameter.dim() - 1)).expand(parameter.shape)
    return scores


def batchnorms(net: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the name of the BatchNorm weight after each layer's weight; raise as `batchnorm_scale`."""
    # only modules with weights: a learned fake quantizer is between a layer and its BatchNorm
    leaves = [
        (name, module)
        for name, module in net.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    behind = {f"{name}.weight": after for (name, _), after in pairwise(leaves)}
    found = {}
    for name in names:
        after, norm = behind.get(name, ("", None))
        outputs = net.get_parameter(name).shape[0]
        if not isinstance(norm, _BatchNorm) or norm.num_features != outputs or not norm.affine:
            raise UserError(
                f"criterion=batchnorm: no BatchNorm of {outputs} channels follows {name}: exclude it, or take "
                "magnitude."
            )
        found[name] = f"{after}.weight"
    return found


@torch.no_grad()
def add_gradients(
    sums: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    criterion: Literal["taylor", "movement"],
) -> None:
    """Add a step's gradients to the scores, in place; call before an optimizer step.

    - taylor: |w grad|, the first-order change of the loss without the weight (Molchanov et al. 2017 and 2019,
      arXiv:1611.06440, arXiv:1906.10771).
    - movement: -w grad, positive for a move away from zero (Sanh et al. 2020, arXiv:2005.07683). In the paper masked
      weights continue to move; here they are zero and keep their last score.

    Values that are not finite count as 0.
    """
    found = {name: gradient for name in sums if (gradient := gradients[name]) is not None}
    if not found:
        return
    products = torch._foreach_mul([weights[name].float() for name in found], list(found.values()))
    if criterion == "movement":
        torch._foreach_neg_(products)
    else:
        torch._foreach_abs_(products)
    for product in products:
        product.nan_to_num_(0.0, 0.0, 0.0)
    torch._foreach_add_([sums[name] for name in found], products)


def wanda(parameters: Mapping[str, Tensor], squares: Mapping[str, Tensor]) -> Scores:
    """Return |w| times its input's L2 norm (Sun et al. 2023, arXiv:2306.11695, with scope=output)."""
    scores = {}
    for name, parameter in parameters.items():
        require(
            name in squares,
            f"criterion=wanda: the net uses {name} without calling its layer. Name it in exclude.",
        )
        norms = squares[name].sqrt()  # [groups, inputs]
        rows = norms.repeat_interleave(parameter.shape[0] // norms.shape[0], 0)
        scores[name] = parameter.detach().abs() * rows.reshape(*rows.shape, *[1] * (parameter.dim() - 2))
    return scores


@contextmanager
def input_squares(net: nn.Module, names: Iterable[str]) -> Iterator[Scores]:
    """Sum the squares of each layer's input, [groups, input channels or features], within the context.

    ```python
    with input_squares(net, parameters) as squares, torch.no_grad():
        net(batch)
    scores = wanda(parameters, squares)
    ```
    """
    squares: Scores = {}
    handles = []
    for name in names:
        layer: Any = net.get_submodule(name.rpartition(".")[0])
        if not isinstance(layer, (nn.Linear, *CONV)) or not name.endswith("weight"):
            raise UserError(
                f"criterion=wanda: {name} multiplies no activations. Choose linear layers and convolutions."
            )

        def add(module: Any, inputs: tuple[Tensor, ...], name: str = name) -> None:
            x = inputs[0].detach().float().square()
            channel = 1 if isinstance(module, CONV) else x.dim() - 1
            total = x.sum([dim for dim in range(x.dim()) if dim != channel]).reshape(getattr(module, "groups", 1), -1)
            squares[name] = squares[name] + total if name in squares else total

        handles.append(layer.register_forward_pre_hook(add))
    try:
        yield squares
    finally:
        for handle in handles:
            handle.remove()
