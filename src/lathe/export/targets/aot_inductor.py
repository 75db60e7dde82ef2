"""A compiled package (`torch._inductor.aot_compile`): machine code and weights in one file, for torch without Python's
net.

The code is made for the instruction set of the machine that compiles it. Of a quantized net, integers go through
oneDNN's kernels.
"""

import logging
import mmap
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import quantized_layers
from lathe.errors import UserError
from lathe.export import sums
from lathe.export.calls import Array, on_arrays
from lathe.export.deploy import copied, deployable
from lathe.export.dialects import Inductor
from lathe.export.files import readable, whole
from lathe.export.inputs import dynamic_axes, stand_in
from lathe.export.targets.onnx_graph import quiet
from lathe.files import scratch

log = logging.getLogger(__name__)
suffix = ".pt2"
computes = True
integers: bool | None = None

# In a package's metadata, which C++ reads as well: the type of the input, the smallest and largest of each of its
# sides, and how many values token ids have; -1 for any
DTYPE, SMALLEST, LARGEST, VALUES = "input_dtype", "input_smallest", "input_largest", "input_values"
# "1" where the answers are right on a processor alone that sums products of integers exactly, see `lathe.export.sums`
EXACT = "exact_sums"
ANY = -1


def available() -> str | None:
    """None, or the sentence that says what to install. Loading a package needs nothing but torch."""
    if _compiler() is None:
        return "no C++ compiler was found, which target=aot_inductor compiles with: install g++ or clang++, or set CXX."
    return None


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


def export(net: nn.Module, example: Tensor, path: str | Path) -> None:
    """Compiles the net for this machine's CPU, for batches of any size; token ids `[batch, time]` for times up to the
    example's. `example` is the net's input, `[batch, ...]`; only its shape and type are used. The net and its modes
    stay as they are.

    Weights are frozen into the code as constants, laid out for their kernels. The number of threads is that of the
    process that runs it. Layers of integers that this processor would not sum exactly are computed in floats, and that
    is logged.

    Raises:
        UserError: there is no compiler or it fails, a quantized net has no ranges yet, or the file can't be written.
    """
    sentence = available()
    if sentence:
        raise UserError(sentence)
    if Path(path).suffix != suffix:
        raise UserError(f"{path} is no name for a compiled package: end it with {suffix}.")
    given = stand_in(example)
    found, exact = _of_integers(net, given) if quantized_layers(net) else (copied(net), False)
    with whole(path) as temporary, scratch() as folder, torch.no_grad(), _quiet():
        from torch._inductor.package import package_aoti

        program = torch.export.export(found, (given,), dynamic_shapes=_axes(net, given))
        files = _compiled(program, given, folder, {**_signature(program), EXACT: str(int(exact))})
        for file in folder.glob("*.so"):
            _blank(file, Path(torch.__file__).parent, b"torch")
            _blank(file, folder, b"model")
        # without the generated C++, which names this machine's folders and which nothing reads once it is compiled
        package = folder / f"model{suffix}"  # the archive has a folder of this name
        package_aoti(str(package), [file for file in files if not str(file).endswith(".cpp")])
        shutil.copyfile(package, temporary)


def _of_integers(net: nn.Module, given: Tensor) -> tuple[nn.Module, bool]:
    """The net as it ships, and whether its answers need exact sums of integers."""
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


def _axes(net: nn.Module, given: Tensor) -> tuple[dict[int, Any]]:
    """`dynamic_axes` with a time that may be one, which an axis that torch bounds itself may not."""
    (axes,) = dynamic_axes(net, given)
    if axes.get(1) is torch.export.Dim.AUTO:
        axes[1] = torch.export.Dim("time", min=1, max=given.shape[1])
    return (axes,)


def _compiled(
    program: torch.export.ExportedProgram, given: Tensor, folder: Path, metadata: Mapping[str, str]
) -> list[Any]:
    """Files of a package in `folder`.

    Raises:
        UserError: the compiler fails.
    """
    from torch._inductor import aot_compile, config
    from torch._inductor.exc import CppCompileError, InductorError

    from lathe.export.targets.prepack import PackConvolutions

    settings = {
        "freezing": True,
        "cpp.dynamic_threads": True,
        "cpp.cxx": (None, _compiler()),
        "post_grad_custom_pre_pass": PackConvolutions(),
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        "aot_inductor.metadata": dict(metadata),
    }
    if hasattr(
        config.aot_inductor, "enable_line_tables"
    ):  # paths of sources, which newer torch puts into the machine code
        settings["aot_inductor.enable_line_tables"] = False
    try:
        # freezing is read outside of the options' reach as well
        with config.patch(settings):
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
    """Puts `name` for the folder, which the messages of torch's headers tell of the source, in a text of the same
    length.
    """
    path = os.fsencode(folder)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as code:
        while (place := code.find(path)) >= 0:
            code[place : place + len(path)] = name.ljust(len(path), b"/")


def _signature(program: torch.export.ExportedProgram) -> dict[str, str]:
    """What the program takes, as a package's metadata."""
    name = program.graph_signature.user_inputs[0]
    entry = next(node for node in program.graph.nodes if node.name == name)
    value = entry.meta["val"]
    smallest, largest = [], []
    for side in value.shape:
        if not isinstance(side, int):
            bounds = program.range_constraints[side.node.expr]
            smallest.append(int(bounds.lower))
            largest.append(ANY if bounds.upper >= 2**31 else int(bounds.upper))
        else:
            smallest.append(side)
            largest.append(side)
    tables = [node.args[0].meta["val"] for node in entry.users if node.target == torch.ops.aten.embedding.default]
    values = [min(len(table) for table in tables) if tables else ANY]
    lists = {SMALLEST: smallest, LARGEST: largest, VALUES: values}
    return {
        DTYPE: str(value.dtype).rpartition(".")[2],
        **{key: " ".join(map(str, found)) for key, found in lists.items()},
    }


@contextmanager
def _quiet() -> Iterator[None]:
    with quiet(), warnings.catch_warnings():
        # torch's own modules, which inductor imports
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated")
        # inductor's lowering of quantized convolutions, about its own constants
        warnings.filterwarnings("ignore", message="To copy construct from a tensor", category=UserWarning)
        yield


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """A function of the net's input, `[batch, ...]`, that gives its output; several threads may call it, one runs at a
    time. `threads` is torch's number of threads during each call, in the thread that calls; None leaves it as it is.

    Compiled code takes what it is given for the type and shape that it was compiled for, and ends the process at a
    token id that the net does not have, so these are checked here; the function raises UserError for others.

    Raises:
        UserError: there is no such file, or it can't be read on this machine.
    """
    from torch._inductor import aoti_load_package

    path = readable(path, "path")
    try:
        package = aoti_load_package(str(path))
    except Exception as error:  # an archive that is torn, or code for another machine
        raise UserError(
            f"{path} can't be loaded as a compiled package ({type(error).__name__}): export the run again, here."
        ) from error
    takes = _Takes(path, package.get_metadata())
    run = on_arrays(package, threads)

    def forward(x: Array) -> Array:
        takes.check(x)
        return run(x)

    return forward


class _Takes:
    """What a package takes, read from its metadata.

    Raises:
        UserError: the metadata lack it, or the code has instructions that this machine lacks.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        if not {DTYPE, SMALLEST, LARGEST, VALUES} <= set(metadata):
            raise UserError(
                f"{path} does not say what it takes, so Lathe did not make it: export the run again with "
                "scripts/export.py."
            )
        has = {
            "AVX512": torch.backends.cpu.get_cpu_capability() == "AVX512",
            "AVX512_VNNI": torch.cpu._is_vnni_supported(),
            "AMX_TILE": torch.cpu._is_amx_tile_supported(),
        }
        lacking = next((name for name in metadata.get("AOTI_CPU_ISA", "").split() if not has.get(name, True)), None)
        if lacking:
            raise UserError(
                f"{path} was compiled for a CPU with {lacking}, which this one lacks: export the run again, here."
            )
        if metadata.get(EXACT) == "1" and not sums.exact():
            raise UserError(
                f"{path} was compiled for a CPU that sums products of 8-bit integers exactly (VNNI), which this one "
                "does not: export the run again, here."
            )
        self.name, self.dtype, self.values = path.name, np.dtype(metadata[DTYPE]), int(metadata[VALUES])
        self.sides = list(
            zip(*([int(word) for word in metadata[key].split()] for key in (SMALLEST, LARGEST)), strict=True)
        )

    def check(self, x: Array) -> None:
        """Raises UserError for another type or shape, and for token ids that are none."""
        fits = x.ndim == len(self.sides) and all(
            low <= side and (side <= high or high == ANY) for side, (low, high) in zip(x.shape, self.sides, strict=True)
        )
        if not fits or x.dtype != self.dtype:
            sides = ", ".join(
                str(low) if low == high else f"{low} to {'any' if high == ANY else high}" for low, high in self.sides
            )
            raise UserError(
                f"{self.name} takes {self.dtype} of shape [{sides}], not {x.dtype} of shape {list(x.shape)}."
            )
        if self.values != ANY and not 0 <= x.min() <= x.max() < self.values:
            raise UserError(
                f"{self.name} takes token ids from 0 to {self.values - 1}, not from {x.min()} to {x.max()}."
            )
