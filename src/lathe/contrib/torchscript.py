"""TorchScript, for programs that already load it, such as C++ with LibTorch.

PyTorch has deprecated it in favour of torch.export. Files are float: a quantized net is written with the float values
of its integer weights, and activations are not rounded.
"""

import io
import json
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError
from lathe.export import Array, Target, export_target, first_line
from lathe.export.bundle import readable, whole
from lathe.export.inputs import Shipped, quiet, stand_in
from lathe.export.integer_layers import copied
from lathe.export.torch_runner import on_arrays

NOTE = "lathe.json"  # in the archive: options for load
CLOSE = 1e-3  # allowed difference by fusing, as a share of the largest value
PLANS = 4  # number of input shapes with fused kernels; each has a copy of the weights in its layout


@export_target("torchscript")
class TorchScript(Target):
    """The net for batches of any size.

    Args:
        method: trace records the operators of one call; script compiles the net's Python code, with its branches.
        freeze: make weights constants, and fold BatchNorm into convolutions.
        fuse: let oneDNN fuse operators in `load`; the file stores only this option.
    """

    suffix, is_program, integers = ".pt", True, False

    @validated
    def __init__(self, method: Literal["trace", "script"] = "trace", freeze: bool = True, fuse: bool = True) -> None:
        if fuse and not freeze:
            raise ArgumentError("fuse=true needs constant weights: set target.torchscript.freeze=true, or fuse=false.")
        self.method, self.freeze, self.fuse = method, freeze, fuse

    def export(self, net: nn.Module, example: Tensor, path: str | Path) -> None:
        plain, inputs, buffer = copied(net, floats=True), stand_in(net, example)[0], io.BytesIO()
        with whole(path) as temporary, torch.no_grad(), quiet():
            module = _traced(plain, inputs) if self.method == "trace" else _scripted(plain, inputs)
            if self.freeze:
                module = torch.jit.freeze(module)
            torch.jit.save(module, buffer, _extra_files={NOTE: json.dumps({"fuse": self.fuse})})
            # without debug records, which contain source lines and local paths
            with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
                for entry in source.infolist():
                    if not entry.filename.endswith(".debug_pkl"):
                        archive.writestr(zipfile.ZipInfo(entry.filename), source.read(entry))

    def load(self, path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[[Array], Array]:
        """Load a file as a function from the net's input, `[batch, ...]`, to its output.

        With `fuse`, each of the first four input shapes gets its own kernels of oneDNN, in a first call that takes as
        long as about five; calls with further shapes run without them.
        """
        path = readable(path)
        notes: dict[str, Any] = {NOTE: ""}
        try:
            with quiet():
                module = torch.jit.load(str(path), map_location="cpu", _extra_files=notes)
            fuse = bool(json.loads(notes[NOTE] or "{}").get("fuse"))
        except Exception as error:  # a torn archive can raise anything
            reason = type(error).__name__
            raise UserError(f"{path} can't be read as TorchScript ({reason}): export the run again.") from error
        return on_arrays(_Fused(module) if fuse and torch.backends.mkldnn.is_available() else module, threads)


def _traced(net: nn.Module, example: Tensor) -> Any:
    return torch.jit.trace(net, (example,), check_trace=False)


def _scripted(net: nn.Module, example: Tensor) -> Any:
    if isinstance(net, Shipped):  # preprocessing has no data-dependent branches
        return torch.jit.script(nn.Sequential(_traced(net.preprocess, example), _scripted(net.net, example)).eval())
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.ModuleList) and hasattr(module, "in_segments"):  # its forward can recompute
            net.set_submodule(name, nn.Sequential(*module).eval())
    try:
        with _without_properties(net):
            return torch.jit.script(net)
    except Exception as error:  # TorchScript's errors have no common class
        message = (
            f"{type(net).__name__} has Python code that TorchScript lacks ({first_line(error)}): set method=trace."
        )
        raise UserError(f"target.torchscript.method=script: {message}") from error


@contextmanager
def _without_properties(net: nn.Module) -> Iterator[None]:
    """Exclude properties, such as a strategy's plan; TorchScript compiles them even if forward uses none."""
    name = "__jit_unused_properties__"
    changed: list[type] = []
    try:
        for kind in {kind for module in net.modules() for kind in type(module).__mro__ if name not in vars(kind)}:
            properties = [key for key, value in vars(kind).items() if isinstance(value, property)]
            if properties:
                setattr(kind, name, properties)
                changed.append(kind)
        yield
    finally:
        for kind in changed:
            delattr(kind, name)


class _Fused:
    """A frozen module with a fused plan for each of the first input shapes."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.plans: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {}
        self.lock = threading.Lock()

    def __call__(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape)
        with self.lock:
            if shape not in self.plans and len(self.plans) < PLANS:
                self.plans[shape] = self._planned(x)
        out: Tensor = self.plans.get(shape, self.module)(x)
        return out

    def _planned(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the graph with the module's weights as a function whose executor fuses for one shape.

        The module itself, with a warning, if oneDNN fails, or changes values, as for some divisions by a scalar tensor.
        """
        function = torch._C._create_function_from_graph("forward", self.module.graph.copy())
        was = torch.jit.onednn_fusion_enabled()  # of this process; read when a plan is made
        try:
            torch.jit.enable_onednn_fusion(False)
            expected = self.module(x)
            torch.jit.enable_onednn_fusion(True)
            for _ in range(2):  # the first call records shapes, the second makes the plan
                outputs = function(self.module._c, x)
            finite = expected[expected.isfinite()].abs()
            within = {"rtol": CLOSE, "atol": CLOSE * float(finite.max()) if finite.numel() else 0.0}
            if outputs.shape == expected.shape and torch.allclose(outputs, expected, **within, equal_nan=True):
                return lambda x: function(self.module._c, x)
        except RuntimeError:
            pass
        finally:
            torch.jit.enable_onednn_fusion(was)
        warnings.warn(
            f"TorchScript: oneDNN can't fuse this net for inputs of shape {list(x.shape)}, which run without it.",
            stacklevel=2,
        )
        return self.module
