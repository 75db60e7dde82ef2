"""Dependent channels of a net, found by torch-pruning's graph, as plain names and positions."""

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lathe.compression.channels.fade import silence
from lathe.compression.channels.heads import PROJECTIONS, attentions, head_groups
from lathe.compression.channels.slices import Group, Slice, remove
from lathe.compression.modes import copy_input
from lathe.errors import ArgumentError, UserError, uninstalled


def require_packages() -> None:
    """Raise UserError if torch-pruning, an extra, is not installed."""
    sentence = uninstalled("compress", "torch_pruning")
    if sentence:
        raise UserError(f"removing channels: {sentence}")


def find_groups(net: nn.Module, example: Tensor, exclude: Sequence[str] = ()) -> list[Group]:
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
    example = example[:2].detach().cpu()
    twin = copy.deepcopy(net).cpu().float().eval().requires_grad_(True)
    twin.register_forward_pre_hook(copy_input)
    _scatter(twin)
    found = [*_dependencies(twin, example), *head_groups(twin)]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name, _ in net.named_modules() if name):
            raise ArgumentError(
                f"exclude={pattern} matches no layer of the net: write a name such as {_some_name(found)} or a pattern."
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


def _some_name(groups: list[Group]) -> str:
    return groups[0].name if groups else "blocks.0.conv1"


def _dependencies(net: nn.Module, example: Tensor) -> list[Group]:
    import torch_pruning as tp  # type: ignore[import-untyped]

    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # on parameters outside of layers, whose groups are dropped
        graph = tp.DependencyGraph()
        try:
            graph.build_dependency(net, example, forward_fn=lambda net, x: net(x), verbose=False)
            found = list(graph.get_all_groups(root_module_types=[nn.modules.conv._ConvNd, nn.Linear]))
        except Exception as error:
            raise _unfollowed(net, str(error)) from error
    names = {module: name for name, module in net.named_modules()}
    apart = {module.get_submodule(part) for module in attentions(net).values() for part in PROJECTIONS}
    _refuse_padding(net, example)
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
    width = index.shape[1]
    if isinstance(module, _BatchNorm):
        tensors = [(key, "out") for key in ("weight", "bias")] + [
            (key, "state") for key in ("running_mean", "running_var")
        ]
        return (
            [Slice(name, key, 0, index, role) for key, role in tensors if getattr(module, key) is not None],  # type: ignore[arg-type]
            [(name, "num_features", width)],
        )
    if isinstance(module, nn.Linear):
        sizes = [(name, "out_features" if out else "in_features", width)]
        return _matrix(module, name, index, out, transposed=False), sizes
    assert isinstance(module, _ConvNd)
    if module.groups > 1:
        if not module.groups == module.in_channels == module.out_channels:
            return None
        return _matrix(module, name, index, True, False), [
            (name, key, width) for key in ("out_channels", "in_channels", "groups")
        ]
    transposed = isinstance(module, _ConvTransposeNd)
    return _matrix(module, name, index, out, transposed), [(name, "out_channels" if out else "in_channels", width)]


def _matrix(module: nn.Module, name: str, index: Tensor, out: bool, transposed: bool) -> list[Slice]:
    if not out:
        return [Slice(name, "weight", 0 if transposed else 1, index, "in")]
    weight = Slice(name, "weight", 1 if transposed else 0, index, "out")
    return [weight] if module.bias is None else [weight, Slice(name, "bias", 0, index, "out")]


def _scatter(net: nn.Module) -> None:
    """Move the weights of a copy away from zero, where a wrong channel would not change the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def _prove(net: nn.Module, groups: list[Group], example: Tensor) -> None:
    """Raise UserError unless removing every other unit of each group equals zeroing it."""
    chosen = {group.name: list(range(1, group.units, 2)) for group in groups}
    with torch.no_grad():
        net(example)  # older weight_norm and spectral_norm keep a weight with its graph, which can't be copied
    silent, small = copy.deepcopy(net), copy.deepcopy(net)
    silence(silent, groups, chosen)
    remove(small, groups, chosen)
    with torch.no_grad():
        expected = silent(example)
        try:
            outputs = small(example)
        except (RuntimeError, ValueError) as error:
            raise _unfollowed(net, str(error).splitlines()[0]) from error
    if outputs.shape != expected.shape or not bool((outputs - expected).abs().max() <= 1e-4 * expected.abs().max()):
        raise _unfollowed(net, "outputs change when silent channels are removed")


def _refuse_padding(net: nn.Module, example: Tensor) -> None:
    """Raise UserError if the net pads channels, as a residual net's parameter-free shortcut does."""
    with torch.enable_grad():
        stack, seen = [net(example).grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        padding = getattr(node, "_saved_pad", ()) if "ConstantPad" in node.name() else ()
        if len(padding) >= 6 and any(padding[4:6]):
            raise UserError(
                f"The channels of {type(net).__name__} can't be followed, as they are padded with zeros: "
                "build it with shortcut=projection where it has that, or choose another method, such as prune."
            )
        stack += [parent for parent, _ in node.next_functions]


def _unfollowed(net: nn.Module, reason: str) -> UserError:
    return UserError(
        f"How {type(net).__name__} joins its channels can't be followed ({reason}): list the layers at fault under "
        "exclude, or choose another method, such as prune."
    )
