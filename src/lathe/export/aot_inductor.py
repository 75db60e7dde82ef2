"""A compiled package (`torch._inductor.aoti_compile_and_package`): machine code and weights in one file, for torch without Python's net.

The code is made for the instruction set of the machine that compiles it. Of a quantized net, integers go through oneDNN's kernels.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from lathe.compression.quantize import quantized_layers
from lathe.errors import UserError
from lathe.export.deploy import copied, deployable
from lathe.export.dialects import Inductor
from lathe.export.files import readable, whole
from lathe.export.onnx_graph import Array, dynamic_axes, quiet, stand_in

suffix = ".pt2"


def available() -> str | None:
    """None, or the sentence that says what to install. Loading a package needs nothing but torch."""
    if any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
        return None
    return "no C++ compiler was found, which target=aot_inductor compiles with: install g++ or clang++, or set CXX."


def export(net: nn.Module, example: Tensor, path: str | Path) -> None:
    """Compiles the net for this machine's CPU, for batches of any size. `example` is the net's input, `[batch, ...]`; only its shape and
    type are used. The net and its modes stay as they are.

    Weights are frozen into the code as constants, laid out for their kernels. The number of threads is that of the process that runs it.

    Raises:
        UserError: there is no compiler, a quantized net has no ranges yet, or the file can't be written.
    """
    sentence = available()
    if sentence:
        raise UserError(sentence)
    if Path(path).suffix != suffix:
        raise UserError(f"{path} is no name for a compiled package: end it with {suffix}.")
    given = stand_in(example)
    found = deployable(net, given, Inductor()) if quantized_layers(net) else copied(net)
    settings = {"freezing": True, "cpp.dynamic_threads": True}
    with whole(path) as temporary, torch.no_grad(), _quiet():
        from torch._inductor import aoti_compile_and_package, config

        program = torch.export.export(found, (given,), dynamic_shapes=dynamic_axes(given))
        # freezing is read outside of the options' reach as well
        with config.patch(settings):
            aoti_compile_and_package(program, package_path=str(temporary), inductor_configs=settings)


@contextmanager
def _quiet() -> Iterator[None]:
    with quiet(), warnings.catch_warnings():
        # torch's own modules, which inductor imports
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning)
        # inductor's lowering of quantized convolutions, about its own constants
        warnings.filterwarnings("ignore", message="To copy construct from a tensor", category=UserWarning)
        yield


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """A function of the net's input, `[batch, ...]`, that gives its output. `threads` is torch's number of threads during each call; None
    leaves it as it is.

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

    def forward(x: Array) -> Array:
        was = torch.get_num_threads()
        if threads is not None and threads != was:
            torch.set_num_threads(threads)
        try:
            with torch.no_grad():
                out: Tensor = package(torch.from_numpy(x))
            found: Array = out.numpy()
            return found
        finally:
            if threads is not None and threads != was:
                torch.set_num_threads(was)

    return forward
