"""Selects fused or foreach kernels of an optimizer."""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices, _get_fused_kernels_supported_devices


def with_kernels(factory: Any, parameters: Iterable[nn.Parameter], unscales_late: bool) -> tuple[Any, str]:
    """Return `factory` with `fused=True`, else `foreach=True`, if its class and the devices support it.

    The second value is the end of a message that says which one was chosen, or why none. Values in the configuration
    are kept. The weights after a step differ in their last digits from those of torch's default on CPUs, which updates
    one tensor after the other.

    Args:
        parameters: of the net, on the devices where they are trained.
        unscales_late: gradients are clipped and scaled, and a fused step would unscale them too late.
    """
    given = getattr(factory, "keywords", {})
    kind = given.get("kind")
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        made = getattr(getattr(factory, "func", factory), "__name__", "its function")
        return factory, f": {made} makes an optimizer in its own way, which stays."
    typed = [name for name in ("fused", "foreach", "differentiable", "capturable") if given.get(name) is not None]
    if typed:
        return factory, f": {typed[0]}={str(given[typed[0]]).lower()} of the optimizer says it already, and stays."
    takes, plain = inspect.signature(kind).parameters, list(parameters)
    devices = sorted({parameter.device.type for parameter in plain})
    fits = all(type(p.data) is Tensor and torch.is_floating_point(p) for p in plain)
    for name, there in (
        ("fused", [] if unscales_late else _get_fused_kernels_supported_devices()),
        ("foreach", [*_get_foreach_kernels_supported_devices(), "cpu"]),
    ):
        if name in takes and fits and set(devices) <= set(there):
            how = "one kernel" if name == "fused" else "one call for each operation"
            line = f" took {name}: {kind.__name__} updates all weights of {_listed(devices)} in {how}."
            return partial(factory, **{name: True}), line
    why = "the net is spread over processes" if not fits else f"{kind.__name__} has no such kernels"
    return factory, f": the optimizer's step stays as it is, since {why}."


def _listed(devices: list[str]) -> str:
    return " and ".join({"cpu": "the CPU", "cuda": "the GPU"}.get(name, name) for name in devices)
