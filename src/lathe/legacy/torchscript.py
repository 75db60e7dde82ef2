"""TorchScript, for programs that already load it, such as C++ with LibTorch.

PyTorch has deprecated it in favour of torch.export. Files are float: a quantized net is written with the float values
of its integer weights, and activations are not rounded.
"""

import io
import json
import re
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
from lathe.errors import UserError
from lathe.export.calls import Array, on_arrays
from lathe.export.deploy import copied
from lathe.export.files import readable, whole
from lathe.export.inputs import stand_in, takes_any_size, takes_any_time
from lathe.export.preprocess import Shipped

suffix = ".pt"
computes = True
integers: bool | None = False
NOTE = "lathe.json"  # in the archive: options for load
CLOSE = 1e-3  # allowed difference by folding and fusing, as a share of the largest value
PLANS = 4  # number of input shapes with fused kernels; each has a copy of the weights in its layout


def available() -> str | None:
    """Return None: only torch is needed."""
    return None


@validated
def export(
    net: nn.Module,
    example: Tensor,
    path: str | Path,
    method: Literal["trace", "script"] = "trace",
    freeze: bool = True,
    fuse: bool = True,
) -> None:
    """Write the net for batches of any size.

    Args:
        method: trace records the operators of one call; script compiles the net's Python code, with its branches.
        freeze: make weights constants, and fold BatchNorm into convolutions.
        fuse: let oneDNN fuse operators in `load`; the file stores only this option.
    """
    if fuse and not freeze:
        raise UserError(
            "target.torchscript.fuse=true needs weights that are constants: set target.torchscript.freeze=true, or "
            "fuse=false."
        )
    found, given = copied(net, floats=True), stand_in(example)
    with whole(path) as temporary, torch.no_grad(), _quiet():
        module = _traced(found, given) if method == "trace" else _scripted(found, given)
        if freeze:
            module = torch.jit.freeze(module)
        trials = _trials(found, given)
        _check(module, found, trials, method)
        if fuse and not all(_Fused(module).planned(x) for x in trials):
            fuse = False
            warnings.warn(
                "target.torchscript.fuse=true: oneDNN can't fuse this net rightly, so its file runs without it.",
                stacklevel=2,
            )
        buffer = io.BytesIO()
        torch.jit.save(module, buffer, _extra_files={NOTE: json.dumps({"fuse": fuse})})
        _write_bare(buffer, temporary)


def _traced(net: nn.Module, given: Tensor) -> Any:
    try:
        return torch.jit.trace(net, (given,), check_trace=False)
    except UserError:
        raise
    except Exception as error:  # tracing Python code can raise anything
        raise UserError(
            f"target.torchscript.method=trace: {type(net).__name__} can't be traced ({_first(error)})."
        ) from error


def _scripted(net: nn.Module, given: Tensor) -> Any:
    if isinstance(net, Shipped):  # preprocessing has no data-dependent branches
        return torch.jit.script(nn.Sequential(_traced(net.preprocess, given), _scripted(net.net, given)).eval())
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.ModuleList) and hasattr(module, "in_segments"):  # its forward can recompute
            net.set_submodule(name, nn.Sequential(*module).eval())
    try:
        with _without_properties(net):
            return torch.jit.script(net)
    except Exception as error:  # TorchScript's errors have no common class
        raise UserError(
            f"target.torchscript.method=script: {type(net).__name__} has Python code that TorchScript lacks "
            f"({_first(error)}): set method=trace."
        ) from error


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


def _first(error: Exception) -> str:
    text = re.sub(r" \(of Python compilation unit at: 0x\w+\)", "", str(error))
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)[:200].rstrip(":. ")


def _trials(net: nn.Module, given: Tensor) -> list[Tensor]:
    """Return inputs of other sizes than the traced one."""
    draw, found = torch.Generator().manual_seed(0), []
    for batch in (1, 3):
        shape = [batch, *given.shape[1:]]
        if not given.is_floating_point() and given.dim() == 2:  # token ids
            time = max(1, shape[1] // batch) if takes_any_time(net, shape[1]) else shape[1]
            found.append(given[:1, :time].repeat(batch, 1))
            continue
        if takes_any_size(net):
            shape[-1] += batch
        x = torch.randn(shape, generator=draw)
        found.append(x if given.is_floating_point() else (40 * x + 128).clamp(0, 255).to(given.dtype))
    return found


def _check(module: Any, net: nn.Module, trials: list[Tensor], method: str) -> None:
    """Raise UserError if outputs differ from the net's: a trace keeps numbers that Python made of sizes."""
    for x in trials:
        try:
            same = _close(module(x), net(x))
        except RuntimeError:
            same = False
        if not same:
            raise UserError(
                f"target.torchscript.method={method}: the file would not compute the net for an input of shape "
                f"{list(x.shape)}; where its "
                "code makes a Python number of a size, as len(x) does, write x.shape[0], or set the other method."
            )


def _close(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    finite = wanted[wanted.isfinite()].abs()
    return torch.allclose(
        found, wanted, rtol=CLOSE, atol=CLOSE * float(finite.max()) if finite.numel() else 0, equal_nan=True
    )


def _write_bare(buffer: io.BytesIO, path: Path) -> None:
    """Write the archive without debug records, which contain source lines and local paths."""
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as found:
        for entry in source.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                found.writestr(zipfile.ZipInfo(entry.filename), source.read(entry))


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # The target's docs mention it. The warning's class depends on torch's version (2.15: FutureWarning).
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported in Python 3\.14)")
        # `_check` verifies branches on a size
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        yield


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """Load a file as a function from the net's input, `[batch, ...]`, to its output.

    oneDNN makes kernels for one input shape, at run time. With `fuse`, each of the first four shapes gets its own
    kernels, in a first call that takes as long as about five; calls with further shapes run without them. So call it
    with the most important shapes first.

    The file's code is TorchScript, which can't access Python; PyTorch still says to treat such files as programs.
    """
    path = readable(path, "path")
    notes: dict[str, Any] = {NOTE: ""}
    try:
        with _quiet():
            module = torch.jit.load(str(path), map_location="cpu", _extra_files=notes)
        fuse = bool(json.loads(notes[NOTE] or "{}").get("fuse"))
    except Exception as error:  # a torn archive can raise anything
        raise UserError(
            f"{path} can't be read as TorchScript ({type(error).__name__}): export the run again."
        ) from error
    return on_arrays(_Fused(module) if fuse and torch.backends.mkldnn.is_available() else module, threads)


class _Fused:
    """A frozen module with a fused plan for each of the first input shapes."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.plans: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {}
        self.lock = threading.Lock()

    def __call__(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape)
        plan = self.plans.get(shape)
        if plan is None and len(self.plans) < PLANS:
            with self.lock:
                if shape not in self.plans and len(self.plans) < PLANS:
                    self.plans[shape] = self.planned(x) or self._without(shape)
                plan = self.plans.get(shape)
        out: Tensor = (plan or self.module)(x)
        return out

    def planned(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return the graph with the module's weights as a function whose executor fuses for one shape.

        None if oneDNN fails, or changes values, as for some divisions by a scalar tensor.
        """
        function = torch._C._create_function_from_graph("forward", self.module.graph.copy())
        was = torch.jit.onednn_fusion_enabled()  # of this process; read when a plan is made
        try:
            torch.jit.enable_onednn_fusion(False)
            wanted = self.module(x)
            torch.jit.enable_onednn_fusion(True)
            for _ in range(2):  # the first call records shapes, the second makes the plan
                found = function(self.module._c, x)
        except RuntimeError:
            return None
        finally:
            torch.jit.enable_onednn_fusion(was)
        return (lambda x: function(self.module._c, x)) if _close(found, wanted) else None

    def _without(self, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        warnings.warn(
            f"TorchScript: oneDNN can't fuse this net for inputs of shape {list(shape)}, which run without it.",
            stacklevel=2,
        )
        return self.module
