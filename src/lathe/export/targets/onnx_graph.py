"""From a net to one ONNX file, and from the file to a function: what the ONNX targets have in common."""

import logging
import warnings
from collections.abc import Callable, Iterator
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
    """None, or the sentence that says what to install."""
    return uninstalled("export", "onnx", "onnxscript", "onnxruntime")


def require_packages() -> None:
    """Raises UserError where `available` has something to say."""
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
    """Traces a net in eval mode to `path`, a self-contained file with inputs `input` and outputs `output`."""
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
        program.model.metadata_props.update(properties or {})
        program.save(str(temporary), external_data=False)


def _bare(model: Any) -> None:
    """Takes away what torch notes on each node and value: source lines with paths of this machine, half of a small
    file.
    """
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


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's exporter says of packages that are not needed, and of its own use of a deprecated name."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)  # "torchvision is not installed", once for each of its operators
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def open_session(path: str | Path, threads: int | None = None, **options: Any) -> Any:
    """An ONNX Runtime session on the CPU; `threads` None is ONNX Runtime's own choice, one for each core.

    Raises:
        UserError: there is no such file, or it can't be read.
    """
    require_packages()
    import onnxruntime  # type: ignore[import-untyped,import-not-found,unused-ignore]

    path = readable(path, "path")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # errors, which are raised as well
    if threads is not None:
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
    for name, value in options.items():
        setattr(settings, name, value)
    try:
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        if session.get_modelmeta().custom_metadata_map.get(FLOAT_ARITHMETIC):
            # integers are only stored: they become floats once, when the file is loaded, instead of at each call
            settings.add_session_config_entry("session.disable_quant_qdq", "1")
            session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no class in common
        first = str(error).strip().splitlines()[0]
        raise UserError(f"{path} can't be read as ONNX ({first[:200]}): export the run again.") from error
    return session


FLOAT_ARITHMETIC = "lathe.float_arithmetic"


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """A function of the net's input, `[batch, ...]`, that gives its output; see `open_session`."""
    session = open_session(path, threads)
    name = session.get_inputs()[0].name

    def forward(x: Array) -> Array:
        out: Array = session.run(None, {name: x})[0]
        return out

    return forward
