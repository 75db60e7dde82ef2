"""Inputs of exported graphs: preprocessing of pixels, a core's named tensors, dynamic axes, and largest batches."""

import inspect
import logging
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lathe.errors import require
from lathe.export import Array

ANY = "any"
BATCH = "batch"  # name of the axis of samples
LARGEST = 4096  # pixels of a fixed side; larger images need "any", or scaling by the client


class Preprocess(nn.Module):
    """Scales uint8 pixels `[batch, channels, height, width]` to the net's size and normalizes them.

    Without scaling, the result equals `lathe.data.Normalizer` bit for bit. Scaling is that of
    `lathe.images.scaled` (the largest centered window of the net's aspect ratio, an antialiased bilinear
    filter) without rounding to integers, as two matrix products, which every back end has.

    Args:
        mean, std: of each channel, pixels on a scale from 0 to 1.
        size: height and width that the net takes.
        input_size: height and width of the input, "any" for images of any size, or None for the net's.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        size: tuple[int, int],
        input_size: Sequence[int] | str | None = None,
    ) -> None:
        super().__init__()
        # imported late: it imports Lightning, which a server does not need
        from lathe.data.augment import Normalizer

        normalizer = Normalizer(mean, std, len(mean))
        self.register_buffer("scale", normalizer.scale)
        self.register_buffer("shift", normalizer.shift)
        self.size = size
        self.input_size = check_input_size(input_size, size)
        if isinstance(self.input_size, tuple) and self.input_size != size:
            step = window_step(*self.input_size, size)
            self.register_buffer("rows", filter_matrix(self.input_size[0], size[0], step))
            self.register_buffer("columns", filter_matrix(self.input_size[1], size[1], step))

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.float()
        if self.input_size == ANY:
            height, width = x.shape[-2:]
            step = window_step(height, width, self.size)
            x = filter_matrix(height, self.size[0], step) @ x @ filter_matrix(width, self.size[1], step).t()
        elif self.input_size != self.size:
            x = self.rows @ x @ self.columns.t()  # type: ignore[operator]
        return x * self.scale + self.shift


def check_input_size(input_size: Any, size: tuple[int, int]) -> tuple[int, int] | str:
    """Return height and width of the input, or "any"."""
    if input_size is None:
        return size
    if input_size == ANY:
        return ANY
    sides = [input_size, input_size] if isinstance(input_size, int) else input_size
    pair = isinstance(sides, (list, tuple)) and len(sides) == 2
    pair = pair and all(type(side) is int and 1 <= side <= LARGEST for side in sides)
    form = f"give [height, width] in pixels, up to {LARGEST} each, any, or null"
    require(pair, f"target.input_size={input_size}: {form}.")
    height, width = sides
    return height, width


def window_step(height: Any, width: Any, size: tuple[int, int]) -> Tensor:
    """Return the input pixels per output pixel of the largest window. Height and width may be symbolic."""
    return torch.minimum(torch.ones(()) * (height / size[0]), torch.ones(()) * (width / size[1]))


def filter_matrix(source: Any, size: int, step: Tensor) -> Tensor:
    """Return the weights `[size, source]` of a triangle filter that resamples the centered window.

    The window has `size` x `step` values. When it shrinks, the filter is as wide as a step, so that every value counts.
    `source` may be symbolic.
    """
    width = torch.clamp(step, min=1.0)
    centres = torch.ones(()) * (source / 2) + (torch.arange(size) + (1 - size) / 2) * step
    places = torch.arange(source) + 0.5
    weights = (1 - (places[None, :] - centres[:, None]).abs() / width).clamp_min(0)
    return weights / weights.sum(1, keepdim=True)


class Shipped(nn.Module):
    """A net with its preprocessing, for files that take pixels."""

    def __init__(self, net: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.preprocess, self.net = preprocess, net
        self.eval()

    def forward(self, pixels: Tensor) -> Any:
        return self.net(self.preprocess(pixels))


class FlatCore(nn.Module):
    """The core of a LightningModule as a function of tensors: nested arguments and outputs become flat lists.

    `args` and `kwargs` are the core's arguments, as in a recorded call; plain values among them are constants. Entries
    of dicts that the core does not read, such as a batch's labels, are not inputs. `axes` has the dynamic axes of each
    input by name. Raises UserError if the core returns something other than nested tensors.
    """

    def __init__(self, core: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.core = core
        self.eval()
        self.unread = _unread(core, args, kwargs)
        leaves, self.form = pytree.tree_flatten_with_path(self._read_of(args, kwargs))
        self.constants = [None if isinstance(value, Tensor) else value for _, value in leaves]
        self.places = [index for index, (_, value) in enumerate(leaves) if isinstance(value, Tensor)]
        self.example = tuple(leaves[index][1] for index in self.places)
        parameters = [name for name, kind in inspect.signature(core.forward).parameters.items() if kind.kind in (0, 1)]
        self.names = []  # that of the parameter, with the place in nested arguments, such as `batch.mask`
        paths: list[Any] = [leaves[index][0] for index in self.places]
        for which, first, *rest in paths:
            known = which.idx == 0 and first.idx < len(parameters)
            name = first.key if which.idx else parameters[first.idx] if known else f"arg{first.idx}"
            self.names.append(_path_name(str(name), rest))
        # the places of the inputs in the recorded call, as `Call.tensors` names them
        self.paths = [_path_name("", leaves[index][0][1:]).removeprefix(".") for index in self.places]
        self.axes: list[dict[int, str]] = [{} for _ in self.places]
        with torch.no_grad():
            outputs = self.nested(*(tensor.clone() for tensor in self.example))
        output_leaves, self.output_form = pytree.tree_flatten_with_path(outputs)
        wrong = next((value for _, value in output_leaves if not isinstance(value, Tensor | None)), None)
        kind = f"{type(core).__name__} returns a {type(wrong).__name__}"
        require(wrong is None, f"model.core: {kind}. Name a submodule that returns tensors, also in tuples or dicts.")
        self.output_places = [index for index, (_, value) in enumerate(output_leaves) if value is not None]
        require(bool(self.output_places), f"model.core: {type(core).__name__} returns no tensor.")
        self.output_names = [_path_name("output", output_leaves[index][0]) for index in self.output_places]
        self.outputs = [output_leaves[index][1] for index in self.output_places]  # for the example

    def nested(self, *tensors: Tensor) -> Any:
        """Return the core's own outputs for the tensors of its arguments."""
        values = list(self.constants)
        for index, tensor in zip(self.places, tensors, strict=True):
            values[index] = tensor
        args, kwargs = pytree.tree_unflatten(values, self.form)
        return self.core(*args, **kwargs)

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the core's tensors: one, or several as a tuple."""
        outputs = tuple(value for value in pytree.tree_leaves(self.nested(*tensors)) if isinstance(value, Tensor))
        return outputs[0] if len(outputs) == 1 else outputs

    def nest(self, outputs: Sequence[Tensor]) -> Any:
        """Return tensors, as `forward` returns them, as the core's own outputs."""
        values = dict(zip(self.output_places, outputs, strict=True))
        form = self.output_form
        return pytree.tree_unflatten([values.get(index) for index in range(form.num_leaves)], form)

    def tensors_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors of another call of the core, in the order of the inputs."""
        values, form = pytree.tree_flatten(self._read_of(args, kwargs))
        require(form == self.form, "model.core: its calls differ in the arguments' nesting: name another submodule.")
        for index, (value, first) in enumerate(zip(values, self.constants, strict=True)):
            same = isinstance(value, Tensor) == (index in self.places) and (index in self.places or value == first)
            differ = f"model.core: an argument that is no tensor is {first!r} in one call and {value!r} in another"
            require(same, f"{differ}, and a graph has one value. Name another submodule.")
        return tuple(values[index] for index in self.places)

    def _read_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments without the entries of dicts that the core does not read."""

        def read(name: int | str, value: Any) -> Any:
            unread = self.unread.get(name)
            return {key: item for key, item in value.items() if key not in unread} if unread else value

        return tuple(starmap(read, enumerate(args))), {name: read(name, value) for name, value in kwargs.items()}

    def rows(self, tensors: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        """Return the tensors with `count` samples, repeated in turn; those without an axis of samples stay."""

        def cut(tensor: Tensor, axes: Mapping[int, str]) -> Tensor:
            for axis, name in axes.items():
                if name == BATCH:
                    index = torch.arange(count) % tensor.shape[axis]
                    return tensor.index_select(axis, index)
            return tensor.clone()

        return tuple(cut(tensor, axes) for tensor, axes in zip(tensors, self.axes, strict=True))

    def find_batch(self) -> None:
        """Make the first axis of the inputs dynamic where it has the size of the batch, if the core takes others.

        The size is that of the first input that has axes. Others of that size may be something else, such as a mask
        `[time, time]`: then the first input alone is tried.
        """
        size = next((len(tensor) for tensor in self.example if tensor.dim()), None)
        alike = [index for index, tensor in enumerate(self.example) if tensor.dim() and len(tensor) == size]
        for chosen in (alike, alike[:1]):
            self.axes = [{0: BATCH} if index in chosen else {} for index in range(len(self.example))]
            if chosen and self._follows():
                return
        self.axes = [{} for _ in self.example]

    @torch.no_grad()
    def _follows(self) -> bool:
        """Return whether the outputs have one or three samples if the inputs do; scalars have none."""
        for count in (1, 3):
            try:
                outputs = as_list(self(*self.rows(self.example, count)))
            except Exception:  # of the user's code, for a size that it does not take
                return False
            if any(own.dim() != out.dim() for own, out in zip(self.outputs, outputs, strict=True)):
                return False
            if any(out.dim() and len(out) != count for out in outputs):
                return False
        return True

    def declare_axes(self, declared: Mapping[str, Mapping[Any, str]]) -> None:
        """Add dynamic axes: for names of inputs, the name of each axis by its number."""
        for name, axes in declared.items():
            require(name in self.names, f"target.axes.{name}: the inputs are {', '.join(self.names)}.")
            index = self.names.index(name)
            for axis, word in axes.items():
                most = self.example[index].dim() - 1
                valid = str(axis).isdecimal() and int(axis) <= most
                require(valid, f"target.axes.{name}.{axis}: expected 0 to {most}.")
                self.axes[index][int(axis)] = str(word)

    @property
    def has_batch(self) -> bool:
        """Return whether the number of samples may vary."""
        return any(BATCH in axes.values() for axes in self.axes)

    def describe(self) -> dict[str, Any]:
        """Return the manifest's entries: `inputs` (with their place in the call) and `outputs`: name, dtype, shape."""

        def entry(name: str, tensor: Tensor, axes: Mapping[int, str]) -> dict[str, Any]:
            shape = [axes.get(axis, side) for axis, side in enumerate(tensor.shape)]
            return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}

        batch = {0: BATCH} if self.has_batch else {}
        outputs = zip(self.output_names, self.outputs, strict=True)
        inputs = [entry(*each) for each in zip(self.names, self.example, self.axes, strict=True)]
        return {
            "inputs": [facts | {"place": path} for facts, path in zip(inputs, self.paths, strict=True)],
            "outputs": [entry(name, tensor, batch if tensor.dim() else {}) for name, tensor in outputs],
        }


class _Watched(UserDict[Any, Any]):
    """A dict that notes which keys are read; looking at all of them reads all."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.read: set[Any] = set()
        super().__init__(values)

    def __getitem__(self, key: Any) -> Any:  # also for `get`, `pop`, `items` and `values`
        self.read.add(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self.read.update(self.data)
        return super().__iter__()


def _unread(core: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, set[Any]]:
    """Return the keys that the core does not read of the dicts among its arguments, by place or name of the dict."""

    def watched(value: Any) -> Any:
        return _Watched(value) if type(value) is dict else value

    places, names = [watched(value) for value in args], {name: watched(value) for name, value in kwargs.items()}
    with torch.no_grad():
        try:
            core(*places, **names)
        except Exception:  # it wants a plain dict: all of it is read
            return {}
    arguments: dict[int | str, Any] = dict(enumerate(places))
    arguments.update(names.items())
    return {name: value.data.keys() - value.read for name, value in arguments.items() if isinstance(value, _Watched)}


def _path_name(name: str, path: Sequence[Any]) -> str:
    parts = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path)
    return ".".join(map(str, (name, *parts)))


def as_list(outputs: Any) -> list[Any]:
    """Return the outputs of a net or a file as a list: several come in a list or a tuple, one alone."""
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def stand_in(net: nn.Module, example: Tensor | tuple[Tensor, ...], batch: int = 2) -> tuple[Tensor, ...]:
    """Return arguments to trace with, with a batch of two; tracers make a batch of one constant.

    They are zeros of the example's shape; for a core rows of the example, whose values may be lengths or indices.
    """
    if isinstance(net, FlatCore):
        return net.rows(as_list(example), batch)
    assert isinstance(example, Tensor)
    dtype = torch.float32 if example.is_floating_point() else example.dtype
    return (torch.zeros(batch, *example.shape[1:], dtype=dtype),)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what exporters log and warn about the packages that they use, and about names that these deprecate."""
    # operators of a missing torchvision, libraries of other processors, enumerations that are registered twice
    names = ("torch.onnx._internal.exporter._registration", "torchao", "torch.utils._pytree")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in (
                ".*treespec, LeafSpec.*",
                "(?s).*shares the same shape constraints",  # several inputs of a core have one batch
                r"`torch\.jit\.\w+` is (deprecated|not supported in Python 3\.14)",  # also of target=torchscript itself
                "To copy construct from a tensor",  # inductor's lowering of quantized convolutions
                r"(read|open)_(text|binary) is deprecated",
                "This API is experimental",
            ):
                warnings.filterwarnings("ignore", message=message)
            warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # the comparison has other sizes
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def has_tokens(example: Tensor) -> bool:
    """Return whether an input is token ids `[batch, time]`."""
    return not example.is_floating_point() and example.dim() == 2


def takes_any_size(net: nn.Module) -> bool:
    """Return whether the net scales images of any size to its own."""
    return isinstance(net, Shipped) and net.preprocess.input_size == ANY


@torch.no_grad()
def takes_any_time(net: nn.Module, length: int) -> bool:
    """Return whether a net of token ids takes fewer than `length` of them."""
    try:
        net(torch.zeros(2, max(1, length // 2), dtype=torch.int64))
    except (RuntimeError, ValueError, AssertionError, IndexError):  # the errors of layers with fixed sizes
        return False
    return length > 1


def dynamic_axes(net: nn.Module, tensors: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    """Return the dynamic axes of each input: batch, time of token ids if the net allows it, free sides of images.

    Those of a core are its batch and what target.axes declares.
    """
    if isinstance(net, FlatCore):
        names = {name for axes in net.axes for name in axes.values()}
        sides = {name: torch.export.Dim(name, min=1) for name in sorted(names)}
        return tuple({axis: sides[name] for axis, name in axes.items()} for axes in net.axes)
    axes: dict[int, Any] = {0: torch.export.Dim(BATCH, min=1)}
    if has_tokens(tensors[0]):
        if takes_any_time(net, tensors[0].shape[1]):
            axes[1] = torch.export.Dim.AUTO
    elif takes_any_size(net):
        axes |= {2: torch.export.Dim("height", min=1), 3: torch.export.Dim("width", min=1)}
    return (axes,)


def bounded_axes(net: nn.Module, largest: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    """Return `dynamic_axes` with the sizes of `largest` as maxima; an axis of size one is fixed."""
    names = {0: BATCH, 1: "time"}
    bounds, sides = [], dict[str, Any]()
    for index, (axes, tensor) in enumerate(zip(dynamic_axes(net, largest), largest, strict=True)):
        own = net.axes[index] if isinstance(net, FlatCore) else names
        sizes = {axis: tensor.shape[axis] for axis in axes if tensor.shape[axis] > 1}
        bounds.append(
            {axis: sides.setdefault(own[axis], torch.export.Dim(own[axis], min=1, max=n)) for axis, n in sizes.items()}
        )
    return tuple(bounds)


def shapes_for(net: nn.Module, axes: tuple[dict[int, Any], ...]) -> Any:
    """Return the dynamic axes as `torch.export.export` takes them, by the parameters of `net.forward`."""
    return {"tensors": axes} if isinstance(net, FlatCore) else axes


def check_bounds(net: nn.Module, target: str) -> None:
    """Raise UserError if the net takes images of any size."""
    message = f"target.input_size=any: target={target} needs a largest picture; give [height, width]."
    require(not takes_any_size(net), message)


def in_parts(run: Callable[..., Any], inputs: Sequence[Array], largest: int) -> Any:
    """Run at most `largest` samples at a time; a sample's output does not depend on the rest of the batch."""
    size = len(inputs[0])
    if size <= largest:
        return run(*inputs)
    parts = [as_list(run(*(x[start : start + largest] for x in inputs))) for start in range(0, size, largest)]
    joined = [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]
    return joined[0] if len(joined) == 1 else joined
