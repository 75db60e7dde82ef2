"""Rewrites graphs of quantized nets for the integer patterns of ExecuTorch's XNNPACK partitioner."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

GEMMS = ("aten.conv2d.default", "aten.linear.default")  # in torch's graph
LOWERED_GEMMS = (
    "aten.convolution.default",
    "aten.linear.default",
    "aten.addmm.default",
    "aten.mm.default",
)  # in ExecuTorch's


@dataclass
class Delegated:
    """Counts of convolutions and linear layers in XNNPACK, and the names of those that it does not take."""

    integers: int = 0
    floats: int = 0
    left: list[str] = field(default_factory=list)


def share_roundings(program: ExportedProgram) -> None:
    """Merge equal roundings of a tensor: XNNPACK's integer layers need a result with one reader."""
    graph = program.graph_module.graph
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if _is(node, "quantize_per_tensor.default"):
            first = seen.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    program.graph_module.recompile()


def without_kernel(program: ExportedProgram) -> list[str]:
    """Return names of convolutions without a kernel: one input channel each and a float result."""
    return [
        list(node.meta["nn_module_stack"].values())[-1][0]
        for node in _integer_gemms(program)
        if _is(node, "conv2d.default") and _reads_one_channel(node) and not _rounded_next(node)
    ]


def round_rows(program: ExportedProgram) -> None:
    """Give layers with a float result the pattern of XNNPACK's kernels with float results.

    These round each row of their input again, to 256 values between its minimum and maximum, which are as fine as the
    layer's range or finer.
    """
    ops, graph = torch.ops.quantized_decomposed, program.graph_module.graph
    least = torch.finfo(torch.float32).tiny
    for node in _integer_gemms(program):
        read: Any = node.args[0]
        if _rounded_next(node) or _is(read, "dequantize_per_tensor.tensor"):
            continue
        with graph.inserting_before(node):
            found = _call(graph, ops.choose_qparams.tensor, (read, -128, 127, least, torch.int8))
            scale, zero = (_call(graph, operator.getitem, (found, index)) for index in range(2))
            arguments = (scale, zero, -128, 127, torch.int8)
            q = _call(graph, ops.quantize_per_tensor.tensor, (read, *arguments))
            node.update_arg(0, _call(graph, ops.dequantize_per_tensor.tensor, (q, *arguments)))
    program.graph_module.recompile()


def delegated(program: ExportedProgram) -> Delegated:
    """Count the layers of a partitioned program."""
    from executorch.exir.lowered_backend_module import get_lowered_submodules  # type: ignore[import-untyped,import-not-found,unused-ignore]

    found = Delegated(left=[node.name for node in _lowered_gemms(program.graph_module.graph)])
    for _, lowered, _ in get_lowered_submodules(program.graph_module):
        for node in _lowered_gemms(lowered.original_module.graph):
            if any("dequantize_per_channel" in _name(read) for read in node.all_input_nodes):
                found.integers += 1
            else:
                found.floats += 1
    return found


def _lowered_gemms(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if _name(node) in LOWERED_GEMMS)


def _integer_gemms(program: ExportedProgram) -> list[fx.Node]:
    nodes = program.graph_module.graph.nodes
    return [node for node in nodes if _name(node) in GEMMS and _is(node.args[1], "dequantize_per_channel.default")]


def _rounded_next(node: fx.Node) -> bool:
    """Return whether the only reader of the result, or of its ReLU, is one rounding to a static range."""
    users = list(node.users)
    if len(users) == 1 and _is(users[0], "relu.default"):
        users = list(users[0].users)
    return len(users) == 1 and _is(users[0], "quantize_per_tensor.default")


def _reads_one_channel(node: fx.Node) -> bool:
    weight: Any = node.args[1]
    return bool(weight.meta["val"].shape[1] == 1)


def _is(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and _name(node).endswith(f".{name}")


def _name(node: fx.Node) -> str:
    """Return an operator's name, such as `aten.linear.default`, for torch's operators and ExecuTorch's."""
    if node.op != "call_function":
        return ""
    return str(node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", ""))


def _call(graph: fx.Graph, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*fx.node.map_arg(arguments, lambda argument: argument.meta["val"]))
    return node
