"""Run torch modules as functions of arrays, and open .pt2 archives. Archives of target=torchserve hold this file.

`torch.export.load` unpickles objects, evaluates sizes as Python expressions and resolves any name that a graph calls:
an untrusted archive can run code. Files of target=torch_export need only the operators of a net, so everything else is
rejected before torch reads the file.
"""

import ast
import io
import json
import re
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
# The values of `target.aot_inductor.device`. A test maps a GPU to the CPU, which then runs all steps but the copies.
DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda")}

_ALONE = threading.Lock()  # `full_float32` sets options of the process
# The entries of a .pt2 archive that holds only data
CONFIGS = re.compile(r"data/(weights|constants)/model_\w+_config\.json")
TENSORS = re.compile(r"data/(weights|constants)/(weight|tensor)_\d+")
SAMPLE = "data/sample_inputs/model.pt"
GRAPH = "models/model.json"
OTHERS = re.compile(
    r"archive_(format|version)|byteorder|version|\.data/(version|serialization_id)|\.(format_version|storage_alignment)"
)
# of "aten", all but the operators that open files
OPERATORS = re.compile(r"torch\.ops\.(aten\.(?!from_file)|quantized_decomposed\.)[\w.]+|torch\.sym_\w+")
PYTHON = re.compile(
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|eq|ne|lt|le|gt|ge|and_|or_|getitem)|math\.(ceil|floor|trunc)"
)
CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")
SYMBOLS = re.compile(r"[suz]\d+")
FUNCTIONS = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|Abs|And|Or|Not|Eq|Ne|Lt|Le|Gt|Ge|(Une|E)quality|(Strict)?(Less|Greater)Than"
    r"|true|false|floor|ceiling|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|(Ceil|Floor|Trunc|Round)ToInt|CeilDiv|[LR]Shift"
    r"|PowByNatural|FloatPow|(Float|Int)TrueDiv|TruncToFloat|RoundDecimal|ToFloat|Identity"
)
OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop)
ARITHMETIC = (ast.Expression, ast.Call, ast.keyword, ast.Load, *OPERATIONS)


def is_missing(device: torch.device) -> bool:
    """Return whether torch does not find the device on this machine."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()


def describe_device(device: torch.device) -> dict[str, str]:
    """Describe the device for a compiled file: kind and, of a GPU, name and compute capability (`9.0`)."""
    if device.type != "cuda":
        return {"device": device.type}
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return {"device": device.type, "name": name, "compute_capability": f"{major}.{minor}"}


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 without TF32, which cuDNN uses in convolutions and leaves three digits of a logit."""
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was[0])
        torch.backends.cudnn.allow_tf32 = was[1]


def prepared(manifest: Mapping[str, Any], inputs: Array) -> Array:
    """Return the input that an export's file takes: pixels, normalized unless the graph does it."""
    preprocess = manifest["preprocess"]
    if preprocess is None or preprocess["in_graph"]:
        return inputs
    mean, std = (np.asarray(preprocess[name], dtype=np.float64)[:, None, None] for name in ("mean", "std"))
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    return inputs.astype(np.float32) * scale + shift


def on_arrays(
    call: Callable[..., Any], threads: int | None = None, device: torch.device | None = None
) -> Callable[..., Any]:
    """Return `call`, of one tensor or several, on arrays, without gradients; several outputs are a list.

    `threads` is torch's number of threads during each call; None leaves it unchanged. `call` computes on `device`, with
    copies to it and back, in float32 without TF32, one call at a time; None is the CPU.
    """

    def run(*arrays: Array) -> Any:
        # a client's buffer may be read-only or have negative strides, which tensors can't have
        tensors = (torch.from_numpy(np.require(x, requirements=["C", "W"])).to(device) for x in arrays)
        with torch.no_grad():
            outputs = call(*tensors)
        return outputs.cpu().numpy() if isinstance(outputs, Tensor) else [out.cpu().numpy() for out in outputs]

    def forward(*arrays: Array) -> Any:
        was = torch.get_num_threads()
        if threads is not None and threads != was:
            torch.set_num_threads(threads)
        try:
            if device is None:
                return run(*arrays)
            with _ALONE, full_float32():
                return run(*arrays)
        finally:
            if threads is not None and threads != was:
                torch.set_num_threads(was)

    return forward


def open_program(path: Path, device: str | None = None) -> Any:
    """Check an archive, and load its program as a module on the CPU or the GPU `device`.

    torch reads a copy of the entries that were checked: in a crafted file, its reader may find others. Raises
    ValueError for an archive with more than data, or torch's own error.
    """
    import torch.ao.quantization.fx._decomposed  # registers the operators of integers
    from torch.export.passes import move_to_device_pass

    buffer = io.BytesIO()
    with path.open("rb") as file:
        check_archive(file)
        with zipfile.ZipFile(file) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as copy:
            for name in source.namelist():
                copy.writestr(zipfile.ZipInfo(name), source.read(name))
    buffer.seek(0)
    with warnings.catch_warnings():
        # the weights' memory is read-only, and nothing writes to it
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
        program = torch.export.load(buffer)
        if device is not None:
            program = move_to_device_pass(program, device)
        return program.module(check_guards=False)  # guards are Python code; sizes are checked without them


def check_archive(path: Path | BinaryIO) -> None:
    """Raise ValueError, with its name, for anything in the archive but tensors and a graph of operators."""
    with zipfile.ZipFile(path) as archive:
        names = [name.lower() for name in archive.namelist()]  # torch's reader ignores case
        # of entries with one name, torch may read another than Python
        _require(len(set(names)) == len(names), "several entries of one name")
        _require(len({name.partition("/")[0] for name in names}) == 1, "several folders")
        for full in archive.namelist():
            name = full.partition("/")[2]
            if CONFIGS.fullmatch(name):
                for tensor, entry in json.loads(archive.read(full))["config"].items():
                    _require(entry["use_pickle"] is False, f"{tensor} of {name}, a pickle")
            elif name == GRAPH:
                _check_graph(json.loads(archive.read(full)))
            elif name == SAMPLE:
                _require(archive.getinfo(full).file_size == 0, f"{name}, a pickle")
            else:
                _require(OTHERS.fullmatch(name) or TENSORS.fullmatch(name), full)


def _check_graph(graph: Any) -> None:
    for key, value in _entries(graph):
        if key in ("target", "as_operator") and isinstance(value, str):
            _require(OPERATORS.fullmatch(value) or PYTHON.fullmatch(value), f"the operator {value}")
        elif key == "expr_str":
            _require(isinstance(value, str) and _is_size(value), f"the size {value}")
        elif key in ("as_custom_obj", "as_opaque_obj", "as_opaque_value"):
            _require(False, f"an object, {value}")
        elif key in ("in_spec", "out_spec"):
            kinds = [kind for entry, kind in _entries(json.loads(value)) if entry == "type"] if value else []
            # torch imports the modules that other types name, such as a defaultdict's
            _require(all(kind in CONTAINERS for kind in kinds), f"the structure {value}")


def _entries(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of all dicts in parsed JSON."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield key, value
            yield from _entries(value)
    elif isinstance(node, list):
        for value in node:
            yield from _entries(value)


def _is_size(text: str) -> bool:
    """Return whether a size is only arithmetic, such as `Mul(Integer(2), Symbol('s77', positive=True))`."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name):
            if not FUNCTIONS.fullmatch(node.id) and not SYMBOLS.fullmatch(node.id):
                return False
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and not re.fullmatch(r"[suz]?\d+(\.\d+)?", node.value):
                return False
        elif not isinstance(node, ARITHMETIC):
            return False
    return True


def _require(holds: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"it holds {what[:100]}")
