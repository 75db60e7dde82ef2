"""Writes a net as one ONNX file and opens it as a function; shared by the ONNX targets."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lathe.errors import UserError, uninstalled
from lathe.export.files import readable, whole
from lathe.export.inputs import dynamic_axes, stand_in

Array = np.ndarray[Any, Any]


def available() -> str | None:
    """Return None, or the message that says what to install."""
    return uninstalled("export", "onnx", "onnxscript", "onnxruntime")


def require_packages() -> None:
    """Raise UserError if a package is missing."""
    sentence = available()
    if sentence:
        raise UserError(sentence)


def write(
    net: nn.Module,
    example: Tensor,
    path: str | Path,
    opset: int | None = None,
    properties: dict[str, str] | None = None,
) -> None:
    """Trace a net in eval mode to the self-contained file `path`, with input `input` and output `output`."""
    given = stand_in(example)
    with whole(path) as temporary, torch.no_grad(), quiet():
        program = torch.onnx.export(
            net,
            (given,),
            dynamo=True,
            dynamic_shapes=dynamic_axes(net, given),
            input_names=["input"],
            output_names=["output"],
            opset_version=opset,
            verbose=False,
        )
        assert program is not None
        _bare(program.model)
        _own_zero_points(program.model)
        program.model.metadata_props.update(properties or {})
        program.save(str(temporary), external_data=False)


def _bare(model: Any) -> None:
    """Remove torch's notes on nodes and values: source lines with local paths, half of a small file."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()


def _own_zero_points(model: Any) -> None:
    """Give each integer layer a separate zero point; the exporter shares them among layers of one width.

    With exact sums (`EXACT`), ONNX Runtime can't read a file in which two layers share one.
    """
    from onnx_ir import DataType, Value, tensor

    taken = set()
    for number, node in enumerate(model.graph.all_nodes()):
        shared = node.inputs[2] if node.op_type == "DequantizeLinear" and len(node.inputs) == 3 else None
        if shared is None or shared.const_value is None or shared.dtype != DataType.INT8:
            continue
        if shared.name in taken:
            name = f"{shared.name}.{number}"
            own = Value(name=name, type=shared.type, shape=shared.shape)
            own.const_value = tensor(shared.const_value.numpy(), name=name)
            model.graph.register_initializer(own)
            node.replace_input_with(2, own)
        taken.add(shared.name)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide messages of torch's exporter about unneeded packages and its own use of a deprecated name."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)  # "torchvision is not installed", once for each of its operators
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def open_session(path: str | Path, threads: int | None = None, device: str | None = None, **options: Any) -> Any:
    """Return an ONNX Runtime session on the CPU or on the GPU `device`, such as `cuda:1`.

    `threads=None` is ONNX Runtime's default, one for each core. Integers are summed exactly on every processor
    (`EXACT`).
    """
    require_packages()
    import onnxruntime  # type: ignore[import-untyped,import-not-found,unused-ignore]

    path = readable(path, "path")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # errors are raised
    if threads is not None:
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
    for name, value in options.items():
        setattr(settings, name, value)
    if not torch.cpu._is_vnni_supported():
        settings.add_session_config_entry(EXACT, "1")

    providers = providers_for(device, onnxruntime.get_available_providers())

    def session() -> Any:
        return onnxruntime.InferenceSession(str(path), settings, providers=providers)

    try:
        found = session()
        if found.get_modelmeta().custom_metadata_map.get(FLOAT_ARITHMETIC):
            # integers are only stored: convert them to floats once, at load time, instead of at each call
            settings.add_session_config_entry("session.disable_quant_qdq", "1")
            found = session()
    except Exception as error:  # ONNX Runtime's exceptions have no common class
        first = str(error).strip().splitlines()[0]
        raise UserError(f"{path} can't be read as ONNX ({first[:200]}): export the run again.") from error
    if len(providers) > 1 and found.get_providers()[0] != CUDA:  # it would silently compute on the CPU
        raise UserError(
            f"{path}: onnxruntime could not load its CUDA provider, so nothing would run on {device}: install the "
            "onnxruntime-gpu of torch's CUDA version, or leave trainer.accelerator=cpu."
        )
    return found


CUDA = "CUDAExecutionProvider"


def providers_for(device: str | None, available: Sequence[str]) -> list[Any]:
    """Return ONNX Runtime's providers for `device`: on a GPU, CUDA without TF32, then the CPU."""
    cpu = "CPUExecutionProvider"
    if device is None or not device.startswith("cuda"):
        return [cpu]
    if CUDA not in available:
        raise UserError(
            f"onnxruntime has no CUDA provider here, which {device} takes: pip install onnxruntime-gpu in its place, "
            "or leave trainer.accelerator=cpu."
        )
    return [(CUDA, {"device_id": int(device.partition(":")[2] or 0), "use_tf32": 0}), cpu]


FLOAT_ARITHMETIC = "lathe.float_arithmetic"
# x86 without VNNI adds products of 8-bit integers in pairs, in 16 bits, which saturate: without this option of ONNX
# Runtime's (`kOrtSessionOptionsAvx2PrecisionMode`) logits were off by up to 0.25 of the largest. With VNNI sums are
# exact, and the option, which makes signed weights unsigned, takes 2.6 times as long (ONNX Runtime 1.31, a ResNet-18 at
# 32x32).
EXACT = "session.x64quantprecision"


def load(path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[[Array], Array]:
    """Load a file as a function from the net's input to its output; see `open_session`."""
    session = open_session(path, threads, device)
    name = session.get_inputs()[0].name

    def forward(x: Array) -> Array:
        out: Array = session.run(None, {name: x})[0]
        return out

    return forward
