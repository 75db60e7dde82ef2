"""The forms of a net that are measured (eager, compiled, the file of an export target), and their interleaved times."""

import copy
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lathe import export
from lathe.errors import UserError
from lathe.export.inputs import as_list
from lathe.measure import interleaved, verdict

CPU = torch.device("cpu")
Input = Tensor | tuple[Tensor, ...]  # of a net, or of the core of a LightningModule
FLOAT_TWIN = {"onnx_int8": "onnx", "aot_inductor": "compiled_fp32"}  # the dense net's form, if it has another name


@dataclass(frozen=True)
class Opened:
    """A form that is ready to run: `call` runs its own batch, `forward` any batch on the CPU."""

    call: Callable[[], Any]
    forward: Callable[[Tensor], Tensor]


class Form:
    """A net in one runtime: `of` is "this" or "dense", `backend` the runtime, `name` both."""

    def __init__(self, of: str, backend: str, device: torch.device = CPU) -> None:
        self.of, self.backend, self.device, self.name = of, backend, device, f"{of} {backend}"

    def open(self, x: Input, threads: int) -> Opened:
        """Prepare it for the batch `x` [batch, ...] on the CPU and this number of threads."""
        raise NotImplementedError


class Module(Form):
    """The module itself, with `bf16` under autocast: the speed-up that is available without compression.

    `compiled` is inductor with frozen weights, for one batch size as on a server.
    """

    def __init__(
        self, of: str, net: nn.Module, device: torch.device = CPU, bf16: bool = False, compiled: bool = False
    ) -> None:
        backend = f"compiled_{'bf16' if bf16 else 'fp32'}" if compiled else "eager_bf16" if bf16 else "eager"
        super().__init__(of, backend, device)
        self.net, self.compiled = _Autocast(net, device.type) if bf16 else net, compiled

    def open(self, x: Input, threads: int) -> Opened:
        copied = self.compiled or self.device != CPU
        net: Callable[..., Tensor] = copy.deepcopy(self.net).to(self.device) if copied else self.net
        inside = [tensor.to(self.device) for tensor in as_list(x)]
        if not self.compiled:
            return Opened(lambda: net(*inside), lambda batch: net(batch.to(self.device)).float().cpu())
        # Exceeding the recompile limit is an error: torch would silently run eagerly.
        with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            warnings.simplefilter("ignore", DeprecationWarning)  # from inductor's imports
            net = torch.compile(net, dynamic=False, options={"freezing": True})
            net(*inside)
            size = len(inside[0])

        def forward(batch: Tensor) -> Tensor:
            parts = []
            for part in batch.split(size):
                full = torch.cat([part, part[:1].expand(size - len(part), *part.shape[1:])])
                parts.append(net(full.to(self.device))[: len(part)].float().cpu())
            return torch.cat(parts)

        return Opened(lambda: net(*inside), forward)


class _Autocast(nn.Module):
    """Autocast inside the compiled region: outside, it would slow every call of a small net."""

    def __init__(self, net: nn.Module, device_type: str) -> None:
        super().__init__()
        self.net, self.device_type = net, device_type

    def forward(self, *x: Tensor) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16):
            return self.net(*x)


class Target(Form):
    """The file of an export target in its own runtime and device, from and to host arrays."""

    def __init__(self, of: str, target: str, path: Path, device: torch.device = CPU) -> None:
        super().__init__(of, target, device)
        self.path = path

    def open(self, x: Input, threads: int) -> Opened:
        run = export.get(self.backend).load(self.path, threads)
        inside = [tensor.numpy() for tensor in as_list(x)]
        return Opened(lambda: run(*inside), lambda batch: torch.from_numpy(np.asarray(run(batch.numpy()))).float())


def export_to(target: str, net: nn.Module, example: Input, folder: Path, **options: Any) -> Path:
    """Export `net` to `target` with these options, below `folder`, and return the file."""
    module = export.get(target, **options)
    missing = module.available()
    if missing is not None:
        raise UserError(missing)
    path = folder / target / f"model{module.suffix}"
    path.parent.mkdir(parents=True)
    quiet = logging.root.manager.disable
    logging.disable(max(quiet, logging.INFO))  # exporters log every pass over the graph
    try:
        module.export(copy.deepcopy(net), example, path)
    finally:
        logging.disable(quiet)
    return path


def reason(error: BaseException) -> str:
    """Return the first line of an error, with its class unless it is a UserError."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return lines[0] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[0]}"


def references(form: Form) -> dict[str, str]:
    """Return the names of the forms that a row is compared with, by column.

    The gain over the twin, the dense net in the same runtime, is due to compression.
    """
    twin = f"dense {FLOAT_TWIN.get(form.backend, form.backend)}"
    return {"eager": "dense eager", "bf16": "dense compiled_bf16", "twin": twin}


def time_forms(
    forms: Sequence[Form],
    cells: Sequence[tuple[torch.device, int, int]],
    sample: Callable[[int], Input],
    limits: tuple[int, int, float],
    left_out: list[dict[str, str]],
    beside: Callable[[Form], Mapping[str, str]] = references,
    check: Callable[[Form, Opened], None] = lambda form, opened: None,
    step: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Return a row for each form in each cell: a device, a batch size and a number of threads.

    `sample` makes a batch of a given size; `limits` are repeats, warm-up calls and seconds, as in `interleaved`. Forms
    that can't be opened, or fail `check`, go to `left_out` with the reason; `step` is called with what is measured
    next.
    """
    rows: list[dict[str, Any]] = []
    for device, batch, threads in cells:
        torch.set_num_threads(threads)
        x, opened = sample(batch), dict[Form, Opened]()
        for form in (form for form in forms if form.device == device):
            step(f"{form.name}, batch {batch}")
            try:
                ready = form.open(x, threads)
                ready.call()
                check(form, ready)
                opened[form] = ready
            except Exception as error:  # a failing back end must not hide the others
                where = f"{form.name}, {device.type}, batch {batch}, {threads} thread{'s' * (threads > 1)}"
                left_out.append({"form": where, "reason": reason(error)})
        step(f"timing, batch {batch}")
        times = interleaved({form.name: ready.call for form, ready in opened.items()}, *limits, device)
        for form in opened:
            this = times[form.name]
            row = {
                **{"of": form.of, "backend": form.backend, "device": device.type, "batch": batch},
                "threads": threads if device == CPU else None,
                **{"median_ms": this.median * 1e3, "p10_ms": this.p10 * 1e3, "p90_ms": this.p90 * 1e3, "n": this.n},
            }
            for key, name in beside(form).items():
                other = times.get(name)
                row[f"over_{key}"] = this.median / other.median if other else None
                row[f"beside_{key}"] = verdict(this, other) if other and name != form.name else None
            rows.append(row)
        torch.compiler.reset()  # earlier cells' graphs would count towards torch's recompile limit
    return rows
