"""The net of a run as it is exported: with preprocessing, in floats or integers, and with the facts for clients.

The core of a user's LightningModule is exported as a function of named arrays.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lathe.compression.callback import inputs_of
from lathe.compression.quantization.net import describe, quantized_layers, strip
from lathe.compression.quantization.ptq import quantize_static
from lathe.config.resolve import set_data_folder
from lathe.data.checks import check_class_names, squashed
from lathe.errors import require
from lathe.export.inputs import ANY, FlatCore, Preprocess, Shipped, as_list, takes_any_size, takes_any_time
from lathe.measure.calls import Call
from lathe.runs.inference import check_input_spec, open_data, open_run_net
from lathe.runs.rundir import RunDir, open_run
from lathe.tasks import Task
from lathe.tasks.core import EXAMPLE, record_calls

T = TypeVar("T", bound="ExportModel")
BATCHES = 16  # training batches to calibrate ranges on
HELD = 64  # held-out batches to compare a core on, without target.samples


@dataclass
class ExportModel:
    """A net to export. `net` takes the input that `facts["input"]` describes; `trained` is the run's net without
    preprocessing. Both are on the CPU in eval mode.
    """

    task: Task
    cfg: dict[str, Any]
    trained: nn.Module
    net: nn.Module
    example: Tensor
    facts: dict[str, Any]

    @cached_property
    def data(self) -> Any:
        """The run's data module, set up."""
        return open_data(self.cfg, self.task)

    def in_numbers(self, integers: bool | None) -> nn.Module:
        """Return the trained net, or a copy of it in floats or integers, and note that in the facts.

        None keeps the net as it was trained; False gives a quantized net in floats, with its rounded weights; True
        calibrates one that is not quantized on its training data, as compression=ptq_static does.
        """
        net, is_quantized = self.trained, bool(describe(self.trained))
        if is_quantized and integers is False:
            net = strip(net).eval()
        elif integers and not is_quantized:
            net = copy.deepcopy(net)
            quantize_static(net, inputs_of(self.data, BATCHES), bias_correction=True)
        self.facts |= {"integers": bool(describe(net)), "calibrated": bool(integers and not is_quantized)}
        return net.eval()

    @property
    def inner(self) -> nn.Module:
        """The net without preprocessing."""
        return self.net.net if isinstance(self.net, Shipped) else self.net

    @property
    def activation_bits(self) -> int | None:
        """The fewest bits of quantized activations; None if there are none."""
        names = ("input_quantizer", "other_quantizer")
        quantizers = [getattr(layer, name, None) for layer in quantized_layers(self.inner).values() for name in names]
        return min((int(quantizer.bits) for quantizer in quantizers if quantizer is not None), default=None)

    @property
    def takes_any_size(self) -> bool:
        """True if the graph resizes images of any size."""
        return takes_any_size(self.net)

    @property
    def other_size(self) -> tuple[int, int] | None:
        """Height and width of the input, if the graph resizes it; None for the net's own size or any."""
        size = self.net.preprocess.input_size if isinstance(self.net, Shipped) else None
        return size if isinstance(size, tuple) and size != self.net.preprocess.size else None

    def logits_of(self, x: Tensor) -> int:
        """Return the number of logits of a batch."""
        shape = self.facts["output"]["shape"]
        return int(len(x) * shape[-1] * (x.shape[1] if len(shape) == 3 else 1))

    def inputs_of(self, x: Tensor) -> Tensor:
        """Return a batch of the data module as clients send it: as uint8 pixels, or token ids."""
        preprocess = self.facts["preprocess"]
        if preprocess is None or not preprocess["in_graph"]:
            return x
        own = make_preprocess(self.cfg)
        return ((x - own.shift) / own.scale).round().clamp(0, 255).to(torch.uint8)


def opened(
    kind: Callable[..., T], run: RunDir, key: str, checkpoint: str, eval_batch_size: int | None, data_folder: str | None
) -> T:
    """Open a run for an export as a `kind` of ExportModel, whose net is not prepared yet; None keeps the run's own."""
    task, cfg = open_run_net(run.path, key, checkpoint, own=kind is not ExportModel)
    if eval_batch_size is not None:
        cfg["data"]["eval_batch_size"] = eval_batch_size
    set_data_folder(cfg, data_folder)
    facts = {"run": run.path.name, "task": type(task).__name__, "net": type(task.core).__name__}
    return kind(task, cfg, task.core, task.core, torch.empty(0), {**facts, "checkpoint": checkpoint})


def is_image(cfg: Mapping[str, Any]) -> bool:
    """Return whether the data of a configuration are images."""
    return cfg["data"].get("image_size") is not None and cfg["data"].get("channels") is not None


def make_preprocess(cfg: Mapping[str, Any], input_size: Any = None) -> Preprocess:
    """Return the preprocessing of the configuration's images."""
    data = cfg["data"]
    message = f"target.input_size={input_size} scales the middle of images, but data.source.resize=squash. Use null."
    require(input_size is None or not squashed(data), message)
    return Preprocess(data["mean"], data["std"], (data["image_size"], data["image_size"]), input_size)


def open_export_model(
    path: str | Path,
    *,
    checkpoint: str = "best",
    preprocess: bool = True,
    input_size: Any = None,
    integers: bool | None = None,
    eval_batch_size: int | None = None,
    data_folder: str | None = None,
    key: str = "run",
) -> ExportModel:
    """Open the net of a run directory for an export target.

    Args:
        integers: as for `ExportModel.in_numbers`.
        eval_batch_size, data_folder: replace those of the run, unless None.
    """
    run = open_run(path, key)
    check_input_spec(run.config, path, key)
    model = opened(ExportModel, run, key, checkpoint, eval_batch_size, data_folder)
    cfg, net = model.cfg, model.in_numbers(integers)
    model.facts["classes"] = class_names(cfg)
    prepare = _images if is_image(cfg) else _tokens
    model.net, model.example = prepare(model.facts, cfg, net, preprocess, input_size)
    with torch.no_grad():
        answer = model.net(model.example)
    times = model.facts["input"]["shape"][1:2] if answer.dim() == 3 else []
    model.facts["output"] = {"name": "output", "dtype": "float32", "shape": ["batch", *times, answer.shape[-1]]}
    return model


def _images(
    facts: dict[str, Any], cfg: Mapping[str, Any], net: nn.Module, preprocess: bool, input_size: Any
) -> tuple[nn.Module, Tensor]:
    """Return the net for images with preprocessing, and an example of its input; adds to the facts."""
    own = make_preprocess(cfg, input_size if preprocess else None)
    channels, free = cfg["data"]["channels"], own.input_size == ANY
    sides = list(own.size if isinstance(own.input_size, str) else own.input_size)
    facts["preprocess"] = {
        "in_graph": preprocess,
        "scale": 1 / 255,
        "mean": [float(value) for value in cfg["data"]["mean"]],
        "std": [float(value) for value in cfg["data"]["std"]],
        "size": list(own.size),
        "resize": "middle, bilinear, antialiased" if own.input_size != own.size else None,
        "squash": squashed(cfg["data"]),
    }
    shape = ["batch", channels, *(["height", "width"] if free else sides)]
    facts["input"] = {"name": "input", "dtype": "uint8" if preprocess else "float32", "shape": shape, "layout": "NCHW"}
    # tracers take a side of one for a constant
    example = torch.zeros(2, channels, *(max(side, 2) if free else side for side in sides))
    return (Shipped(net, own), example.to(torch.uint8)) if preprocess else (net, example)


def _tokens(
    facts: dict[str, Any], cfg: Mapping[str, Any], net: nn.Module, preprocess: bool, input_size: Any
) -> tuple[nn.Module, Tensor]:
    """Do as `_images` for token ids `[batch, time]`, of any time up to the data's length if the net allows it."""
    require(input_size is None, f"target.input_size={input_size} is for images: leave it null for this run.")
    length = int(cfg["data"]["length"])
    time = "time" if takes_any_time(net, length) else length
    facts["preprocess"] = None
    facts["input"] = {
        "name": "input",
        "dtype": "int64",
        "shape": ["batch", time],
        "layout": "NT",
        "longest": length,
        "vocab_size": int(cfg["data"]["vocab_size"]),
    }
    return net, torch.zeros(2, length, dtype=torch.int64)


def class_names(cfg: Mapping[str, Any]) -> list[str] | None:
    """Return the class names in the order of the logits, or numbers if the data declare none; None for token ids."""
    data = cfg["data"]
    if "num_classes" not in data:
        return None
    names = check_class_names(data.get("class_names"), data["num_classes"])
    return names or [str(index) for index in range(data["num_classes"])]


# The core of a LightningModule


@dataclass
class CoreModel(ExportModel):
    """A core to export. `net` is the `FlatCore` of it, `example` its inputs, `trained` the core of the run's task."""

    net: FlatCore
    example: tuple[Tensor, ...]  # type: ignore[assignment]

    @property
    def inner(self) -> nn.Module:
        """The core that is exported: the run's own, or a copy of it in integers or floats."""
        return self.net.core

    def held_out(self, split: str, samples: int | None) -> list[tuple[Tensor, ...]]:
        """Return the inputs of the core in the first batches of a split, for at least `samples` samples."""
        batches = self.data.eval_loader(split)
        first = record_calls(self.task, batches, 1)
        require(bool(first), f"target.split={split}: the run's data have no batch there.")
        limit = HELD if samples is None else max(1, -(-samples // first[0].samples()))
        inputs = [self.net.tensors_of(call.args, call.kwargs) for call in record_calls(self.task, batches, limit)]
        shapes = [tensor.shape for tensor in self.example]
        fixed = not self.net.has_batch
        return [each for each in inputs if [x.shape for x in each] == shapes] if fixed else inputs

    def odd_inputs(self) -> list[tuple[Tensor, ...]]:
        """Return the example in batch sizes that were not traced."""
        if not self.net.has_batch:
            return [self.example]
        return [self.net.rows(self.example, count) for count in (1, 2, 3, 7, 16, 33)]

    def replacement(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward pass for the core in its module that runs a file: `run` takes and returns arrays."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            arrays = [tensor.detach().cpu().numpy() for tensor in self.net.tensors_of(args, kwargs)]
            return self.net.nest(list(map(torch.from_numpy, as_list(run(*arrays)))))

        return forward


def open_core(
    path: str | Path,
    *,
    checkpoint: str = "best",
    integers: bool | None = None,
    axes: Mapping[str, Mapping[Any, str]] | None = None,
    eval_batch_size: int | None = None,
    data_folder: str | None = None,
    key: str = "run",
) -> CoreModel:
    """Open the core of a run's LightningModule for an export target, with the arguments of example.pt.

    Args:
        integers: as for `ExportModel.in_numbers`.
        axes: dynamic axes in addition to the batch, by input and number.
        eval_batch_size, data_folder: replace those of the run, unless None.
    """
    run = open_run(path, key)
    model = opened(CoreModel, run, key, checkpoint, eval_batch_size, data_folder)
    task: Any = model.task
    file = run.path / EXAMPLE
    call = Call.load(file) if file.is_file() else record_calls(task, model.data.eval_loader("val"), 1)[0]
    model.net = FlatCore(model.in_numbers(integers), call.args, call.kwargs)
    model.net.find_batch()
    model.net.declare_axes(axes or {})
    model.example = model.net.example
    model.facts |= {"module": type(task.net).__name__, "core": task.core_name, "classes": None, "preprocess": None}
    model.facts |= model.net.describe()
    return model
