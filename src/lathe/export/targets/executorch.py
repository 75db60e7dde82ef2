"""ExecuTorch programs (.pte) for phones and small devices, with XNNPACK's float32 and 8-bit kernels.

Integers are the weights and ranges of training. A layer whose result is quantized next is computed fully in integers;
any other quantizes each row of its input again and returns floats (`lathe.export.targets.xnnpack_graph`).
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lathe.compression.quantization.net import quantized_layers
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import UserError, uninstalled
from lathe.export.bounded import Array, bounded_axes, check_bounds, in_parts, largest
from lathe.export.deploy import copied, deployable
from lathe.export.dialects import Xnnpack, to_float
from lathe.export.files import readable, whole
from lathe.export.inputs import stand_in
from lathe.export.targets.executorch_program import POOL, Program, quiet, without_native_notes
from lathe.export.targets.xnnpack_graph import Delegated, delegated, round_rows, share_roundings, without_kernel

suffix = ".pte"
computes = True
integers: bool | None = None
MOST_MEMORY = 2**31  # bytes that a program may reserve when it is loaded
DTYPES = {0: "uint8", 4: "int64", 6: "float32"}  # by ExecuTorch's number of each


def available() -> str | None:
    """Return None, or the message that says what to install."""
    return uninstalled("export", "executorch")


@validated
def export(net: nn.Module, example: Tensor, path: str | Path, max_batch_size: Count = 64) -> None:
    """Write one file with its weights, for batches of up to `max_batch_size`.

    Sequences may have up to the example's length. Loading reserves memory for the largest input. Layers without an
    integer kernel of XNNPACK are stored as floats, with the values of their integers: those with float activations,
    those with grouped scales, and convolutions that read one channel each with a float result.

    Raises:
        UserError: the net takes images of any size, a quantized net has no ranges yet or no layer that XNNPACK computes
            in integers, or too much memory would be reserved.
    """
    sentence = available()
    if sentence:
        raise UserError(sentence)
    check_bounds(net, "executorch")
    given, quantized = largest(example, max_batch_size), bool(quantized_layers(net))
    with whole(path) as temporary, torch.no_grad(), quiet():
        import_module("executorch.kernels.quantized")  # registers operators for roundings that XNNPACK does not take
        program = _integer_program(net, given) if quantized else _traced(net, copied(net), given)
        lowered, found = _lowered(program)
        _judge(found, quantized)
        made = lowered.to_executorch()
        _check_memory(made, given)
        with open(temporary, "wb") as file:
            made.write_to_file(file)


def _traced(net: nn.Module, found: nn.Module, given: Tensor) -> ExportedProgram:
    for name, module in list(found.named_modules()):
        if isinstance(
            module, nn.Dropout
        ):  # dropout is a copy in ExecuTorch's graph, which separates a layer from the rounding of its result
            found.set_submodule(name, nn.Identity().eval())
    return torch.export.export(found, (given,), dynamic_shapes=bounded_axes(net, given))


def _integer_program(net: nn.Module, given: Tensor) -> ExportedProgram:
    dialect = Xnnpack()
    found = deployable(net, stand_in(given), dialect)
    for layer in found.modules():
        if hasattr(layer, "integers") and not isinstance(layer, nn.Embedding):
            dialect.prepare(layer)
    program = _traced(net, found, given)
    share_roundings(program)
    lacking = without_kernel(program)
    if lacking:
        for name in lacking:
            to_float(found.get_submodule(name))
        program = _traced(net, found, given)
        share_roundings(program)
    round_rows(program)
    return program


def _lowered(program: ExportedProgram) -> tuple[Any, Delegated]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from executorch.exir import to_edge_transform_and_lower  # type: ignore[import-untyped,import-not-found,unused-ignore]

    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    return lowered, delegated(lowered.exported_program())


def _judge(found: Delegated, quantized: bool) -> None:
    """Raise UserError if no layer would run as requested; warn of layers in slow portable kernels."""
    if quantized and not found.integers:
        raise UserError(
            "XNNPACK would compute no layer of this net in integers, such as where weights alone are quantized: export "
            "it as floats with target.executorch.integers=false, or quantize activations too."
        )
    if not quantized and not found.floats:
        raise UserError(
            "XNNPACK would compute no layer of this net, which has no convolution or linear layer that it knows: "
            "choose another target."
        )
    if found.left:
        warnings.warn(
            f"XNNPACK does not take {len(found.left)} layers of this net, which ExecuTorch's slow portable kernels "
            f"compute: {', '.join(found.left)}.",
            stacklevel=3,
        )


def _check_memory(made: Any, given: Tensor) -> None:
    """Raise UserError if the largest batch needs too much memory, or memory was planned for another."""
    plan = made.executorch_program.execution_plan[0]
    planned = tuple(plan.values[plan.inputs[0]].val.sizes)
    if planned != tuple(given.shape):  # ExecuTorch narrows bounds by its assumptions about the example
        raise UserError(
            f"target.executorch.max_batch_size={len(given)}: ExecuTorch plans memory for {list(planned)} instead of "
            f"{list(given.shape)}: choose another one."
        )
    reserved = sum(plan.non_const_buffer_sizes)
    if reserved > MOST_MEMORY:
        raise UserError(
            f"target.executorch.max_batch_size={len(given)} reserves {reserved / 2**30:.1f} GiB whenever the file is "
            "loaded: choose a smaller one."
        )


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """Load a program as a function of the net's input, `[batch, ...]`; larger batches run in parts.

    `threads` is the size of XNNPACK's pool, which the whole process shares: calls wait for each other, and if functions
    of different `threads` alternate, each change reloads their files. None leaves the pool unchanged, initially one
    thread for each core. The function raises UserError for an input that does not fit the file.
    """
    sentence = available()
    if sentence:
        raise UserError(sentence)
    path = readable(path, "path")
    program = Program(path, threads)
    try:
        with POOL.lock, quiet(), without_native_notes():
            meta = program.ready().metadata.input_tensor_meta(0)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{path} can't be read as an ExecuTorch program ({str(error)[:200]}): export the run again."
        ) from error
    limits, dtype = tuple(meta.sizes()), DTYPES[meta.dtype()]

    def forward(x: Array) -> Array:
        sequences = dtype == "int64"
        fits = x.ndim == len(limits) and (x.shape[1] <= limits[1] if sequences else x.shape[1:] == limits[1:])
        if not fits or not x.size or x.dtype != dtype:
            takes = ("up to " if sequences else "") + ", ".join(map(str, limits[1:]))
            raise UserError(
                f"{path} takes {dtype} of shape [batch, {takes}] and nothing empty: {x.dtype} of shape "
                f"{list(x.shape)} does not fit."
            )
        return in_parts(program, x, limits[0])

    return forward
