"""An archive for TorchServe (.mar): the net as another target's file, with a handler that needs no Lathe, facts.json
and model-config.yaml.

TorchServe's maintainers write that it is no longer actively maintained and that security patches are not planned:
`scripts/serve.py` is the way to serve that Lathe recommends.
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
SECONDS = 600  # in which the archiver has to end


def available() -> str | None:
    """None, or the sentence that says what to install. Nothing of TorchServe itself or Java is needed to write or load
    an archive.
    """
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
    """Writes the archive. `example` is the net's input, `[batch, ...]`; only its shape and type are used. The net stays
    as it is.

    `facts` are what the manifest of an export says: of them, `input`, `preprocess` and `classes` go into the archive.
    Without them it can be loaded, but its handler does not know what requests hold, and refuses them. `payload` None is
    torch_export: one file for every machine, in a format that is not deprecated. Of a quantized net it is onnx, since
    torch computes an exported program's integers by floats.

    Raises:
        UserError: an option that can't be, a package is missing, what the payload's target raises, or the file can't be
            written.
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
    # beside the archive: where the disk is full there, it is said of that place
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
    """Names and contents of the handler's file and of Lathe's modules that it imports, which import each other by names
    without Lathe's.

    They are read, not imported: the handler stands on a floor above this one, since it decodes and answers as
    scripts/serve.py does.
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
    """The name of a module's file in an archive."""
    return f"{module.replace('.', '_')}.py"


def archive(folder: Path, file: str) -> None:
    """Puts the files of `folder`, with `file` as the payload, into `folder`/model.mar.

    Raises:
        UserError: the archiver failed.
        OSError: the disk is full.
    """
    # the archiver empties <temporary folder>/<model name>, whatever lies there: it gets a temporary folder of its own
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
    """A function of the net's input, `[batch, ...]`, that gives its output, computed by the archive's own handler and
    payload in this process, without TorchServe and Java. `threads` None is what the archive says.

    Raises:
        UserError: there is no such file, it is no archive of Lathe's, or its payload can't be loaded here.
    """
    path = readable(path, "path")
    folder = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
    try:
        unpack(path, folder)
        with importable(folder):
            model = importlib.import_module(Path(file_of(HANDLER)).stem).Model(folder, threads)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, RuntimeError):  # a payload that is torn, or made for another machine
            raise UserError(
                f"{path} can't be loaded as an archive for TorchServe, {error}: export the run again, here."
            ) from error
        raise
    found: Callable[[Array], Array] = model.run
    weakref.finalize(found, shutil.rmtree, folder, True)  # not before: a payload may read its file later
    return found


def unpack(path: Path, folder: Path) -> None:
    """Writes the handler, the facts and the payload of an archive into `folder`, and nothing else of it.

    The handler is code, so that it has to be the very one that this Lathe puts into archives.

    Raises:
        UserError: it is no archive of Lathe's.
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
    """With the modules in `folder` as a worker of TorchServe imports them, which are forgotten afterwards."""
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
