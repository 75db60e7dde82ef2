"""Teachers of a student: opened from the configuration, or an average of the student itself."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lathe.callbacks.ema import MovingAverage
from lathe.compression.modes import copy_input
from lathe.compression.quantization.net import describe
from lathe.compression.structure import apply_structure
from lathe.errors import UserError
from lathe.measure.processes import processes
from lathe.measure.shards import whole

KEY = "compression.distill.teacher"
OpenRun = Callable[[str], nn.Module]


def specs_of(teacher: Any) -> list[Any]:
    """Return the configured teachers, each a run directory, "ema", or {"net": net, "weights": path}."""
    several = isinstance(teacher, Sequence) and not isinstance(teacher, str)
    specs = list(teacher) if several else [teacher]
    if not specs or any(spec is None for spec in specs):
        raise UserError(
            f"{KEY}={teacher} names no teacher: give the directory of a finished run, ema, or a net with its weights."
        )
    for spec in specs:
        if isinstance(spec, Mapping):
            if set(spec) != {"net", "weights"} or not isinstance(spec["net"], nn.Module):
                raise UserError(
                    f"{KEY} has the keys {', '.join(map(str, spec))}: a net needs net (with its _target_) and weights."
                )
        elif not isinstance(spec, str | Path):
            raise UserError(
                f"{KEY}={spec!r} is no teacher: give the directory of a finished run, ema, or a net with its weights."
            )
    if "ema" in specs and len(specs) > 1:
        raise UserError(f"{KEY}={teacher}: ema teaches alone; list runs, or take ema.")
    return specs


def open_teacher(spec: Any, open_run: OpenRun | None) -> nn.Module:
    """Return the net of a run directory or of {"net", "weights"}, frozen in eval mode, on the CPU."""
    if isinstance(spec, Mapping):
        net: nn.Module = spec["net"]
        _load(net, str(spec["weights"]))
    else:
        if open_run is None:
            raise UserError(
                f"{KEY}={spec}: outside of train.py set the callback's open_run, or give a net with its weights."
            )
        net = open_run(str(spec))
    return frozen(net)


def frozen(net: nn.Module) -> nn.Module:
    net.register_forward_pre_hook(copy_input)
    return net.eval().requires_grad_(False)


def _load(net: nn.Module, path: str) -> None:
    if not Path(path).is_file():
        raise UserError(
            f"{KEY}.weights={path}: there is no such file; give a checkpoint, or a state dict that torch.save has "
            "written."
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or malicious file can raise nearly anything
        raise UserError(
            f"{KEY}.weights={path} can't be read as plain tensors: give a checkpoint, or a state dict."
        ) from error
    weights: dict[str, Tensor] = state.get("state_dict", state) if isinstance(state, dict) else {"": state}
    plain = isinstance(weights, dict) and all(
        isinstance(name, str) and name and isinstance(value, Tensor) and not value.is_meta
        for name, value in weights.items()
    )
    if not plain:
        raise UserError(f"{KEY}.weights={path} holds more than plain tensors: give a checkpoint, or a state dict.")
    apply_structure(net, state.get("structure", {}))
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(
            f"{KEY}.weights={path} does not fit {KEY}.net ({first}): give the net that it was trained with."
        ) from error


class Average:
    """A teacher that is the moving average of its student (Tarvainen and Valpola 2017, arXiv:1703.01780).

    After each optimizer step, `average = decay * average + (1 - decay) * weights`; update t uses min(decay, (1 + t) /
    (10 + t)). Create it before a strategy shards the net: every rank holds the whole average, in at least float32.
    Buffers are averaged too, and are rank 0's. Fake quantization is off in the teacher.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net = frozen(copy.deepcopy(net))
        if describe(self.net):
            from lathe.compression.quantization.net import set_enabled  # type: ignore[attr-defined,unused-ignore]

            set_enabled(self.net, False)
        self._average = MovingAverage(decay)
        self._live: list[Tensor] = []
        self._buffers: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Return the averaged tensors by name: all of floating point except the quantizers'."""
        return {
            name: tensor
            for name, tensor in self.net.state_dict(keep_vars=True).items()
            if tensor.is_floating_point() and "quantizer" not in name
        }

    def bind(self, student: nn.Module) -> None:
        """Find the student's tensors, in each epoch: another callback may have replaced some.

        Raises:
            UserError: a rank does not hold whole parameters (deepspeed_3), or a shape has changed.
        """
        live = student.state_dict(keep_vars=True)
        names = [name for name in self.tensors() if name in live]
        own = self.tensors()
        for name in names:
            if hasattr(live[name], "ds_id"):
                raise UserError(
                    f"{KEY}=ema needs whole weights, of which strategy=deepspeed_3 keeps parts: use fsdp, "
                    "deepspeed_2 or ddp."
                )
            if live[name].shape != own[name].shape:
                raise UserError(
                    f"{KEY}=ema can't follow {name}, whose shape another method of compression changes: give a "
                    "finished run as teacher."
                )
        self._live = [live[name] for name in names]
        self._average.tensors = [own[name].detach() for name in names]
        self._buffers = [i for i, tensor in enumerate(self._live) if not isinstance(tensor, nn.Parameter)]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after an optimizer step. A collective for sharded parameters and for buffers."""
        live = [whole(tensor).to(average) for tensor, average in zip(self._live, self._average.tensors, strict=True)]
        if self._buffers and processes() > 1:
            flat = torch.cat([live[i].flatten() for i in self._buffers])
            torch.distributed.broadcast(flat, src=0)
            parts = flat.split([live[i].numel() for i in self._buffers])
            for i, part in zip(self._buffers, parts, strict=True):
                live[i] = part.view(live[i].shape)
        self._average.update(live)

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": self._average.updates,
            "average": {name: tensor.detach().clone() for name, tensor in self.tensors().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average.updates = state["updates"]
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.detach().copy_(state["average"][name])
