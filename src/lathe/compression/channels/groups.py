"""Removable units of a net, as plain names and positions: attention heads, and channels by torch-pruning's graph."""

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lathe.compression.channels.slices import Group, Slice, remove, silence
from lathe.compression.modes import copy_input
from lathe.errors import ArgumentError, UserError, uninstalled
from lathe.measure.calls import Call, output_of, run

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
    _scatter(twin)
    found = [*_dependencies(twin, example), *head_groups(twin)]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name, _ in net.named_modules() if name):
            raise ArgumentError(
                f"exclude={pattern} matches no layer of the net; units are of {found[0].name if found else 'none'}, ..."
            )
    found = _tied(twin, found)
    groups = [
        group for group in found if not any(fnmatchcase(name, pattern) for name in layers(group) for pattern in exclude)
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
            every = [*sharing, group]
            slices, sizes = sum((one.slices for one in every), ()), sum((one.sizes for one in every), ())
            joined.append(replace(every[0], slices=slices, sizes=sizes))
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
            found = list(graph.get_all_groups(root_module_types=[nn.modules.conv._ConvNd, nn.Linear]))
        except UserError:
            raise
        except Exception as error:
            raise _unfollowed(net, str(error)) from error
    names = {module: name for name, module in net.named_modules()}
    apart = {module.get_submodule(part) for module in attentions(net).values() for part in PROJECTIONS}
    order = {name: position for position, name in enumerate(names.values())}
    groups = [group for group in (_group(graph, group, names, apart) for group in found) if group is not None]
    return sorted(groups, key=lambda group: order[group.name])


def _group(graph: Any, found: Any, names: dict[nn.Module, str], apart: set[nn.Module]) -> Group | None:
    """Return a group of torch-pruning as names and positions; None if it is not removable."""
    root, end = found[0].dep.target.module, next(iter(graph.module2node))  # the graph is built from the output
    units = int(graph.get_out_channels(root))
    slices: list[Slice] = []
    sizes: list[tuple[str, str, int]] = []
    for item in found.items:
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
        transposed, kind = (
            isinstance(module, _ConvTransposeNd),
            "features" if isinstance(module, nn.Linear) else "channels",
        )
        if out:
            tensors[0] = ("weight", int(transposed), "out")
        else:
            tensors = [("weight", 1 - int(transposed), "in")]
        counts = [f"{'out' if out else 'in'}_{kind}"]
    slices = [Slice(name, key, dim, index, role) for key, dim, role in tensors if getattr(module, key) is not None]
    return slices, [(name, count, index.shape[1]) for count in counts]


def _scatter(net: nn.Module) -> None:
    """Move the weights of a copy away from zero, where a wrong channel would not change the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


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
    found = output_of(run(net, example))
    if found is None:
        raise UserError(f"{type(net).__name__} returns several tensors, whose channels are not followed. Use prune.")
    return found


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
    return [_heads(name, module) for name, module in attentions(net).items()]


def _heads(name: str, attention: nn.Module) -> Group:
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
