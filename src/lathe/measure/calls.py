"""Calls of a net: its arguments, for nets that take something other than one tensor."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lathe.errors import UserError

PLAIN = (bool, int, float, complex, str, torch.dtype, type(None))


@dataclass(frozen=True)
class Call:
    """Arguments of one forward pass: tensors and plain values, in lists, tuples and dicts."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """Return the call with `change` applied to each tensor."""
        return Call(_map(change, self.args), _map(change, self.kwargs))

    def to(self, device: torch.device | str) -> "Call":
        return self.map(lambda tensor: tensor.to(device))

    def detach(self) -> "Call":
        return self.map(Tensor.detach)

    @property
    def device(self) -> torch.device:
        """Return the device of the first tensor."""
        return next((tensor.device for tensor in self.tensors().values()), torch.device("cpu"))

    def __getitem__(self, rows: slice) -> "Call":
        """Return the call for these samples: tensors whose first size is the batch size are cut."""
        size = self.samples()
        return self.map(lambda tensor: tensor[rows] if tensor.dim() and len(tensor) == size else tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their place, such as "0" or "mask" or "batch.tokens"."""
        return dict(_tensors("", {**{str(i): value for i, value in enumerate(self.args)}, **self.kwargs}))

    def samples(self) -> int:
        """Return the batch size: the first size of the first tensor that has one; 1 without."""
        return next((len(tensor) for tensor in self.tensors().values() if tensor.dim()), 1)

    @property
    def example(self) -> "Tensor | Call":
        """Return the tensor of a call with a single one, else the call."""
        single = len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor)
        return self.args[0] if single else self

    def save(self, path: Path | str) -> None:
        """Write the call as plain containers, which open with `torch.load(weights_only=True)`."""
        copy = self.map(lambda tensor: tensor.detach().cpu().clone())  # a view would write its whole storage
        torch.save({"args": copy.args, "kwargs": copy.kwargs}, path)

    @classmethod
    def load(cls, path: Path | str) -> "Call":
        """Read what `save` has written, or a tensor, tuple or dict of arguments; raise UserError for other files."""
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises nearly anything
            raise UserError(f"model.example={path}: {' '.join(str(error).split())[:120]}") from error
        if isinstance(content, dict) and set(content) == {"args", "kwargs"}:
            return cls(tuple(content["args"]), dict(content["kwargs"]))
        return cls.of(content)

    @classmethod
    def of(cls, example: Any) -> "Call":
        """Return the call with a tensor, a tuple of arguments or a dict of keyword arguments."""
        if isinstance(example, dict):
            return cls((), example)
        return cls(tuple(example) if isinstance(example, tuple | list) else (example,))


def run(net: nn.Module, example: Any) -> Any:
    """Return `net(example)`, or the outputs for the arguments of a Call, which the net may change."""
    if not isinstance(example, Call):
        return net(example)
    copy = example.map(Tensor.clone)
    return net(*copy.args, **copy.kwargs)


def unknown(tree: Any) -> Any:
    """Return the first value in nested containers that is neither a tensor nor plain; None without one."""
    if type(tree) in (list, tuple):
        return next((item for value in tree if (item := unknown(value)) is not None), None)
    if type(tree) is dict:
        return next((item for pair in tree.items() for value in pair if (item := unknown(value)) is not None), None)
    return None if isinstance(tree, (Tensor, *PLAIN)) else tree


def output_of(tree: Any) -> Tensor | None:
    """Return the tensor of a net's outputs: the only one, or the one named logits; None for several."""
    logits = tree.get("logits") if isinstance(tree, Mapping) else getattr(tree, "logits", None)
    tensors = [tensor for _, tensor in _tensors("", {"": tree if logits is None else logits})]
    return tensors[0] if len(tensors) == 1 else None


def _map(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)(_map(change, value) for value in tree)
    return {key: _map(change, value) for key, value in tree.items()} if type(tree) is dict else tree


def _tensors(path: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _tensors(f"{path}.{key}".lstrip("."), value)
