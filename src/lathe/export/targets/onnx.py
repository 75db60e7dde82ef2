"""ONNX in float32 and in integers, for ONNX Runtime and other readers of ONNX."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lathe.errors import UserError, require, uninstalled
from lathe.export import Array, Target, export_target, first_line
from lathe.export.bundle import readable, whole
from lathe.export.inputs import FlatCore, dynamic_axes, quiet, shapes_for, stand_in
from lathe.export.integer_layers import Affine, Dialect, IntegerAdd, copied, deployable

CUDA = "CUDAExecutionProvider"
BLOCKED_OPSET = 21  # the first in which groups of weights can have scales
# The metadata of a file whose integers are only stored, and converted to floats when it is loaded.
FLOAT_ARITHMETIC = "lathe.float_arithmetic"
# x86 without VNNI adds products of 8-bit integers in pairs, in 16 bits, which saturate: without this option of ONNX
# Runtime's (`kOrtSessionOptionsAvx2PrecisionMode`) logits were off by up to 0.25 of the largest. With VNNI sums are
# exact, and the option, which makes signed weights unsigned, takes 2.6 times as long (ONNX Runtime 1.31, a ResNet-18 at
# 32x32).
EXACT = "session.x64quantprecision"


@export_target("onnx")
class Onnx(Target):
    """One self-contained float file for any batch size; a quantized net keeps only rounded weights."""

    suffix, has_gpu, takes_cores, integers = ".onnx", True, True, False

    def __init__(self) -> None:
        pass

    def available(self) -> str | None:
        return uninstalled("export", "onnx", "onnxscript", "onnxruntime")

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        write(copied(net, floats=True), example, path)

    def load(self, path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[..., Any]:
        session = open_session(path, threads, device)
        names = [entry.name for entry in session.get_inputs()]

        def forward(*arrays: Array) -> Any:
            outputs = session.run(None, dict(zip(names, arrays, strict=True)))
            return outputs[0] if len(outputs) == 1 else outputs

        return forward


@export_target("onnx_int8")
class OnnxInt8(Onnx):
    """One self-contained file of a quantized net, with integer weights, for batches of any size.

    BatchNorm is folded. Activations are unsigned, weights signed with a scale for each output channel, biases 32-bit,
    so that ONNX Runtime computes fully in integers. Operations without a range, such as attention, norms and pooling,
    stay float. The CUDA provider has no integer arithmetic.
    """

    has_gpu, integers = False, True

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        integer_net = deployable(net, stand_in(net, example), OnnxDialect())
        modules: list[Any] = list(integer_net.modules())
        blocked = any(module.scale.dim() == 2 for module in modules if hasattr(module, "integers"))
        rounds = any(
            isinstance(module, IntegerAdd) or getattr(module, "source", None) is not None for module in modules
        )
        properties = {} if rounds else {FLOAT_ARITHMETIC: "1"}
        write(integer_net, example, path, BLOCKED_OPSET if blocked else None, properties)


class OnnxDialect(Dialect):
    """ONNX's operators, in the patterns that ONNX Runtime fuses into integer kernels."""

    integer_bias = True

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        scale, zero = torch.tensor(affine.scale), torch.tensor(affine.zero_point + self.lowest, dtype=self.dtype)
        q = operator("QuantizeLinear", (x, scale, zero), self.dtype, x.shape)
        if affine.top < 255:  # QuantizeLinear saturates at 255
            q = operator("Min", (q, torch.tensor(affine.top + self.lowest, dtype=self.dtype)), self.dtype, x.shape)
        return operator("DequantizeLinear", (q, scale, zero), torch.float32, x.shape)

    def rounded_dynamically(self, x: Tensor) -> Tensor:
        return operator("DequantizeLinear", self._dynamic(x), torch.float32, x.shape)

    def _dynamic(self, x: Tensor) -> tuple[Tensor, ...]:
        types, shapes = (torch.uint8, torch.float32, torch.uint8), (x.shape, (), ())
        return tuple(torch.onnx.ops.symbolic_multi_out("DynamicQuantizeLinear", (x,), dtypes=types, shapes=shapes))

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        attributes = {"axis": 0} if scale.dim() == 1 else {"axis": 1, "block_size": integers.shape[1] // scale.shape[1]}
        zeros = torch.zeros_like(scale, dtype=integers.dtype)  # ONNX Runtime fuses a Gemm only if it has them
        return operator("DequantizeLinear", (integers, scale, zeros), torch.float32, integers.shape, **attributes)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Gemm takes an integer bias, and inputs of two axes
        flat = x if x.dim() == 2 else x.flatten(0, -2)
        inputs = (flat, weight) if bias is None else (flat, weight, bias)
        out = operator("Gemm", inputs, torch.float32, (flat.shape[0], weight.shape[0]), transB=1)
        return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])

    def dynamic_linear(self, x: Tensor, integers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        q, x_scale, x_zero = self._dynamic(x)
        shape = (*x.shape[:-1], integers.shape[0])
        products = operator("MatMulInteger", (q, integers.t().contiguous(), x_zero), torch.int32, shape)
        out = operator("Cast", (products,), torch.float32, shape, to=1) * (x_scale * scale)
        return out if bias is None else out + bias


def operator(name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
    """Return an ONNX operator's output for tracing; it computes nothing."""
    return torch.onnx.ops.symbolic(name, inputs, attributes, dtype=dtype, shape=shape)


def write(
    net: nn.Module, example: Any, path: str | Path, opset: int | None = None, properties: dict[str, str] | None = None
) -> None:
    """Trace a net in eval mode to the self-contained file `path`, with input `input` and output `output`.

    A core keeps the names of its inputs and outputs.
    """
    inputs, flat = stand_in(net, example), net if isinstance(net, FlatCore) else None
    with whole(path) as temporary, torch.no_grad(), quiet():
        program = torch.onnx.export(
            net,
            inputs,
            dynamo=True,
            dynamic_shapes=shapes_for(net, dynamic_axes(net, inputs)),
            input_names=["input"] if flat is None else flat.names,
            output_names=["output"] if flat is None else flat.output_names,
            opset_version=opset,
            verbose=False,
        )
        assert program is not None
        # remove torch's notes on nodes and values: source lines with local paths, half of a small file
        graph = program.model.graph
        nodes: list[Any] = list(graph.all_nodes())
        values: list[Any] = [value for node in nodes for value in node.outputs]
        for noted in (*nodes, *values):
            noted.doc_string = None
        for noted in (program.model, graph, *nodes, *values, *graph.inputs, *graph.initializers.values()):
            noted.metadata_props.clear()
        _separate_zero_points(program.model)
        program.model.metadata_props.update(properties or {})
        program.save(str(temporary), external_data=False)


def _separate_zero_points(model: Any) -> None:
    """Give each integer layer its own zero point; the exporter shares them among layers of one width.

    With exact sums (`EXACT`), ONNX Runtime can't read a file in which two layers share one.
    """
    from onnx_ir import DataType, Value, tensor

    used = set()
    for number, node in enumerate(model.graph.all_nodes()):
        shared = node.inputs[2] if node.op_type == "DequantizeLinear" and len(node.inputs) == 3 else None
        if shared is None or shared.const_value is None or shared.dtype != DataType.INT8:
            continue
        if shared.name in used:
            name = f"{shared.name}.{number}"
            own = Value(name=name, type=shared.type, shape=shared.shape)
            own.const_value = tensor(shared.const_value.numpy(), name=name)
            model.graph.register_initializer(own)
            node.replace_input_with(2, own)
        used.add(shared.name)


def open_session(path: str | Path, threads: int | None = None, device: str | None = None, **options: Any) -> Any:
    """Return an ONNX Runtime session on the CPU or on the GPU `device`, such as `cuda:1`.

    `threads=None` is ONNX Runtime's default, one for each core. Integers are summed exactly on every processor
    (`EXACT`). `options` are attributes of SessionOptions.
    """
    import onnxruntime  # type: ignore[import-untyped,import-not-found,unused-ignore]

    path = readable(path)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # errors are raised
    if threads is not None:
        options |= {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    for name, value in options.items():
        setattr(settings, name, value)
    if not torch.cpu._is_vnni_supported():
        settings.add_session_config_entry(EXACT, "1")
    providers = providers_for(device, onnxruntime.get_available_providers())

    try:
        session = onnxruntime.InferenceSession(str(path), settings, providers=providers)
        if session.get_modelmeta().custom_metadata_map.get(FLOAT_ARITHMETIC):
            settings.add_session_config_entry("session.disable_quant_qdq", "1")
            session = onnxruntime.InferenceSession(str(path), settings, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions have no common class
        raise UserError(f"{path} can't be read as ONNX ({first_line(error)}): export the run again.") from error
    loaded = len(providers) == 1 or session.get_providers()[0] == CUDA  # else it would silently compute on the CPU
    fix = "install the onnxruntime-gpu of torch's CUDA version, or leave trainer.accelerator=cpu"
    require(loaded, f"{path}: onnxruntime could not load its CUDA provider: {fix}.")
    return session


def providers_for(device: str | None, available: Sequence[str]) -> list[Any]:
    """Return ONNX Runtime's providers for `device`: on a GPU, CUDA without TF32, then the CPU."""
    cpu = "CPUExecutionProvider"
    if device is None or not device.startswith("cuda"):
        return [cpu]
    fix = "pip install onnxruntime-gpu in its place, or leave trainer.accelerator=cpu"
    require(CUDA in available, f"onnxruntime has no CUDA provider here, which {device} takes: {fix}.")
    return [(CUDA, {"device_id": int(device.partition(":")[2] or 0), "use_tf32": 0}), cpu]
