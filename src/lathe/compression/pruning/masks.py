"""Weight masks by parameter name, True where a weight is kept: which weights, by which scores, how many, and when.

Besides pruning: dynamic sparse training by gradients (RigL, Evci et al. 2020, arXiv:1911.11134) or at random (SET,
Mocanu et al. 2018, arXiv:1707.04780), and lottery tickets, which prune the smallest trained weights, rewind the others
and train again (Frankle and Carbin 2019, arXiv:1803.03635; to a later step: Frankle et al. 2020, arXiv:1912.05671).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
from lathe.measure.processes import processes
from lathe.measure.shards import is_sharded, local, part_of, whole

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
    parameters: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        if module is last or _matches(name, exclude) or not (layers is None or _matches(name, layers)):
            continue
        for own in ("weight", "bias") if "bias" in types else ("weight",):
            parameter = getattr(module, own, None)
            if isinstance(parameter, nn.Parameter) and (parameter.requires_grad or frozen_too):
                parameters[names[id(parameter)]] = parameter
    return parameters


def weights_of(
    net: nn.Module, layers: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the weights of the net, or of modules that match `layers` but not `exclude`, by name.

    A weight has at least two dimensions; with a first dimension of 1, such as learned positions, it counts as a bias.
    """
    weights = {}
    for name, parameter in net.named_parameters():
        parts = name.split(".")  # conv.parametrizations.weight.original1 is a weight of conv
        modules = [".".join(parts[:end]) for end in range(len(parts))]
        wanted = layers is None or any(_matches(module, layers) for module in modules)
        wanted &= not any(_matches(module, exclude) for module in modules)
        if wanted and parameter.dim() > 1 and parameter.shape[0] > 1:
            weights[name] = parameter
    return weights


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def head_of(net: nn.Module) -> nn.Module | None:
    """Return the layer of the logits: the last linear layer, else convolution, of `net.head` or the net."""
    head = getattr(net, "head", None)
    within = list((head if isinstance(head, nn.Module) else net).modules())
    for kinds in ((nn.Linear,), CONV):
        layers = [module for module in within if isinstance(module, kinds)]
        if layers:
            return layers[-1]
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

    def weights(self, units: Tensor, shape: torch.Size) -> Tensor:
        """Return the mask of a weight of `shape` from one boolean per unit."""
        if self.granularity == "unstructured":
            return units.reshape(shape)
        if self.granularity == "n_m":
            return units.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()
        rows, columns = self._tile(shape)
        return units.reshape(shape[0] // rows, -1).repeat_interleave(rows, 0).repeat_interleave(columns, 1).view(shape)

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
            remaining = units.units(previous[name].float(), None) > 0
            ranked = torch.where(remaining, ranked, -torch.inf)
        if units.granularity == "n_m":
            ranks = ranked.argsort(dim=-1, stable=True).argsort(dim=-1)  # the rank of a weight in its group
            ranked = torch.where(ranks < units.m - units.n, ranked, torch.inf)
        ranked = ranked.flatten()
        ranked[ranked.argmax()] = torch.inf  # a layer without weights would disconnect the net
        flat[name] = ranked
    removed: Masks = {}
    if units.scope == "output":
        for name, ranked in flat.items():
            rows = ranked.view(len(scores[name]), -1)
            ranks = rows.argsort(dim=1, stable=True).argsort(dim=1)
            gone = (ranks < round(sparsity * rows.shape[1])) & (rows < torch.inf)
            removed[name] = gone | (rows == -torch.inf)
    elif units.scope == "layer":
        removed = {name: _lowest(ranked, sparsity) for name, ranked in flat.items()}
    else:
        first = next(iter(flat.values())).device
        gone = _lowest(torch.cat([ranked.to(first) for ranked in flat.values()]), sparsity)
        pieces = gone.split([ranked.numel() for ranked in flat.values()])
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


def batchnorm_weights(net: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the weight of the BatchNorm after each layer, by the name of the layer's weight.

    Its magnitude scores output channels (Liu et al. 2017, "Network Slimming", arXiv:1708.06519). The next layer with
    weights in `net.modules()` must be a BatchNorm of as many channels, else UserError.
    """
    # only modules with weights: a learned fake quantizer is between a layer and its BatchNorm
    leaves = [pair for pair in net.named_modules() if isinstance(getattr(pair[1], "weight", None), nn.Parameter)]
    behind = {f"{name}.weight": norm for (name, _), (_, norm) in pairwise(leaves)}
    weights: dict[str, Tensor] = {}
    for name in names:
        norm, outputs = behind.get(name), net.get_parameter(name).shape[0]
        if not isinstance(norm, _BatchNorm) or norm.num_features != outputs or not norm.affine:
            raise UserError(
                f"criterion=batchnorm: no BatchNorm of {outputs} channels follows {name}: exclude it, or take "
                "magnitude."
            )
        weights[name] = norm.weight
    return weights


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
    present = {name: gradient for name in sums if (gradient := gradients[name]) is not None}
    if not present:
        return
    products = torch._foreach_mul([weights[name].float() for name in present], list(present.values()))
    if criterion == "movement":
        torch._foreach_neg_(products)
    else:
        torch._foreach_abs_(products)
    for product in products:
        product.nan_to_num_(0.0, 0.0, 0.0)
    torch._foreach_add_([sums[name] for name in present], products)


def wanda(parameters: Mapping[str, Tensor], squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return |w| times its input's L2 norm (Sun et al. 2023, arXiv:2306.11695, with scope=output)."""
    scores = {}
    for name, parameter in parameters.items():
        require(name in squares, f"criterion=wanda: the net calls no layer of {name}. Name it in exclude.")
        norms = squares[name].sqrt()  # [groups, inputs]
        rows = norms.repeat_interleave(parameter.shape[0] // norms.shape[0], 0)
        scores[name] = parameter.detach().abs() * rows.reshape(*rows.shape, *[1] * (parameter.dim() - 2))
    return scores


@contextmanager
def input_squares(net: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Sum the squares of each layer's input, [groups, input channels or features], within the context."""
    squares: dict[str, Tensor] = {}
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


@validated
def erdos_renyi_kernel(shapes: Mapping[str, Sequence[int]], sparsity: OpenShare) -> dict[str, float]:
    """Return densities in proportion to sum(shape) / prod(shape), at most 1: small tensors are denser.

    In total `1 - sparsity` of the weights are kept. ERK of Evci et al. 2020, after Mocanu et al. 2018.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    ratios = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        rest = [name for name in shapes if name not in dense]
        room = (1 - sparsity) * sum(sizes.values()) - sum(sizes[name] for name in dense)
        scale = room / sum(ratios[name] * sizes[name] for name in rest) if rest else 0.0
        full = {name for name in rest if scale * ratios[name] > 1}
        if not full:
            return {name: 1.0 if name in dense else scale * ratios[name] for name in shapes}
        # as in the authors' code: the tensors of the highest ratio become dense, and the others share the rest
        highest = max(ratios[name] for name in full)
        dense |= {name for name in full if ratios[name] == highest}


def random_masks(shapes: Mapping[str, Sequence[int]], densities: Mapping[str, float], seed: int) -> Masks:
    """Return random masks (True: kept) of `round(density * n)`, at least one, on the CPU, by seed."""
    scores = {name: random_scores(shape, seed, 0, index) for index, (name, shape) in enumerate(shapes.items())}
    return largest_masks(scores, densities)


def largest_masks(scores: Mapping[str, Tensor], densities: Mapping[str, float]) -> Masks:
    """Return masks (True: kept) of the `round(density * n)`, at least one, largest scores."""
    return {name: lowest(-score, max(1, round(densities[name] * score.numel()))) for name, score in scores.items()}


def random_scores(shape: Sequence[int], seed: int, step: int, index: int) -> Tensor:
    """Return uniform numbers that depend only on (seed, step, index), made on the CPU for all devices."""
    word = ((seed * 1_000_003 + step) * 1_000_003 + index) % 2**63
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(word))


def exchange(weight: Tensor, mask: Tensor, growth: Tensor, fraction: float) -> Tensor:
    """Return the mask after dropping `fraction` of the kept weights by magnitude and growing as many.

    Places of largest `growth` grow: |gradient| for RigL, random numbers for SET; as in the paper, also those just
    dropped, which keep their weight. All arguments have the weight's shape.
    """
    mask = mask.bool()
    remaining = int(mask.sum())
    moved = min(int(fraction * remaining), mask.numel() - remaining)
    if moved == 0:
        return mask.clone()
    stays = lowest(-weight.detach().abs().float().masked_fill(~mask, -1.0), remaining - moved)
    return stays | lowest(-growth.detach().float().masked_fill(stays, -math.inf), moved)


@validated
def round_sparsities(sparsity: OpenShare, rounds: Annotated[int, Field(ge=2)]) -> list[float]:
    """Return the share of zeros in each of `rounds` trainings: from 0 to `sparsity`, geometrically."""
    return [1 - (1 - sparsity) ** (k / (rounds - 1)) for k in range(rounds)]


def copy_state(net: nn.Module) -> dict[str, Tensor]:
    """Copy weights and buffers of `net` to the CPU, whole and as rank 0 has them. A collective."""
    saved = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        value = whole(tensor)
        if not is_sharded(tensor) and processes() > 1:
            value = value.clone()
            torch.distributed.broadcast(value, src=0)
        saved[name] = value.to("cpu", copy=True)
    return saved


@torch.no_grad()
def rewind(net: nn.Module, saved: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None) -> None:
    """Load what `copy_state` returned into `net`, in place, with zeros where `masks` are False."""
    for name, tensor in net.state_dict(keep_vars=True).items():
        mask = (masks or {}).get(name)
        value = saved[name] if mask is None else saved[name] * mask.to(saved[name].device)
        local(tensor).copy_(part_of(value.to(tensor.device), tensor))
