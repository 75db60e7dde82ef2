"""TorchServe archives (.mar): the net in another target's format, with a handler without Lathe.

TorchServe is no longer actively maintained, and its maintainers plan no security patches: Lathe recommends
`scripts/serve.py` for serving.
"""

import errno
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lathe import export as exports
from lathe.config.types import Count, NonNegativeInt
from lathe.config.validation import validated
from lathe.errors import UserError, uninstalled
from lathe.export.deploy import is_quantized
from lathe.export.files import readable, whole
from lathe.files import put, scratch, scratch_prefix

suffix = ".mar"
computes = True
integers: bool | None = None
Array = np.ndarray[Any, Any]

HANDLER = "lathe.legacy.torchserve_handler"
IMPORT = re.compile(r"^(\s*from )(lathe(?:\.\w+)+)(?= import )", re.MULTILINE)
FACTS, SETTINGS = "facts.json", "model-config.yaml"
SECONDS = 600  # time limit of the archiver


def available() -> str | None:
    """Return None, or the message that says what to install; TorchServe and Java are not needed."""
    return uninstalled("export", "model_archiver")


@validated
def export(
    net: nn.Module,
    example: Tensor,
    path: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    payload: Literal["torch_export", "onnx", "aot_inductor", "torchscript"] | None = None,
    workers: Count = 1,
    threads: Count | None = None,
    batch_size: Count = 32,
    max_batch_delay: NonNegativeInt = 5,
    response_timeout: Count = 60,
    top_k: Count = 5,
    max_pixels: Count = 2**24,
) -> None:
    """Write the archive.

    `facts` are the entries of an export's manifest; `input`, `preprocess` and `classes` go into the archive. Without
    them it can be loaded, but its handler does not know the format of requests, and rejects them. `payload` None is
    torch_export, one file for every machine in a format that is not deprecated; for a quantized net it is onnx, because
    torch runs an exported program's integers as floats.
    """
    if Path(path).suffix != suffix:
        raise UserError(f"{path} is no name for an archive of TorchServe: end it with {suffix}.")
    sentence = available()
    if sentence:
        raise UserError(sentence)
    quantized = is_quantized(net)
    kind = payload or ("onnx" if quantized else "torch_export")
    target = exports.get("onnx_int8" if kind == "onnx" and quantized else kind)
    sentence = target.available()
    if sentence:
        raise UserError(f"target.torchserve.payload={kind}: {sentence}")
    if quantized and target.integers is False:
        raise UserError(
            f"target.torchserve.payload={kind} holds floats alone, and this net is quantized: choose onnx or "
            "aot_inductor."
        )
    facts = facts or {}
    # in the archive's folder, so that an error of a full disk names that place
    with whole(path) as temporary, scratch(temporary.parent) as folder:
        file = f"model{target.suffix}"
        target.export(net, example, folder / file)
        told = {
            "version": 1,
            "payload": {"kind": kind, "file": file},
            "integers": quantized,
            "torch": torch.__version__,
            **{key: facts.get(key) for key in ("input", "preprocess", "classes")},
            "top_k": top_k,
            "max_pixels": max_pixels,
            "threads": threads,
        }
        (folder / FACTS).write_text(json.dumps(told, indent=2) + "\n")
        settings = {
            "minWorkers": workers,
            "maxWorkers": workers,
            "batchSize": batch_size,
            "maxBatchDelay": max_batch_delay,
            "responseTimeout": response_timeout,
            "deviceType": "cpu",
        }
        (folder / SETTINGS).write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
        for name, text in sources().items():
            (folder / name).write_text(text)
        archive(folder, file)
        put(folder / f"model{suffix}", temporary)


def sources() -> dict[str, str]:
    """Return names and contents of the handler and of Lathe's modules that it imports.

    Imports are rewritten to names without Lathe's packages. The files are read, not imported: the handler uses modules
    of a higher layer, because it decodes and answers like scripts/serve.py.
    """
    found: dict[str, str] = {}
    wanted = [HANDLER]
    while wanted:
        module = wanted.pop()
        if file_of(module) in found:
            continue
        text = (Path(__file__).parents[2] / f"{module.replace('.', '/')}.py").read_text()
        wanted += [name for _, name in IMPORT.findall(text)]
        found[file_of(module)] = IMPORT.sub(lambda match: match[1] + match[2].replace(".", "_"), text)
    return found


def file_of(module: str) -> str:
    """Return the name of a module's file in an archive."""
    return f"{module.replace('.', '_')}.py"


def archive(folder: Path, file: str) -> None:
    """Pack the files of `folder`, with `file` as the payload, into `folder`/model.mar.

    Raises:
        UserError: the archiver failed.
        OSError: the disk is full.
    """
    # the archiver empties <temporary folder>/<model name>, so it gets a private temporary folder
    scratch = folder / "scratch"
    scratch.mkdir()
    extra = [FACTS, *(name for name in sources() if name != file_of(HANDLER))]
    # names without a folder: the archiver reads commas and brackets in paths as lists and wildcards
    command = [
        sys.executable,
        "-m",
        "model_archiver.model_packaging",
        "--model-name",
        "model",
        "--version",
        "1.0",
        "--serialized-file",
        file,
        "--handler",
        file_of(HANDLER),
        "--extra-files",
        ",".join(extra),
        "--config-file",
        SETTINGS,
        "--archive-format",
        "zip-store",
        "--export-path",
        ".",
    ]
    environment = {**os.environ, "TMPDIR": str(scratch.resolve()), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(  # noqa: S603  # its names are those above
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode or not (folder / f"model{suffix}").is_file():
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise UserError(f"torch-model-archiver could not make the archive ({lines[-1][:300]}).")


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """Load an archive as a function from the net's input, `[batch, ...]`, to its output.

    The archive's handler and payload run in this process, without TorchServe and Java. `threads` None is the archive's
    setting.
    """
    path = readable(path, "path")
    folder = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
    try:
        unpack(path, folder)
        with importable(folder):
            model = importlib.import_module(Path(file_of(HANDLER)).stem).Model(folder, threads)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, RuntimeError):  # a torn payload, or one for another machine
            raise UserError(
                f"{path} can't be loaded as an archive for TorchServe, {error}: export the run again, here."
            ) from error
        raise
    found: Callable[[Array], Array] = model.run
    weakref.finalize(found, shutil.rmtree, folder, True)  # not earlier: a payload may read its file later
    return found


def unpack(path: Path, folder: Path) -> None:
    """Write only the handler, the facts and the payload of an archive into `folder`.

    The handler is code, so it must equal the one that this Lathe writes.
    """
    again = "export the run again"
    try:
        with zipfile.ZipFile(path) as archive:
            codes = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
            facts = archive.read(FACTS)
            file = str(json.loads(facts)["payload"]["file"])
            if file != f"model{Path(file).suffix}":
                raise ValueError(f"a payload named {file}")
            with archive.open(file) as source, (folder / file).open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError) as error:
        raise UserError(f"{path} can't be read as an archive that Lathe made for TorchServe: {again}.") from error
    if codes != {name: text.encode() for name, text in sources().items()}:
        raise UserError(
            f"{path} holds another handler than this Lathe's, which is not run here: {again}, or give the file to "
            "TorchServe."
        )
    for name, code in codes.items():
        (folder / name).write_bytes(code)
    (folder / FACTS).write_bytes(facts)


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make the modules in `folder` importable as in a TorchServe worker; remove them afterwards."""
    names = [Path(name).stem for name in sources()]
    wrote, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = wrote
        for name in names:
            sys.modules.pop(name, None)
