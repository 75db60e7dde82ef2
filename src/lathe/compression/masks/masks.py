"""Weight masks by parameter name, True where a weight is kept.

```python
masks = magnitude_masks(net, sparsity=0.8)
apply_masks(net, masks)
```

A mask zeroes weights; shapes and dense speed do not change.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lathe.compression.masks.parameters import HEAD_RULE, maskable
from lathe.config.types import Count, MaskScope
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError

Masks = dict[str, Tensor]
Granularity = Literal["unstructured", "structured", "n_m", "block"]
Scope = MaskScope


def make_masks(
    scores: Mapping[str, Tensor],
    sparsity: float,
    *,
    granularity: Granularity = "unstructured",
    scope: Scope = "global",
    previous: Mapping[str, Tensor] | None = None,
    norm: float | None = None,
    n: int = 2,
    m: int = 4,
    block: tuple[int, int] = (4, 1),
) -> Masks:
    """Return masks that remove the units of lowest score.

    Units are single weights, rows (`structured`: dimension 0, output channels or features), blocks of `block` (rows x
    columns of the weight as a matrix [outputs, inputs * kernel]), or, of every `m` consecutive inputs (dimension 1, at
    one position of the kernel), up to m - n single weights (`n_m`). round(sparsity * units) are removed in total
    (`global`), per layer (`layer`) or per row (`output`: single weights only), but every layer keeps its best unit, and
    what `previous` has removed stays removed. Of equal scores, the first is removed first. A row's or block's score is
    the mean of its weights' scores, or with `norm` p, (mean |score|^p)^(1/p), so that layers are comparable.

    Raises:
        UserError: an option is invalid, or the granularity does not divide a weight's shape.
    """
    check_options(sparsity, granularity, scope, n, m, block)
    units = {name: _units(score.detach().float(), granularity, norm, m, block, name) for name, score in scores.items()}
    if not units:
        raise UserError(f"masks: there is nothing to mask; {HEAD_RULE}")
    flat: dict[str, Tensor] = {}
    for name, unit in units.items():
        ranked = unit.nan_to_num(nan=torch.inf)
        if previous is not None and name in previous:
            kept = _units(previous[name].float(), granularity, None, m, block, name) > 0
            ranked = torch.where(kept, ranked, -torch.inf)
        if granularity == "n_m":
            place = ranked.argsort(dim=-1, stable=True).argsort(dim=-1)  # the rank of a weight in its group
            ranked = torch.where(place < m - n, ranked, torch.inf)
        ranked = ranked.flatten()
        ranked[ranked.argmax()] = torch.inf  # a layer without weights would disconnect the net
        flat[name] = ranked
    if scope == "output":
        kept_units = {
            name: ~_lowest_of_rows(ranked.reshape(len(scores[name]), -1), sparsity) for name, ranked in flat.items()
        }
    elif scope == "layer":
        kept_units = {name: ~_lowest(ranked, sparsity) for name, ranked in flat.items()}
    else:
        first = next(iter(flat.values())).device
        removed = _lowest(torch.cat([ranked.to(first) for ranked in flat.values()]), sparsity)
        pieces = removed.split([ranked.numel() for ranked in flat.values()])
        kept_units = {name: ~piece.to(flat[name].device) for name, piece in zip(flat, pieces, strict=True)}
    return {name: _weights(kept, scores[name], granularity, m, block) for name, kept in kept_units.items()}


def _lowest(ranked: Tensor, sparsity: float) -> Tensor:
    """Mark the round(sparsity * n) lowest of `ranked` [n], never those at +inf, always those at -inf."""
    gone = ranked == -torch.inf
    count = min(max(round(sparsity * ranked.numel()), int(gone.sum())), int((ranked < torch.inf).sum()))
    if count == 0:
        return gone
    threshold = ranked.topk(count, largest=False, sorted=False).values.max()
    below, equal = ranked < threshold, ranked == threshold
    return below | (equal & (equal.cumsum(0) <= count - below.sum()))


def _lowest_of_rows(ranked: Tensor, sparsity: float) -> Tensor:
    """Apply `_lowest` to each row of [rows, n]."""
    place = ranked.argsort(dim=1, stable=True).argsort(dim=1)
    removed = (place < round(sparsity * ranked.shape[1])) & (ranked < torch.inf)
    return removed | (ranked == -torch.inf)


def _units(score: Tensor, granularity: str, norm: float | None, m: int, block: tuple[int, int], name: str) -> Tensor:
    """Return the scores of units: [units], or [groups, m] for n_m."""
    if granularity == "unstructured":
        return score.flatten()
    if score.dim() < 2:
        raise UserError(
            f"{name} has one dimension, which granularity={granularity} does not divide: leave it to unstructured."
        )
    if granularity == "structured":
        return _mean(score.flatten(1), norm, (1,))
    if not divides(score.shape, granularity, m, block):
        raise UserError(
            f"{name} of shape {list(score.shape)} does not divide into {_pieces(granularity, m, block)}: exclude it."
        )
    if granularity == "n_m":
        return score.movedim(1, -1).reshape(-1, m)
    rows, columns = block
    matrix = score.flatten(1)
    tiles = matrix.reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)
    return _mean(tiles, norm, (1, 3)).flatten()


def _mean(score: Tensor, norm: float | None, dims: tuple[int, ...]) -> Tensor:
    return score.mean(dims) if norm is None else score.abs().pow(norm).mean(dims).pow(1 / norm)


def _weights(kept: Tensor, like: Tensor, granularity: str, m: int, block: tuple[int, int]) -> Tensor:
    """Return the mask in the shape of the weight, from one boolean per unit."""
    shape = like.shape
    if granularity == "unstructured":
        return kept.reshape(shape)
    if granularity == "structured":
        return kept.reshape(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()
    if granularity == "n_m":
        moved = like.movedim(1, -1).shape
        return kept.reshape(moved).movedim(-1, 1).contiguous()
    rows, columns = block
    matrix = kept.reshape(shape[0] // rows, -1).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return matrix.reshape(shape)


def divides(shape: Sequence[int], granularity: str, m: int, block: tuple[int, int]) -> bool:
    """Return whether a weight of `shape` divides into the units of a granularity."""
    if granularity == "n_m":
        return len(shape) > 1 and shape[1] % m == 0
    if granularity == "block":
        return len(shape) > 1 and shape[0] % block[0] == 0 and shape[1:].numel() % block[1] == 0  # type: ignore[attr-defined]
    return granularity == "unstructured" or len(shape) > 1


def _pieces(granularity: str, m: int, block: tuple[int, int]) -> str:
    return f"groups of {m} inputs" if granularity == "n_m" else f"blocks of {block[0]} x {block[1]}"


@validated
def check_options(
    sparsity: float,
    granularity: Literal["unstructured", "structured", "block", "n_m"],
    scope: MaskScope,
    n: Count,
    m: Count,
    block: Annotated[Sequence[Count], Field(min_length=2, max_length=2)],
) -> None:
    """Raise ArgumentError for options that `make_masks` does not accept."""
    if not 0 <= sparsity < 1:
        raise ArgumentError(f"sparsity={sparsity} is not in [0, 1): give the share of weights to remove, such as 0.8.")
    if scope == "output" and granularity not in ("unstructured", "n_m"):
        raise ArgumentError(
            f"scope=output is for single weights, not for granularity={granularity}: choose layer or global."
        )
    if n >= m:
        raise ArgumentError(f"n={n} of m={m} keeps all: take n from 1 to m - 1, such as 2 of 4.")


def magnitude_masks(
    net: nn.Module,
    sparsity: float,
    *,
    granularity: Granularity = "unstructured",
    scope: Scope = "global",
    norm: float = 1.0,
    layers: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    n: int = 2,
    m: int = 4,
    block: tuple[int, int] = (4, 1),
) -> Masks:
    """Return masks of the smallest magnitudes, of the layers that `maskable` returns; see `make_masks`."""
    scores = {name: parameter.detach().abs() for name, parameter in maskable(net, layers, exclude).items()}
    return make_masks(scores, sparsity, granularity=granularity, scope=scope, norm=norm, n=n, m=m, block=block)


@torch.no_grad()
def apply_masks(net: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Zero the masked weights of `net`, in place; raise UserError if a name or shape differs."""
    parameters = dict(net.named_parameters())
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            raise UserError(
                f"The net has no parameter {name} of shape {list(mask.shape)}: these masks are of another net."
            )
    for name, mask in masks.items():
        parameters[name].masked_fill_(~mask.to(parameters[name].device).bool(), 0.0)


def sparsity_of(masks: Mapping[str, Tensor]) -> float:
    """Return the share of masked weights."""
    return sum(int((~mask.bool()).sum()) for mask in masks.values()) / max(
        sum(mask.numel() for mask in masks.values()), 1
    )
