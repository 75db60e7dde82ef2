"""Channels, heads and hidden units of a net: which depend on each other, which to remove, and their removal."""

import copy
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils.flop_counter import FlopCounterMode

from lathe.compression.modes import copy_input, evaluated, without_memory
from lathe.config.types import ChannelBudget, ChannelImportance, Count, Name, OpenShare
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, uninstalled
from lathe.measure.calls import Call, output_of, run
from lathe.measure.comparison import interleaved

_KEY = "_channels_removed"  # in a net's __dict__, which deepcopy copies


@dataclass(frozen=True)
class Slice:
    """Positions of a group's units in one tensor: `index` `[units, positions]` of dimension `dim`.

    `role` is "out" for tensors that make a unit's output (a convolution's rows and bias, a BatchNorm's weight and
    bias), which is zero if all of these are; "in" for tensors that read it (a convolution's columns); "state" for
    running statistics.
    """

    module: str
    tensor: str
    dim: int
    index: Tensor
    role: Literal["out", "in", "state"]

    @property
    def name(self) -> str:
        return f"{self.module}.{self.tensor}" if self.module else self.tensor


@dataclass(frozen=True)
class Group:
    """Units that have to be removed from all their layers together: channels, heads or hidden units.

    `name` is that of the first layer. `sizes` are module attributes that count units: (module, attribute, its count per
    unit).
    """

    name: str
    kind: Literal["channels", "heads"]
    units: int
    slices: tuple[Slice, ...]
    sizes: tuple[tuple[str, str, int], ...]


def remove(net: nn.Module, groups: Iterable[Group], chosen: Mapping[str, Sequence[int]]) -> None:
    """Remove the units `chosen[group.name]` of each group from `net`, in place.

    Tensors are replaced by smaller ones; create optimizers afterwards. The net's output does not change if the units'
    "out" slices are zero.
    """
    groups = list(groups)
    dropped = positions(groups, chosen)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for group in groups:
        for path, attribute, width in group.sizes if chosen.get(group.name) else ():
            sizes[path, attribute] += width * len(chosen[group.name])
    new: dict[int, Tensor] = {}
    for name, dims in dropped.items():
        tensor = attrgetter(name)(net)
        if id(tensor) not in new:  # a tied tensor is cut once
            new[id(tensor)] = _without(tensor, dims)
    for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        if id(tensor) in new:
            _put(net, name, new[id(tensor)])
    for name, dims in dropped.items():  # quantizers with one scale per output channel lose the channels' scales
        path, _, attribute = name.rpartition(".")
        quantizer = getattr(net.get_submodule(path), "weight_quantizer", None)
        if attribute == "weight" and 0 in dims and isinstance(quantizer, nn.Module):
            count = len(attrgetter(name)(net)) + len(dims[0])
            for own, tensor in [*quantizer.named_parameters(), *quantizer.named_buffers()]:
                if tensor.dim() and len(tensor) == count > 1:
                    _put(quantizer, own, _without(tensor, {0: dims[0]}))
    if dropped:
        noted = net.__dict__.setdefault(_KEY, {"tensors": {}, "modules": {}})
        noted["tensors"] |= {name: list(attrgetter(name)(net).shape) for name in dropped}
    for (path, attribute), count in sizes.items():
        module = net.get_submodule(path)
        setattr(module, attribute, getattr(module, attribute) - count)
        noted["modules"].setdefault(path, {})[attribute] = getattr(module, attribute)


def fading(groups: Sequence[Group], chosen: Mapping[str, Sequence[int]], net: nn.Module) -> dict[str, Tensor]:
    """Return masks, True where a weight makes the output of a unit in `chosen`, by parameter name.

    A unit's output is zero if all of these are: rows and bias of each convolution that writes its channel, and the
    BatchNorms' weight and bias, whatever their running statistics.
    """
    parameters = dict(net.named_parameters())
    masks: dict[str, Tensor] = {}
    for group in groups:
        units = list(chosen.get(group.name, ()))
        for part in group.slices if units else ():
            if part.role == "out":
                mask = masks.setdefault(part.name, torch.zeros(parameters[part.name].shape, dtype=torch.bool))
                mask.index_fill_(part.dim, part.index[units].flatten(), True)
    return masks


def silence(net: nn.Module, groups: Sequence[Group], chosen: Mapping[str, Sequence[int]]) -> None:
    """Zero the weights that make the output of the chosen units, in place."""
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        for name, mask in fading(groups, chosen, net).items():
            parameters[name].masked_fill_(mask.to(parameters[name].device), 0.0)


def positions(groups: Iterable[Group], chosen: Mapping[str, Sequence[int]]) -> dict[str, dict[int, set[int]]]:
    """Return the positions that `remove` removes, by tensor name and dimension."""
    dropped: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for group in groups:
        units = list(chosen.get(group.name, ()))
        for part in group.slices if units else ():
            dropped[part.name][part.dim].update(part.index[units].flatten().tolist())
    return dropped


def staying(shape: Sequence[int], dims: Mapping[int, Iterable[int]]) -> tuple[Tensor, ...]:
    """Return an index of what remains of a tensor of `shape` without the positions `dims`."""
    dropped = {dim: set(places) for dim, places in dims.items()}
    remaining = [[i for i in range(size) if i not in dropped.get(dim, ())] for dim, size in enumerate(shape)]
    return tuple(torch.tensor(places).view(-1, *[1] * (len(shape) - 1 - dim)) for dim, places in enumerate(remaining))


def describe(net: nn.Module) -> dict[str, Any]:
    """Return the shapes that removal has changed, as plain data; empty if none."""
    return copy.deepcopy(net.__dict__.get(_KEY, {}))


def rebuild(net: nn.Module, description: dict[str, Any]) -> None:
    """Give `net` the shapes that `describe` returned, in place; load values afterwards.

    Raises:
        UserError: the net has no such tensors, or they are smaller.
    """
    tensors, modules = description["tensors"], description["modules"]
    named = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    for name, shape in tensors.items():
        old: Any = tuple(named[name].shape) if name in named else ()
        if len(old) != len(shape) or any(not 0 < size <= was for size, was in zip(shape, old, strict=True)):
            raise UserError(
                f"The structure's {name} has shape {list(shape)}, and the net's {list(old)}: it is of another net."
            )
    counts = [(net.get_submodule(path), *item) for path, values in modules.items() for item in values.items()]
    for module, attribute, value in counts:  # before any change
        old = getattr(module, attribute)
        if type(old) is not int or type(value) is not int or not 0 < value <= old:
            raise UserError(f"The structure's {attribute} is {value!a}, the net's {old!r:.60}: it is of another net.")
    new: dict[int, Tensor] = {}
    for name, shape in tensors.items():
        tensor = named[name]
        if id(tensor) not in new:
            new[id(tensor)] = _like(tensor, tensor.detach()[tuple(slice(size) for size in shape)].clone())
    for name, tensor in named.items():  # a tied tensor has several names
        if id(tensor) in new:
            _put(net, name, new[id(tensor)])
    for module, attribute, value in counts:
        setattr(module, attribute, value)
    net.__dict__[_KEY] = copy.deepcopy(description)


def _put(net: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(net.get_submodule(path), attribute, tensor)


def _like(old: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else values


def _without(tensor: Tensor, dims: Mapping[int, set[int]]) -> Tensor:
    values = tensor.detach()
    for dim, positions in dims.items():
        keep = [position for position in range(values.shape[dim]) if position not in positions]
        values = values.index_select(dim, torch.tensor(keep, dtype=torch.long, device=values.device))
    return _like(tensor, values)


PROJECTIONS = ("q", "k", "v")


def require_packages() -> None:
    """Raise UserError if torch-pruning, an extra, is not installed."""
    sentence = uninstalled("compress", "torch_pruning")
    if sentence:
        raise UserError(f"removing channels: {sentence}")


def find_groups(net: nn.Module, example: Tensor | Call, exclude: Sequence[str] = ()) -> list[Group]:
    """Return the removable units of `net`: convolution channels, hidden units of MLPs, attention heads.

    Traces a copy on `example` with the dependency graph of Fang et al. 2023 (DepGraph, arXiv:2301.12900). Excluded are
    channels of the net's input and output, those that a norm mixes (LayerNorm, GroupNorm: a transformer's residual
    stream), grouped convolutions that are not depthwise, and groups with a layer that matches a pattern of `exclude`. A
    test on a copy verifies that removing units equals zeroing them.

    Raises:
        UserError: a pattern matches no layer, nothing can be removed, the net can't be traced, or torch-pruning is not
            installed.
    """
    require_packages()
    example = example[:2].detach().to("cpu")
    twin = copy.deepcopy(net).cpu().float().eval().requires_grad_(True)
    twin.register_forward_pre_hook(copy_input)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # away from zero, where a wrong channel would not change the output
        for parameter in twin.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    candidates = [*_dependencies(twin, example), *head_groups(twin)]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name, _ in net.named_modules() if name):
            first = candidates[0].name if candidates else "none"
            raise ArgumentError(f"exclude={pattern} matches no layer of the net; units are of {first}, ...")
    candidates = _tied(twin, candidates)
    groups = [
        group
        for group in candidates
        if not any(fnmatchcase(name, pattern) for name in layers(group) for pattern in exclude)
    ]
    if not groups:
        raise UserError(
            f"{type(net).__name__} has no channels that could be removed: choose another method, such as prune."
        )
    _prove(twin, groups, example)
    return groups


def _tied(net: nn.Module, groups: list[Group]) -> list[Group]:
    """Join groups that share a tied weight; drop those of a computed one, or of only some of its uses."""
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers())}
    uses = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))

    def tied(group: Group) -> Counter[tuple[int, int]]:
        return Counter((id(tensors[s.name]), s.dim) for s in group.slices if uses[id(tensors[s.name])] > 1)

    joined: list[Group] = []
    for group in groups:
        if not all(part.name in tensors for part in group.slices):
            continue
        sharing = [other for other in joined if tied(other).keys() & tied(group).keys()]
        for other in sharing:
            joined.remove(other)
        if all(other.units == group.units for other in sharing):
            members = [*sharing, group]
            slices, sizes = (
                sum((member.slices for member in members), ()),
                sum((member.sizes for member in members), ()),
            )
            joined.append(replace(members[0], slices=slices, sizes=sizes))
    joined = [group for group in joined if all(count == uses[key[0]] for key, count in tied(group).items())]
    names = {name for name, _ in [*net.named_parameters(), *net.named_buffers()]}  # first name of a tied tensor
    return [replace(group, slices=tuple(part for part in group.slices if part.name in names)) for group in joined]


def layers(group: Group) -> list[str]:
    """Return the layers whose outputs are a group's units, and the group's own name."""
    return list(dict.fromkeys([group.name, *(part.module for part in group.slices if part.role == "out")]))


def _dependencies(net: nn.Module, example: Tensor | Call) -> list[Group]:
    import torch_pruning as tp  # type: ignore[import-untyped]

    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # on parameters outside of layers, whose groups are dropped
        graph = tp.DependencyGraph()
        try:
            graph.build_dependency(net, example, forward_fn=_answer, verbose=False)
            dependencies = list(graph.get_all_groups(root_module_types=[nn.modules.conv._ConvNd, nn.Linear]))
        except UserError:
            raise
        except Exception as error:
            raise _unfollowed(net, str(error)) from error
    names = {module: name for name, module in net.named_modules()}
    apart = {module.get_submodule(part) for module in attentions(net).values() for part in PROJECTIONS}
    order = {name: position for position, name in enumerate(names.values())}
    groups = [group for group in (_group(graph, group, names, apart) for group in dependencies) if group is not None]
    return sorted(groups, key=lambda group: order[group.name])


def _group(graph: Any, dependency: Any, names: dict[nn.Module, str], apart: set[nn.Module]) -> Group | None:
    """Return a group of torch-pruning as names and positions; None if it is not removable."""
    root, end = dependency[0].dep.target.module, next(iter(graph.module2node))  # the graph is built from the output
    units = int(graph.get_out_channels(root))
    slices: list[Slice] = []
    sizes: list[tuple[str, str, int]] = []
    for item in dependency.items:
        module, function = item.dep.target.module, item.dep.handler
        out = bool(graph.is_out_channel_pruning_fn(function))
        if module is end and out:
            return None
        if isinstance(module, nn.Module) and module not in names:
            continue  # an operation without parameters
        if module in apart or not isinstance(module, _ConvNd | nn.Linear | _BatchNorm):
            return None
        index = _positions(item.idxs, item.root_idxs, units)
        parts = None if index is None else _parts(module, names[module], index, out)
        if parts is None:
            return None
        slices += parts[0]
        sizes += parts[1]
    return Group(names[root], "channels", units, tuple(slices), tuple(sizes))


def _positions(idxs: list[int], roots: list[int], units: int) -> Tensor | None:
    """Return each unit's positions in a tensor, `[units, positions]`: several after a flattening."""
    by_unit: list[list[int]] = [[] for _ in range(units)]
    for position, root in zip(idxs, roots, strict=True):
        if root is None or not 0 <= root < units:
            return None
        by_unit[root].append(position)
    even = len({len(positions) for positions in by_unit}) == 1 and bool(by_unit[0])
    return torch.tensor(by_unit, dtype=torch.long) if even else None


def _parts(
    module: nn.Module, name: str, index: Tensor, out: bool
) -> tuple[list[Slice], list[tuple[str, str, int]]] | None:
    """Return slices and sizes of a layer that makes the units (`out`) or reads them; None for grouped channels."""
    tensors: list[tuple[str, int, Literal["out", "in", "state"]]] = [("weight", 0, "out"), ("bias", 0, "out")]
    counts = ["num_features"]
    if isinstance(module, _BatchNorm):
        tensors += [("running_mean", 0, "state"), ("running_var", 0, "state")]
    elif isinstance(module, _ConvNd) and module.groups > 1:
        if not module.groups == module.in_channels == module.out_channels:
            return None
        counts = ["out_channels", "in_channels", "groups"]
    else:
        transposed = isinstance(module, _ConvTransposeNd)
        if out:
            tensors[0] = ("weight", int(transposed), "out")
        else:
            tensors = [("weight", 1 - int(transposed), "in")]
        counts = [f"{'out' if out else 'in'}_{'features' if isinstance(module, nn.Linear) else 'channels'}"]
    slices = [Slice(name, key, dim, index, role) for key, dim, role in tensors if getattr(module, key) is not None]
    return slices, [(name, count, index.shape[1]) for count in counts]


def _prove(net: nn.Module, groups: list[Group], example: Tensor | Call) -> None:
    """Raise UserError unless removing every other unit of each group equals zeroing it."""
    chosen = {group.name: list(range(1, group.units, 2)) for group in groups}
    with torch.no_grad():
        run(net, example)  # older weight_norm and spectral_norm keep a weight with its graph, which can't be copied
    silent, small = copy.deepcopy(net), copy.deepcopy(net)
    silence(silent, groups, chosen)
    remove(small, groups, chosen)
    with torch.no_grad():
        expected = _answer(silent, example)
        try:
            outputs = _answer(small, example)
        except (RuntimeError, ValueError) as error:
            raise _unfollowed(net, str(error).splitlines()[0]) from error
    if outputs.shape != expected.shape or not bool((outputs - expected).abs().max() <= 1e-4 * expected.abs().max()):
        raise _unfollowed(net, "outputs change when silent channels are removed")


def _answer(net: nn.Module, example: Tensor | Call) -> Tensor:
    output = output_of(run(net, example))
    if output is None:
        raise UserError(f"{type(net).__name__} returns several tensors, whose channels are not followed. Use prune.")
    return output


def _unfollowed(net: nn.Module, reason: str) -> UserError:
    return UserError(
        f"How {type(net).__name__} joins its channels can't be followed ({reason}): list the layers at fault under "
        "exclude, or choose another method, such as prune."
    )


def attentions(net: nn.Module) -> dict[str, nn.Module]:
    """Return modules with Linears q, k, v, out and `head_dim`, as `lathe.nets.transformer.Attention`."""
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
    groups = []
    for name, attention in attentions(net).items():
        head_dim = int(attention.head_dim)  # type: ignore[arg-type]
        index = torch.arange(int(attention.get_submodule("out").in_features)).view(-1, head_dim)  # type: ignore[arg-type]
        prefix = f"{name}." if name else ""
        slices, sizes = [], []
        for part in PROJECTIONS:
            slices.append(Slice(prefix + part, "weight", 0, index, "out"))
            if isinstance(attention.get_submodule(part).bias, Tensor):
                slices.append(Slice(prefix + part, "bias", 0, index, "out"))
            sizes.append((prefix + part, "out_features", head_dim))
        slices.append(Slice(prefix + "out", "weight", 1, index, "in"))
        sizes.append((prefix + "out", "in_features", head_dim))
        groups.append(Group(name, "heads", len(index), tuple(slices), tuple(sizes)))
    return groups


ALPHA = 4.0  # as Torch-Pruning: the weakest unit's penalty is 2**ALPHA times the strongest's


@validated
def scores(
    groups: Sequence[Group],
    tensors: Mapping[str, Tensor],
    importance: ChannelImportance = "group_norm",
    *,
    sensitivity: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return a score `[units]` for each group by name, with mean 1 so that groups can be compared.

    Args:
        tensors: a net's full parameters by name.
        importance: `group_norm`, mean square of a unit's weights (Fang et al. 2023, DepGraph, arXiv:2301.12900); `l1`
            or `l2`, norm of the weights that make its output (Li et al. 2017, arXiv:1608.08710); `bn_scale`, magnitude
            of its BatchNorm weights (Liu et al. 2017, Network Slimming, arXiv:1708.06519); `taylor`, first-order change
            of the loss (Molchanov et al. 2019, arXiv:1906.10771), given as `sensitivity`; `random`.
    """
    generator = torch.Generator().manual_seed(seed)
    by_group: dict[str, Tensor] = {}
    for group in groups:
        weights = [(part, tensors[part.name].float()) for part in group.slices if part.tensor == "weight"]
        if importance == "random":
            score = torch.rand(group.units, generator=generator)
        elif importance == "taylor":
            score = (sensitivity or {}).get(group.name, torch.zeros(group.units)).detach().float().cpu()
        elif importance == "group_norm":
            score = torch.stack([per_unit(weight.square(), part) for part, weight in weights]).mean(0)
        elif importance == "bn_scale":
            scales = [per_unit(weight.abs(), part) for part, weight in weights if weight.dim() == 1]
            if not scales:
                raise ArgumentError(
                    f"importance=bn_scale: {group.name} has no BatchNorm; use group_norm, or list it under exclude."
                )
            score = torch.stack(scales).mean(0)
        else:
            power = 1 if importance == "l1" else 2
            rows = [(part, weight) for part, weight in weights if part.role == "out" and weight.dim() > 1]
            sums = torch.stack([per_unit(weight.abs() ** power, part) for part, weight in rows]).sum(0)
            score = sums ** (1 / power)
        score = score.detach().cpu()
        by_group[group.name] = score / score.mean().clamp_min(torch.finfo(torch.float32).tiny)
    return by_group


def loss_change(
    groups: Sequence[Group], tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return each unit's squared sum of weight x gradient; its mean over batches is `sensitivity`."""
    changes = {}
    for group in groups:
        makers = [part for part in group.slices if part.role == "out" and part.name in gradients]
        products = [per_unit((tensors[part.name] * gradients[part.name]).float(), part) for part in makers]
        changes[group.name] = torch.stack(products).sum(0).square() if products else torch.zeros(group.units)
    return changes


def per_unit(values: Tensor, part: Slice) -> Tensor:
    """Sum `values`, shaped as the slice's tensor, over each unit's positions: `[units]`."""
    sums = values.sum([dim for dim in range(values.dim()) if dim != part.dim]) if values.dim() > 1 else values
    return sums[part.index.to(values.device)].sum(1)


@torch.no_grad()
def add_penalty(net: nn.Module, groups: Sequence[Group], kind: str, strength: float) -> None:
    """Add the gradient of a penalty to the gradients of `net`, in place.

    - `group_norm`: strength x 2^(4 (max - I) / (max - min)) x weight, where I is the norm of a unit's weights (Fang et
      al. 2023, DepGraph, arXiv:2301.12900, as in Torch-Pruning's GroupNormPruner).
    - `group_lasso`: strength x weight / I (Yuan and Lin 2006; Wen et al. 2016, arXiv:1608.03665).
    - `bn_scale`: strength x sign of BatchNorm's weights (Liu et al. 2017, Network Slimming, arXiv:1708.06519).
    """
    tensors = dict(net.named_parameters())
    for group in groups:
        parts = [part for part in group.slices if part.tensor == "weight" and tensors[part.name].grad is not None]
        if kind == "bn_scale":
            for part in parts:
                weight = tensors[part.name]
                if weight.dim() == 1:
                    _push(weight, weight.sign(), part, weight.new_full((group.units,), strength))
            continue
        squares = torch.stack([per_unit(tensors[part.name].square(), part) for part in parts])
        if kind == "group_norm":
            norm = squares.mean(0)
            norm = (norm / norm.mean()).sqrt()
            spread = (norm.max() - norm.min()).clamp_min(1e-12)
            factor = strength * 2 ** (ALPHA * (norm.max() - norm) / spread)
        else:
            factor = strength / squares.sum(0).sqrt().clamp_min(1e-12)
        for part in parts:
            _push(tensors[part.name], tensors[part.name], part, factor)


def _push(weight: Tensor, direction: Tensor, part: Slice, factor: Tensor) -> None:
    """Add factor `[units]` x direction to the gradient at each unit's positions."""
    shape = [1] * weight.dim()
    shape[part.dim] = weight.shape[part.dim]
    index = part.index.to(weight.device)
    spread = factor.new_zeros(weight.shape[part.dim]).index_put_((index,), factor.view(-1, 1).expand_as(index))
    assert weight.grad is not None
    weight.grad.addcmul_(direction, spread.view(shape))


@validated
@dataclass(frozen=True)
class Options:
    """Options of channel removal; the keys of `compression.prune_channels`.

    Attributes:
        budget: `macs`, `parameters` or `latency` (on the example's device).
        share: of the dense net's budget that remains, in (0, 1).
        importance: see `scores`.
        scope: `global` ranks the units of all groups together; `local` removes the same share of each group.
        round_to: remaining channels of a layer are a multiple of it, which kernels prefer; not for heads. None is 8 for
            layers of at least 32 channels, 4 from 16 channels on.
        min_channels: remaining channels of each group at least; of heads, one remains.
        exclude: patterns of layers that stay.
    """

    budget: ChannelBudget = "macs"
    share: OpenShare = 0.5
    importance: ChannelImportance = "group_norm"
    scope: Literal["global", "local"] = "global"
    round_to: Count | None = None
    min_channels: Count = 4
    exclude: tuple[Name, ...] = ()

    def pick(
        self,
        net: nn.Module,
        groups: Sequence[Group],
        example: Tensor | Call,
        tensors: Mapping[str, Tensor],
        sensitivity: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> dict[str, list[int]]:
        """Return the fewest units of lowest score whose removal meets the budget, by group.

        `net` has the dense net's shapes (it is copied, not changed), `tensors` its full weights.

        Raises:
            ArgumentError: the budget can't be met.
        """
        group_scores = scores(groups, tensors, self.importance, sensitivity=sensitivity, seed=seed)
        ranked = sorted((float(score), g) for g, group in enumerate(groups) for score in group_scores[group.name])
        orders = [torch.argsort(group_scores[group.name], stable=True).tolist() for group in groups]
        base, cost = self._cost(net, example)

        def removed(count: int) -> dict[str, list[int]]:
            counts = Counter(g for _, g in ranked[:count])
            units = {}
            for g, (group, order) in enumerate(zip(groups, orders, strict=True)):
                number = counts[g] if self.scope == "global" else int(group.units * count / len(ranked))
                keep = max(group.units - number, 1)
                if group.kind == "channels":
                    multiple = self.round_to or (8 if group.units >= 32 else 4 if group.units >= 16 else 1)
                    keep = min(-(-max(keep, self.min_channels) // multiple) * multiple, group.units)
                if keep < group.units:
                    units[group.name] = sorted(order[: group.units - keep])
            return units

        def spent(count: int) -> float:
            small = copy.deepcopy(base)
            remove(small, groups, removed(count))
            return cost(small)

        low, high = 0, len(ranked)  # the answer is in (low, high]: low costs too much, high does not
        least = spent(high)
        if least > self.share:
            raise ArgumentError(
                f"share={self.share}: the fewest channels that may remain cost {least:.3f} of the dense net: raise "
                "share or lower min_channels."
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if spent(middle) > self.share else (low, middle)
        return removed(high)

    def _cost(self, dense: nn.Module, example: Tensor | Call) -> tuple[nn.Module, Callable[[nn.Module], float]]:
        """Return a net to copy, on the meta device unless time counts, and a function for a copy's share."""
        if self.budget == "latency":
            base = copy.deepcopy(dense).to(example.device).eval()
            return base, lambda small: latency_share(small, base, example)
        bare, shape = skeleton(dense, example)
        if self.budget == "parameters":
            total = parameters(bare)
            return bare, lambda small: parameters(small) / total
        total = macs(bare, shape)
        return bare, lambda small: macs(small, shape) / total


def prune_channels(
    net: nn.Module,
    example: Tensor | Call,
    *,
    sensitivity: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    **options: object,
) -> dict[str, float]:
    """Remove channels, heads and hidden units from `net`, in place, until it meets a budget.

    Returns the remaining shares, {"macs": share, "parameters": share}. Call `reestimate_batchnorm` and fine-tune
    afterwards. `example` is an input `[batch, ...]`, `options` are those of `Options`; `importance="taylor"` needs
    `sensitivity`, means of `loss_change` over batches.

    Raises:
        UserError: an option is out of range, the net can't be traced, or the budget can't be met.
    """
    chosen = Options(**options)  # type: ignore[arg-type]
    groups = find_groups(net, example, chosen.exclude)
    before = sizes(net, example)
    with torch.no_grad():
        units = chosen.pick(net, groups, example, dict(net.named_parameters()), sensitivity, seed)
    remove(net, groups, units)
    return shares(before, sizes(net, example))


def sizes(net: nn.Module, example: Tensor | Call) -> dict[str, int]:
    """Count the MACs of one sample, and the parameters, without computing anything."""
    bare, shape = skeleton(net, example)
    return {"macs": macs(bare, shape), "parameters": parameters(bare)}


def shares(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """Return the remaining share of each size."""
    return {name: after[name] / size for name, size in before.items()}


def parameters(net: nn.Module) -> int:
    """Count the parameters, tied ones once."""
    return sum(parameter.numel() for parameter in net.parameters())


def macs(net: nn.Module, example: Tensor | Call) -> int:
    """Count the multiply-adds of a forward pass on `example`; on the meta device nothing is computed."""
    with evaluated(net), torch.no_grad(), FlopCounterMode(display=False) as counter:
        run(net, example)
    return int(counter.get_total_flops()) // 2


def skeleton(net: nn.Module, example: Tensor | Call) -> tuple[nn.Module, Tensor | Call]:
    """Return a copy of a net and one sample on the meta device, with identities for slow BatchNorms."""
    bare = without_memory(net)
    for module in bare.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            module.forward = lambda x: x  # type: ignore[method-assign,assignment]
    return bare, example[:1].detach().to("meta")


def latency_share(small: nn.Module, dense: nn.Module, example: Tensor | Call) -> float:
    """Return the median time of 15 forward passes of `small` over that of `dense`."""
    calls = {"small": partial(run, small, example), "dense": partial(run, dense, example)}
    with torch.inference_mode():
        times = interleaved(calls, repeats=15, warmup=3, device=example.device)
    return times["small"].median / times["dense"].median
