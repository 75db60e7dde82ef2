"""Compiled packages (`torch._inductor.aot_compile`): machine code and weights in one file.

torch runs them without the net's Python code. The code is for the instruction set of the machine that compiles it, or
for its GPU. Integers of a quantized net use oneDNN's kernels.
"""

import logging
import mmap
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import quantized_layers
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require
from lathe.export import gpu, sums
from lathe.export.calls import Array, on_arrays
from lathe.export.deploy import copied, deployable
from lathe.export.dialects import Inductor
from lathe.export.files import readable, whole
from lathe.export.inputs import dynamic_axes, stand_in
from lathe.export.targets import aot_metadata
from lathe.export.targets.onnx_graph import quiet
from lathe.files import scratch

log = logging.getLogger(__name__)
suffix = ".pt2"
computes = True
integers: bool | None = None
GRID = 65535  # blocks of a grid's second and third dimension
FLOATS = (
    "device={} compiles floats alone, and what is asked for are integers, whose kernels are those of CPUs: add "
    "target.aot_inductor.integers=false for floats of their values, or take target=tensorrt."
)


def available(device: str = "cpu", integers: bool | None = None) -> str | None:
    """Return None, or the message that says what is missing to compile for `device`.

    `integers` are compiled only for CPUs. Loading needs only torch.
    """
    if integers and device != "cpu":
        return f"target.aot_inductor.{FLOATS.format(device)}"
    if gpu.missing(gpu.DEVICES[device]):
        return (
            f"target.aot_inductor.device={device}: torch finds no GPU here to compile for: export on the machine that "
            "is to run the file, or leave device=cpu."
        )
    if _compiler() is None:
        return "no C++ compiler was found, which target=aot_inductor compiles with: install g++ or clang++, or set CXX."
    if gpu.DEVICES[device].type == "cuda" and not _toolkit():
        return (
            f"target.aot_inductor.device={device}: no CUDA toolkit was found, whose headers the package is compiled "
            "with: install that of torch's CUDA version, and set CUDA_HOME to its folder."
        )
    return None


def _toolkit() -> bool:
    from torch.utils import cpp_extension

    return cpp_extension.CUDA_HOME is not None


def made_for(device: str = "cpu") -> dict[str, Any]:
    """Return the manifest's entry for a package that was compiled for `device`; empty for the CPU."""
    return {} if device == "cpu" else {"compiled_for": gpu.described(gpu.DEVICES[device])}


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


@validated
def export(net: nn.Module, example: Tensor, path: str | Path, device: Literal["cpu", "cuda"] = "cpu") -> None:
    """Compile the net for this machine's CPU or, with device=cuda, its GPU, for batches of any size.

    Token ids `[batch, time]` may have times up to the example's. Weights are constants in the layout of their kernels.
    The process that runs the package sets the number of threads. Integer layers that this processor would not sum
    exactly are computed in floats, with a warning in the log.

    Raises:
        UserError: the compiler or GPU is missing, the compiler fails, or a quantized net has no ranges yet or is for a
            GPU.
    """
    sentence = available(device)
    if sentence:
        raise UserError(sentence)
    if Path(path).suffix != suffix:
        raise UserError(f"{path} is no name for a compiled package: end it with {suffix}.")
    quantized = bool(quantized_layers(net))
    if quantized and device != "cpu":
        raise ArgumentError(FLOATS.format(device))
    given, place = stand_in(example), gpu.DEVICES[device]
    found, exact = _of_integers(net, given) if quantized else (copied(net), False)
    with whole(path) as temporary, scratch() as folder, torch.no_grad(), _quiet():
        from torch._inductor.package import package_aoti

        axes, there = _axes(net, given, place.type), given.to(place)
        program = torch.export.export(found.to(place), (there,), dynamic_shapes=axes)
        says = {**aot_metadata.signature(program), aot_metadata.EXACT: str(int(exact)), **_holds_for(device)}
        files = _compiled(program, there, folder, says)
        for file in folder.glob("*.so"):
            _blank(file, Path(torch.__file__).parent, b"torch")
            _blank(file, folder, b"model")
        for name in map(str, files):
            if name.endswith(".cpp"):  # it has local paths; torch 2.11 needs its name, not its content
                Path(name).write_bytes(b"")
        package = folder / f"model{suffix}"  # the archive has a folder of this name
        package_aoti(str(package), files)
        shutil.copyfile(package, temporary)


def _holds_for(device: str) -> dict[str, str]:
    """Return the metadata of a package that runs only on a GPU."""
    if device == "cpu":
        return {}
    found = gpu.described(gpu.DEVICES[device])
    more = {aot_metadata.CAPABILITY: found["compute_capability"]} if "compute_capability" in found else {}
    return {aot_metadata.DEVICE: found["device"], **more}


def _of_integers(net: nn.Module, given: Tensor) -> tuple[nn.Module, bool]:
    """Return the net with integer layers, and whether its outputs need exact sums of integers."""
    dialect = Inductor()
    found = deployable(net, given, dialect)
    layers = {name: layer for name, layer in found.named_modules() if getattr(layer, "source", None) is not None}
    for layer in layers.values():
        dialect.prepare(layer)
    floats = [name for name, layer in layers.items() if layer.scale is None]
    if floats:
        log.warning(
            "this processor (x86 without VNNI) sums products of 8-bit integers inexactly, so %d of %d quantized layers "
            "(%s first) are stored and summed as floats, with the values of their integers: export on a processor with "
            "VNNI for code of integers.",
            len(floats),
            len(layers),
            floats[0],
        )
    return found, len(floats) < len(layers) and sums.exact()


def _axes(net: nn.Module, given: Tensor, kind: str) -> tuple[dict[int, Any]]:
    """Return `dynamic_axes` with a time from one, which torch's own bounds exclude.

    For a GPU the batch is bounded, as in some kernels (pooling maps a sample to a row of its grid).
    """
    (axes,) = dynamic_axes(net, given)
    if kind == "cuda":
        axes[0] = torch.export.Dim("batch", min=1, max=GRID)
    if axes.get(1) is torch.export.Dim.AUTO:
        axes[1] = torch.export.Dim("time", min=1, max=given.shape[1])
    return (axes,)


def _compiled(
    program: torch.export.ExportedProgram, given: Tensor, folder: Path, metadata: Mapping[str, str]
) -> list[Any]:
    """Return the files of a package in `folder`."""
    from torch._inductor import aot_compile, config
    from torch._inductor.exc import CppCompileError, InductorError

    from lathe.export.targets.prepack import PackConvolutions

    settings = {
        "freezing": True,
        "cpp.dynamic_threads": True,
        "cpp.cxx": (None, _compiler()),
        **({"post_grad_custom_pre_pass": PackConvolutions()} if given.device.type == "cpu" else {}),
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        "aot_inductor.metadata": dict(metadata),
    }
    if hasattr(
        config.aot_inductor, "enable_line_tables"
    ):  # paths of sources, which newer torch puts into the machine code
        settings["aot_inductor.enable_line_tables"] = False
    try:
        # parts of inductor read freezing from the config, not from the options
        with config.patch(settings), gpu.full_float32() if given.device.type == "cuda" else nullcontext():
            files = aot_compile(program.module(), (given,), options=settings)
    except (CppCompileError, InductorError) as error:
        cause = getattr(error, "inner_exception", error)
        if not isinstance(cause, CppCompileError):
            raise
        lines = [line for line in str(cause).splitlines() if "error" in line.lower()] or ["without a word"]
        raise UserError(
            f"the C++ compiler {_compiler()} failed ({lines[-1].strip()[:200]}): try another one with CXX."
        ) from error
    assert isinstance(files, list)
    return files


def _blank(file: Path, folder: Path, name: bytes) -> None:
    """Replace the folder, which messages of torch's headers contain, by `name`, padded to the same length."""
    path = os.fsencode(folder)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as code:
        while (place := code.find(path)) >= 0:
            code[place : place + len(path)] = name.ljust(len(path), b"/")


@contextmanager
def _quiet() -> Iterator[None]:
    with quiet(), warnings.catch_warnings():
        # torch's own modules, which inductor imports
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated")
        # inductor's lowering of quantized convolutions, about its own constants
        warnings.filterwarnings("ignore", message="To copy construct from a tensor", category=UserWarning)
        yield


def load(path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[[Array], Array]:
    """Load a package as a function from the net's input, `[batch, ...]`, to its output.

    Several threads may call it; calls run one at a time. A package for a GPU runs on `device`, such as `cuda:1` (None:
    torch's current one), with copies to it and back.

    Compiled code does not check dtype and shape, and an unknown token id ends the process, so the function checks both
    and raises UserError.
    """
    from torch._inductor import aoti_load_package

    path = readable(path, "path")
    place = aot_metadata.placed(path, aot_metadata.written(path), device)
    index = -1 if place is None or place.index is None else place.index  # -1: torch's current device
    try:
        package = aoti_load_package(str(path), device_index=index)
    except Exception as error:  # a torn archive, or code for another machine
        folder = os.environ.get("TMPDIR", "/tmp")  # noqa: S108 (as torch's C++ has it, which unpacks the archive there)
        require(
            os.access(folder, os.W_OK | os.X_OK),
            f"{path} can't be loaded: the folder for temporary files, {folder}, can't be used; TMPDIR names another.",
        )
        raise UserError(
            f"{path} can't be loaded as a compiled package ({type(error).__name__}): export the run again, here."
        ) from error
    takes = aot_metadata.Takes(path, package.get_metadata())
    run = on_arrays(package, threads, place)

    def forward(x: Array) -> Array:
        takes.check(x)
        return run(x)

    return forward
