"""Opens .pt2 archives of `torch.export.save` that hold only data. Archives of target=torchserve hold this file.

`torch.export.load` unpickles objects, evaluates sizes as Python expressions and resolves any name that a graph calls:
an untrusted archive can run code. Files of target=torch_export need only the operators of a net, so everything else is
rejected before torch reads the file.
"""

import ast
import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

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


def open_program(path: Path, device: str | None = None) -> Any:
    """Check an archive, and load its program as a module on the CPU or the GPU `device`.

    torch reads a copy of the entries that were checked: in a crafted file, its reader may find others. Raises
    ValueError for an archive with more than data, or torch's own error.
    """
    import torch
    import torch.ao.quantization.fx._decomposed  # registers the operators of integers
    from torch.export.passes import move_to_device_pass

    found = io.BytesIO()
    with path.open("rb") as file:
        check(file)
        with zipfile.ZipFile(file) as source, zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as copy:
            for name in source.namelist():
                copy.writestr(zipfile.ZipInfo(name), source.read(name))
    found.seek(0)
    with warnings.catch_warnings():
        # the weights' memory is read-only, and nothing writes to it
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
        program = torch.export.load(found)
        if device is not None:
            program = move_to_device_pass(program, device)
        return program.module(check_guards=False)  # guards are Python code; sizes are checked without them


def check(path: Path | BinaryIO) -> None:
    """Raise ValueError, with its name, for anything in the archive but tensors and a graph of operators."""
    with zipfile.ZipFile(path) as archive:
        names = [name.lower() for name in archive.namelist()]  # torch's reader ignores case
        # of entries with one name, torch may read another than Python
        _require(len(set(names)) == len(names), "several entries of one name")
        _require(len({name.partition("/")[0] for name in names}) == 1, "several folders")
        for full in archive.namelist():
            name = full.partition("/")[2]
            if CONFIGS.fullmatch(name):
                _check_tensors(json.loads(archive.read(full)), name)
            elif name == GRAPH:
                _check_graph(json.loads(archive.read(full)))
            elif name == SAMPLE:
                _require(archive.getinfo(full).file_size == 0, f"{name}, a pickle")
            else:
                _require(OTHERS.fullmatch(name) or TENSORS.fullmatch(name), full)


def _check_tensors(config: Any, name: str) -> None:
    for tensor, entry in config["config"].items():
        _require(entry["use_pickle"] is False, f"{tensor} of {name}, a pickle")


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
