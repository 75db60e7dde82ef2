"""ExecuTorch programs (.pte) for phones and small devices, with XNNPACK's float32 and 8-bit kernels.

Integers are the weights and ranges of training. A layer whose result is quantized next is computed fully in integers;
any other quantizes each row of its input again and returns floats.
"""

import operator
import os
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from lathe.compression.quantization.net import quantized_layers
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import UserError, require, uninstalled
from lathe.export import Array, Target, export_target
from lathe.export.bundle import readable, whole
from lathe.export.inputs import FlatCore, bounded_axes, check_bounds, in_parts, quiet, shapes_for, stand_in
from lathe.export.integer_layers import Affine, Dialect, copied, deployable, to_float

MOST_MEMORY = 2**31  # bytes that a program may reserve when it is loaded
DTYPES = {0: "uint8", 3: "int32", 4: "int64", 6: "float32", 7: "float64", 11: "bool"}  # by ExecuTorch's number of each
# printed by ExecuTorch's runtime on every processor that is not a phone's
NATIVE_NOTES = (b"[cpuinfo_utils.cpp", b"[threadpool.cpp")
GEMMS = ("aten.conv2d.default", "aten.linear.default")  # in torch's graph
LOWERED_GEMMS = ("aten.convolution.default", "aten.linear.default", "aten.addmm.default", "aten.mm.default")


@export_target("executorch")
class Executorch(Target):
    """One file with its weights, for batches of up to `max_batch_size`.

    Sequences may have up to the example's length. Loading reserves memory for the largest input. Layers without an
    integer kernel of XNNPACK are stored as floats, with the values of their integers: those with float activations,
    those with grouped scales, and convolutions that read one channel each with a float result.
    """

    suffix, takes_cores = ".pte", True

    @validated
    def __init__(self, integers: bool | None = None, max_batch_size: Count = 64) -> None:
        self.integers, self.max_batch_size = integers, max_batch_size

    def available(self) -> str | None:
        return uninstalled("export", "executorch")

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        check_bounds(net, "executorch")
        inputs, quantized = stand_in(net, example, self.max_batch_size), bool(quantized_layers(net))
        with whole(path) as temporary, torch.no_grad(), quiet():
            import_module("executorch.kernels.quantized")  # operators for roundings that XNNPACK does not take
            program = _integer_program(net, inputs) if quantized else _traced(net, copied(net), inputs)
            lowered, counts = _lowered(program)
            _check_layers(counts, quantized)
            compiled = lowered.to_executorch()
            plan = compiled.executorch_program.execution_plan[0]
            key = f"target.executorch.max_batch_size={len(inputs[0])}"
            for index, tensor in enumerate(inputs):  # ExecuTorch narrows bounds by its assumptions about the example
                planned, wanted = list(plan.values[plan.inputs[index]].val.sizes), list(tensor.shape)
                fix = f"ExecuTorch plans memory for {planned} instead of {wanted}: choose another one."
                require(planned == wanted, f"{key}: {fix}")
            reserved = sum(plan.non_const_buffer_sizes)
            fix = f"reserves {reserved / 2**30:.1f} GiB whenever the file is loaded: choose a smaller one."
            require(reserved <= MOST_MEMORY, f"{key} {fix}")
            temporary.write_bytes(compiled.buffer)

    def load(self, path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[..., Any]:
        """Load a program as a function; larger batches run in parts.

        `threads` is the size of XNNPACK's pool, which the whole process shares: calls wait for each other, and if
        functions of different `threads` alternate, each change reloads their files. None leaves the pool unchanged,
        initially one thread for each core. The function raises UserError for an input that does not fit the file.
        """
        path = readable(path)
        program = Program(path, threads)
        try:
            with Program.lock, quiet(), _without_native_notes():
                meta = program.ready().metadata
                metas = [meta.input_tensor_meta(index) for index in range(meta.num_inputs())]
        except (RuntimeError, ValueError) as error:
            message = f"{path} can't be read as an ExecuTorch program ({str(error)[:200]}): export the run again."
            raise UserError(message) from error
        shapes, dtypes = [tuple(each.sizes()) for each in metas], [DTYPES[each.dtype()] for each in metas]

        def forward(*arrays: Array) -> Any:
            for x, limits, dtype in zip(arrays, shapes, dtypes, strict=True):
                sequences = len(limits) > 1 and (dtype == "int64" or len(arrays) > 1)
                longest = all(side <= most for side, most in zip(x.shape[1:], limits[1:], strict=False))
                fits = x.ndim == len(limits) and (longest if sequences else x.shape[1:] == limits[1:])
                if not fits or not x.size or x.dtype != dtype:
                    takes = ("up to " if sequences else "") + ", ".join(map(str, limits[1:]))
                    fault = f"not {x.dtype} of {list(x.shape)}"
                    raise UserError(f"{path} takes {dtype} of shape [batch, {takes}], {fault}.")
            together = len({limits[:1] for limits in shapes}) == 1 and len({x.shape[:1] for x in arrays}) == 1
            return in_parts(program, arrays, shapes[0][0] if together and shapes[0] else sys.maxsize)

        return forward


class Xnnpack(Dialect):
    """PT2E's operators in the patterns that ExecuTorch's partitioner for XNNPACK takes.

    Activations are signed, zero points are stored, and biases are float; XNNPACK converts these to 32-bit integers.
    `zeros` are the zero points of one layer's weights, made before tracing: the partitioner takes only constants.
    """

    integer_bias = True  # for the scales: with them, the bias fits into XNNPACK's 32 bits
    lowest, dtype = -128, torch.int8

    def __init__(self, zeros: Tensor | None = None) -> None:
        super().__init__()
        self.zeros = zeros

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        if affine.top < 255:  # XNNPACK saturates at the ends of int8, whatever the arguments say
            x = x.clamp(-affine.scale * affine.zero_point, affine.scale * (affine.top - affine.zero_point))
        return super().rounded(x, replace(affine, top=255))

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.ops.dequantize_per_channel.default(integers, scale, self.zeros, 0, -127, 127, torch.int8)
        return out


def _traced(net: nn.Module, traced: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    for name, module in list(traced.named_modules()):
        # dropout is a copy in ExecuTorch's graph, which separates a layer from the rounding of its result
        if isinstance(module, nn.Dropout):
            traced.set_submodule(name, nn.Identity().eval())
    return torch.export.export(traced, inputs, dynamic_shapes=shapes_for(net, bounded_axes(net, inputs)))


def _integer_program(net: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    integer_net = deployable(net, stand_in(net, inputs if isinstance(net, FlatCore) else inputs[0]), Xnnpack())
    layers: list[Any] = [layer for layer in integer_net.modules() if hasattr(layer, "integers")]
    for layer in layers:
        if isinstance(layer, nn.Embedding):
            continue
        if layer.offset_scale is not None:
            layer.offset, layer.offset_scale = (layer.offset.double() * layer.offset_scale.double()).float(), None
        if layer.source is None or layer.scale.dim() == 2:  # without a kernel
            to_float(layer)
        else:
            layer.dialect = Xnnpack(torch.zeros(len(layer.scale), dtype=torch.int64))
    program = _traced(net, integer_net, inputs)
    _share_roundings(program)
    # convolutions without a kernel: one input channel each and a float result
    convolutions = [node for node in _integer_gemms(program) if _is(node, "conv2d.default") and not _rounded_next(node)]
    stacks = [node.meta["nn_module_stack"] for node in convolutions if node.args[1].meta["val"].shape[1] == 1]  # type: ignore[union-attr]
    if stacks:
        for stack in stacks:
            to_float(integer_net.get_submodule(list(stack.values())[-1][0]))
        program = _traced(net, integer_net, inputs)
        _share_roundings(program)
    _round_rows(program)
    return program


def _share_roundings(program: ExportedProgram) -> None:
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


def _round_rows(program: ExportedProgram) -> None:
    """Give layers with a float result the pattern of XNNPACK's kernels with float results.

    These round each row of their input again, to 256 values between its minimum and maximum, which are as fine as the
    layer's range or finer.
    """
    ops, graph = torch.ops.quantized_decomposed, program.graph_module.graph

    def call(target: Any, *arguments: Any) -> fx.Node:
        node = graph.call_function(target, arguments)
        node.meta["val"] = target(*fx.node.map_arg(arguments, lambda argument: argument.meta["val"]))
        return node

    for node in _integer_gemms(program):
        read: Any = node.args[0]
        if _rounded_next(node) or _is(read, "dequantize_per_tensor.tensor"):
            continue
        with graph.inserting_before(node):
            parameters = call(ops.choose_qparams.tensor, read, -128, 127, torch.finfo(torch.float32).tiny, torch.int8)
            scale, zero_point = (call(operator.getitem, parameters, index) for index in (0, 1))
            arguments = (scale, zero_point, -128, 127, torch.int8)
            q = call(ops.quantize_per_tensor.tensor, read, *arguments)
            node.update_arg(0, call(ops.dequantize_per_tensor.tensor, q, *arguments))
    program.graph_module.recompile()


@dataclass
class Delegated:
    """Counts of convolutions and linear layers in XNNPACK, and the names of those that it does not take."""

    integers: int = 0
    floats: int = 0
    left: list[str] = field(default_factory=list)


def _lowered(program: ExportedProgram) -> tuple[Any, Delegated]:
    """Partition a program for XNNPACK, and count its layers."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from executorch.exir import to_edge_transform_and_lower  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from executorch.exir.lowered_backend_module import get_lowered_submodules  # type: ignore[import-untyped,import-not-found,unused-ignore]

    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    module = lowered.exported_program().graph_module
    counts = Delegated(left=[node.name for node in module.graph.nodes if _name(node) in LOWERED_GEMMS])
    for _, part, _ in get_lowered_submodules(module):
        for node in part.original_module.graph.nodes:
            if _name(node) in LOWERED_GEMMS:
                integers = any("dequantize_per_channel" in _name(read) for read in node.all_input_nodes)
                counts.integers += integers
                counts.floats += not integers
    return lowered, counts


def _integer_gemms(program: ExportedProgram) -> list[fx.Node]:
    nodes = program.graph_module.graph.nodes
    return [node for node in nodes if _name(node) in GEMMS and _is(node.args[1], "dequantize_per_channel.default")]


def _rounded_next(node: fx.Node) -> bool:
    """Return whether the only reader of the result, or of its ReLU, is one rounding to a static range."""
    users = list(node.users)
    if len(users) == 1 and _is(users[0], "relu.default"):
        users = list(users[0].users)
    return len(users) == 1 and _is(users[0], "quantize_per_tensor.default")


def _is(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and _name(node).endswith(f".{name}")


def _name(node: fx.Node) -> str:
    """Return an operator's name, such as `aten.linear.default`, for torch's operators and ExecuTorch's."""
    if node.op != "call_function":
        return ""
    return str(node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", ""))


def _check_layers(counts: Delegated, quantized: bool) -> None:
    """Raise UserError if no layer would run as requested; warn of layers in slow portable kernels."""
    integers = "in integers: quantize activations too, or set target.executorch.integers=false"
    fix = integers if quantized else "at all: choose another target"
    count = counts.integers if quantized else counts.integers + counts.floats
    require(count > 0, f"XNNPACK would compute no layer of this net {fix}.")
    if counts.left:
        names = ", ".join(counts.left)
        warnings.warn(f"ExecuTorch's slow portable kernels compute what XNNPACK does not take: {names}.", stacklevel=3)


class Program:
    """The method `forward` of a file. The content is kept for reloading, because the file may be replaced.

    All programs of a process share XNNPACK's thread pool. A program keeps a reference to the pool that it was loaded
    with, and would use it after it is freed: so all are unloaded before the pool changes, and reloaded at their next
    call.
    """

    lock = threading.RLock()
    everyone: ClassVar["weakref.WeakSet[Program]"] = weakref.WeakSet()

    def __init__(self, path: Path, threads: int | None) -> None:
        self.content, self.threads = path.read_bytes(), threads
        self.loaded: Any = None  # program and method
        self.everyone.add(self)

    def ready(self) -> Any:
        """Return the loaded method, on the requested number of threads."""
        from executorch.extension.pybindings import portable_lib  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from executorch.runtime import Runtime  # type: ignore[import-untyped,import-not-found,unused-ignore]

        if self.threads not in (None, portable_lib._threadpool_get_thread_count()):
            for program in self.everyone:
                program.loaded = None
            with _without_native_notes():
                portable_lib._unsafe_reset_threadpool(self.threads)
        if self.loaded is None:
            program = Runtime.get().load_program(self.content)
            self.loaded = program, program.load_method("forward")
        return self.loaded[1]

    def __call__(self, *arrays: Array) -> Any:
        with self.lock:
            inputs = tuple(torch.from_numpy(np.require(x, requirements=["C", "W"])) for x in arrays)
            outputs = [out.numpy() for out in self.ready().execute(inputs)]
        return outputs[0] if len(outputs) == 1 else outputs


@contextmanager
def _without_native_notes() -> Iterator[None]:
    """Buffer the process's stderr, then print it without the lines of `NATIVE_NOTES`."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as buffer:
        own = os.dup(2)
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)
            buffer.seek(0)
            for line in buffer:
                if not line.startswith(NATIVE_NOTES):
                    os.write(2, line)
