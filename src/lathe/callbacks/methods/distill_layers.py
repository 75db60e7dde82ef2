"""Pairs of student and teacher layers, and their features."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lathe.compression.modes import evaluated
from lathe.errors import UserError

KEY = "compression.distill"
Shape = tuple[int, ...]
LISTED = 12  # names in a message


@dataclass
class Probe:
    """A net's output, and each layer's output shape without the batch, in call order.

    `head` is the last linear layer, `embedding` the shape of its input.
    """

    output: Tensor
    shapes: dict[str, Shape] = field(default_factory=dict)
    head: str | None = None
    embedding: Shape = ()


def probe(net: nn.Module, x: Tensor) -> Probe:
    """Run `net` on `x` [batch, ...] once, in eval mode and uncompiled, and leave it unchanged."""
    found = Probe(torch.empty(0))
    handles = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and name:
            found.shapes[name] = tuple(output.shape[1:])
            if isinstance(module, nn.Linear):
                found.head, found.embedding = name, tuple(inputs[0].shape[1:])

    for name, module in net.named_modules():
        handles.append(module.register_forward_hook(lambda m, i, o, name=name: look(name, m, i, o)))
    with evaluated(net, handles), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found.output = net(x)
    return found


def stage_ends(net: nn.Module, found: Probe) -> list[str]:
    """Return the last of each run of `net.blocks` with one output shape; empty for a net without `blocks`."""
    names = [name for name in found.shapes if name.startswith("blocks.") and name.count(".") == 1]
    return [
        name for i, name in enumerate(names) if i + 1 == len(names) or found.shapes[names[i + 1]] != found.shapes[name]
    ]


def fits(method: str, student: Shape, teacher: Shape) -> bool:
    """Return whether a feature method can compare features of these shapes, without the batch."""
    if method == "attention":
        pairs = list(zip(student[1:], teacher[1:], strict=False))
        return len(student) == len(teacher) == 3 and all(max(pair) % min(pair) == 0 for pair in pairs)
    if method == "fitnets":
        places = (student[1:], teacher[1:]) if len(student) == 3 else (student[:-1], teacher[:-1])
        return len(student) == len(teacher) <= 3 and places[0] == places[1]
    return all(len(shape) in (1, 3) for shape in (student, teacher))  # rkd and crd: one vector per sample


def choose(key: str, patterns: Sequence[str], found: Probe) -> list[str]:
    """Return the layers that match `patterns` (`*` for anything), in the order of patterns and calls."""
    chosen: list[str] = []
    for pattern in patterns:
        matching = [name for name in found.shapes if fnmatchcase(name, pattern)]
        if not matching:
            raise UserError(f"{KEY}.{key}={pattern} matches no layer: choose among {listed(found.shapes)}.")
        chosen += [name for name in matching if name not in chosen]
    return chosen


def pairs_of(
    method: str, student: Probe, teacher: Probe, nets: tuple[nn.Module, nn.Module], patterns: tuple[Any, Any]
) -> list[tuple[str, str]]:
    """Return the layers of student and teacher that a feature method compares.

    By default: the input of the head, written `<head>.input`, for rkd and crd; the last blocks of all stages for
    attention, of the middle stage for fitnets. Raises UserError if a pattern matches nothing, or numbers or shapes
    differ.
    """
    chosen: list[list[str]] = []
    for key, given, found, net in zip(
        ("student_layers", "teacher_layers"), patterns, (student, teacher), nets, strict=True
    ):
        if given is not None:
            chosen.append(choose(key, [given] if isinstance(given, str) else list(given), found))
        elif method in ("rkd", "crd") and found.head is not None:
            found.shapes[f"{found.head}.input"] = found.embedding
            chosen.append([f"{found.head}.input"])
        else:
            ends = stage_ends(net, found)
            if not ends:
                raise UserError(
                    f"{KEY}.{key}=null: the net names no blocks to choose from for {method}; choose among "
                    f"{listed(found.shapes)}."
                )
            chosen.append([ends[len(ends) // 2]] if method == "fitnets" else ends)
    ours, theirs = chosen
    if len(ours) != len(theirs):
        raise UserError(
            f"{KEY}.student_layers are {', '.join(ours)} and teacher_layers {', '.join(theirs)}: {method} compares as "
            f"many of one as of the other; choose among {listed(student.shapes)} and {listed(teacher.shapes)}."
        )
    for mine, other in zip(ours, theirs, strict=True):
        shape = teacher.shapes[other]
        if not fits(method, student.shapes[mine], shape):
            able = {name: there for name, there in student.shapes.items() if fits(method, there, shape)}
            rest = (
                f"choose among the student's {listed(able)}"
                if able
                else "no layer of the student can; name other teacher_layers"
            )
            raise UserError(
                f"{KEY}.student_layers={mine} gives {list(student.shapes[mine])}, which {method} can't compare with "
                f"{list(shape)} of the teacher's {other}: {rest}."
            )
    return list(zip(ours, theirs, strict=True))


def listed(shapes: dict[str, Shape]) -> str:
    names = [f"{name} {list(shape)}" for name, shape in shapes.items()]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


class Capture:
    """Store the outputs of layers of `net` in a forward pass, by name; `<name>.input` is a layer's input.

    Hooks have to be set before a net is compiled, whose graph then returns these tensors too. With `training_only`,
    evaluation stores nothing.
    """

    def __init__(self, net: nn.Module, names: Sequence[str], training_only: bool) -> None:
        self.found: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        found = self.found  # hooks must not refer to this object, which the compiler would trace
        for name in dict.fromkeys(names):
            inner = name.removesuffix(".input")
            module = net.get_submodule(inner)

            def before(module: nn.Module, inputs: Any, name: str = name) -> None:
                if module.training or not training_only:
                    found[name] = inputs[0].clone()  # the layer may modify it in place

            def after(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                if module.training or not training_only:
                    found[name] = output.clone()  # the next layer may modify it in place

            if inner != name:
                self._handles.append(module.register_forward_pre_hook(before))
            else:
                self._handles.append(module.register_forward_hook(after))

    def take(self, name: str) -> Tensor:
        """Return a layer's features; raise UserError if it was not called, or this rank has only a shard."""
        if name not in self.found:
            raise UserError(
                f"{KEY}: the layer {name} gave nothing in this step; feature methods need a net that calls its layers "
                "as modules: use method=kd, dkd or dist."
            )
        tensor = self.found[name]
        if hasattr(tensor, "device_mesh"):
            raise UserError(
                f"{KEY}: a process holds a part of {name} alone under this strategy; use method=kd, dkd or dist, or "
                "strategy=ddp."
            )
        return tensor

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.found.clear()
