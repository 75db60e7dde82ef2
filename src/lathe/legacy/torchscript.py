"""TorchScript, for programs that already load it, such as C++ with LibTorch. PyTorch has deprecated it in favour of
torch.export.

Floats alone: of a quantized net, the weights are the values that its integers stand for, and activations are not
rounded.
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
NOTE = "lathe.json"  # in the archive: what load has to do
CLOSE = 1e-3  # difference as a share of the largest value that folding and fusing may make
PLANS = 4  # input shapes that get fused kernels; each has weights of its own, laid out for these


def available() -> str | None:
    """None: nothing is needed but torch."""
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
    """Writes the net for batches of any size. `example` is its input, `[batch, ...]`; only its shape and type are used.
    The net and its modes stay as they are.

    Args:
        method: trace records the operators of one call; script compiles the net's Python code, with its branches.
        freeze: weights become constants, and BatchNorm is folded into convolutions.
        fuse: `load` lets oneDNN fuse operators. Nothing of that is in the file but the wish.

    Raises:
        UserError: an option that can't be, a net that can't be traced or scripted, or the file can't be written.
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
    except Exception as error:  # what Python code can be up to has no class in common
        raise UserError(
            f"target.torchscript.method=trace: {type(net).__name__} can't be traced ({_first(error)})."
        ) from error


def _scripted(net: nn.Module, given: Tensor) -> Any:
    if isinstance(net, Shipped):  # preprocessing has no branches that a call decides
        return torch.jit.script(nn.Sequential(_traced(net.preprocess, given), _scripted(net.net, given)).eval())
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.ModuleList) and hasattr(module, "in_segments"):  # its forward can recompute
            net.set_submodule(name, nn.Sequential(*module).eval())
    try:
        with _without_properties(net):
            return torch.jit.script(net)
    except Exception as error:  # what TorchScript's language lacks has no class in common
        raise UserError(
            f"target.torchscript.method=script: {type(net).__name__} has Python code that TorchScript lacks "
            f"({_first(error)}): set method=trace."
        ) from error


@contextmanager
def _without_properties(net: nn.Module) -> Iterator[None]:
    """TorchScript compiles a class's properties whether or not its forward reads them, such as the plan of a
    strategy.
    """
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
    """Inputs of sizes that a trace was not made with."""
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
    """Raises UserError where a file would answer otherwise than the net: a number that Python code made of a size is
    kept in a trace.
    """
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
    """Without the records that tell from which lines, in which folders of this machine, the code came."""
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as found:
        for entry in source.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                found.writestr(zipfile.ZipInfo(entry.filename), source.read(entry))


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # This target's docs say so, once. Of which kind the warning is depends on torch's version (2.15:
        # FutureWarning).
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported in Python 3\.14)")
        # a branch on a size, such as a check of it, is judged by _compare
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        yield


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """A function of the net's input, `[batch, ...]`, that gives its output. `threads` is torch's number of threads
    during each call; None leaves it as it is.

    oneDNN makes kernels for one shape of inputs, in the program that runs them. So of a file that was exported with
    `fuse`, each of the first four shapes that come gets kernels of its own, in a first call that takes as long as about
    five; calls of further shapes run without. Call it with the shapes that matter first.

    The file's code is TorchScript's, which has no access to Python; PyTorch asks to treat such files as programs
    nevertheless.

    Raises:
        UserError: there is no such file, or it can't be read.
    """
    path = readable(path, "path")
    notes: dict[str, Any] = {NOTE: ""}
    try:
        with _quiet():
            module = torch.jit.load(str(path), map_location="cpu", _extra_files=notes)
        fuse = bool(json.loads(notes[NOTE] or "{}").get("fuse"))
    except Exception as error:  # whatever a torn archive raises
        raise UserError(
            f"{path} can't be read as TorchScript ({type(error).__name__}): export the run again."
        ) from error
    return on_arrays(_Fused(module) if fuse and torch.backends.mkldnn.is_available() else module, threads)


class _Fused:
    """A frozen module whose graph is planned once for each of the first shapes that come."""

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
        """The graph, with the module's weights, as a function of its own: an executor fuses for one shape. None where
        oneDNN can't, or gives other values than without it, as it does of some divisions by a scalar tensor."""
        function = torch._C._create_function_from_graph("forward", self.module.graph.copy())
        was = torch.jit.onednn_fusion_enabled()  # of this process; looked at when a plan is made
        try:
            torch.jit.enable_onednn_fusion(False)
            wanted = self.module(x)
            torch.jit.enable_onednn_fusion(True)
            for _ in range(2):  # the first call records shapes, the second one makes the plan
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
