"""Forward and backward time of each module of a net."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.profiler import record_function

MARK = "module: "
BACKWARD = "autograd::engine::evaluate_function"


class ModuleTime(NamedTuple):
    """Milliseconds per step of a module, without its submodules."""

    name: str
    kind: str
    forward: float
    backward: float


@contextmanager
def marked(net: nn.Module) -> Iterator[None]:
    """Record each module call below `net` as a range of the trace, named after the module."""
    handles = []
    for name, module in net.named_modules():
        frames: list[Any] = []

        def enter(module: nn.Module, args: Any, name: str = name, frames: list[Any] = frames) -> None:
            frames.append(record_function(MARK + (name or "the net")))
            frames[-1].__enter__()

        def leave(module: nn.Module, args: Any, output: Any, frames: list[Any] = frames) -> None:
            frames.pop().__exit__(None, None, None)

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def module_times(events: Any, net: nn.Module, on_gpu: bool, steps: int) -> list[ModuleTime]:
    """Return the times of all modules that were called, the slowest first.

    A backward operation has the sequence number of its forward operation, which gives its module. Recomputed forward
    passes count as backward.
    """

    def took(event: Any) -> float:
        return float(event.device_time_total if on_gpu else event.cpu_time_total) / 1e3 / steps

    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    numbers: dict[int, str] = {}
    for event in events:
        owner, again = _owner(event)
        if again:
            continue
        if event.name.startswith(MARK):
            forward[event.name] += took(event)
            if owner is not None:
                forward[owner] -= took(event)
        elif owner is not None and event.sequence_nr >= 0:
            numbers.setdefault(event.sequence_nr, owner)
    for event in events:
        if event.name.startswith(BACKWARD) and event.sequence_nr in numbers:
            backward[numbers[event.sequence_nr]] += took(event)
    kinds = {MARK + (name or "the net"): type(module).__name__ for name, module in net.named_modules()}
    found = [
        ModuleTime(name.removeprefix(MARK), kinds[name], max(0.0, forward[name]), backward[name]) for name in forward
    ]
    return sorted(found, key=lambda one: -(one.forward + one.backward))


def _owner(event: Any) -> tuple[str | None, bool]:
    """Return the module that contains an event, and whether the event is in the backward pass."""
    parent, owner = event.cpu_parent, None
    while parent is not None:
        if parent.name.startswith(BACKWARD):
            return None, True
        if owner is None and parent.name.startswith(MARK):
            owner = parent.name
        parent = parent.cpu_parent
    return owner, False
