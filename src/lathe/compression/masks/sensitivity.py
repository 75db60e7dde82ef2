"""Sensitivity of a net to sparsity or fewer bits in a single layer.

```python
found = scan(net, layers(net), sparsities=[0.5, 0.9], bits=[8, 4], score=score, batches=inputs)
```
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.compression.batchnorm import reestimate_batchnorm
from lathe.compression.masks.masks import make_masks
from lathe.errors import UserError

KINDS = ("sparsity", "bits")
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Embedding)

Score = Callable[[], dict[str, float]]
Found = dict[str, dict[str, dict[float, dict[str, float]]]]


def layers(net: nn.Module, patterns: Sequence[str] | None = None, key: str = "layers") -> dict[str, nn.Module]:
    """Return convolutions, linear layers and embeddings by name, or those that match shell `patterns`.

    Of layers that share a weight, the first counts. A pattern without a match raises UserError with `key`.
    """
    found: dict[str, nn.Module] = {}
    shared: set[int] = set()
    for name, module in net.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, LAYERS) and isinstance(weight, nn.Parameter) and id(weight) not in shared:
            shared.add(id(weight))
            found[name] = module
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in found):
            raise UserError(
                f"{key}: {pattern} matches no convolution, linear layer or embedding: layers are {', '.join(found)}."
            )
    return {
        name: module for name, module in found.items() if not patterns or any(fnmatchcase(name, p) for p in patterns)
    }


def change(weight: Tensor, kind: str, value: float) -> Tensor:
    """Return `weight` with its smallest share `value` set to zero, or rounded to `value` bits."""
    if kind == "bits":
        return round_to_nearest(weight, int(value))
    scores = {"weight": weight.abs()}
    return weight * make_masks(scores, value, scope="layer")["weight"]


def round_to_nearest(weight: Tensor, bits: int) -> Tensor:
    """Round `weight` [out, ...] to symmetric integers of `bits` bits, with a scale per output channel."""
    most = 2 ** (bits - 1) - 1
    scale = (
        weight.flatten(1).abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny).view(-1, *[1] * (weight.dim() - 1))
        / most
    )
    return (weight / scale).round().clamp(-most, most) * scale


class Changed:
    """Change layers' weights and re-estimate BatchNorm within a `with`, then restore `net` bit for bit.

    `net` is in eval mode; `values` are the kind of change and the value by layer; `batches` are inputs for BatchNorm's
    statistics, none keeps them.
    """

    def __init__(self, net: nn.Module, values: Mapping[str, tuple[str, float]], batches: Iterable[Tensor] = ()) -> None:
        self.net, self.values, self.batches = net, values, batches
        self._before: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def __enter__(self) -> nn.Module:
        weights = {name: self.net.get_submodule(name).get_parameter("weight") for name in self.values}
        touched: list[Tensor] = list(weights.values())
        for module in self.net.modules():
            if isinstance(module, _BatchNorm):
                touched += module.buffers()
        self._before = [(tensor, tensor.detach().clone()) for tensor in touched]
        for name, (kind, value) in self.values.items():
            weights[name].copy_(change(weights[name], kind, value))
        reestimate_batchnorm(self.net, self.batches, limit=None)
        return self.net

    @torch.no_grad()
    def __exit__(self, *exception: object) -> None:
        for tensor, value in self._before:
            tensor.copy_(value)


@torch.no_grad()
def scan(
    net: nn.Module,
    names: Iterable[str],
    *,
    sparsities: Sequence[float],
    bits: Sequence[int],
    score: Score,
    batches: Sequence[Tensor] = (),
    done: Callable[[], None] = lambda: None,
) -> Found:
    """Return `score()` with one layer changed at a time: layer -> KINDS -> value -> metrics."""
    tried: dict[str, Sequence[float]] = {"sparsity": sparsities, "bits": bits}
    found: Found = {}
    for name in names:
        found[name] = {kind: {} for kind in KINDS}
        for kind in KINDS:
            for value in tried[kind]:
                with Changed(net, {name: (kind, value)}, batches):
                    found[name][kind][value] = score()
                done()
    return found
