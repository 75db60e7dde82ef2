"""Weight masks by parameter name, True where a weight is kept: which weights, how many, and when.

```python
masks = magnitude_masks(net, sparsity=0.8)
apply_masks(net, masks)
```

A mask zeroes weights; shapes and dense speed do not change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lathe.config.types import (
    Count,
    LayerTypes,
    MaskScope,
    Name,
    OpenShare,
    Positive,
    ShareBelowOne,
    SomeNames,
    SparsityCurve,
)
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require

Masks = dict[str, Tensor]
Granularity = Literal["unstructured", "structured", "block", "n_m"]
Block = Annotated[Sequence[Count], Field(min_length=2, max_length=2)]
HEAD_RULE = (
    "the head (the attribute `head` of the net, else its last linear layer) stays dense unless head=true, and "
    "embeddings, norms and biases unless types name them."
)
CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # not transposed ones, whose first dimension is the input
TYPES: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "conv": CONV,
    "embedding": (nn.Embedding,),
    "norm": (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm),
}


@validated
def maskable(
    net: nn.Module,
    layers: SomeNames | None = None,
    exclude: Sequence[Name] = (),
    types: LayerTypes = ("linear", "conv"),
    head: bool = False,
    prefix: str = "masks",
) -> dict[str, nn.Parameter]:
    """Return the parameters that may be masked, by their names in `net.named_parameters()`.

    Patterns are shell patterns of module names (`blocks.*.conv1`); one without a match raises UserError. `types` are
    linear, conv, embedding, norm (their weights) and bias (the biases of the chosen layers). The head (`head_of`) stays
    dense unless `head` is True. Tied parameters are chosen once. In a partly frozen net, frozen parameters are left out
    unless `layers` name them: training could not compensate for their loss.
    """
    kinds = tuple(kind for name in types if name != "bias" for kind in TYPES[name])
    modules = {name: module for name, module in net.named_modules() if isinstance(module, kinds)}
    for key, patterns in (("layers", layers or ()), ("exclude", exclude)):
        for pattern in patterns:
            require(
                any(fnmatchcase(name, pattern) for name in modules),
                f"{prefix}.{key}: {pattern} matches no layer of the types {', '.join(types)}: layers are "
                f"{', '.join(list(modules)[:6]) or 'none'}, ...",
            )
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    frozen_too = layers is not None or not any(parameter.requires_grad for parameter in net.parameters())
    last = None if head else head_of(net)
    found: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        if module is last or _matches(name, exclude) or not (layers is None or _matches(name, layers)):
            continue
        for own in ("weight", "bias") if "bias" in types else ("weight",):
            parameter = getattr(module, own, None)
            if isinstance(parameter, nn.Parameter) and (parameter.requires_grad or frozen_too):
                found[names[id(parameter)]] = parameter
    return found


def weights_of(
    net: nn.Module, layers: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the weights of the net, or of modules that match `layers` but not `exclude`, by name.

    A weight has at least two dimensions; with a first dimension of 1, such as learned positions, it counts as a bias.
    """
    found = {}
    for name, parameter in net.named_parameters():
        parts = name.split(".")  # conv.parametrizations.weight.original1 is a weight of conv
        modules = [".".join(parts[:end]) for end in range(len(parts))]
        wanted = layers is None or any(_matches(module, layers) for module in modules)
        wanted &= not any(_matches(module, exclude) for module in modules)
        if wanted and parameter.dim() > 1 and parameter.shape[0] > 1:
            found[name] = parameter
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def head_of(net: nn.Module) -> nn.Module | None:
    """Return the layer of the logits: the last linear layer, else convolution, of `net.head` or the net."""
    head = getattr(net, "head", None)
    within = list((head if isinstance(head, nn.Module) else net).modules())
    for kinds in ((nn.Linear,), CONV):
        found = [module for module in within if isinstance(module, kinds)]
        if found:
            return found[-1]
    return None


def zero_share(net: nn.Module) -> float:
    """Return the share of exact zeros among the maskable weights: the sparsity of a net without masks."""
    weights = maskable(net).values()
    return sum(int((weight == 0).sum()) for weight in weights) / max(sum(weight.numel() for weight in weights), 1)


@validated
@dataclass(frozen=True)
class Pattern:
    """The units that are masked together, and where they compete.

    Units are single weights, rows (`structured`: dimension 0, output channels or features), blocks of `block` (rows x
    columns of the weight as a matrix [outputs, inputs * kernel]), or, of every `m` consecutive inputs (dimension 1, at
    one position of the kernel), up to m - n single weights (`n_m`). They compete in all layers (`global`), in their
    `layer`, or in their row (`output`: single weights only). A unit's score is the mean of its weights' scores, or with
    `norm` p, (mean |score|^p)^(1/p), so that layers are comparable.
    """

    granularity: Granularity = "unstructured"
    scope: MaskScope = "global"
    norm: Positive | None = None
    n: Count = 2
    m: Count = 4
    block: Block = (4, 1)

    def __post_init__(self) -> None:
        if self.scope == "output" and self.granularity not in ("unstructured", "n_m"):
            raise ArgumentError(f"scope=output masks single weights. Use scope=layer for {self.granularity}.")
        if self.n >= self.m:
            raise ArgumentError(f"n={self.n} of m={self.m} keeps all: take n from 1 to m - 1, such as 2 of 4.")

    @property
    def pieces(self) -> str:
        """Return what a weight is divided into, for messages."""
        if self.granularity == "n_m":
            return f"groups of {self.m} inputs"
        return f"blocks of {self.block[0]} x {self.block[1]}" if self.granularity == "block" else "rows"

    def divides(self, shape: torch.Size) -> bool:
        """Return whether a weight of `shape` divides into units."""
        if self.granularity == "n_m":
            return len(shape) > 1 and shape[1] % self.m == 0
        if self.granularity == "block":
            return len(shape) > 1 and shape[0] % self.block[0] == 0 and shape[1:].numel() % self.block[1] == 0
        return self.granularity == "unstructured" or len(shape) > 1

    def units(self, score: Tensor, norm: float | None) -> Tensor:
        """Return the scores of the units of a weight that divides: [units], or [groups, m] for n_m."""
        if self.granularity == "unstructured":
            return score.flatten()
        if self.granularity == "n_m":
            return score.movedim(1, -1).reshape(-1, self.m)
        rows, columns = self._tile(score.shape)
        tiles = score.reshape(len(score) // rows, rows, -1, columns)
        return (tiles.mean((1, 3)) if norm is None else tiles.abs().pow(norm).mean((1, 3)).pow(1 / norm)).flatten()

    def weights(self, kept: Tensor, shape: torch.Size) -> Tensor:
        """Return the mask of a weight of `shape` from one boolean per unit."""
        if self.granularity == "unstructured":
            return kept.reshape(shape)
        if self.granularity == "n_m":
            return kept.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()
        rows, columns = self._tile(shape)
        return kept.reshape(shape[0] // rows, -1).repeat_interleave(rows, 0).repeat_interleave(columns, 1).view(shape)

    def _tile(self, shape: torch.Size) -> tuple[int, int]:
        """Return rows and columns of a unit of the weight as a matrix."""
        return (1, shape[1:].numel()) if self.granularity == "structured" else (self.block[0], self.block[1])


def make_masks(
    scores: Mapping[str, Tensor],
    sparsity: float,
    *,
    previous: Mapping[str, Tensor] | None = None,
    **pattern: Any,
) -> Masks:
    """Return masks that remove the units of lowest score; `pattern` are the fields of `Pattern`.

    round(sparsity * units) are removed where units compete, but every layer keeps its best unit, and what `previous`
    has removed stays removed. Of equal scores, the first is removed first.

    Raises:
        UserError: an option is invalid, or a weight's shape does not divide into units.
    """
    if not 0 <= sparsity < 1:
        raise ArgumentError(f"sparsity={sparsity} is not in [0, 1): give the share of weights to remove, such as 0.8.")
    if not scores:
        raise UserError(f"masks: there is nothing to mask; {HEAD_RULE}")
    units = Pattern(**pattern)
    flat: dict[str, Tensor] = {}
    for name, score in scores.items():
        if not units.divides(score.shape):
            raise UserError(f"{name} of shape {list(score.shape)} does not divide into {units.pieces}: exclude it.")
        ranked = units.units(score.detach().float(), units.norm).nan_to_num(nan=torch.inf)
        if previous is not None and name in previous:
            kept = units.units(previous[name].float(), None) > 0
            ranked = torch.where(kept, ranked, -torch.inf)
        if units.granularity == "n_m":
            place = ranked.argsort(dim=-1, stable=True).argsort(dim=-1)  # the rank of a weight in its group
            ranked = torch.where(place < units.m - units.n, ranked, torch.inf)
        ranked = ranked.flatten()
        ranked[ranked.argmax()] = torch.inf  # a layer without weights would disconnect the net
        flat[name] = ranked
    if units.scope == "output":
        removed = {name: _lowest_of_rows(ranked.view(len(scores[name]), -1), sparsity) for name, ranked in flat.items()}
    elif units.scope == "layer":
        removed = {name: _lowest(ranked, sparsity) for name, ranked in flat.items()}
    else:
        first = next(iter(flat.values())).device
        lowest = _lowest(torch.cat([ranked.to(first) for ranked in flat.values()]), sparsity)
        pieces = lowest.split([ranked.numel() for ranked in flat.values()])
        removed = {name: piece.to(flat[name].device) for name, piece in zip(flat, pieces, strict=True)}
    return {name: units.weights(~gone, scores[name].shape) for name, gone in removed.items()}


def _lowest(ranked: Tensor, sparsity: float) -> Tensor:
    """Mark the round(sparsity * n) lowest of `ranked` [n], never those at +inf, always those at -inf."""
    gone = int((ranked == -torch.inf).sum())
    return lowest(ranked, min(max(round(sparsity * ranked.numel()), gone), int((ranked < torch.inf).sum())))


def lowest(values: Tensor, count: int) -> Tensor:
    """Mark the `count` lowest values; of equal ones, the first."""
    flat = values.flatten()
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    threshold = flat.topk(count, largest=False, sorted=False).values.max()
    below, equal = flat < threshold, flat == threshold
    return (below | (equal & (equal.cumsum(0) <= count - below.sum()))).view(values.shape)


def _lowest_of_rows(ranked: Tensor, sparsity: float) -> Tensor:
    """Apply `_lowest` to each row of [rows, n]."""
    place = ranked.argsort(dim=1, stable=True).argsort(dim=1)
    removed = (place < round(sparsity * ranked.shape[1])) & (ranked < torch.inf)
    return removed | (ranked == -torch.inf)


def magnitude_masks(
    net: nn.Module,
    sparsity: float,
    *,
    norm: float = 1.0,
    layers: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    **pattern: Any,
) -> Masks:
    """Return masks of the smallest magnitudes, of the layers that `maskable` returns; see `make_masks`."""
    scores = {name: p.detach().abs() for name, p in maskable(net, layers, exclude, head=head).items()}
    return make_masks(scores, sparsity, norm=norm, **pattern)


@torch.no_grad()
def apply_masks(net: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Zero the masked weights of `net`, in place; raise UserError if a name or shape differs."""
    parameters = dict(net.named_parameters())
    for name, mask in masks.items():
        require(
            name in parameters and parameters[name].shape == mask.shape,
            f"The net has no parameter {name} of shape {list(mask.shape)}: these masks are of another net.",
        )
    for name, mask in masks.items():
        parameters[name].masked_fill_(~mask.to(parameters[name].device).bool(), 0.0)


def sparsity_of(masks: Mapping[str, Tensor]) -> float:
    """Return the share of masked weights."""
    zeros = sum(int((~mask.bool()).sum()) for mask in masks.values())
    return zeros / max(sum(mask.numel() for mask in masks.values()), 1)


@validated
@dataclass(frozen=True)
class SparsitySchedule:
    """Sparsity from `initial_sparsity` at optimizer step `start` to `sparsity` at step `end`.

    Masks are updated every `every_n_steps` steps and at `end`, and then fixed. With the initial and final sparsity, and
    t, the share of the way from start to end:

    - one_shot: final at `start`; `end` is not used.
    - linear: initial + (final - initial) t.
    - cubic: final + (initial - final) (1 - t)^3 (Zhu and Gupta 2017, arXiv:1710.01878).
    - exponential: 1 - (1 - initial) ((1 - final) / (1 - initial))^t.
    - stepped: `jumps` equal jumps, the first at `start`, the last at `end`.

    Steps count from 1; 0 is before the first.
    """

    sparsity: OpenShare
    schedule: SparsityCurve = "cubic"
    initial_sparsity: ShareBelowOne = 0.0
    start: int = 0
    end: int = 0
    every_n_steps: Count = 1
    jumps: Count = 4

    def __post_init__(self) -> None:
        if self.initial_sparsity > self.sparsity:
            raise ArgumentError(
                f"initial_sparsity={self.initial_sparsity} is above sparsity={self.sparsity}: lower it."
            )

    @property
    def last(self) -> int:
        """Return the step of the last update."""
        return self.start if self.schedule == "one_shot" else self.end

    def due(self, step: int) -> bool:
        """Return whether masks are updated after this optimizer step."""
        if step == self.last:
            return True
        if not self.start <= step < self.last:
            return False
        if self.schedule == "stepped":
            return self._jumps_by(step) > self._jumps_by(step - 1)
        return (step - self.start) % self.every_n_steps == 0

    def at(self, step: int) -> float:
        """Return the sparsity after this optimizer step, as if masks were updated at each; 0 before `start`."""
        if step < self.start:
            return 0.0
        if step >= self.last:
            return self.sparsity
        t = (step - self.start) / (self.end - self.start)
        if self.schedule == "stepped":
            t = self._jumps_by(step) / self.jumps
        elif self.schedule == "cubic":
            return self.sparsity + (self.initial_sparsity - self.sparsity) * (1 - t) ** 3
        elif self.schedule == "exponential":
            ratio: float = ((1 - self.sparsity) / (1 - self.initial_sparsity)) ** t
            return 1 - (1 - self.initial_sparsity) * ratio
        return self.initial_sparsity + (self.sparsity - self.initial_sparsity) * t

    def _jumps_by(self, step: int) -> int:
        """Count the jumps up to `step`; jump i of `jumps`, from 0, is at i / (jumps - 1) of the way."""
        if step < self.start:
            return 0
        if step >= self.end:
            return self.jumps
        return 1 + (step - self.start) * (self.jumps - 1) // (self.end - self.start) if self.jumps > 1 else 0
