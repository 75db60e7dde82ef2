"""A graph of ATen operators (`torch.export.save`), for torch without the net's code, and compilers."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import quantized_layers
from lathe.errors import UserError
from lathe.export.calls import Array, on_arrays
from lathe.export.deploy import copied, deployable
from lathe.export.dialects import Inductor
from lathe.export.files import readable, whole
from lathe.export.inputs import dynamic_axes, stand_in
from lathe.export.targets import pt2_archive
from lathe.export.targets.onnx_graph import quiet

suffix = ".pt2"
computes = True
integers: bool | None = None
# torch's notes on each node: source lines with paths of this machine, and names of Python classes
NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom")


def available() -> str | None:
    """Return None: only torch is needed."""
    return None


def export(net: nn.Module, example: Tensor, path: str | Path) -> None:
    """Write the net's graph, which takes batches of any size.

    A quantized net's weights are stored as int8, with PT2E's operators for rounding. Torch runs these one by one, in
    float32: for speed, compile the graph (`torch.compile(program.module())`), or use target=aot_inductor.
    """
    if Path(path).suffix != suffix:
        raise UserError(f"{path} is no name for an exported program: end it with {suffix}.")
    given = stand_in(example)
    found = deployable(net, given, Inductor()) if quantized_layers(net) else copied(net)
    with whole(path) as temporary, quiet():
        program = _program(found, given, dynamic_axes(net, given))
        buffer = io.BytesIO()  # otherwise the archive contains the temporary file's name, and differs at each export
        torch.export.save(program, buffer)
        try:
            pt2_archive.check(buffer)
        except ValueError as error:
            raise UserError(
                f"target=torch_export: the file would not be loaded again, since {error}, which is not torch's own."
            ) from error
        temporary.write_bytes(buffer.getvalue())


def _program(net: nn.Module, given: Tensor, axes: tuple[dict[int, object]]) -> torch.export.ExportedProgram:
    """Trace the net; remove notes and example inputs from the program."""
    try:
        with torch.no_grad():
            program = torch.export.export(net, (given,), dynamic_shapes=axes)
    except UserError:
        raise
    except Exception as error:  # tracing Python code can raise anything
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"target=torch_export: torch.export can't trace {type(net).__name__} for inputs of any size "
            f"({line[:200]}); where its code makes a Python number of a size, as len(x) does, write x.shape[0]."
        ) from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for name in NOTES:
                node.meta.pop(name, None)
    program.example_inputs = None  # a pickle
    return program


def load(path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[[Array], Array]:
    """Load a file as a function from the net's input, `[batch, ...]`, to its output.

    It computes on `device`, such as `cuda:1`, with copies to it and back; None is the CPU.

    `torch.export.load` unpickles and evaluates an archive's content, and has no `weights_only`; so archives with
    anything but tensors and operators are rejected (`pt2_archive`). `torch.export.load(path)` reads the file as well,
    after `import torch.ao.quantization.fx._decomposed` if it has integers.
    """
    import torch.ao.quantization.fx._decomposed  # registers the operators of integers
    from torch.export.passes import move_to_device_pass

    path = readable(path, "path")
    try:
        archive = pt2_archive.checked(path)
        with warnings.catch_warnings(), quiet():
            # the weights' memory is read-only, and nothing writes to it
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            program = torch.export.load(archive)
            if device is not None:
                program = move_to_device_pass(program, device)
            # guards are Python code; sizes are checked without them
            module = program.module(check_guards=False)
    except Exception as error:  # a torn archive, or one of another version of torch
        reason = str(error) if type(error) is ValueError else type(error).__name__
        raise UserError(
            f"{path} can't be read as a program of target=torch_export ({reason}): export the run again."
        ) from error
    return on_arrays(module, threads, None if device is None else torch.device(device))
