"""Maps the words of a net's `tensor_plan` to styles of torch.distributed.tensor.parallel.

These are Megatron's column and row shards (Shoeybi et al. 2019, arXiv:1909.08053) and sequence parallelism (Korthikanti
et al. 2022, arXiv:2205.05198): between the sharded layers, each rank holds a slice of dimension 1, and norms work on
that slice.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lathe.errors import UserError, did_you_mean

WORDS = ("column", "row", "gather", "sequence", "split", "join", "vocab", "logits")


def plan_of(net: nn.Module) -> dict[str, str]:
    """Return the word of each module, by name: the net's `tensor_plan` with its patterns expanded.

    Raises:
        UserError: the net declares no plan, a pattern matches no module, or a word is unknown.
    """
    name = type(net).__name__
    plan = getattr(net, "tensor_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UserError(
            f"strategy=tensor cuts a net by its `tensor_plan`, and {name} declares none: use strategy=fsdp, or "
            "declare one."
        )
    modules = [module_name for module_name, _ in net.named_modules() if module_name]
    words: dict[str, str] = {}
    for pattern, word in plan.items():
        if word not in WORDS:
            raise UserError(f"{name}.tensor_plan[{pattern!r}]={word!r}: {did_you_mean(word, WORDS)}")
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        found = [module_name for module_name in modules if expression.fullmatch(module_name)]
        if not found:
            raise UserError(f"{name}.tensor_plan[{pattern!r}] fits no module of the net: correct the pattern.")
        words |= dict.fromkeys(found, word)
    return words


def check_limits(net: nn.Module, size: int) -> None:
    """Raise UserError if `size` does not divide a number in the net's `tensor_limits`."""
    for key, number in getattr(net, "tensor_limits", {}).items():
        if number % size:
            raise UserError(
                f"model.net.{key}={number} does not divide by strategy.tensor={size}: choose a multiple of {size}, "
                "or another "
                "size."
            )


def parallelize(net: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard `net` by its plan, in place, with ties. A plan without `split` disables sequence parallelism."""
    words = plan_of(net)
    check_limits(net, mesh.size())
    in_slices = sequence_parallel and "split" in words.values()
    ties = _ties(net)
    for name, word in words.items():
        module = net.get_submodule(name)
        if word == "split" and in_slices:
            module.register_forward_hook(_DividesBy(mesh.size()))  # runs before the hook that slices
        style = _style(word, in_slices)
        if style is not None:
            parallelize_module(
                module, mesh, style, src_data_rank=None
            )  # every rank holds the same weights: no broadcast is needed
    for first, *others in ties:
        _tie(net, first, others)


def _style(word: str, in_slices: bool) -> ParallelStyle | None:
    stream = Shard(1) if in_slices else Replicate()  # layout between the sharded layers
    whole = Replicate()
    if word == "column":
        return ColwiseParallel(input_layouts=stream)
    if word == "row":
        return RowwiseParallel(output_layouts=stream)
    if word == "gather":
        return ColwiseParallel(input_layouts=stream, output_layouts=stream)
    if word == "logits":
        return ColwiseParallel(input_layouts=stream, output_layouts=whole)
    if word == "vocab":
        return RowwiseParallel(input_layouts=whole, output_layouts=whole)
    if not in_slices:
        return None
    if word == "sequence":
        return SequenceParallel(use_local_output=True)
    if word == "split":
        return PrepareModuleOutput(output_layouts=whole, desired_output_layouts=stream)
    return PrepareModuleInput(input_layouts=stream, desired_input_layouts=whole, use_local_output=True)


class _DividesBy:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        length = output.shape[1]
        if length % self.size:
            raise UserError(
                f"strategy.sequence_parallel=true: a sequence of {length} tokens does not divide by "
                f"strategy.tensor={self.size}: set strategy.sequence_parallel=false, or choose another length."
            )


def _ties(net: nn.Module) -> list[list[tuple[str, str]]]:
    """Return the parameters that several modules share, each as its (module name, own name) pairs."""
    places: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for module_name, module in net.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module_name, own_name))
    return [found for found in places.values() if len(found) > 1]


def _tie(net: nn.Module, first: tuple[str, str], others: list[tuple[str, str]]) -> None:
    shared = net.get_submodule(first[0]).get_parameter(first[1])
    for module_name, own_name in others:
        module = net.get_submodule(module_name)
        other = module.get_parameter(own_name)
        alike = isinstance(shared, DTensor) == isinstance(other, DTensor)
        if not alike or (
            isinstance(shared, DTensor) and isinstance(other, DTensor) and shared.placements != other.placements
        ):
            raise UserError(
                f"{type(net).__name__}.tensor_plan cuts {'.'.join(first)} and {module_name}.{own_name} in different "
                "ways, but they are one weight: give both modules words that go together, such as vocab and logits."
            )
        setattr(module, own_name, shared)
