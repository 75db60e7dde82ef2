"""Compiled packages (`torch._inductor.aot_compile`): machine code and weights in one file.

torch runs them without the net's Python code. The code is for the instruction set of the machine that compiles it, or
for its GPU. Integers of a quantized net use oneDNN's kernels.
"""

import json
import logging
import mmap
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import quantized_layers
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require
from lathe.export import Array, Target, export_target, first_line
from lathe.export.bundle import readable, whole
from lathe.export.inputs import FlatCore, dynamic_axes, quiet, shapes_for, stand_in
from lathe.export.integer_layers import Affine, Inductor, copied, deployable, to_float
from lathe.export.torch_runner import DEVICES, describe_device, full_float32, is_missing, on_arrays
from lathe.files import scratch

log = logging.getLogger(__name__)
GRID = 65535  # blocks of a grid's second and third dimension
LARGEST_SUM = 2**15 - 1  # of two products in the 16 bits of inexact kernels
FLOATS = (
    "device={} compiles floats alone: add target.aot_inductor.integers=false, or take target=tensorrt for integers."
)
# The metadata of a package, which C++ also reads: dtype of the input, minimum and maximum of each side, the number of
# token ids (-1 for any); "1" if outputs need exact sums of integers; of a package for a GPU the device, and the compute
# capability ("9.0") of its kernels.
DTYPE, SMALLEST, LARGEST, VALUES = "input_dtype", "input_smallest", "input_largest", "input_values"
EXACT, DEVICE, CAPABILITY = "exact_sums", "compiled_device", "compiled_capability"
ANY = -1
SEVERAL = ";"  # between the entries of several inputs


@export_target("aot_inductor")
class AotInductor(Target):
    """A package for this machine's CPU or, with device=cuda, its GPU, for batches of any size.

    Token ids `[batch, time]` may have times up to the example's. Weights are constants in the layout of their kernels.
    The process that runs the package sets the number of threads. Integer layers that this processor would not sum
    exactly are computed in floats, with a warning in the log.
    """

    suffix, is_program, has_gpu, takes_cores = ".pt2", True, True, True

    @validated
    def __init__(self, integers: bool | None = None, device: Literal["cpu", "cuda"] = "cpu") -> None:
        self.integers, self.device = integers, device

    def available(self) -> str | None:
        """Return None, or the message that says what is missing to compile. Loading needs only torch."""
        key, device = f"target.aot_inductor.device={self.device}", DEVICES[self.device]
        if self.integers and self.device != "cpu":
            return f"target.aot_inductor.{FLOATS.format(self.device)}"
        if is_missing(device):
            return f"{key}: torch finds no GPU here: export on the machine that runs the file, or leave device=cpu."
        if _compiler() is None:
            return "target=aot_inductor found no C++ compiler: install g++ or clang++, or set CXX."
        from torch.utils import cpp_extension

        if device.type == "cuda" and cpp_extension.CUDA_HOME is None:
            return f"{key}: no CUDA toolkit was found: install that of torch's CUDA version, and set CUDA_HOME."
        return None

    def machine(self) -> dict[str, Any]:
        return {} if self.device == "cpu" else {"compiled_for": describe_device(DEVICES[self.device])}

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        inputs, device = stand_in(net, example), DEVICES[self.device]
        quantized = bool(quantized_layers(net))
        if quantized and self.device != "cpu":
            raise ArgumentError(FLOATS.format(self.device))
        module, exact = _integer_net(net, inputs) if quantized else (copied(net), False)
        with whole(path) as temporary, scratch() as folder, torch.no_grad(), quiet():
            from torch._inductor.package import package_aoti

            there, axes = tuple(tensor.to(device) for tensor in inputs), dynamic_axes(net, inputs)
            if not isinstance(net, FlatCore):
                if device.type == "cuda":  # some kernels bound the batch: pooling maps a sample to a row of its grid
                    axes[0][0] = torch.export.Dim("batch", min=1, max=GRID)
                if axes[0].get(1) is torch.export.Dim.AUTO:  # a time from one, which torch's own bounds exclude
                    axes[0][1] = torch.export.Dim("time", min=1, max=inputs[0].shape[1])
            program = torch.export.export(module.to(device), there, dynamic_shapes=shapes_for(net, axes))
            metadata = _signature(program) | {EXACT: str(int(exact))}
            if self.device != "cpu":
                description = describe_device(device)
                metadata[DEVICE] = description["device"]
                if "compute_capability" in description:
                    metadata[CAPABILITY] = description["compute_capability"]
            files = _compiled(program, there, folder, metadata)
            for file in folder.glob("*.so"):
                _blank(file, Path(torch.__file__).parent, b"torch")
                _blank(file, folder, b"model")
            for name in map(str, files):
                if name.endswith(".cpp"):  # it has local paths; torch 2.11 needs its name, not its content
                    Path(name).write_bytes(b"")
            package = folder / "model.pt2"  # the archive has a folder of this name
            package_aoti(str(package), files)
            shutil.copyfile(package, temporary)

    def load(self, path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[..., Any]:
        """Load a package as a function; several threads may call it, and calls run one at a time.

        Compiled code does not check dtype and shape, and an unknown token id ends the process: the function checks
        both, and raises UserError.
        """
        from torch._inductor import aoti_load_package

        path = readable(path)
        gpu = placed(path, read_metadata(path), device)
        index = -1 if gpu is None or gpu.index is None else gpu.index  # -1: torch's current device
        try:
            package = aoti_load_package(str(path), device_index=index)
        except Exception as error:  # a torn archive, code for another machine, or no place for temporary files
            message = f"{path} can't be loaded as a compiled package ({first_line(error)}): export it again, here."
            raise UserError(message) from error
        check = _input_check(path, package.get_metadata())
        run = on_arrays(package, threads, gpu)

        def forward(*arrays: Array) -> Any:
            check(*arrays)
            return run(*arrays)

        return forward


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


@cache
def sums_are_exact() -> bool:
    """Return whether oneDNN's kernels sum products of 8-bit integers exactly on this processor.

    On x86 without VNNI, they add pairs of products in 16 bits, which saturate. This is measured, because the
    processor's name does not determine its kernels (oneDNN's developer guide, "Nuances of int8 computations").
    """
    if not torch.backends.mkldnn.is_available():
        return True  # there are no such kernels
    outputs, inputs = 8, 64
    ops = torch.ops.onednn
    x, weight = torch.full((1, inputs), 255, dtype=torch.uint8), torch.full((outputs, inputs), 127, dtype=torch.int8)
    scales, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    packed = ops.qlinear_prepack(weight, [1, inputs])
    sums: Tensor = ops.qlinear_pointwise(x, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return bool((sums == 255 * 127 * inputs).all())


def _integer_net(net: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[nn.Module, bool]:
    """Return the net with integer layers, and whether its outputs need exact sums of integers."""
    integer_net, exact = deployable(net, inputs, Inductor()), sums_are_exact()
    layers = [layer for layer in integer_net.modules() if getattr(layer, "source", None) is not None]
    floats = []
    for layer in layers:
        top = layer.source.top if isinstance(layer.source, Affine) else 255
        if not exact and layer.scale.dim() == 1 and 2 * top * int(layer.integers.abs().max()) > LARGEST_SUM:  # type: ignore[operator]
            to_float(layer)
            floats.append(layer)
    if floats:
        log.warning(
            "this processor (x86 without VNNI) sums products of 8-bit integers inexactly: %d of %d quantized layers "
            "are stored and summed as floats; export on a processor with VNNI for code of integers.",
            len(floats),
            len(layers),
        )
    return integer_net, len(floats) < len(layers) and exact


def _compiled(
    program: torch.export.ExportedProgram, inputs: tuple[Tensor, ...], folder: Path, metadata: Mapping[str, str]
) -> list[Any]:
    """Return the files of a package in `folder`."""
    from torch._inductor import aot_compile, config

    from lathe.export.targets.prepack import PackConvolutions

    settings = {
        "freezing": True,
        "cpp.dynamic_threads": True,
        "cpp.cxx": (None, _compiler()),
        **({"post_grad_custom_pre_pass": PackConvolutions()} if inputs[0].device.type == "cpu" else {}),
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        "aot_inductor.metadata": dict(metadata),
    }
    if hasattr(config.aot_inductor, "enable_line_tables"):  # newer torch puts paths of sources into the machine code
        settings["aot_inductor.enable_line_tables"] = False
    # parts of inductor read freezing from the config, not from the options
    with config.patch(settings), full_float32() if inputs[0].device.type == "cuda" else nullcontext():
        files = aot_compile(program.module(), inputs, options=settings)
    assert isinstance(files, list)
    return files


def _blank(file: Path, folder: Path, name: bytes) -> None:
    """Replace the folder, which messages of torch's headers contain, by `name`, padded to the same length."""
    path = os.fsencode(folder)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as code:
        while (start := code.find(path)) >= 0:
            code[start : start + len(path)] = name.ljust(len(path), b"/")


def _signature(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Return the program's inputs as metadata of a package."""
    entries: dict[str, list[str]] = {DTYPE: [], SMALLEST: [], LARGEST: [], VALUES: []}
    for name in program.graph_signature.user_inputs:
        entry = next(node for node in program.graph.nodes if node.name == name)
        value, smallest, largest = entry.meta["val"], [], []
        for side in value.shape:
            bounds = None if isinstance(side, int) else program.range_constraints[side.node.expr]
            smallest.append(side if bounds is None else int(bounds.lower))
            largest.append(side if bounds is None else ANY if bounds.upper >= 2**31 else int(bounds.upper))
        tables = [node.args[0].meta["val"] for node in entry.users if node.target == torch.ops.aten.embedding.default]
        entries[DTYPE].append(str(value.dtype).rpartition(".")[2])
        entries[SMALLEST].append(" ".join(map(str, smallest)))
        entries[LARGEST].append(" ".join(map(str, largest)))
        entries[VALUES].append(str(min(map(len, tables), default=ANY)))
    return {key: SEVERAL.join(values) for key, values in entries.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in a package's file without loading code; {} if unreadable."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("_metadata.json"))
            return dict(json.loads(archive.read(name)))
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError, TypeError):
        return {}


def placed(path: Path, metadata: Mapping[str, str], requested: str | None) -> torch.device | None:
    """Return the GPU for a package's inputs, `asked` if given; None for a package for CPUs."""
    kind, option = metadata.get(DEVICE), "export the run again with target.aot_inductor.device="
    if kind is None:
        require(requested is None, f"{path} was compiled for CPUs, not for {requested}: {option}cuda.")
        return None
    device = torch.device(requested or kind)
    message = f"{path} was compiled for a GPU ({device}), and torch finds none here: open it there, or {option}cpu."
    require(not is_missing(device), message)
    own, current = metadata.get(CAPABILITY), describe_device(device).get("compute_capability")
    message = f"{path} was compiled for a GPU of compute capability {own}, and this one has {current}"
    require(own == current, f"{message}: export the run again, here.")
    return device


def _input_check(path: Path, metadata: Mapping[str, str]) -> Callable[..., None]:
    """Return a check of inputs, which raises UserError; raise it for a package that this machine can't run."""
    again = "export the run again, here"
    known = {DTYPE, SMALLEST, LARGEST, VALUES} <= set(metadata)
    require(known, f"{path} does not say what it takes, so Lathe did not make it: {again}.")
    has = {
        "AVX512": torch.backends.cpu.get_cpu_capability() == "AVX512",
        "AVX512_VNNI": torch.cpu._is_vnni_supported(),
        "AMX_TILE": torch.cpu._is_amx_tile_supported(),
    }
    lacking = next((name for name in metadata.get("AOTI_CPU_ISA", "").split() if not has.get(name, True)), None)
    require(not lacking, f"{path} was compiled for a CPU with {lacking}, which this one lacks: {again}.")
    message = f"{path} was compiled for a CPU that sums products of 8-bit integers exactly (VNNI), unlike this one"
    require(metadata.get(EXACT) != "1" or sums_are_exact(), f"{message}: {again}.")
    entries = zip(*(metadata[key].split(SEVERAL) for key in (DTYPE, SMALLEST, LARGEST, VALUES)), strict=True)
    inputs = [
        (np.dtype(dtype), list(zip(map(int, least.split()), map(int, most.split()), strict=True)), int(values))
        for dtype, least, most, values in entries
    ]

    def check(*arrays: Array) -> None:
        for x, (dtype, sides, values) in zip(arrays, inputs, strict=True):
            fits = x.dtype == dtype and x.ndim == len(sides)
            if not fits or any(
                n < low or (high != ANY and n > high) for n, (low, high) in zip(x.shape, sides, strict=True)
            ):
                ends = [(low, "any" if high == ANY else high) for low, high in sides]
                text = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in ends)
                raise UserError(f"{path.name} takes {dtype} of shape [{text}], not {x.dtype} of shape {list(x.shape)}.")
            if values != ANY and not 0 <= x.min() <= x.max() < values:
                raise UserError(f"{path.name} takes token ids from 0 to {values - 1}, not from {x.min()} to {x.max()}.")

    return check
