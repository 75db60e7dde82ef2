"""Compress and export any module from Python, by the functions that runs use: docs/python.md."""

import copy
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lathe import export
from lathe.compression import QAT, PTQDynamic, PTQStatic, WeightOnly, reestimate_batchnorm
from lathe.compression.channels import prune_channels
from lathe.compression.channels.removal import Options
from lathe.compression.pruning import apply_masks, magnitude_masks, sparsity_of
from lathe.compression.pruning.masks import Masks
from lathe.compression.quantization import describe, freeze_observers, quantize, set_enabled, strip, update_ranges
from lathe.errors import UserError, did_you_mean, require
from lathe.export.bundle import whole
from lathe.export.inputs import FlatCore, as_list
from lathe.files import scratch
from lathe.measure.calls import Call
from lathe.runs.export_model import CoreModel
from lathe.verbs import export as parity
from lathe.verbs.export import get_target, make

AFTER: dict[str, Any] = {"ptq_static": PTQStatic, "ptq_dynamic": PTQDynamic, "weight_only": WeightOnly}
# Options of each method that act without the schedule of a run; they are keys of configs/compression.
_MASKS = ("sparsity", "granularity", "scope", "norm", "block", "layers", "exclude", "head")
METHODS: dict[str, tuple[str, ...]] = {
    "prune_channels": tuple(Options.__dataclass_fields__),
    "prune": _MASKS,
    "prune_structured": tuple(name for name in _MASKS if name not in ("granularity", "block")),
    "prune_nm": ("n", "m", "scope", "layers", "exclude", "head"),
    "qat": ("bits", "activation_bits", "per_channel", "layer_bits", "exclude", "observer", "percentile"),
    **{name: tuple(inspect.signature(kind).parameters) for name, kind in AFTER.items()},
}
BATCHES = 16  # calls of the loop that calibrate, at most
SUFFIXES = {".onnx": "onnx", ".pt2": "torch_export", ".pte": "executorch", ".safetensors": "safetensors"}


def compress(
    module: nn.Module,
    methods: str | Sequence[str] | Mapping[str, Mapping[str, Any]],
    example: Any,
    loop: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Compress a module in place by one or several methods, and return it; its modes are restored.

    Channels are removed first, then weights are masked, then `qat` rounds; `loop` is called once, and `ptq_static`,
    `ptq_dynamic` and `weight_only` follow. Masks stay after every step of any optimizer that the loop takes.

    Args:
        module: any module; parameters keep their names.
        methods: a name of `METHODS`, a list of them, or their options by name: `{"prune": {"sparsity": 0.5}}`.
        example: the module's input: a tensor, a tuple of its arguments or a dict of its keyword arguments.
        loop: trains the module, or only feeds it: its first 16 calls calibrate. None calibrates on `example`.

    Raises:
        UserError: a method or option is unknown, does not fit the module, or needs the loop.
    """
    names = [methods] if isinstance(methods, str) else list(methods)
    chosen = {name: dict(methods[name] or {}) if isinstance(methods, Mapping) else {} for name in names}
    require(bool(chosen), f"compress: name a method of {', '.join(METHODS)}.")
    for name, options in chosen.items():
        require(name in METHODS, f"compress: {name} needs a run; {did_you_mean(name, METHODS)}")
        for key in options:
            require(key in METHODS[name], f"compress: {name}.{key}: the options are {', '.join(METHODS[name])}.")
    after = {name: AFTER[name](**options) for name, options in chosen.items() if name in AFTER}
    qat = QAT(**chosen["qat"]) if "qat" in chosen else None
    require(qat is None or loop is not None, "compress: qat rounds while the module trains: give `loop`.")
    once = len(after) + (qat is not None) < 2
    require(once, f"compress: {', '.join(chosen)} would quantize twice: choose one of them.")
    call, masks, figures = Call.of(example), dict[str, torch.Tensor](), dict[str, float]()
    with _modes(module):
        if "prune_channels" in chosen:
            shares = prune_channels(module, call.example, **chosen["prune_channels"])
            figures |= {f"prune_channels/{name}_share": share for name, share in shares.items()}
        for name in ("prune", "prune_structured", "prune_nm"):
            if name in chosen:
                masks |= _masks(module, name, chosen[name])
                figures[f"{name}/sparsity"] = sparsity_of(masks)
        apply_masks(module, masks)
        if qat is not None:
            settings: dict[str, Any] = {"observer": qat.observer, "percentile": qat.percentile}
            figures["qat/layers"] = len(quantize(module, call.example, qat.plan, qat.overrides, **settings))
            set_enabled(module, True)
    inputs = [call.example]
    if loop is not None:
        inputs, steps = _run(module, loop, masks, qat is not None)
        if not steps and "prune_channels" in chosen:
            reestimate_batchnorm(module, inputs)
    with _modes(module):
        if qat is not None:
            freeze_observers(module)
        for name, method in after.items():
            done = method.quantize(module, inputs, method.plan, method.overrides, key=method.key)
            figures[f"{name}/layers"] = len(done.layers)
    print("compress:", ", ".join(f"{name} {round(value, 4):g}" for name, value in figures.items()))
    return module


def _masks(module: nn.Module, name: str, options: dict[str, Any]) -> Masks:
    """Return masks of the smallest weights, with the defaults of configs/compression/<name>.yaml."""
    if name == "prune":
        return magnitude_masks(module, **{"sparsity": 0.8, "scope": "global", **options})
    if name == "prune_structured":
        defaults = {"sparsity": 0.5, "scope": "layer", "norm": 2.0}
        return magnitude_masks(module, **{**defaults, **options}, granularity="structured")
    n, m = options.get("n", 2), options.get("m", 4)
    return magnitude_masks(module, 1 - n / m, **{"scope": "layer", **options}, granularity="n_m")


def _run(module: nn.Module, loop: Callable[[nn.Module], object], masks: Masks, rounds: bool) -> tuple[list[Any], int]:
    """Call the loop; return the inputs of the module's first calls, and the steps of optimizers."""
    calls, steps = list[Call](), 0

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(calls) < BATCHES:
            calls.append(Call(args, kwargs).map(lambda tensor: tensor.detach().clone()))

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        apply_masks(module, masks)
        if rounds:
            update_ranges(module)

    recording = module.register_forward_pre_hook(record, with_kwargs=True)
    stepping = register_optimizer_step_post_hook(stepped)
    try:
        loop(module)
    finally:
        recording.remove()
        stepping.remove()
    require(bool(calls), f"compress: loop does not call the {type(module).__name__} that it is given.")
    return [call.example for call in calls], steps


def export_module(
    module: nn.Module,
    example: Any,
    path: str | Path,
    *,
    target: str | None = None,
    axes: Mapping[str, Mapping[Any, str]] | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write a module to one file, run it in a fresh process on batches of several sizes, and return the comparison.

    Args:
        module: as trained or compressed; a quantized one is written in integers where the target has them.
        example: its input, as in `compress`; the batch is dynamic where the module takes other sizes.
        path: .onnx, .pt2 (torch.export), .pte (ExecuTorch) or .safetensors (weights alone).
        target: another target, such as aot_inductor for a .pt2.
        axes: further dynamic axes, by input and number: `{"x": {1: "time"}}`.
        tolerance: the largest difference, as a share of the largest output; None is the target's own.
        options: keys of configs/target/<target>.yaml.

    Raises:
        UserError: the target can't take the module, or the file's outputs differ: nothing is written then.
    """
    path, call, quantized = Path(path), Call.of(example), bool(describe(module))
    name = target or SUFFIXES.get(path.suffix, "")
    require(bool(name), f"path={path}: end it with {', '.join(SUFFIXES)}, or name the target.")
    name = "onnx_int8" if name == "onnx" and target is None and quantized else name
    kind = get_target(name, options)
    missing = kind.available()
    require(missing is None, str(missing))
    require(kind.takes_cores, f"target={name} takes the nets of runs: choose {', '.join(SUFFIXES.values())}.")
    require(kind.suffix == path.suffix, f"path={path}: target={name} writes {kind.suffix}.")
    fix = "call lathe.compress(module, 'ptq_static', example, loop) before"
    require(quantized or not kind.integers, f"target={name} writes a quantized module: {fix}.")
    net = strip(module) if quantized and kind.integers is False else module
    with _modes(net), torch.random.fork_rng(devices=[]), torch.no_grad(), scratch() as folder:
        flat = FlatCore(net, call.args, call.kwargs)
        flat.find_batch()
        flat.declare_axes(axes or {})
        facts = {"module": type(module).__name__, "calibrated": False, "preprocess": None, **flat.describe()}
        ready = CoreModel(None, {"model": {}}, net, flat, flat.example, facts)  # type: ignore[arg-type]  # no run
        file = folder / make(ready, name, options, folder)["file"]
        report = _compared(ready, call, kind, name, file, {**options, "tolerance": tolerance})
        with whole(path) as temporary:
            shutil.copyfile(file, temporary)
    return report


def _compared(
    ready: CoreModel, call: Call, kind: export.Target, name: str, file: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return how far the file's outputs are from the module's; raise UserError for more than the tolerance."""
    arithmetic, inputs = parity.arithmetic_of(ready, kind), ready.odd_inputs()
    tolerance, least = parity.tolerances(ready, arithmetic)
    tolerance = tolerance if options["tolerance"] is None else options["tolerance"]
    try:
        references = parity.reference_outputs(ready, inputs)
        if kind.computes:
            job = {"folder": str(file.parent), "run": None, "threads": torch.get_num_threads()}
            outputs = parity.probe_outputs(job, inputs)
        else:  # these need the module's code, which a fresh process may not find
            blank = copy.deepcopy(ready.inner)
            for parameter in blank.parameters():
                parameter.zero_()
            restored = FlatCore(kind.restore(blank, file), call.args, call.kwargs)
            outputs = [as_list(restored(*each)) for each in inputs]
        relative = parity.compare(outputs, references, "values")["relative"]
    except UserError as error:
        raise UserError(f"target={name}: {error}, so nothing was exported.") from error
    report = {"target": name, "arithmetic": arithmetic, "tolerance": tolerance, "relative": relative}
    odd_inputs = {"agreement": None, "relative": relative}
    parity.check_tolerances({**report, "least_agreement": least, "held_out": None, "odd_inputs": odd_inputs})
    return report


@contextmanager
def _modes(module: nn.Module) -> Iterator[None]:
    """Restore the training modes of all parts."""
    before = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
