"""TensorRT engines for NVIDIA GPUs, in float32, float16 or 8-bit integers.

They are built by torch_tensorrt, or from ONNX by NVIDIA's builder, for one kind of GPU and version of TensorRT.
Networks are strongly typed: the graph itself has float16 and integers.

This code follows the documented interfaces of TensorRT 10 and 11 and of torch_tensorrt, and has not been run with them.
"""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import quantized_layers
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError
from lathe.export.bounded import Array, bounded_axes, check_bounds, in_parts, largest
from lathe.export.deploy import IntegerEmbedding, copied, deployable
from lathe.export.dialects import Symmetric, scaled
from lathe.export.files import readable, whole
from lathe.export.inputs import stand_in
from lathe.export.preprocess import Shipped
from lathe.export.targets.onnx_graph import available as onnx_available
from lathe.export.targets.onnx_graph import write
from lathe.files import scratch

suffix = ".engine"
computes = True
integers: bool | None = None
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def available() -> str | None:
    """Return None, or the message that says what is missing."""
    if importlib.util.find_spec("tensorrt") is None:
        return (
            "tensorrt can't be imported, which target=tensorrt builds and runs with: pip install tensorrt, on a "
            "machine with an NVIDIA GPU."
        )
    if not torch.cuda.is_available():
        return (
            "torch finds no NVIDIA GPU, for which target=tensorrt builds: export on the machine that is to run the "
            "file."
        )
    return None


@validated
def export(
    net: nn.Module,
    example: Tensor,
    path: str | Path,
    through: Literal["auto", "torch_tensorrt", "onnx"] = "auto",
    half: bool = False,
    max_batch_size: Count = 64,
    typical_batch_size: Count | None = None,
    workspace: Count | None = None,
) -> None:
    """Build an engine for batches of up to `max_batch_size`, fastest at `typical_batch_size`.

    `typical_batch_size` is the largest by default. Sequences may have up to the example's length. through=auto is
    torch_tensorrt if that is installed and the net is float, else onnx. With `half`, everything after the preprocessing
    is float16. `workspace` is the number of bytes that kernels may use (None: TensorRT's limit). A quantized net gets
    symmetric ranges (`lathe.export.dialects.Symmetric`).

    Raises:
        UserError: options conflict, or TensorRT can't build the net.
    """
    quantized = bool(quantized_layers(net))
    check_bounds(net, "tensorrt")
    if typical_batch_size is not None and typical_batch_size > max_batch_size:
        raise ArgumentError(
            f"typical_batch_size={typical_batch_size} is above max_batch_size={max_batch_size}: lower it."
        )
    way = chosen(through, quantized, half)
    sentence = available() or (onnx_available() if way == "onnx" else None)
    if sentence:
        raise UserError(sentence)
    shapes = profile(example, max_batch_size, typical_batch_size)
    with whole(path) as temporary, torch.no_grad():
        if way == "onnx":
            with scratch() as folder:
                graph = folder / "net.onnx"
                write(prepared(net, example, half), example, graph)
                plan = built(graph.read_bytes(), shapes, workspace)
        else:
            plan = compiled(prepared(net, example, half), net, largest(example, max_batch_size), shapes, workspace)
        temporary.write_bytes(plan)


def chosen(through: str, quantized: bool, half: bool) -> str:
    """Return the builder to use, "torch_tensorrt" or "onnx"."""
    if quantized and half:
        raise UserError(
            "target.tensorrt.half=true does not fit a quantized net, whose integers stand for float32: leave one of "
            "them out (as floats: target.tensorrt.integers=false)."
        )
    installed = importlib.util.find_spec("torch_tensorrt") is not None
    if through == "torch_tensorrt" and quantized:
        raise UserError("target.tensorrt.through=torch_tensorrt takes no quantized net: use through=onnx.")
    if through == "torch_tensorrt" and not installed:
        raise UserError(
            "torch_tensorrt can't be imported, which target.tensorrt.through=torch_tensorrt needs: pip install "
            "torch-tensorrt, or use through=onnx."
        )
    if through == "auto":
        return "torch_tensorrt" if installed and not quantized else "onnx"
    return through


def profile(example: Tensor, max_batch_size: int, typical_batch_size: int | None) -> Shapes:
    """Return the smallest, typical and largest input shape; batch and time of token ids differ."""
    rest = tuple(example.shape[1:])
    least = (1,) if not example.is_floating_point() and example.dim() == 2 else rest
    return (1, *least), (typical_batch_size or max_batch_size, *rest), (max_batch_size, *rest)


def prepared(net: nn.Module, example: Tensor, half: bool) -> nn.Module:
    """Return a copy of the net for tracing, with float16 or integers in its graph."""
    if not quantized_layers(net):
        found = copied(net)
        return Half(found) if half else found
    dialect = Symmetric()
    found = deployable(net, stand_in(example), dialect)
    rounded = 0
    for name, layer in list(found.named_modules()):
        if isinstance(layer, IntegerEmbedding):  # TensorRT looks up no integers
            found.set_submodule(
                name, nn.Embedding.from_pretrained(scaled(layer.integers, layer.scale).view(layer.full)).eval()
            )
        elif hasattr(layer, "integers"):
            dialect.prepare(layer)
            rounded += layer.scale is not None
    if not rounded:
        raise UserError(
            "TensorRT would compute no layer of this net in integers, such as where weights alone are quantized: "
            "export it as floats with target.tensorrt.integers=false, or quantize activations too."
        )
    return found


class Half(nn.Module):
    """A float16 net with float32 input and output. Preprocessing, which has values up to 255, stays in float32."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.before = net.preprocess if isinstance(net, Shipped) else nn.Identity()
        self.net = (net.net if isinstance(net, Shipped) else net).half()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        out: Tensor = self.net(x.half() if x.is_floating_point() else x)
        return out.float()


def built(graph: bytes, shapes: Shapes, workspace: int | None) -> bytes:
    """Return the engine that NVIDIA's builder makes from an ONNX graph."""
    import tensorrt  # type: ignore[import-untyped,import-not-found,unused-ignore]

    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    builder = tensorrt.Builder(logger)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse(graph):
        raise UserError(f"TensorRT can't read the net's graph ({parser.get_error(0)}): choose another target.")
    config = builder.create_builder_config()
    config.clear_flag(tensorrt.BuilderFlag.TF32)  # TF32's ten bits of mantissa would not compute what was trained
    if workspace is not None:
        config.set_memory_pool_limit(tensorrt.MemoryPoolType.WORKSPACE, workspace)
    ranges = builder.create_optimization_profile()
    ranges.set_shape(network.get_input(0).name, *shapes)
    config.add_optimization_profile(ranges)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UserError(
            "TensorRT built no engine for this net, for the reasons that it printed above: choose another target."
        )
    return bytes(plan)


def compiled(found: nn.Module, net: nn.Module, given: Tensor, shapes: Shapes, workspace: int | None) -> bytes:
    """Return the engine that torch_tensorrt makes from a module."""
    import torch_tensorrt  # type: ignore[import-untyped,import-not-found,unused-ignore]

    make = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    program = torch.export.export(found.cuda(), (given.cuda(),), dynamic_shapes=bounded_axes(net, given))
    names = ("min_shape", "opt_shape", "max_shape")
    inputs = [torch_tensorrt.Input(**dict(zip(names, shapes, strict=True)), dtype=given.dtype)]
    settings: dict[str, Any] = {"disable_tf32": True, "require_full_compilation": True}
    if workspace is not None:
        settings["workspace_size"] = workspace
    if "use_explicit_typing" in inspect.signature(make).parameters:  # later versions support only this
        settings["use_explicit_typing"] = True
    plan: bytes = make(program, arg_inputs=inputs, **settings)
    return plan


def load(path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[[Array], Array]:
    """Load an engine as a function of the net's input, `[batch, ...]`; larger batches run in parts.

    It runs on torch's current GPU, one call after the other; `device`, such as `cuda:1`, becomes the current one.
    `threads` has no effect. The function raises UserError for an input that does not fit the engine.
    """
    sentence = available()
    if sentence:
        raise UserError(sentence)
    import tensorrt

    if device is not None:
        torch.cuda.set_device(device)
    path = readable(path, "path")
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise UserError(
            f"{path} can't be loaded as an engine of TensorRT {tensorrt.__version__} on this GPU: export the run "
            "again, here."
        )
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    (source,) = (name for name in names if engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT)
    (result,) = (name for name in names if name != source)
    least, _, most = (tuple(shape) for shape in engine.get_tensor_profile_shape(source, 0))
    dtype = np.dtype(tensorrt.nptype(engine.get_tensor_dtype(source)))

    def run(x: Array) -> Array:
        given = torch.from_numpy(np.require(x, requirements=["C", "W"])).cuda()
        context.set_input_shape(source, tuple(given.shape))
        out = torch.empty(tuple(context.get_tensor_shape(result)), dtype=torch.float32, device="cuda")
        context.set_tensor_address(source, given.data_ptr())
        context.set_tensor_address(result, out.data_ptr())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # it copies the input
        if not context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError(f"TensorRT could not run {path}")
        stream.synchronize()
        found: Array = out.cpu().numpy()
        return found

    def forward(x: Array) -> Array:
        fits = x.ndim == len(most) and all(
            low <= size <= high for low, size, high in zip(least[1:], x.shape[1:], most[1:], strict=True)
        )
        if not fits or not x.size or x.dtype != dtype:
            raise UserError(
                f"{path} takes {dtype} of shapes from {list(least)} to {list(most)}: {x.dtype} of shape "
                f"{list(x.shape)} does not fit."
            )
        return in_parts(run, x, most[0])

    return forward
