"""A graph of ATen operators (`torch.export.save`), for torch without the net's code, and compilers."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import quantized_layers
from lathe.errors import UserError
from lathe.export import Target, export_target, first_line
from lathe.export.bundle import readable, whole
from lathe.export.inputs import FlatCore, dynamic_axes, quiet, shapes_for, stand_in
from lathe.export.integer_layers import Inductor, copied, deployable
from lathe.export.torch_runner import check_archive, on_arrays, open_program

# torch's notes on each node: source lines with paths of this machine, and names of Python classes
NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom")


@export_target("torch_export")
class TorchExport(Target):
    """The net's graph, which takes batches of any size.

    A quantized net's weights are stored as int8, with PT2E's operators for rounding. Torch runs these one by one, in
    float32: for speed, compile the graph (`torch.compile(program.module())`), or use target=aot_inductor.
    """

    suffix, has_gpu, takes_cores = ".pt2", True, True

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        inputs = stand_in(net, example)
        module = deployable(net, inputs, Inductor()) if quantized_layers(net) else copied(net)
        with whole(path) as temporary, quiet():
            program = _program(module, inputs, shapes_for(net, dynamic_axes(net, inputs)))
            buffer = io.BytesIO()  # an archive contains its file's name, which would differ at each export
            torch.export.save(program, buffer)
            try:
                check_archive(buffer)
            except ValueError as error:
                message = f"the file would not be loaded again, since {error}, which is not torch's own."
                raise UserError(f"target=torch_export: {message}") from error
            temporary.write_bytes(buffer.getvalue())

    def load(self, path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[..., Any]:
        """Load a file as a function; it computes on `device` with copies to it and back.

        `torch.export.load` unpickles and evaluates an archive's content, and has no `weights_only`; so archives with
        anything but tensors and operators are rejected.
        """
        path = readable(path)
        try:
            module = open_program(path, device)
        except Exception as error:  # a torn archive, or one of another version of torch
            reason = str(error) if type(error) is ValueError else type(error).__name__
            message = f"{path} can't be read as a program of target=torch_export ({reason}): export the run again."
            raise UserError(message) from error
        return on_arrays(module, threads, None if device is None else torch.device(device))


def _program(net: nn.Module, inputs: tuple[Tensor, ...], axes: Any) -> torch.export.ExportedProgram:
    """Trace the net; remove notes and example inputs from the program."""
    try:
        with torch.no_grad():
            program = torch.export.export(net, inputs, dynamic_shapes=axes)
    except Exception as error:  # tracing Python code can raise anything
        name = type(net.core if isinstance(net, FlatCore) else net).__name__
        message = f"torch.export can't trace {name} for inputs of any size ({first_line(error)})"
        fix = "where its code makes a Python number of a size, as len(x) does, write x.shape[0]"
        raise UserError(f"target=torch_export: {message}; {fix}.") from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for name in NOTES:
                node.meta.pop(name, None)
    program.example_inputs = None  # a pickle
    return program
