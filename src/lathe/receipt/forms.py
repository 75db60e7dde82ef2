"""The forms of a net that are measured: eager, compiled, and the file of each export target."""

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lathe import export
from lathe.errors import UserError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Opened:
    """A form that is ready to run: `call` runs its own batch, `forward` any batch on the CPU."""

    call: Callable[[], Any]
    forward: Callable[[Tensor], Tensor]


class Form:
    """A net in one runtime: `of` is "this" or "dense", `backend` the runtime."""

    def __init__(self, of: str, backend: str, device: torch.device = CPU) -> None:
        self.of, self.backend, self.device = of, backend, device

    @property
    def name(self) -> str:
        """The name, unique on its device."""
        return f"{self.of} {self.backend}"

    def open(self, x: Tensor, threads: int) -> Opened:
        """Prepare it for the batch `x` [batch, ...] on the CPU and this number of threads."""
        raise NotImplementedError


class Eager(Form):
    """The module in float32, or with `dtype` bfloat16 under autocast."""

    def __init__(self, of: str, net: nn.Module, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(of, {torch.float32: "eager", torch.bfloat16: "eager_bf16"}[dtype], device)
        self.net = net if dtype is torch.float32 else _Autocast(net, device.type, dtype)

    def open(self, x: Tensor, threads: int) -> Opened:
        net = self.net if self.device == CPU else copy.deepcopy(self.net).to(self.device)
        inside = x.to(self.device)
        return Opened(lambda: net(inside), lambda batch: net(batch.to(self.device)).float().cpu())


class Compiled(Form):
    """The module compiled with inductor and frozen weights for one batch size.

    `dtype` bfloat16 runs under autocast: the speed-up that is available without compression.
    """

    def __init__(self, of: str, net: nn.Module, dtype: torch.dtype, device: torch.device = CPU) -> None:
        super().__init__(of, {torch.float32: "compiled_fp32", torch.bfloat16: "compiled_bf16"}[dtype], device)
        self.net, self.dtype = net, dtype

    def open(self, x: Tensor, threads: int) -> Opened:
        inner = _Autocast(copy.deepcopy(self.net).to(self.device), self.device.type, self.dtype)
        # For these shapes only, as on a server. Exceeding the recompile limit is an error: torch would silently run
        # eagerly.
        with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            warnings.simplefilter("ignore", DeprecationWarning)  # from inductor's imports
            net = torch.compile(inner, dynamic=False, options={"freezing": True})
            inside, size = x.to(self.device), len(x)
            net(inside)

        def forward(batch: Tensor) -> Tensor:
            parts = []
            for part in batch.split(size):
                full = (
                    torch.cat([part, part[:1].expand(size - len(part), *part.shape[1:])]) if len(part) < size else part
                )
                parts.append(net(full.to(self.device))[: len(part)].float().cpu())
            return torch.cat(parts)

        return Opened(lambda: net(inside), forward)


class _Autocast(nn.Module):
    """Autocast inside the compiled region: outside, it would slow every call of a small net."""

    def __init__(self, net: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.device_type, self.dtype = net, device_type, dtype

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            return self.net(x)


class Target(Form):
    """The file of an export target in its own runtime and device, from and to host arrays."""

    def __init__(self, of: str, target: str, path: Path, device: torch.device = CPU) -> None:
        super().__init__(of, target, device)
        self.path = path

    def open(self, x: Tensor, threads: int) -> Opened:
        run = export.get(self.backend).load(self.path, threads)
        inside = x.numpy()
        return Opened(lambda: run(inside), lambda batch: torch.from_numpy(np.asarray(run(batch.numpy()))).float())


def export_to(target: str, net: nn.Module, example: Tensor, folder: Path, **options: Any) -> Path:
    """Export `net` to `target` with these options, below `folder`, and return the file."""
    module = export.get(target, **options)
    missing = module.available()
    if missing is not None:
        raise UserError(missing)
    path = folder / target / f"model{module.suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
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
