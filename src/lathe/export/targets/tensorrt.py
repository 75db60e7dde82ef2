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
from lathe.errors import ArgumentError, UserError, require
from lathe.export import Array, Target, export_target, get
from lathe.export.bundle import readable, whole
from lathe.export.inputs import Shipped, bounded_axes, check_bounds, has_tokens, in_parts, stand_in
from lathe.export.integer_layers import DYNAMIC, Affine, IntegerEmbedding, copied, deployable, scaled, to_float
from lathe.export.targets.onnx import OnnxDialect, write
from lathe.files import scratch

NO_GPU = "target=tensorrt: torch finds no NVIDIA GPU here: export on the machine that is to run the file."
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@export_target("tensorrt")
class TensorRT(Target):
    """An engine for batches of up to `max_batch_size`, fastest at `typical_batch_size`.

    `typical_batch_size` is the largest by default. Sequences may have up to the example's length. through=auto is
    torch_tensorrt if that is installed and the net is float, else onnx. With `half`, everything after the preprocessing
    is float16. `workspace` is the number of bytes that kernels may use (None: TensorRT's limit). A quantized net gets
    symmetric ranges (`Symmetric`).
    """

    suffix, is_program, has_gpu = ".engine", True, True

    @validated
    def __init__(
        self,
        integers: bool | None = None,
        through: Literal["auto", "torch_tensorrt", "onnx"] = "auto",
        half: bool = False,
        max_batch_size: Count = 64,
        typical_batch_size: Count | None = None,
        workspace: Count | None = None,
    ) -> None:
        typical = typical_batch_size or max_batch_size
        if typical > max_batch_size:
            raise ArgumentError(f"typical_batch_size={typical} is above max_batch_size={max_batch_size}: lower it.")
        self.integers, self.through, self.half, self.workspace = integers, through, half, workspace
        self.max_batch_size, self.typical_batch_size = max_batch_size, typical

    def available(self) -> str | None:
        if importlib.util.find_spec("tensorrt") is None:
            return "target=tensorrt: tensorrt can't be imported: pip install tensorrt, on a machine with an NVIDIA GPU."
        return None if torch.cuda.is_available() else NO_GPU

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        check_bounds(net, "tensorrt")
        way = self.builder(bool(quantized_layers(net)))
        missing = self.available() or (get("onnx").available() if way == "onnx" else None)
        require(missing is None, str(missing))
        # the smallest, typical and largest input shape; batch and time of token ids differ
        rest = tuple(example.shape[1:])
        least = (1,) if has_tokens(example) else rest
        shapes = (1, *least), (self.typical_batch_size, *rest), (self.max_batch_size, *rest)
        with whole(path) as temporary, torch.no_grad():
            module = prepared(net, example, self.half)
            if way == "onnx":
                with scratch() as folder:
                    write(module, example, folder / "net.onnx")
                    plan = built((folder / "net.onnx").read_bytes(), shapes, self.workspace)
            else:
                plan = compiled(module, net, stand_in(net, example, self.max_batch_size)[0], shapes, self.workspace)
            temporary.write_bytes(plan)

    def builder(self, quantized: bool) -> str:
        """Return the builder to use, "torch_tensorrt" or "onnx"."""
        installed = importlib.util.find_spec("torch_tensorrt") is not None
        auto = "torch_tensorrt" if installed and not quantized else "onnx"
        way = auto if self.through == "auto" else self.through
        key = "target.tensorrt.through=torch_tensorrt"
        message = "target.tensorrt.half=true does not fit a quantized net: leave it out, or set integers=false."
        require(not quantized or not self.half, message)
        require(way == "onnx" or not quantized, f"{key} takes no quantized net: use through=onnx.")
        require(way == "onnx" or installed, f"{key}: pip install torch-tensorrt, or use through=onnx.")
        return way

    def load(self, path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[[Array], Array]:
        """Load an engine as a function of the net's input, `[batch, ...]`; larger batches run in parts.

        It runs on torch's current GPU, one call after the other; `device`, such as `cuda:1`, becomes the current one.
        `threads` has no effect. The function raises UserError for an input that does not fit the engine.
        """
        require(torch.cuda.is_available(), NO_GPU)
        import tensorrt  # type: ignore[import-untyped,import-not-found,unused-ignore]

        if device is not None:
            torch.cuda.set_device(device)
        path = readable(path)
        runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            version = tensorrt.__version__
            raise UserError(f"{path} is not an engine of TensorRT {version} for this GPU: export the run again, here.")
        context = engine.create_execution_context()
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        (source,) = (name for name in names if engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT)
        (result,) = (name for name in names if name != source)
        least, _, most = (tuple(shape) for shape in engine.get_tensor_profile_shape(source, 0))
        dtype = np.dtype(tensorrt.nptype(engine.get_tensor_dtype(source)))

        def run(x: Array) -> Array:
            tensor = torch.from_numpy(np.require(x, requirements=["C", "W"])).cuda()
            context.set_input_shape(source, tuple(tensor.shape))
            out = torch.empty(tuple(context.get_tensor_shape(result)), dtype=torch.float32, device="cuda")
            context.set_tensor_address(source, tensor.data_ptr())
            context.set_tensor_address(result, out.data_ptr())
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())  # it copies the input
            if not context.execute_async_v3(stream.cuda_stream):
                raise RuntimeError(f"TensorRT could not run {path}")
            stream.synchronize()
            output: Array = out.cpu().numpy()
            return output

        def forward(x: Array) -> Array:
            sides = zip(least[1:], x.shape[1:], most[1:], strict=False)
            fits = x.ndim == len(most) and x.size > 0 and all(low <= side <= high for low, side, high in sides)
            takes = f"{dtype} of shapes from {list(least)} to {list(most)}"
            require(fits and x.dtype == dtype, f"{path} takes {takes}, not {x.dtype} of shape {list(x.shape)}.")
            out: Array = in_parts(run, [x], most[0])
            return out

        return forward


class Symmetric(OnnxDialect):
    """ONNX's operators for TensorRT: signed activations with zero point 0, float biases.

    A range of 8 bits, `lowest..highest`, becomes `-largest..largest`, with `largest` the greater of their magnitudes:
    nonnegative activations, such as those after a ReLU, have half as many values. Ranges of fewer bits are kept.
    Dynamic ranges are not supported.
    """

    integer_bias = False
    lowest, dtype = -128, torch.int8

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        below, above = affine.zero_point, affine.top - affine.zero_point
        step = affine.scale * max(below, above, 127) / 127  # not finer than before: integers below 128 are unchanged
        if affine.top < 255:  # QuantizeLinear saturates at the ends of int8
            x = x.clamp(-affine.scale * below, affine.scale * above)
        return super().rounded(x, Affine(step, 128, 255))


def prepared(net: nn.Module, example: Tensor, half: bool) -> nn.Module:
    """Return a copy of the net for tracing, with float16 or integers in its graph.

    Weights are stored as floats if TensorRT has no integer kernel: for float activations or grouped scales.
    """
    if not quantized_layers(net):
        converted = copied(net)
        return Half(converted) if half else converted
    converted = deployable(net, stand_in(net, example), Symmetric())
    rounded = 0
    for name, layer in list(converted.named_modules()):
        if isinstance(layer, IntegerEmbedding):  # TensorRT looks up no integers
            weight = scaled(layer.integers, layer.scale).view(layer.full)
            converted.set_submodule(name, nn.Embedding.from_pretrained(weight).eval())
        elif hasattr(layer, "integers"):
            message = "target=tensorrt has no dynamic ranges of activations: quantize with static ranges."
            require(layer.source != DYNAMIC, message)
            if layer.source is None or layer.scale.dim() == 2:
                to_float(layer)
            else:
                rounded += 1
    fix = "quantize activations too, or set target.tensorrt.integers=false"
    require(rounded > 0, f"TensorRT would compute no layer of this net in integers: {fix}.")
    return converted


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
    require(plan is not None, "TensorRT built no engine, for the reasons that it printed above: choose another target.")
    return bytes(plan)


def compiled(module: nn.Module, net: nn.Module, example: Tensor, shapes: Shapes, workspace: int | None) -> bytes:
    """Return the engine that torch_tensorrt makes from a module."""
    import torch_tensorrt  # type: ignore[import-untyped,import-not-found,unused-ignore]

    make = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    program = torch.export.export(module.cuda(), (example.cuda(),), dynamic_shapes=bounded_axes(net, (example,)))
    names = ("min_shape", "opt_shape", "max_shape")
    inputs = [torch_tensorrt.Input(**dict(zip(names, shapes, strict=True)), dtype=example.dtype)]
    settings: dict[str, Any] = {"disable_tf32": True, "require_full_compilation": True}
    if workspace is not None:
        settings["workspace_size"] = workspace
    if "use_explicit_typing" in inspect.signature(make).parameters:  # later versions support only this
        settings["use_explicit_typing"] = True
    plan: bytes = make(program, arg_inputs=inputs, **settings)
    return plan
